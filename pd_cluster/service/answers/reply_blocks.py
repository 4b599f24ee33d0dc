"""Splits a reply into blocks: reasoning, text and calls, in the order in which the model wrote them.

/v1/messages and /v1/responses share this form, and name the blocks differently. Knows nothing of these routes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from pd_cluster.errors import PdClusterError
from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content, Part, Reasoning
from pd_cluster.service.answers.token_alignment import TokenAlignment
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.text_sequence import Piece, TokenLogprobs

Kind = Literal["reasoning", "text", "call"]


class Block:
    """One block. `text`: the text so far, or a call's arguments. `call_id` and `name` are a call's.

    `tokens`: the tokens of a text block, if they have logprobs.
    """

    def __init__(self, index: int, kind: Kind, call_id: str = "", name: str = "") -> None:
        self.index, self.kind, self.call_id, self.name = index, kind, call_id, name
        self.tokens: list[TokenLogprobs] = []
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        self._texts.append(text)

    @property
    def text(self) -> str:
        self._texts = ["".join(self._texts)]
        return self._texts[0]


class BlockChange(NamedTuple):
    """One step of a reply.

    A block begins, grows by `text` any number of times, and ends before the next block begins.
    """

    what: Literal["begins", "grows", "ends"]
    block: Block
    text: str = ""
    tokens: Sequence[TokenLogprobs] = ()  # the tokens of this text, as in Block


class BlockReader:
    """Reads one choice's pieces. `blocks`: all blocks so far; the last one may still grow."""

    def __init__(self, generation: Generation, shows_reasoning: bool = True) -> None:
        self._generation = generation
        self._reader = generation.new_reader() if generation.new_reader is not None else None
        generation.parts_steps = self._reader is not None  # until the first token after the reasoning is found
        self._new_call_id = generation.new_call_id
        self._shows_reasoning = shows_reasoning
        shows_stop_token = generation.sequences[0].shows_stop_token
        self._shares = TokenAlignment(shows_stop_token) if generation.sampling.logprobs is not None else None
        self._has_reasoned = False
        self._num_reasoning_tokens = 0
        self._later: list[
            tuple[Part, Sequence[TokenLogprobs]]
        ] = []  # content that the model wrote within a call's arguments; it follows the call
        self.blocks: list[Block] = []

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.blocks)

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens before the answer: the reasoning and the marks around it; 0 without reasoning."""
        return self._num_reasoning_tokens if self._has_reasoned else 0

    def read(self, piece: Piece) -> Iterator[BlockChange]:
        """Yields the changes that are final after this piece; after the last piece, also those that were held back."""
        for text in (piece.text,) if self._shares is None else self._shares.cut(piece):
            parts: list[Part] = [Content(text)] if text else []
            yield from self._all_changes(parts if self._reader is None else self._reader.feed(text))
        if self._reader is not None:
            if self._reader.is_reasoning:
                self._num_reasoning_tokens += len(piece.token_ids)
            else:
                self._generation.parts_steps = False
            if piece.finish_reason is not None:
                yield from self._all_changes(self._reader.finish())
        if piece.finish_reason is not None and self.blocks:
            yield BlockChange("ends", self.blocks[-1])

    def _all_changes(self, parts: list[Part]) -> Iterator[BlockChange]:
        num_held = self._reader.num_held if self._reader is not None else 0
        tokens = self._shares.of(parts, num_held) if self._shares is not None else [()] * len(parts)
        in_call = self._reader is not None and self._reader.in_call
        last = max((at for at, part in enumerate(parts) if isinstance(part, CallArguments)), default=-1)
        for at, (part, its_tokens) in enumerate(zip(parts, tokens, strict=True)):
            within = bool(self.blocks) and self.blocks[-1].kind == "call" and (in_call or at < last)
            if isinstance(part, Content) and within:
                self._later.append((part, its_tokens))
                continue
            if not isinstance(part, CallArguments):
                yield from self._take_later()
            yield from self._changes(part, its_tokens)
        if not in_call:
            yield from self._take_later()

    def _take_later(self) -> Iterator[BlockChange]:
        later, self._later = self._later, []
        for part, tokens in later:
            yield from self._changes(part, tokens)

    def _changes(self, part: Part, tokens: Sequence[TokenLogprobs]) -> Iterator[BlockChange]:
        match part:
            case CallBegin(index, name):
                yield from self._begin("call", self._new_call_id(name, index), name)
                return
            case Reasoning(text):
                kind: Kind = "reasoning"
                self._has_reasoned = True
                if not self._shows_reasoning:
                    return
            case Content(text):
                kind = "text"
            case CallArguments(_, text):
                kind = "call"
        if not self.blocks or self.blocks[-1].kind != kind:
            yield from self._begin(kind)
        self.blocks[-1].add(text)
        self.blocks[-1].tokens += tokens
        yield BlockChange("grows", self.blocks[-1], text, tokens)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[BlockChange]:
        ended, begun = self.blocks[-1:], Block(len(self.blocks), kind, call_id, name)
        self.blocks.append(begun)
        for block in ended:
            yield BlockChange("ends", block)
        yield BlockChange("begins", begun)


class BlockAnswer(ABC):
    """The answer to a request of one choice, whole or as events. `headers` identify it for clients.

    `last`: the piece that ends the answer, set before `events` receives the last changes.
    """

    id: str

    def __init__(self, generation: Generation, streams: bool, shows_reasoning: bool = True) -> None:
        self.generation = generation
        self.streams = streams
        self.reader = BlockReader(generation, shows_reasoning)
        self.last: Piece | None = None
        self._is_opened = False

    @property
    def name(self) -> str:
        """The request's name in logs and timelines, and for aborts."""
        return self.id

    @property
    def headers(self) -> dict[str, str]:
        return {}

    @property
    def is_large(self) -> bool:
        """Whether building the answer takes noticeable time; if so, a thread builds it, or the last events of its
        stream.
        """
        return self.generation.sampling.logprobs is not None

    def read(self, piece: Piece) -> list[BlockChange]:
        """Returns a piece's changes, the input of `events`."""
        if piece.finish_reason is not None:
            self.last = piece
        return [*self.reader.read(piece)]

    def events(self, changes: list[BlockChange]) -> bytes:
        """Returns a piece's events, which begin with `_opening` for the first piece; `closing` follows the last."""
        found = [] if self._is_opened else [self._opening()]
        self._is_opened = True
        return b"".join([*found, *(self._change(change) for change in changes)])

    @abstractmethod
    def whole(self) -> msgspec.Struct:
        """Returns the answer after its last piece."""

    @abstractmethod
    def failure(self, error: PdClusterError) -> bytes:
        """Returns the events of an error after the answer has begun."""

    @abstractmethod
    def _opening(self) -> bytes:
        """Returns the events before any block."""

    @abstractmethod
    def _change(self, change: BlockChange) -> bytes:
        """Returns the events of one step."""

    @abstractmethod
    def closing(self) -> bytes:
        """Returns the events after the last block."""
