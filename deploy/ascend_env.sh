# shellcheck shell=sh
# Sourced: the variables of CANN and of the Ascend driver, where they are installed; nothing happens where they aren't.
# Their own scripts know nothing of `set -eu`.

case $- in *u*) pd_cluster_strict=u ;; *) pd_cluster_strict= ;; esac
case $- in *e*) pd_cluster_strict=e$pd_cluster_strict ;; esac
set +eu
pd_cluster_ascend=${ASCEND_ROOT:-/usr/local/Ascend}
for pd_cluster_each in cann ascend-toolkit; do # the newer layout has both, one a link to the other
    if [ -r "$pd_cluster_ascend/$pd_cluster_each/set_env.sh" ]; then
        # shellcheck source=/dev/null
        . "$pd_cluster_ascend/$pd_cluster_each/set_env.sh"
        break
    fi
done
if [ -r "$pd_cluster_ascend/nnal/atb/set_env.sh" ]; then
    # shellcheck source=/dev/null
    . "$pd_cluster_ascend/nnal/atb/set_env.sh"
fi
for pd_cluster_each in common driver; do # mounted from the host, so that no linker cache names them
    if [ -d "$pd_cluster_ascend/driver/lib64/$pd_cluster_each" ]; then
        export LD_LIBRARY_PATH="$pd_cluster_ascend/driver/lib64/$pd_cluster_each${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    fi
done
[ -z "$pd_cluster_strict" ] || set "-$pd_cluster_strict"
unset pd_cluster_strict pd_cluster_ascend pd_cluster_each
