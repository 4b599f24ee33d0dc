#!/bin/sh
# Compiles pd_cluster/extras/gateway/messages.proto. Every protobuf since 4.21 can load this compiler's output.
set -eu
cd "$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)"
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools"
"$tools/bin/python" -m pip install -q grpcio-tools==1.62.3 "setuptools<80"
"$tools/bin/python" -m grpc_tools.protoc -I. --python_out=. pd_cluster/extras/gateway/messages.proto
