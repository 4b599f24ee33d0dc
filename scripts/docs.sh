#!/bin/sh
# Builds the documentation's site into site/. A dead link or a page missing from the menu is an error.
#
#   sh scripts/docs.sh [FOLDER]        default: site/
#
# Installs mkdocs-material into .venv-docs, which is kept.

set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
cd "$root"
out=${1:-site}
if [ ! -x .venv-docs/bin/mkdocs ]; then
    "${PYTHON:-python3}" -m venv .venv-docs
    .venv-docs/bin/python -m pip install --quiet "mkdocs>=1.6,<2" "mkdocs-material>=9.6,<10"
fi
.venv-docs/bin/mkdocs build --strict --quiet --site-dir "$out"
echo "docs: $(find "$out" -name '*.html' | wc -l) pages in $out"
