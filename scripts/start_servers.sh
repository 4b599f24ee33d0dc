#!/bin/sh
# Starts one instance of the cluster: prefill, decode or scheduler, according to the rank tables. Works in any folder.
#
#   export GLOBAL_RANK_TABLE_FILE_PATH=global_ranktable_10.0.0.18.json
#   export RANK_TABLE_FILE_PATH=local_ranktable_10.0.0.18_45.json
#   export NODE_PORTS=8088,8089
#   export USE_OPENAI=1
#   sh scripts/start_servers.sh --model=MODEL --tensor-parallel-size=2 --host=0.0.0.0 --port=8088 ...
#
# All flags are passed unchanged to `pd-cluster serve`, which also reads the variables. It replaces this shell, so that
# signals reach it, and stays in the caller's folder, so that relative paths keep their meaning.
#
# The instances of a unit are started like all others, in any order and on any host, with --data-parallel-size=N; they
# wait for each other (docs/parallelism.md).
#
# Two defaults follow the deployment guide and differ from `pd-cluster serve`: the model's own sampling defaults are off
# (--generation-config=vllm), and a request must name the model (--require-model). They are set by variables, which
# flags override: --generation-config=auto, --no-require-model. Streams outlive their scheduler by 30 s, unless
# --resume-window or its variable is set.
#
# If CANN is installed (in ASCEND_ROOT, /usr/local/Ascend by default) and its environment has not been sourced yet, this
# script sources it.

set -eu

self=$(readlink -f -- "$0" 2>/dev/null) || self=$0
root=$(CDPATH='' cd -- "$(dirname -- "$self")/.." && pwd -P)

# shellcheck source=deploy/ascend_env.sh
[ ! -r "$root/deploy/ascend_env.sh" ] || . "$root/deploy/ascend_env.sh"

export PD_CLUSTER_SERVE_GENERATION_CONFIG="${PD_CLUSTER_SERVE_GENERATION_CONFIG:-vllm}"
export PD_CLUSTER_SERVE_REQUIRE_MODEL="${PD_CLUSTER_SERVE_REQUIRE_MODEL:-1}"
case "${USE_OPENAI:-1} ${PD_CLUSTER_SERVE_RESUME_WINDOW-} $*" in
"1  "*--resume[-_]window*) ;;
"1  "*) export PD_CLUSTER_SERVE_RESUME_WINDOW=30 PD_CLUSTER_SERVE_RESUME_SCHEDULER_ONLY=1 ;;
esac

if [ -x "$root/.venv/bin/pd-cluster" ] && [ -x "$root/.venv/bin/python" ]; then
    exec "$root/.venv/bin/python" "$root/.venv/bin/pd-cluster" serve "$@"
fi
if command -v pd-cluster >/dev/null 2>&1; then
    exec pd-cluster serve "$@"
fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" && export PYTHONPATH
if python3 -P -c 'import pd_cluster.commands.cli, torch' >/dev/null 2>&1; then
    exec python3 -P -m pd_cluster serve "$@"
fi
echo "start_servers.sh: pd-cluster is not installed; run: sh $root/scripts/setup.sh" >&2
exit 1
