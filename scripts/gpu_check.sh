#!/bin/sh
# Everything that needs a GPU, in one call of less than ten minutes: the GPU tests, then `pd-cluster bench gpu`.
#
#   sh scripts/gpu_check.sh [--wheels FOLDER] [--quick] [--device cpu]
#   sh scripts/gpu_check.sh --download FOLDER        on a machine with a network: fetches the wheels
#
# $OUT is where everything is written; default: docs/benchmarks/gpu-<device name>. What Python lacks is installed from
# FOLDER (or $WHEELS) into a folder that is gone afterwards; without one, what is missing is named. $PYTHON, default
# python3, must have a torch that sees the GPU, transformers and triton. $TESTS_S and $BUDGET_S: seconds of the two
# halves, 110 and 430. $PARTS: of the bench, with commas. $FOLDER: where 18 GB of models can be for the time being.
# Ends with 0 when every test passed and every part was measured.

set -eu

PLATFORMS=$(for glibc in 17 24 26 27 28 31 34; do echo "--platform manylinux_2_${glibc}_x86_64"; done; echo "--platform manylinux2014_x86_64")
# Of pyproject.toml's dependencies these come with the image, as does triton: too large to carry, and built for the GPU.
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

# What pd-cluster and these tests need beside the image, one requirement a line; with "missing" only what isn't there.
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

# From the carried wheels, what they need in turn included; and matplotlib, for the picture, where there is none.
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

# The device's name as a part of a folder's, such as nvidia-h100-80gb-hbm3.
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

run_tests() {
    [ "$quick" ] || run_clusters &
    clusters=$!
    num_workers=$(($(nproc) / 2))
    [ "$num_workers" -ge 1 ] || num_workers=1
    [ "$num_workers" -le 8 ] || num_workers=8
    say "the GPU tests, $tests_s s at most; $out/tests.txt"
    set -- -m "not slow" -n "$num_workers" --dist worksteal --junitxml="$out/tests.xml" -o junit_family=xunit1
    [ "$quick" ] && set -- "$@" -k "block_size or small"
    # shellcheck disable=SC2046
    PD_CLUSTER_TEST_DEVICE=$device timeout -k 5 "$tests_s" "$python" -m pytest "$@" \
        $([ "$quick" ] || ls tests/model/test_cuda_*.py) tests/model/test_graphs.py tests/model/test_greedy_exact.py \
        >"$out/tests.txt" 2>&1 || status=$?
    tail -n 1 "$out/tests.txt" >&2
    wait "$clusters" || status=$?
    [ "$status" -ne 124 ] || say "the tests were not done after $tests_s s"
}

# Clusters of real processes on the device, beside the other tests: what they cost is mostly starting.
run_clusters() {
    ended=0
    PD_CLUSTER_TEST_DEVICE=$device timeout -k 5 "$tests_s" "$python" -m pytest -m "not slow" -n 2 --dist loadfile \
        --junitxml="$out/clusters.xml" -o junit_family=xunit1 tests/cluster/test_exact.py \
        tests/cluster/test_document_rows.py >"$out/clusters.txt" 2>&1 || ended=$?
    tail -n 1 "$out/clusters.txt" >&2
    return "$ended"
}

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
python=${PYTHON:-python3}
wheels=${WHEELS:-}
quick=""
device=cuda
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help)
        sed -n '2,12s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    --download)
        [ $# -eq 2 ] || fail "--download needs a folder, and nothing else"
        download "$2"
        exit 0
        ;;
    --wheels) wheels=${2:?"--wheels needs a folder"} && shift ;;
    --device) device=${2:?"--device needs cuda or cpu"} && shift ;;
    --quick) quick=--quick ;;
    *) fail "unknown option $1; see --help" ;;
    esac
    shift
done
[ -z "$wheels" ] || wheels=$(CDPATH='' cd -- "$wheels" && pwd -P) || fail "--wheels: no such folder"

out=${OUT:-}
case "$out" in "" | /*) ;; *) out=$(pwd -P)/$out ;; esac
cd "$root"
tests_s=${TESTS_S:-110}
status=0
name=$(device_name) || fail "torch of $python finds no CUDA device; PYTHON=/path/to/python names another"
out=${out:-$root/docs/benchmarks/gpu-$name}
mkdir -p "$out"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
install
export PYTHONPATH="$root:$site" HF_HUB_OFFLINE=1
[ "$device" = cpu ] || nvidia-smi >"$out/nvidia-smi.txt" 2>&1 || true

[ "$tests_s" -eq 0 ] || run_tests
say "pd-cluster bench gpu; $out/report.json"
bench=0
"$python" -m pd_cluster.cli bench gpu --device "$device" --budget "${BUDGET_S:-430}" --out "$out" \
    --parts "${PARTS:-}" --folder "${FOLDER:-}" $quick || bench=$?
"$python" -m pd_cluster.cli bench gpu --table "$out/report.json" >"$out/README.md"
say "everything is in $out; the table: $out/README.md"
[ "$status" -eq 0 ] && [ "$bench" -eq 0 ]
