#!/bin/sh
# The first hour of tests on Ascend NPUs, in stages; without names, all in this order:
#
#   sh scripts/npu_check.sh [machine] [operators] [graphs] [pairs] [guide] [figures] [--cards 0,1,2,3] [--model FOLDER]
#   sh scripts/npu_check.sh --simulate [STAGES...]   without NPUs, on torch-npu's wheel: tests this script
#   sh scripts/npu_check.sh --download FOLDER        on a machine with a network: downloads wheels for --wheels FOLDER
#
# machine: cards, versions, rank tables, the network between the cards. operators: every torch-npu operator in use, in
# bfloat16 and real shapes, against float64. graphs: captured decode steps against eager ones, and the time of captures.
# pairs: transfers of KV blocks over HCCL and IPC, their GB/s, and either end killed. guide: the deployment guide's
# example, its commands and requests, without and with --npu-tp-graphs. figures: `benchmarks gpu` on the first card.
# --cards: the driver's numbers; the first half prefills, the others decode (default 0,1,2,3; at least two).
# --model: a model for the guide's example; default: a tiny one.
# Every step updates summary.txt, logs.tar.gz (all logs: send this file), report.json and README.md (its table) in
# $OUT; default: docs/benchmarks/npu-<device name>. Later stages add to these files. $PYTHON, default python3 (with
# --simulate .venv's), must have torch-npu; CANN is sourced if this shell has not done so.
# $STAGE_S: seconds of a stage, 600.
# $FOLDER: a folder with room for 17 GB of models. Exits with 0 if every test passed and every part was measured.

set -eu

PARTS_OF_FIGURES="ceilings,engine,cluster" # of `python -m benchmarks gpu`; the stage pairs measures the handover

own_option() {
    case "$1" in
    --simulate) quick=--quick && slower=2 ;; # the limits assume real NPUs
    --cards) cards=${2:?"--cards needs numbers, such as 0,1,2,3"} && num_words=2 ;;
    --model) model=${2:?"--model needs a folder"} && num_words=2 ;;
    *) return 1 ;;
    esac
}

# Sets this shell up for torch-npu's wheel with stub libraries, and for recorded answers of npu-smi and hccn_tool.
simulate() {
    if [ -z "${PYTHON:-}" ] && [ -x "$root/.venv/bin/python" ]; then
        python=$root/.venv/bin/python
    fi
    "$python" -c 'import torch' 2>/dev/null ||
        fail "$python has no torch; run: sh scripts/setup.sh test, or name another Python: PYTHON=…"
    simulated=$(mktemp -d)
    PYTHONPATH="$root" "$python" -m tests.support.npu_wheel "$simulated" >"$simulated/environment" ||
        fail "no simulated NPUs: $(tail -n 1 "$simulated/environment")"
    # shellcheck disable=SC1091
    . "$simulated/environment"
    before_root=$PYTHONPATH
    OUT=${OUT:-${TMPDIR:-/tmp}/npu-check-simulated}
    more_of_gen="--server-ip 127.0.0.1"
}

# Splits the cards between the two instances: 0,1,2,3 into 0,1 and 2,3.
split_cards() {
    num_cards=$(echo "$cards" | tr ',' '\n' | grep -c .)
    [ "$num_cards" -ge 2 ] || fail "--cards $cards: at least two are needed"
    prefill=$(echo "$cards" | cut -d, -f"1-$((num_cards / 2))")
    decode=$(echo "$cards" | cut -d, -f"$((num_cards / 2 + 1))-$((num_cards / 2 * 2))")
    export PD_CLUSTER_TEST_CARDS="$prefill $decode"
}

run_machine() {
    step npu-smi 60 npu-smi info || failed=1
    step versions 120 "$python" -m pip list --disable-pip-version-check || failed=1
    mkdir -p "$work/tables"
    # shellcheck disable=SC2086
    step tables 120 "$python" scripts/pd_ranktable_tools.py --mode gen --prefill-server-list "$prefill" \
        --decode-server-list "$decode" --api-server --device npu $more_of_gen --save-dir "$work/tables" || failed=1
    for table in "$work"/tables/global_ranktable_*.json; do
        [ -f "$table" ] || return 0
        local=$(find "$work/tables" -name "local_ranktable_*_$(echo "$prefill" | tr -d ,).json")
        for way in "" --network; do
            # shellcheck disable=SC2086
            GLOBAL_RANK_TABLE_FILE_PATH=$table RANK_TABLE_FILE_PATH=$local PD_CLUSTER_SERVE_DEVICE=npu \
                step "check$way" 400 "$python" -m pd_cluster check $way || failed=1
        done
    done
}

run_operators() {
    tests operators 400 -n 0 tests/support/npu_parity_cases.py
}

run_graphs() {
    tests graphs 400 -n 0 tests/support/npu_graph_cases.py
}

run_pairs() {
    tests pairs 500 -n 0 tests/support/npu_pair_cases.py
}

run_guide() {
    export PD_CLUSTER_TEST_MODEL="$model" PD_CLUSTER_TEST_START_S=400
    tests guide 300 -n 0 tests/support/npu_guide_cases.py
    PD_CLUSTER_TEST_FLAGS=--npu-tp-graphs tests guide-graphs 300 -n 0 tests/support/npu_guide_cases.py
}

run_figures() {
    bench --parts "$PARTS_OF_FIGURES"
}

tool=npu_check
kind=npu
device=npu
stage_s=600
STAGES="machine operators graphs pairs guide figures"
cards=0,1,2,3
model=""
simulated=""
more_of_gen=""
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/check_steps.sh
. "$root/scripts/check_steps.sh"
parse "$@"
split_cards
if [ "$quick" ]; then
    simulate
else
    # shellcheck source=deploy/ascend_env.sh
    . "$root/deploy/ascend_env.sh"
fi
begin
# start_servers.sh looks for pd-cluster and python3 in PATH.
PATH=$("$python" -c 'import os, sys; print(os.path.dirname(sys.executable))'):$PATH
trap 'finish; rm -rf ${simulated:+"$simulated"}' EXIT
run_stages
