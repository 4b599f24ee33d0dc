#!/bin/sh
# Starts a cluster from a fresh clone: installs into .venv, then runs pd_cluster/commands/quickstart.py.
#
#   sh scripts/quickstart.sh [--once] [--model PATH] [--prefill N] [--decode N] [--port P]        or --help

set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
case " $* " in
*" --help "* | *" -h "*) if [ ! -d "$root/.venv" ]; then sed -n '2,4s/^# *//p' "$0"; exit 0; fi ;;
esac
sh "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -P -m pd_cluster.commands.quickstart "$@"
