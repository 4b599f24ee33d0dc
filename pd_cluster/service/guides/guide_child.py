"""Checks guides: `python -m pd_cluster.service.guides.guide_child FD`. Runs in a process, because a thread cannot be
stopped.

FD is one end of a socket pair. The child reads its settings, then one guide per line; it writes a line when it is
ready, and a line per guide. The end of the input, or its parent's death, ends the child. If a guide exceeds the
limit of address space, the child answers with the cause and ends. A guide is valid if it compiles and some random
outputs can follow its first tokens.
"""

from __future__ import annotations

import os
import random
import resource
import socket
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np

from pd_cluster.engine.start.rank_main import die_with_parent, leave_signals_to_parent
from pd_cluster.errors import GuideError
from pd_cluster.service.guides.guide_check import CheckAnswer, CheckSettings
from pd_cluster.text.grammar import Compiler, Matcher, Words
from pd_cluster.types import Guide

MAX_NBYTES = 2 << 30  # how much address space a process may use beyond that of a ready one
STACK_NBYTES = 4 << 20  # less than the engine's threads have, so that a stack overflow happens here first
NICENESS = 10  # generation has priority
NUM_WALKS = 3
NUM_WALK_TOKENS = 24


def check(compiler: Compiler, guide: Guide) -> None:
    """Checks a guide. Raises GuideError."""
    matcher = compiler.compile(guide)
    for seed in range(NUM_WALKS):
        _walk(matcher.copy(), compiler, random.Random(seed))


def _walk(matcher: Matcher, compiler: Compiler, rng: random.Random) -> None:
    """Follows the guide along random possible tokens. Raises GuideError."""
    words = np.zeros(compiler.num_words, dtype=np.uint32)
    for _ in range(NUM_WALK_TOKENS):
        matcher.write_mask(words)
        going_on = token_ids_of(words & ~compiler.end_words if matcher.accepts else words)
        if not len(going_on):
            return
        matcher.take([int(going_on[rng.randrange(len(going_on))])])


def token_ids_of(words: Words) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Returns token ids in ascending order."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def main(fd: int) -> int:
    die_with_parent()
    leave_signals_to_parent()
    os.nice(NICENESS)
    channel = socket.socket(fileno=fd)
    lines = channel.makefile("rb")
    settings = msgspec.json.decode(lines.readline(), type=CheckSettings)
    try:
        compiler = Compiler(Path(settings.tokenizer_file), settings.vocab_size, settings.eos_token_ids)
    except GuideError as error:
        _tell(channel, CheckAnswer(str(error)))
        return 1
    _limit_memory()
    _tell(channel, CheckAnswer())
    threading.stack_size(STACK_NBYTES)
    thread = threading.Thread(target=_serve, args=(channel, lines, compiler), name="check")
    thread.start()
    thread.join()
    return 0


def _serve(channel: socket.socket, lines: socket.SocketIO, compiler: Compiler) -> None:
    while line := lines.readline():
        try:
            check(compiler, msgspec.json.decode(line, type=Guide))
        except GuideError as error:
            _tell(channel, CheckAnswer(str(error)))
        except MemoryError:
            _tell(channel, CheckAnswer("it takes too much memory"))
        else:
            _tell(channel, CheckAnswer())


def _limit_memory() -> None:
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_NBYTES, in_use + MAX_NBYTES))


def _tell(channel: socket.socket, answer: CheckAnswer) -> None:
    channel.sendall(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
