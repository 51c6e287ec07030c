#!/bin/sh
# install_clients.sh FOLDER PYTHON: makes an environment in FOLDER for each file in requirements/, as
# not all clients agree on what they need, and one for Node's clients and coding agents, if there is
# an npm. Of these some need a Node of their own, which is among them.
# PyPI's torch pulls in gigabytes of CUDA packages: set PIP_EXTRA_INDEX_URL to PyTorch's CPU index.
set -eu
here=$(dirname "$0")
mkdir -p "$1"
for file in "$here"/requirements/*.txt; do
    venv="$1/$(basename "$file" .txt)"
    "$2" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$file"
done
if command -v npm >/dev/null; then
    mkdir -p "$1/node"
    cp "$here/package.json" "$1/node/"
    npm install --prefix "$1/node" --no-audit --no-fund --loglevel error
fi
