#!/bin/sh
# Everything that needs a GPU, in stages of at most four minutes; without a name, all of them in this order:
#
#   sh scripts/gpu_check.sh [correct] [engine] [cluster] [peers] [--wheels FOLDER] [--quick] [--device cpu]
#   sh scripts/gpu_check.sh --download FOLDER        on a machine with a network: fetches the wheels
#
# correct: attention against float64, graphs against eager steps, the 8B model's logits, the model tests. engine: start,
# decode, prefill, kernels, the price of --deterministic. cluster: clusters of real processes, the handover. peers: other
# engines.
# $OUT receives report.json, README.md (its table), summary.txt and logs.tar.gz, after every step; default:
# docs/benchmarks/gpu-<device name>. A later stage adds to what is there. Missing packages are installed from FOLDER (or
# $WHEELS) into a temporary folder; without wheels, they are listed. $PYTHON, default python3, must have a torch that
# sees the GPU, transformers and triton. $STAGE_S: seconds of a stage, 235. $FOLDER: a folder with room for 18 GB of
# models; default: /dev/shm where they fit. Exits with 0 if every test passed and every part was measured.

set -eu

PLATFORMS=$(for glibc in 17 24 26 27 28 31 34; do echo "--platform manylinux_2_${glibc}_x86_64"; done; echo "--platform manylinux2014_x86_64")
# Dependencies of pyproject.toml that come with the image, as does triton: too large to carry, and built for the GPU.
OF_IMAGE="torch transformers tokenizers safetensors numpy"
FOR_TESTS="pytest pytest-timeout pytest-xdist hypothesis"
MATPLOTLIB="matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil six" # numpy is there

say() {
    echo "gpu_check: $*" >&2
}

fail() {
    say "$*"
    exit 1
}

# Prints the requirements of pd-cluster and these tests beyond the image, one a line; with "missing" the absent ones.
needs() {
    "$python" - "$root/pyproject.toml" "$OF_IMAGE" "$FOR_TESTS" "${1:-}" <<'END'
import re, sys, tomllib
from importlib.metadata import PackageNotFoundError, version

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
of_image, for_tests = sys.argv[2].split(), sys.argv[3].split()
name_of = lambda wanted: re.match(r"[\w.-]+", wanted).group()
wanted = [each for each in project["dependencies"] if name_of(each) not in of_image]
wanted += [each for each in project["optional-dependencies"]["test"] if name_of(each) in for_tests]
parts = lambda text: [int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3]]


def is_there(wanted):
    least = re.search(r">=([\d.]+)", wanted)
    try:
        return not least or parts(version(name_of(wanted))) >= parts(least.group(1))
    except PackageNotFoundError:
        return False


for each in wanted:
    if sys.argv[4] != "missing" or not is_there(each):
        print(each.partition(";")[0])
END
}

# Wheels for Python 3.12 on Linux; $PIP_PYTHON_VERSION chooses another.
download() {
    mkdir -p "$1"
    wanted=$(needs)
    set -f
    for way in "$wanted" "--no-deps $MATPLOTLIB"; do
        # shellcheck disable=SC2086
        "$python" -m pip download -q --disable-pip-version-check --only-binary=:all: $PLATFORMS \
            -c "$root/constraints.txt" --python-version "${PIP_PYTHON_VERSION:-3.12}" -d "$1" $way ||
            fail "pip could not download" $way
    done
    set +f
    say "$(ls "$1" | wc -l) wheels, $(du -sh "$1" | cut -f1) in $1"
}

# Installs the carried wheels and their dependencies; and matplotlib, for the picture, if it is missing.
install() {
    lacking=$(needs missing)
    [ -z "$lacking" ] || [ -n "$wheels" ] ||
        fail "$python lacks" $lacking "- carry them along: sh scripts/gpu_check.sh --download FOLDER, then --wheels FOLDER"
    [ -z "$lacking" ] || pip_install $lacking
    if [ -n "$wheels" ] && ! "$python" -c 'import matplotlib' 2>/dev/null; then
        pip_install --no-deps $MATPLOTLIB
    fi
}

pip_install() {
    say "installing from $wheels:" "$@"
    "$python" -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-warn-conflicts --no-index \
        --find-links "$wheels" --target "$site" "$@" || fail "pip could not install; its own words are above"
}

# Prints the device's name in a form for folders, such as nvidia-h100-80gb-hbm3.
device_name() {
    "$python" - "$device" <<'END'
import re, sys

import torch

if sys.argv[1] == "cpu":
    name = "cpu"
elif not torch.cuda.is_available():
    sys.exit(1)
else:
    name = torch.cuda.get_device_name(0)
print(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"))
END
}

# Runs a command for so many seconds at most, and no longer than the stage: step NAME SECONDS COMMAND...
step() {
    step=$1
    limit=$(($2 * slower))
    shift 2
    code=0
    left=$((stage_end - $(date +%s)))
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 5 ]; then
        note "$step: not run, the stage has no time left"
        code=125
        return "$code"
    fi
    say "$step, $limit s at most"
    started=$(date +%s)
    # In the background, so that a signal to this script is handled at once; there, shells let commands ignore SIGINT.
    env --default-signal=INT timeout -s INT -k 10 "$limit" "$@" >>"$logs/$step.txt" 2>&1 &
    running=$!
    wait "$running" || code=$?
    running=""
    took=$(($(date +%s) - started))
    case $code in
    0) note "$step: passed ($took s): $(tail -n 1 "$logs/$step.txt")" ;;
    124 | 137) note "$step: not done within $limit s" ;;
    *) note "$step: failed with $code ($took s): $(tail -n 1 "$logs/$step.txt")" ;;
    esac
    pack
    return "$code"
}

note() {
    say "$1"
    echo "$1" >>"$logs/summary.txt"
}

# tests NAME SECONDS ARGUMENTS... of pytest. Failed ones run once more with launches that wait, to name the kernel.
tests() {
    name=$1
    limit=$2
    shift 2
    set -- "$@" -v -o faulthandler_timeout=60 -o "cache_dir=$work/cache-$name"
    step "$name" "$limit" "$python" -m pytest "$@" --basetemp "$work/tmp-$name" && return
    failed=1
    [ "$code" -eq 1 ] || return 0
    CUDA_LAUNCH_BLOCKING=1 step "$name-again" 60 "$python" -m pytest "$@" --lf -n 0 --basetemp "$work/tmp-$name-again" ||
        true
}

# Measures the parts of this stage in the time that it has left.
bench() {
    budget=$((stage_end - $(date +%s) - 15))
    [ "$budget" -ge 1 ] || budget=1
    step "bench-$stage" 235 "$python" -m pd_cluster bench gpu --device "$device" --stage "$stage" $quick \
        --budget "$budget" --out "$logs" --models "$models" --resume || failed=1
}

# Writes what comes out; the last whole archive stays if this is cut short.
pack() {
    find "$work" -path "$logs" -prune -o -name "*.log" -size -2048k -print | sed "s|^$work/||" >"$work/processes"
    [ ! -s "$work/processes" ] || tar -cf "$logs/processes.tar" -C "$work" -T "$work/processes"
    cp "$logs/summary.txt" "$out/summary.txt"
    tar -czf "$work/logs.tar.gz" -C "$work" logs && mv "$work/logs.tar.gz" "$out/logs.tar.gz"
    [ -f "$logs/report.json" ] || return 0
    cp "$logs/report.json" "$out/report.json"
    "$python" -m pd_cluster bench gpu --table "$logs/report.json" >"$out/README.md" || say "no table could be made"
}

finish() {
    trap - EXIT
    for each in $running $writer; do
        kill "$each" 2>/dev/null || true
        wait "$each" || true
    done
    pack || say "$out is not complete"
    rm -rf "$work" "$site"
}

has() {
    [ "$device" = cuda ] && command -v "$1" >/dev/null
}

# The models are written while the first tests run, which compile most kernels: each worker others.
run_correct() {
    "$python" -m pd_cluster bench gpu --device "$device" --parts models $quick --models "$models" \
        --out "$work/models-report" >"$logs/models.txt" 2>&1 &
    writer=$!
    tests parity 100 -n "$num_workers" tests/model/test_cuda_parity.py -k "${quick:+mixed-float16-64}"
    if [ "$device" = cuda ]; then
        tests kernels 60 -n "$num_workers" tests/support/cuda_ops_cases.py tests/support/cuda_experts_cases.py
        tests draws 60 -n "$num_workers" -m "not slow" tests/support/cuda_draw_cases.py tests/support/cuda_heads_cases.py
    fi
    chosen="greedy_tokens or test_graphs"
    [ -z "$quick" ] || chosen="sizes_and_buckets"
    tests graphs 80 -n "$num_workers" tests/model/test_graphs.py tests/model/test_cuda_model.py -k "$chosen"
    wait "$writer" || note "models: failed; see models.txt"
    writer=""
    PD_CLUSTER_TEST_MODEL=$models/model-8B tests logits 90 -n 0 tests/model/test_cuda_logits.py
    # Interpreted kernels take minutes of a CPU, and say nothing of this GPU.
    chosen="not greedy_tokens and not interpreter"
    files=$(grep -l "torch\.cuda\." tests/model/test_cuda_*.py | grep -v -e _parity -e _logits)
    if [ "$quick" ]; then
        chosen="block_size or small"
        files=""
    fi
    # shellcheck disable=SC2086
    tests models 90 -n "$num_workers" -m "not slow and not alone" -k "$chosen" $files tests/model/test_greedy_exact.py
    tests alone 45 -n 0 -m alone tests/model/test_cuda_transport.py tests/model/test_cuda_model.py
    if has compute-sanitizer; then
        step sanitizer 60 compute-sanitizer --error-exitcode 9 "$python" -m pytest -v -n 0 -p no:cacheprovider \
            tests/model/test_cuda_parity.py -k "mixed-bfloat16-64 or mixed-float16-96" || failed=1
    fi
}

run_engine() {
    bench
    if has ncu; then
        # By default ncu locks the clocks, and leaves them so if it is stopped: later stages would measure that.
        step ncu 60 ncu --set detailed --clock-control none \
            -k "regex:decode_kernel|merge_kernel|prefill_kernel|gemm|nvjet|cutlass" \
            "$python" -m pd_cluster.lab.peers.gpu_kernels cuda || note "ncu: counters may need rights on this machine"
    else
        step launches 60 "$python" -m pd_cluster.lab.peers.gpu_kernels "$device" || failed=1
    fi
}

run_cluster() {
    [ "$quick" ] || tests clusters 80 -n 2 --dist loadfile -m "not slow" tests/cluster/test_exact.py \
        tests/cluster/test_document_rows.py
    bench
}

run_peers() {
    bench
}

# Prints where the models go: $FOLDER, or /dev/shm where they fit, or the folder for temporary files.
place_of_models() {
    free=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $4 }')
    if [ -n "${FOLDER:-}" ]; then
        echo "$FOLDER"
    elif [ "${free:-0}" -gt 20000000 ]; then
        echo /dev/shm
    else
        echo "${TMPDIR:-/tmp}"
    fi
}

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
python=${PYTHON:-python3}
wheels=${WHEELS:-}
quick=""
slower=1
device=cuda
stages=""
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help)
        sed -n '2,13s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    --download)
        [ $# -eq 2 ] || fail "--download needs a folder, and nothing else"
        download "$2"
        exit 0
        ;;
    --wheels) wheels=${2:?"--wheels needs a folder"} && shift ;;
    --device) device=${2:?"--device needs cuda or cpu"} && shift ;;
    --quick) quick=--quick && slower=4 ;; # limits are for a GPU and its host
    correct | engine | cluster | peers) stages="$stages $1" ;;
    -*) fail "unknown option $1; see --help" ;;
    *) fail "unknown stage $1; there are correct, engine, cluster and peers" ;;
    esac
    shift
done
[ -z "$wheels" ] || wheels=$(CDPATH='' cd -- "$wheels" && pwd -P) || fail "--wheels: no such folder"

out=${OUT:-}
case "$out" in "" | /*) ;; *) out=$(pwd -P)/$out ;; esac
cd "$root"
STAGE_S=${STAGE_S:-$((235 * slower))}
failed=0
name=$(device_name) || fail "torch of $python finds no CUDA device; PYTHON=/path/to/python names another"
out=${out:-$root/docs/benchmarks/gpu-$name}
mkdir -p "$out"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
install
work=$(mktemp -d "$(place_of_models)/pd-cluster-gpu-check-XXXXXX")
logs=$work/logs
models=$work/checkpoints
mkdir "$logs" "$models"
writer=""
running=""
[ ! -f "$out/logs.tar.gz" ] || tar -xzf "$out/logs.tar.gz" -C "$work" || say "$out/logs.tar.gz is not whole: left out"
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
export PYTHONPATH="$root:$site" HF_HUB_OFFLINE=1 PD_CLUSTER_TEST_DEVICE="$device"
num_workers=$(($(nproc) / 2))
[ "$num_workers" -le 8 ] || num_workers=8
[ "$num_workers" -gt 1 ] || num_workers=0
[ "$device" = cpu ] || nvidia-smi >"$logs/nvidia-smi.txt" 2>&1 || true

for stage in ${stages:-correct engine cluster peers}; do
    stage_end=$(($(date +%s) + STAGE_S))
    note "== $stage"
    "run_$stage"
done
say "everything is in $out; the table: $out/README.md"
[ "$failed" -eq 0 ]
