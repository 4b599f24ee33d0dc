# shellcheck shell=sh
# Sourced: sets the variables of CANN and of the Ascend driver, where they are installed and not set yet.
#
# ASCEND_TOOLKIT_HOME, if it is set, names the toolkit; otherwise ASCEND_ROOT (/usr/local/Ascend) has it. A toolkit or an
# ATB whose libraries are on LD_LIBRARY_PATH has been sourced already. CANN's own scripts do not support `set -eu`, and
# some are written for bash, so a script that runs in another shell is started again in bash before it sources them.

pd_cluster_ascend=${ASCEND_ROOT:-/usr/local/Ascend}
pd_cluster_home=${ASCEND_TOOLKIT_HOME:-}
pd_cluster_toolkit=
pd_cluster_atb=
case ":${LD_LIBRARY_PATH:-}" in
*":${pd_cluster_home:-//}/"*) ;;
*)
    # The newer layout has cann and ascend-toolkit, one of which is a link to the other.
    for pd_cluster_each in "${pd_cluster_home:-/nowhere}" "${pd_cluster_home%/*}" \
        "$pd_cluster_ascend/cann" "$pd_cluster_ascend/ascend-toolkit"; do
        if [ -n "$pd_cluster_each" ] && [ -r "$pd_cluster_each/set_env.sh" ]; then
            pd_cluster_toolkit=$pd_cluster_each/set_env.sh
            break
        fi
    done
    ;;
esac
case ":${LD_LIBRARY_PATH:-}" in
*":${ATB_HOME_PATH:-//}/"*) ;;
*) [ ! -r "$pd_cluster_ascend/nnal/atb/set_env.sh" ] || pd_cluster_atb=$pd_cluster_ascend/nnal/atb/set_env.sh ;;
esac

if [ -n "$pd_cluster_toolkit$pd_cluster_atb" ] && [ -z "${BASH_VERSION:-}" ] && [ -f "$0" ]; then
    ! command -v bash >/dev/null 2>&1 || exec bash "$0" "$@"
fi

case $- in *u*) pd_cluster_strict=u ;; *) pd_cluster_strict= ;; esac
case $- in *e*) pd_cluster_strict=e$pd_cluster_strict ;; esac
set +eu
for pd_cluster_each in "$pd_cluster_toolkit" "$pd_cluster_atb"; do
    if [ -n "$pd_cluster_each" ]; then
        # shellcheck source=/dev/null
        . "$pd_cluster_each"
    fi
done
for pd_cluster_each in common driver; do # mounted from the host, so that no linker cache names them
    pd_cluster_home=$pd_cluster_ascend/driver/lib64/$pd_cluster_each
    case ":${LD_LIBRARY_PATH:-}:" in
    *":$pd_cluster_home:"*) ;;
    *) [ ! -d "$pd_cluster_home" ] || export LD_LIBRARY_PATH="$pd_cluster_home${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" ;;
    esac
done
[ -z "$pd_cluster_strict" ] || set "-$pd_cluster_strict"
unset pd_cluster_strict pd_cluster_ascend pd_cluster_home pd_cluster_toolkit pd_cluster_atb pd_cluster_each
