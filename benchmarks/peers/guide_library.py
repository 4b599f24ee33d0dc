"""Tries guides with one library: `python guide_library.py LIBRARY TOKENIZER_FILE CASES_FILE`; prints a JSON line each.

LIBRARY is llguidance, through this project's own grammar.py, or xgrammar, which has an environment of its own and uses
nothing of pd_cluster. CASES_FILE holds [[name, kind, text, counterexample], …]. Each guide is compiled, a few random
outputs are followed, and a non-empty counterexample is tried: `lets_through` reports the result. Lines are printed at
once, so that the parent can stop this process when one takes too long.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

Encode = Callable[[str], list[int]]

NUM_WALKS = 3
NUM_WALK_TOKENS = 60
EOS_ID = 2


class Library(Protocol):
    """A guide library. `start` begins another output with the guide that was compiled last."""

    def compile(self, kind: str, text: str) -> None: ...
    def start(self) -> None: ...
    def fill(self) -> None: ...
    def allowed(self) -> list[int]: ...
    def take(self, token_id: int) -> None: ...


class LLGuidance:
    def __init__(self, tokenizer_file: Path) -> None:
        import numpy as np

        from pd_cluster.text.grammar import Compiler
        from pd_cluster.types import Guide

        self._np, self._guide = np, Guide
        self._compiler = Compiler(tokenizer_file, EOS_ID + 1, {EOS_ID})
        self._words = np.zeros(self._compiler.num_words, dtype=np.uint32)

    def compile(self, kind: str, text: str) -> None:
        self._compiled = self._compiler.compile(self._guide(kind, text))  # type: ignore[arg-type]

    def start(self) -> None:
        self._matcher = self._compiled.copy()

    def fill(self) -> None:
        self._matcher.write_mask(self._words)

    def allowed(self) -> list[int]:
        np = self._np
        found: list[int] = np.flatnonzero(np.unpackbits(self._words.view(np.uint8), bitorder="little")).tolist()
        return found

    def take(self, token_id: int) -> None:
        self._matcher.take([token_id])


class XGrammar:
    def __init__(self, tokenizer_file: Path) -> None:
        import numpy as np
        import xgrammar

        vocab = json.loads(tokenizer_file.read_text("utf-8"))["model"]["vocab"]
        names = sorted(vocab, key=lambda name: int(vocab[name]))
        info = xgrammar.TokenizerInfo(names, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[EOS_ID])
        self._np, self._xgrammar = np, xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def compile(self, kind: str, text: str) -> None:
        compilers: dict[str, Callable[[str], Any]] = {
            "json": self._compiler.compile_json_schema,
            "regex": self._compiler.compile_regex,
            "grammar": self._compiler.compile_grammar,
        }
        self._compiled = compilers[kind](text)

    def start(self) -> None:
        self._matcher = self._xgrammar.GrammarMatcher(self._compiled)

    def fill(self) -> None:
        self._mask.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._mask)

    def allowed(self) -> list[int]:
        np = self._np
        found: list[int] = np.flatnonzero(np.unpackbits(self._mask.numpy().view(np.uint8), bitorder="little")).tolist()
        return found

    def take(self, token_id: int) -> None:
        if not self._matcher.accept_token(token_id):
            raise ValueError(f"token {token_id} was allowed, and is refused")


def tried(library: Library, encode: Encode, kind: str, text: str, counterexample: str) -> dict[str, Any]:
    start_s = time.perf_counter()
    try:
        library.compile(kind, text)
    except Exception as error:  # library-specific errors
        return {"error": " ".join(str(error).split())[:200], "compile_ms": 1e3 * (time.perf_counter() - start_s)}
    compile_ms = 1e3 * (time.perf_counter() - start_s)
    masks_ms: list[float] = []
    problem = ""
    try:
        for seed in range(NUM_WALKS):
            walk(library, random.Random(seed), masks_ms)
    except Exception as caught:
        problem = " ".join(str(caught).split())[:200] or type(caught).__name__
    lets_through = bool(counterexample) and accepts(library, encode(counterexample))
    return {"lets_through": lets_through, "error": problem, "compile_ms": compile_ms, "masks_ms": masks_ms}


def accepts(library: Library, token_ids: list[int]) -> bool:
    """Returns whether these tokens may follow each other, and then the end."""
    library.start()
    for token_id in [*token_ids, EOS_ID]:
        library.fill()
        if token_id not in library.allowed():
            return False
        if token_id != EOS_ID:
            library.take(token_id)
    return True


def walk(library: Library, rng: random.Random, masks_ms: list[float]) -> None:
    library.start()
    for _ in range(NUM_WALK_TOKENS):
        start_s = time.perf_counter()
        library.fill()
        masks_ms.append(1e3 * (time.perf_counter() - start_s))
        allowed = library.allowed()
        if not allowed:
            raise ValueError("nothing can follow")
        token_id = rng.choice(allowed)
        if token_id == EOS_ID:
            return
        library.take(token_id)


def main(name: str, tokenizer_file: str, cases_file: str) -> None:
    library: Library = LLGuidance(Path(tokenizer_file)) if name == "llguidance" else XGrammar(Path(tokenizer_file))
    library.compile("json", '{"type": "boolean"}')  # warm-up
    print(json.dumps({"name": "ready", "rss_mib": rss_mib()}), flush=True)
    tokenizer = Tokenizer.from_file(tokenizer_file)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    for case, *rest in json.loads(Path(cases_file).read_text("utf-8")):
        print(json.dumps({"name": case, **tried(library, encode, *rest), "rss_mib": rss_mib()}), flush=True)


def rss_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
