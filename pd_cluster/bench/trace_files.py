"""Trace files of requests in Mooncake's format, one JSON object per line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2353, 2354]}

`timestamp` is in milliseconds, and lengths are in tokens. `hash_ids` identify the prompt's blocks of 512 tokens; equal
ids mean equal prefixes. Two more fields are written only if they are needed: `block_tokens`, for blocks of another
size, and `session`. The format is that of https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from pd_cluster.bench.request_arrivals import HASH_BLOCK_TOKENS, Arrival
from pd_cluster.errors import ConfigError
from pd_cluster.output_files import write_output

MOST_TOKENS = 1 << 24  # maximum number of tokens of a prompt or an answer; more must be a mistake
MOST_MS = 1 << 43  # 278 years, which admits timestamps since 1970
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_MS)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    timestamp: Milliseconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 62)], ...] = ()
    block_tokens: Tokens | msgspec.UnsetType = msgspec.UNSET
    session: Annotated[str, msgspec.Meta(max_length=200)] = ""

    @property
    def size_of_block(self) -> int:
        return HASH_BLOCK_TOKENS if isinstance(self.block_tokens, msgspec.UnsetType) else self.block_tokens


class TraceScale(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that are made to a trace when it is read, in this order: `limit`, `lengths`, `repeat`, `time`."""

    limit: int | None = None  # how many of its first requests are read; None: all
    lengths: float = 1.0  # multiplies all lengths, also those of blocks, so prefixes keep their shares
    repeat: int = 1  # consecutive copies, each with its own ids and sessions
    time: float = 1.0  # multiplies the intervals between requests; below 1, the load is higher

    def check(self) -> None:
        """Raises ConfigError."""
        for name, value in (("limit", self.limit), ("repeat", self.repeat)):
            if value is not None and value < 1:
                raise ConfigError(f"trace {name} {value}: expected 1 or more")
        for name, factor in (("lengths", self.lengths), ("time", self.time)):
            if not 1e-6 <= factor <= 1e6:
                raise ConfigError(f"trace {name} {factor:g}: expected a factor between 1e-6 and 1e6")


UNSCALED = TraceScale()


def read_trace(path: str | Path, scale: TraceScale = UNSCALED) -> list[Arrival]:
    """Returns the requests in order of time, the first at 0 s. Raises ConfigError with file, line and field."""
    scale.check()
    lines = list(itertools.islice(_lines(Path(path)), scale.limit))
    if not lines:
        raise ConfigError(f"trace {path}: it has no requests")
    first_ms = min(line.timestamp for line in lines)
    found = [_arrival(line, first_ms, scale.lengths) for line in sorted(lines, key=lambda line: line.timestamp)]
    found = repeated(found, scale.repeat)
    if scale.time == 1.0:
        return found
    return [msgspec.structs.replace(each, at_s=each.at_s * scale.time) for each in found]


def write_trace(path: str, arrivals: Sequence[Arrival], flag: str = "--export") -> None:
    """Writes arrivals in order; timestamps in whole milliseconds. Raises ConfigError if the file can't be written."""
    encoder = msgspec.json.Encoder()
    lines = [
        TraceLine(
            timestamp=round(1e3 * each.at_s),
            input_length=each.num_prompt_tokens,
            output_length=each.num_output_tokens,
            hash_ids=each.hash_ids,
            block_tokens=msgspec.UNSET if each.block_tokens == HASH_BLOCK_TOKENS else each.block_tokens,
            session=each.session,
        )
        for each in arrivals
    ]
    write_output(path, flag, encoder.encode_lines(lines))


def repeated(arrivals: list[Arrival], num_times: int) -> list[Arrival]:
    """Returns the load repeated `num_times`; repetitions share no blocks or sessions.

    The pause between two repetitions is the mean time between requests.
    """
    if num_times == 1 or not arrivals:
        return arrivals
    num_ids = 1 + max((hash_id for each in arrivals for hash_id in each.hash_ids), default=-1)
    period_s = arrivals[-1].at_s * len(arrivals) / max(1, len(arrivals) - 1)
    return [
        msgspec.structs.replace(
            each,
            at_s=each.at_s + number * period_s,
            hash_ids=tuple(hash_id + number * num_ids for hash_id in each.hash_ids),
            session=each.session and f"{each.session}.{number}",
        )
        for number in range(num_times)
        for each in arrivals
    ]


def _lines(path: Path) -> Iterator[TraceLine]:
    decoder = msgspec.json.Decoder(TraceLine)
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield _line(decoder, raw, f"trace {path}, line {number}")
    except OSError as error:
        raise ConfigError(f"trace {path}: cannot be read: {error.strerror}") from None


def _line(decoder: msgspec.json.Decoder[TraceLine], raw: bytes, where: str) -> TraceLine:
    try:
        line = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {field_of(error)}") from None
    num_blocks = -(-line.input_length // line.size_of_block)
    if line.hash_ids and len(line.hash_ids) != num_blocks:
        raise ConfigError(
            f"{where}: hash_ids: {len(line.hash_ids)} ids; a prompt of {line.input_length} tokens has {num_blocks} "
            f"blocks of {line.size_of_block}"
        )
    return line


def field_of(error: Exception) -> str:
    """Returns msgspec's message with the field in front: "output_length: expected `int` >= 1"."""
    text, found = str(error), re.search(r" - at `\$\.?([^`]*)`$", str(error))
    if found is None:
        return text[:1].lower() + text[1:]
    text = text[: found.start()]
    return f"{found[1]}: {text[:1].lower()}{text[1:]}"


def _arrival(line: TraceLine, first_ms: float, lengths: float) -> Arrival:
    """Scales each block, including a partial last one, so that the number of blocks stays the same."""
    block_tokens = max(1, round(lengths * line.size_of_block))
    num_full, rest = divmod(line.input_length - 1, line.size_of_block)
    num_rest = min(block_tokens, max(1, round(lengths * (rest + 1))))
    return Arrival(
        at_s=(line.timestamp - first_ms) / 1e3,
        num_prompt_tokens=num_full * block_tokens + num_rest,
        num_output_tokens=max(1, round(lengths * line.output_length)),
        hash_ids=line.hash_ids,
        block_tokens=block_tokens,
        session=line.session,
    )
