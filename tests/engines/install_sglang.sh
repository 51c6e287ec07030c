#!/bin/sh
# install_sglang.sh FOLDER PYTHON: makes a virtual environment with SGLang's cache and publisher.
# PyPI's torch pulls in gigabytes of CUDA packages: set PIP_EXTRA_INDEX_URL to PyTorch's CPU index.
set -eu
"$2" -m venv "$1"
"$1/bin/python" -m pip install --quiet --disable-pip-version-check \
    -r "$(dirname "$0")/sglang-requirements.txt"
"$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
# Its hashes are compiled when they are first used: here, or the tests would wait for that.
TORCH_EXTENSIONS_DIR=$1/torch_extensions "$1/bin/python" -c '
from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash
get_native_hash([1, 2], None, 2)'
