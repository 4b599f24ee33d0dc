#!/bin/sh
# Runs all tests and measurements that need a GPU, in stages of at most four minutes; without names, all in this order:
#
#   sh scripts/gpu_check.sh [correct] [engine] [cluster] [--wheels FOLDER] [--quick] [--device cpu]
#   sh scripts/gpu_check.sh --download FOLDER        on a machine with a network: downloads the wheels
#
# correct: attention against float64, the sum of two ranks' expert outputs, graphs against eager steps, the 8B model's
# logits, the model tests. engine: start, decode, prefill, kernels, drafts, sparse attention, the cost of
# --deterministic, prompts in recurrent layers. cluster: clusters of real processes, the handover.
# Every step updates report.json, README.md (its table), summary.txt and logs.tar.gz in $OUT; default:
# docs/benchmarks/gpu-<device name>. Later stages add to these files. Missing packages are installed from FOLDER (or
# $WHEELS) into a temporary folder; without wheels, they are listed. $PYTHON, default python3, must have a torch that
# sees the GPU, transformers and triton. $STAGE_S: seconds of a stage, 235. $FOLDER: a folder with room for 17 GB of
# models; default: /dev/shm if they fit there. Exits with 0 if every test passed and every part was measured.

set -eu

own_option() {
    case "$1" in
    --device) device=${2:?"--device needs cuda or cpu"} && num_words=2 ;;
    --quick) quick=--quick && slower=4 ;; # the limits assume a GPU
    *) return 1 ;;
    esac
}

has() {
    [ "$device" = cuda ] && command -v "$1" >/dev/null
}

# Models are written while the first tests run. These compile most kernels, each worker different ones.
run_correct() {
    "$python" -m benchmarks gpu --device "$device" --parts models $quick --models "$models" \
        --out "$work/models-report" >"$logs/models.txt" 2>&1 &
    writer=$!
    tests parity 100 -n "$num_workers" tests/model/test_cuda_parity.py -k "${quick:+mixed-float16-64}"
    if [ "$device" = cuda ]; then
        tests kernels 60 -n "$num_workers" tests/support/cuda_ops_cases.py tests/support/cuda_experts_cases.py
        tests codes 60 -n "$num_workers" tests/support/cuda_coded_cases.py tests/support/cuda_pool_cases.py \
            tests/support/cuda_lora_cases.py
        tests states 60 -n "$num_workers" -m "not slow" tests/support/cuda_states_cases.py tests/support/cuda_fla_cases.py
        tests sparse 60 -n "$num_workers" -m "not slow" tests/support/cuda_sparse_cases.py
        tests draws 60 -n "$num_workers" -m "not slow" tests/support/cuda_draw_cases.py tests/support/cuda_heads_cases.py
    fi
    chosen="greedy_tokens or test_graphs"
    [ -z "$quick" ] || chosen="sizes_and_buckets"
    tests graphs 80 -n "$num_workers" tests/model/test_decode_graphs.py tests/model/test_cuda_model.py -k "$chosen"
    wait "$writer" || note "models: failed; see models.txt"
    writer=""
    PD_CLUSTER_TEST_MODEL=$models/model-8B tests logits 90 -n 0 tests/model/test_cuda_logits.py
    # Without tests of interpreted kernels, which take minutes on a CPU and do not test this GPU.
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
    bench --stage "$stage"
}

run_cluster() {
    [ "$quick" ] || tests clusters 80 -n 2 --dist loadfile -m "not slow" tests/cluster/test_exact.py \
        tests/cluster/test_document_rows.py
    bench --stage "$stage"
}

tool=gpu_check
kind=gpu
device=cuda
stage_s=235
STAGES="correct engine cluster"
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/check_steps.sh
. "$root/scripts/check_steps.sh"
parse "$@"
begin
[ "$device" = cpu ] || nvidia-smi >"$logs/nvidia-smi.txt" 2>&1 || true
run_stages
