#!/bin/sh
# Runs a container's instance with these flags, or any other command. Sets CANN's variables if CANN is installed.

set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
# shellcheck source=deploy/ascend_env.sh
. "$here/ascend_env.sh"

case "${1:--}" in
-*) exec sh "$here/../scripts/start_servers.sh" "$@" ;;
*) exec "$@" ;;
esac
