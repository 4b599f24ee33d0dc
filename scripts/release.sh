#!/bin/sh
# Builds wheel and sdist into dist/, and tries each in an environment of its own: in an empty folder, `pd-cluster up`
# serves the model that is shipped, answers a question, and ends with status 0. It starts as the first one does, and
# compiles its kernels. With Debian's chromium and the extra `browser`, the question is asked in the playground.
#
#   sh scripts/release.sh [FOLDER]        default: dist/
#
# A torch that is installed is shared with the environments; otherwise they install the one of scripts/setup.sh.

set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
out=${1:-$root/dist}
mkdir -p "$out"
out=$(CDPATH='' cd -- "$out" && pwd -P)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

sh "$root/scripts/setup.sh" test
python=$root/.venv/bin/python
cd "$root"
rm -f "$out"/pd_cluster-*.whl "$out"/pd_cluster-*.tar.gz
"$python" -m hatchling build -d "$out"

browser=
if command -v chromium >/dev/null && "$python" -c 'import playwright' 2>/dev/null; then
    browser=--browser
fi
# Also those of the Python that .venv was made from, which may have its torch.
sites=$("$python" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")')
for package in "$out"/pd_cluster-*.whl "$out"/pd_cluster-*.tar.gz; do
    echo "release: trying ${package##*/}"
    folder=$work/$(basename "$package" | tr . -)
    "$python" -m venv "$folder/env"
    # The packages that it needs are those of .venv; pd-cluster itself comes from the file alone.
    echo "$sites" >"$("$folder/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/needs.pth"
    "$folder/env/bin/python" -m pip install --quiet --no-deps --no-build-isolation --force-reinstall "$package"
    mkdir "$folder/empty"
    cd "$folder/empty"
    # shellcheck disable=SC2086 # no word where there is no browser
    XDG_CACHE_HOME=$folder/cache "$folder/env/bin/python" "$root/scripts/smoke.py" $browser "$folder/env/bin/pd-cluster"
    cd "$root"
done
echo "release: $(cd "$out" && ls pd_cluster-*)"
