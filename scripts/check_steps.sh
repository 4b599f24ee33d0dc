#!/bin/sh
# Functions that gpu_check.sh and npu_check.sh source: they parse options, install missing packages, run steps with
# deadlines, and write all results into one archive after every step.
#
# The script sets `tool` (its name), `kind` (for the results folder's name), `device`, `stage_s` (a stage's seconds) and
# STAGES. It defines run_STAGE for each stage, and own_option for its own options, which sets num_words for options of
# more than one word.

: "${tool:?}" "${kind:?}" "${device:?}" "${stage_s:?}" "${STAGES:?}" "${root:?}"

# $PIP_MACHINE, such as aarch64: the architecture of the wheels to download
PLATFORMS=$(for glibc in 17 24 26 27 28 31 34; do echo "--platform manylinux_2_${glibc}_${PIP_MACHINE:-x86_64}"; done; echo "--platform manylinux2014_${PIP_MACHINE:-x86_64}")
# Dependencies in pyproject.toml that the image must have, like triton and torch-npu: large, and built for the device.
OF_IMAGE="torch transformers tokenizers safetensors numpy"
FOR_TESTS="pytest pytest-timeout pytest-xdist hypothesis"

say() {
    echo "$tool: $*" >&2
}

fail() {
    say "$*"
    exit 1
}

# Prints what pd-cluster and these tests require beyond the image, one a line; with "missing", only absent ones.
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

# Downloads wheels for Linux and Python 3.12, or $PIP_PYTHON_VERSION.
download() {
    mkdir -p "$1"
    wanted=$(needs)
    set -f
    # shellcheck disable=SC2086
    "$python" -m pip download -q --disable-pip-version-check --only-binary=:all: $PLATFORMS \
        -c "$root/constraints.txt" --python-version "${PIP_PYTHON_VERSION:-3.12}" -d "$1" $wanted ||
        fail "pip could not download" $wanted
    set +f
    say "$(ls "$1" | wc -l) wheels, $(du -sh "$1" | cut -f1) in $1"
}

# Installs missing packages from $wheels.
install() {
    lacking=$(needs missing)
    [ -z "$lacking" ] || [ -n "$wheels" ] ||
        fail "$python lacks" $lacking "- carry them along: sh scripts/$tool.sh --download FOLDER, then --wheels FOLDER"
    [ -z "$lacking" ] || pip_install $lacking
}

pip_install() {
    say "installing from $wheels:" "$@"
    "$python" -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-warn-conflicts --no-index \
        --find-links "$wheels" --target "$site" "$@" || fail "pip could not install; see its messages above"
}

# Prints the first device's name in a form that suits folder names, such as nvidia-h100-80gb-hbm3.
device_name() {
    "$python" - "$device" <<'END'
import re, sys

import torch

if sys.argv[1] == "cpu":
    name = "cpu"
else:
    if sys.argv[1] == "npu":
        import torch_npu
    if not (torch.cuda.is_available() if sys.argv[1] == "cuda" else torch_npu.npu.device_count()):
        sys.exit(1)
    name = (torch.cuda if sys.argv[1] == "cuda" else torch_npu.npu).get_device_name(0)
print(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"))
END
}

# Runs a command, at most SECONDS and not beyond the stage's end: step NAME SECONDS COMMAND...
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
    # In the background, so that this script handles signals at once. Background commands ignore SIGINT unless reset.
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

# tests NAME SECONDS PYTEST_ARGUMENTS... Failed tests run again with synchronous launches, to find the kernel.
tests() {
    name=$1
    limit=$2
    shift 2
    set -- "$@" -v -o faulthandler_timeout=60 -o "cache_dir=$work/cache-$name"
    step "$name" "$limit" "$python" -m pytest "$@" --basetemp "$work/tmp-$name" && return
    failed=1
    [ "$code" -eq 1 ] || return 0
    CUDA_LAUNCH_BLOCKING=1 ASCEND_LAUNCH_BLOCKING=1 step "$name-again" 60 "$python" -m pytest "$@" --lf -n 0 --basetemp "$work/tmp-$name-again" ||
        true
}

# Writes the results. If this is interrupted, the last complete archive stays.
pack() {
    find "$work" -path "$logs" -prune -o -name "*.log" -size -2048k -print | sed "s|^$work/||" >"$work/processes"
    [ ! -s "$work/processes" ] || tar -cf "$logs/processes.tar" -C "$work" -T "$work/processes"
    cp "$logs/summary.txt" "$out/summary.txt"
    tar -czf "$work/logs.tar.gz" -C "$work" logs && mv "$work/logs.tar.gz" "$out/logs.tar.gz"
    [ -f "$logs/report.json" ] || return 0
    cp "$logs/report.json" "$out/report.json"
    "$python" -m benchmarks gpu --table "$logs/report.json" >"$out/README.md" || say "no table could be made"
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

# Prints the folder for models: $FOLDER, or /dev/shm if they fit there, or the folder for temporary files.
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

# bench --stage NAME, or bench --parts PARTS: measures within the stage's remaining time.
bench() {
    budget=$((stage_end - $(date +%s) - 15))
    [ "$budget" -ge 1 ] || budget=1
    step "bench-$stage" 235 "$python" -m benchmarks gpu --device "$device" "$@" $quick \
        --budget "$budget" --out "$logs" --models "$models" --resume || failed=1
}

# parse ARGUMENTS...: parses the script's options and stages.
parse() {
    while [ $# -gt 0 ]; do
        num_words=1
        case "$1" in
        -h | --help)
            sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
            exit 0
            ;;
        --download)
            [ $# -eq 2 ] || fail "--download needs a folder, and nothing else"
            download "$2"
            exit 0
            ;;
        --wheels) wheels=${2:?"--wheels needs a folder"} && num_words=2 ;;
        -*) own_option "$@" || fail "unknown option $1; see --help" ;;
        *)
            case " $STAGES " in
            *" $1 "*) stages="$stages $1" ;;
            *) fail "unknown stage $1; there are $(echo "$STAGES" | sed 's/ /, /g; s/\(.*\), /\1 and /')" ;;
            esac
            ;;
        esac
        shift "$num_words"
    done
    [ -z "$wheels" ] || wheels=$(CDPATH='' cd -- "$wheels" && pwd -P) || fail "--wheels: no such folder"
}

# Makes the folders, installs packages, and sets traps that write the results and end processes on any exit.
begin() {
    out=${OUT:-}
    case "$out" in "" | /*) ;; *) out=$(pwd -P)/$out ;; esac
    cd "$root" || fail "$root is gone"
    name=$(device_name) || fail "torch of $python finds no $(echo "$device" | tr '[:lower:]' '[:upper:]') device; PYTHON=/path/to/python names another"
    out=${out:-$root/docs/benchmarks/$kind-$name}
    mkdir -p "$out"
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    install
    work=$(mktemp -d "$(place_of_models)/pd-cluster-$kind-check-XXXXXX")
    logs=$work/logs
    models=$work/checkpoints
    mkdir "$logs" "$models"
    [ ! -f "$out/logs.tar.gz" ] || tar -xzf "$out/logs.tar.gz" -C "$work" ||
        say "$out/logs.tar.gz is not whole: left out"
    trap finish EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    export PYTHONPATH="${before_root:+$before_root:}$root:$site" HF_HUB_OFFLINE=1 PD_CLUSTER_TEST_DEVICE="$device"
    num_workers=$(($(nproc) / 2))
    [ "$num_workers" -le 8 ] || num_workers=8
    [ "$num_workers" -gt 1 ] || num_workers=0
}

# Runs the given stages, or all. Fails if a step failed.
run_stages() {
    for stage in ${stages:-$STAGES}; do
        stage_end=$(($(date +%s) + ${STAGE_S:-$((stage_s * slower))}))
        note "== $stage"
        "run_$stage"
    done
    say "everything is in $out$([ ! -f "$out/README.md" ] || echo "; the table: $out/README.md")"
    [ "$failed" -eq 0 ]
}

python=${PYTHON:-python3}
wheels=${WHEELS:-}
stages=""
quick=""
slower=1
before_root="" # folders that come before the repository on PYTHONPATH
failed=0
writer=""
running=""
