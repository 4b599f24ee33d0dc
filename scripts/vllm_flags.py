#!/usr/bin/env python3
"""Writes vLLM's list of flags into tests/data/vllm_flags.txt. Run it with the Python in which vLLM is installed.

    path/to/vllm/bin/python scripts/vllm_flags.py

Each flag of `vllm serve` gets a line: its names, with --no- and short forms, then = and its default, if JSON can write
it. The names of LLM's and EngineArgs' arguments follow after [LLM]. tests/unit/test_vllm_flags.py reads it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "tests" / "data" / "vllm_flags.txt"
PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")  # newer and older versions


def flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.option_strings and "--help" not in action.option_strings:
            yield " ".join([*action.option_strings, *_default(action.default)])


def _default(value: Any) -> list[str]:
    is_plain = type(value) in (bool, int, float, str, list, dict) and value != argparse.SUPPRESS
    try:
        return ["=", json.dumps(value)] if is_plain else []
    except TypeError:
        return []


def arguments() -> list[str]:
    from vllm import LLM, EngineArgs

    own = [each.name for each in inspect.signature(LLM).parameters.values() if each.kind is not each.VAR_KEYWORD]
    return sorted({*own, *(each.name for each in dataclasses.fields(EngineArgs))})


def parser() -> argparse.ArgumentParser:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name in PARSERS:
        try:
            found: argparse.ArgumentParser = importlib.import_module(name).make_arg_parser(FlexibleArgumentParser())
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
        else:
            return found
    raise SystemExit(f"vllm_flags.py: this vLLM has its parser in none of {', '.join(PARSERS)}")


if __name__ == "__main__":
    import vllm

    lines = [f"# vLLM {vllm.__version__}, written by scripts/vllm_flags.py", *sorted(flags(parser()))]
    PAGE.write_text("\n".join([*lines, "[LLM]", *arguments()]) + "\n", encoding="utf-8")
    print(f"{PAGE}: {len(lines) - 1} flags")
