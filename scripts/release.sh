#!/bin/sh
# Builds wheel and sdist into dist/, and tries each in its own environment: in an empty folder, `pd-cluster up` must
# serve the shipped model, answer a question, and end with status 0. As at a user's first start, kernels are compiled.
# With Debian's chromium and the extra `browser`, the question is asked in the playground.
#
#   sh scripts/release.sh [FOLDER]        default: dist/
#
# The environments share an installed torch; without one, scripts/setup.sh installs it.

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
# Includes the packages of the Python that .venv was made from, which may have torch.
sites=$("$python" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")')
for package in "$out"/pd_cluster-*.whl "$out"/pd_cluster-*.tar.gz; do
    echo "release: trying ${package##*/}"
    folder=$work/$(basename "$package" | tr . -)
    "$python" -m venv "$folder/env"
    # Dependencies come from .venv, but pd-cluster itself only from the file.
    echo "$sites" >"$("$folder/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/needs.pth"
    "$folder/env/bin/python" -m pip install --quiet --no-deps --no-build-isolation --force-reinstall "$package"
    mkdir "$folder/empty"
    cd "$folder/empty"
    # shellcheck disable=SC2086 # no word where there is no browser
    XDG_CACHE_HOME=$folder/cache "$folder/env/bin/python" "$root/scripts/smoke.py" $browser "$folder/env/bin/pd-cluster"
    cd "$root"
done
echo "release: $(cd "$out" && ls pd_cluster-*)"
