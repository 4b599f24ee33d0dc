"""Flags that each set one value of drafting: vLLM's short forms, its flags of version 0.6, and TACO-LLM's lookahead
cache.

    --spec-method ngram --spec-tokens 8          --speculative-config '{"method": "ngram", ...}'
    --lookahead-cache-config-dir DIR             ngram, then suffix; see DIR/lookahead_cache_config.json
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.setting import Panel, Scope, Setting, within
from pd_cluster.settings.speculation import MOST_DRAFTS, Speculation
from pd_cluster.settings.speculative_config import BATCHES, LEAST, METHOD, MODEL, MOST, speculation_of
from pd_cluster.types import INT32_MAX

CONFIG, DIRECTORY = "speculative_config", "lookahead_cache_config_dir"
DRAFTS = "num_speculative_tokens"
FLAGS = {
    METHOD: "spec_method",
    MODEL: "spec_model",
    DRAFTS: "spec_tokens",
    MOST: "ngram_prompt_lookup_max",
    LEAST: "ngram_prompt_lookup_min",
}
DISABLE = "speculative_disable_by_batch_size"

FILE = "lookahead_cache_config.json"
MODES = {0: ["ngram"], 1: ["suffix"], 2: ["ngram", "suffix"]}
MODE = "cache_mode"
LOOKAHEAD = {  # TACO-LLM's name -> vLLM's name, and TACO-LLM's default
    "copy_length": (DRAFTS, 7),
    "match_length": (MOST, 2),
    "min_match_length": (LEAST, 2),
    "cache_size": ("suffix_decoding_max_cached_tokens", 5_000_000),
}

DRAFTING = partial(Setting, panel=Panel.ENGINE, scope=Scope.ENGINE)


class SpeculationFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Alternative flags for the contents of `--speculative-config`; `into` reads them."""

    spec_method: Annotated[
        str | None,
        DRAFTING("Sets method of --speculative-config: ngram, suffix, draft_model, eagle3 or mtp.", after=CONFIG),
    ] = None
    spec_model: Annotated[
        str | None,
        DRAFTING(
            "Sets model of --speculative-config: a draft model, an EAGLE-3 head, or [ngram].",
            also=("speculative_model",),
            after="spec_method",
        ),
    ] = None
    spec_tokens: Annotated[
        int | None, DRAFTING(f"Sets {DRAFTS} of --speculative-config.", also=(DRAFTS,), after="spec_model")
    ] = None
    ngram_prompt_lookup_max: Annotated[
        int | None, DRAFTING("Sets prompt_lookup_max of --speculative-config.", after="spec_tokens")
    ] = None
    ngram_prompt_lookup_min: Annotated[
        int | None, DRAFTING("Sets prompt_lookup_min of --speculative-config.", after="ngram_prompt_lookup_max")
    ] = None
    speculative_disable_by_batch_size: Annotated[
        int | None,
        DRAFTING(
            "Draft only in steps of at most this many sequences.",
            after="ngram_prompt_lookup_min",
            checks=(within(1, INT32_MAX - 1),),
        ),
    ] = None
    lookahead_cache_config_dir: Annotated[
        str,
        DRAFTING(
            f"TACO-LLM's folder with {FILE}: draft by ngram, then suffix, with its values.",
            metavar="FOLDER",
            after=DISABLE,
        ),
    ] = ""

    def into(self, config: Speculation) -> Speculation:
        """Returns the speculation that these flags and --speculative-config describe. Raises ConfigError if both are
        given.
        """
        given = {key: value for key, flag in FLAGS.items() if (value := getattr(self, flag)) is not None}
        least = self.speculative_disable_by_batch_size
        flags = [*(FLAGS[key] for key in given), *([DISABLE] if least is not None else [])]
        ways = [*([CONFIG] if config.methods else []), *([DIRECTORY] if self.lookahead_cache_config_dir else [])]
        if len(several := [*ways, *flags[:1]]) > 1:
            one, other = map(called, several[:2])
            raise ConfigError(f"{one}: {other} also sets how to draft; give only one of them")
        if self.lookahead_cache_config_dir:
            return _lookahead(self.lookahead_cache_config_dir)
        if not flags:
            return config
        if least is not None:
            given[BATCHES] = [[1, least, MOST_DRAFTS], [least + 1, INT32_MAX, 0]]
        return speculation_of(given, lambda key: called(FLAGS.get(key, DISABLE)))

    def remarks(self) -> list[str]:
        """Returns warnings about values that have no effect. Raises ConfigError."""
        folder = self.lookahead_cache_config_dir
        idle = [name for name in _written_in(folder) if name not in (MODE, *LOOKAHEAD)] if folder else []
        return [f"{Path(folder, FILE)}: no effect here: {', '.join(idle)}"] if idle else []


def _lookahead(folder: str) -> Speculation:
    """Raises ConfigError."""
    written = _written_in(folder)
    mode = written.get(MODE, 2)
    if type(mode) is not int or mode not in MODES:
        raise ConfigError(f"{_place(folder, MODE)} {mode!r}: expected 0 (ngram), 1 (suffix) or 2 (both)")
    given: dict[str, Any] = {key: written.get(name, default) for name, (key, default) in LOOKAHEAD.items()}
    if "min_match_length" not in written and isinstance(given[MOST], int):
        given[LEAST] = min(given[LEAST], given[MOST])
    names = {key: name for name, (key, _) in LOOKAHEAD.items()}
    return speculation_of({METHOD: MODES[mode], **given}, lambda key: _place(folder, names[key]))


def _place(folder: str, name: str) -> str:
    return f"{called(DIRECTORY)}: {Path(folder, FILE)}: {name}"


def _written_in(folder: str) -> dict[str, Any]:
    """Returns the file's contents; {} if there is no file. Raises ConfigError."""
    file = Path(folder, FILE)
    try:
        if not file.parent.is_dir():
            raise ConfigError(f"{called(DIRECTORY)} {folder}: no such folder; give one, such as .")
        found = json.loads(file.read_bytes()) if file.exists() else {}
    except OSError as error:
        raise ConfigError(f"{called(DIRECTORY)}: {file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{called(DIRECTORY)}: {file}: is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f'{called(DIRECTORY)}: {file}: expected an object, such as {{"{MODE}": 2}}')
    return found
