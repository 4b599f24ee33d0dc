#!/bin/sh
# Draws docs/pictures/*.svg from the .puml files beside them. Each picture contains its source's hash.
set -eu

pictures=$(cd "$(dirname "$0")/../docs/pictures" && pwd)

for tool in plantuml dot sha256sum; do
    command -v "$tool" >/dev/null || {
        echo "draw.sh: $tool is missing; install plantuml and graphviz (apt-get install plantuml graphviz)" >&2
        exit 1
    }
done

drawn=$(mktemp)
trap 'rm -f "$drawn"' EXIT

for text in "$pictures"/*.puml; do
    picture=${text%.puml}.svg
    hash=$(sha256sum <"$text" | cut -d ' ' -f 1)
    plantuml -tsvg -nometadata -pipe <"$text" >"$drawn"
    sed -e "s|^<?xml[^>]*?>|&<!-- Made by scripts/draw.sh from ${text##*/}, sha256 $hash -->|" \
        -e 's|<defs/>|&<rect width="100%" height="100%" fill="#FFFFFF"/>|' "$drawn" >"$picture"
done
