"""Formats of tool calls from a Python file that the operator names (`--tool-parser-plugin`).

The file defines `FORMATS`, a dict from names to formats: descriptions such as `JsonCalls`, `NamedCalls` or `XmlCalls`,
or any object with the members of `call_format.Format`. Every process that reads replies runs the file, with the
process's full rights.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pd_cluster.errors import ConfigError, called
from pd_cluster.parsers.auto_format import AUTO
from pd_cluster.parsers.call_format import Format
from pd_cluster.parsers.format_table import FORMATS

SETTING = "tool_parser_plugin"
MEMBERS = ("read", "calls", "perhaps")


@cache
def formats_of(path: str) -> Mapping[str, Format]:
    """Returns the file's formats; empty without a file. Raises ConfigError with the file's name and the fault."""
    if not path:
        return {}
    where = f"{called(SETTING)} {path}"
    if not Path(path).is_file():
        raise ConfigError(f"{where}: there is no such file")
    spec = importlib.util.spec_from_file_location("pd_cluster_tool_parser_plugin", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: must be a Python file, *.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the operator's code may raise anything
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    found = getattr(module, "FORMATS", None)
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{where}: must define FORMATS, a dict from names to formats (docs/extending.md)")
    for name, each in found.items():
        if not isinstance(name, str) or name in (AUTO, *FORMATS):
            raise ConfigError(f"{where}: FORMATS has {name!r}; a name must be a text that no built-in parser has")
        missing = [member for member in MEMBERS if not callable(getattr(each, member, None))]
        if missing or not isinstance(getattr(each, "markers", None), tuple):
            wanted = ", ".join(missing) or "markers, a tuple of texts"
            raise ConfigError(f"{where}: FORMATS[{name!r}] lacks {wanted}")
    return found
