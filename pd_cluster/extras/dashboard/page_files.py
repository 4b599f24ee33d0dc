"""Builds the page's files for browsers: one script and one style sheet, each named by its content's hash.

Their sources are in `static/`; `index.html` refers to the two as `{script}` and `{style}`. A file with a hash in its
name never changes, so browsers cache it forever. Knows nothing of sessions or routes.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

STATIC = Path(__file__).with_name("static")
PAGE = "index.html"
SCRIPTS = ("vendor/uplot.js",)  # plain scripts, which come before the modules
ENTRY = "app.js"
STYLES = ("vendor/uplot.css", "style.css")
MEDIA_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
IMPORT = re.compile(r"^import \{([^}]+)\} from \"\./([\w-]+\.js)\";$", re.MULTILINE)
EXPORT = re.compile(r"^export (?:const|class|function|async function) (\w+)", re.MULTILINE)
OTHER = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)
NUM_HASH_DIGITS = 12


@dataclass(frozen=True, slots=True)
class PageFile:
    """`is_forever`: its content never changes, because its name contains the hash. `packed`: the content, gzipped."""

    content: bytes
    packed: bytes
    media_type: str
    is_forever: bool


@functools.cache
def page_files() -> Mapping[str, PageFile]:
    """Returns name -> file. Built on the first request."""
    texts = {
        "script": (".js", joined_scripts(STATIC)),
        "style": (".css", "\n".join((STATIC / name).read_text("utf-8") for name in STYLES)),
    }
    names, found = {}, {}
    for kind, (suffix, text) in texts.items():
        names[kind] = f"page-{hashlib.sha256(text.encode()).hexdigest()[:NUM_HASH_DIGITS]}{suffix}"
        found[names[kind]] = _file(text.encode(), suffix, is_forever=True)
    page = (STATIC / PAGE).read_text("utf-8")
    for kind, name in names.items():
        page = page.replace(f"{{{kind}}}", name)
    found[PAGE] = _file(page.encode(), ".html")
    found["icon.svg"] = _file((STATIC / "icon.svg").read_bytes(), ".svg")
    return found


def joined_scripts(folder: Path) -> str:
    """Returns the plain scripts and, in the order of their imports, the modules, as one module.

    Each module becomes a separate function, so that names of different modules do not collide. Raises ValueError for an
    import or export in an unsupported form.
    """
    plain = [(folder / name).read_text("utf-8") for name in SCRIPTS]
    return "\n".join([*plain, *_modules(folder, ENTRY, {}).values()])


def _modules(folder: Path, name: str, found: dict[str, str]) -> dict[str, str]:
    """Adds a module to `found`, after the modules that it imports."""
    text = (folder / name).read_text("utf-8")
    for _, needed in IMPORT.findall(text):
        if needed not in found:
            _modules(folder, needed, found)
    exported = EXPORT.findall(text)
    text = IMPORT.sub(lambda match: f"const {{{match[1].replace(' as ', ': ')}}} = {_variable(match[2])};", text)
    text = EXPORT.sub(lambda match: match[0].removeprefix("export "), text)
    if other := OTHER.search(text):
        raise ValueError(f"{name}: {other[0]!r} is a form that page_files.py does not join")
    if name == ENTRY:
        found[name] = text
    else:
        found[name] = f"const {_variable(name)} = (() => {{\n{text}\nreturn {{ {', '.join(exported)} }};\n}})();\n"
    return found


def _variable(name: str) -> str:
    return f"module_{name.removesuffix('.js').replace('-', '_')}"


def _file(content: bytes, suffix: str, is_forever: bool = False) -> PageFile:
    return PageFile(content, gzip.compress(content, mtime=0), MEDIA_TYPES[suffix], is_forever)
