#!/bin/sh
# install_sglang.sh FOLDER PYTHON: makes a virtual environment with SGLang's cache and publisher.
# PyPI's torch pulls in gigabytes of CUDA packages: set PIP_EXTRA_INDEX_URL to PyTorch's CPU index.
set -eu
"$2" -m venv "$1"
"$1/bin/python" -m pip install --quiet --disable-pip-version-check \
    -r "$(dirname "$0")/sglang-requirements.txt"
"$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
