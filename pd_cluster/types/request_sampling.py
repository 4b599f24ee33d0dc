"""How tokens are chosen, as a client asks for it."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

import msgspec

GuideKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag", "reply", "budget"]
MAX_SEQUENCES = 128  # per request
MAX_GUIDE_NUM_CHARS = 256 << 10


class Guide(msgspec.Struct, frozen=True):
    """A constraint on the output. `text` is canonical, so equal guides are equal strings; by kind:

    json: a schema, as JSON; json_object: empty; regex: one that the whole output matches; choice: a JSON array of
    strings; grammar: EBNF (GBNF's or Lark's dialect); structural_tag: JSON, an object with "structures" and "triggers";
    reply: the JSON that parsers/reply_guides.py makes, which may include the others; budget: that of
    text/thinking_budget.py, which may include any other.
    """

    kind: GuideKind
    text: str = ""


class Range(NamedTuple):
    """The finite numbers from `low` to `high`, without `low` itself if it `excludes_low`."""

    low: float = -math.inf
    high: float = math.inf
    excludes_low: bool = False

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int | float) or not math.isfinite(number):
            return False
        return (number > self.low if self.excludes_low else number >= self.low) and number <= self.high

    def __str__(self) -> str:
        starts = "(" if self.excludes_low or self.low == -math.inf else "["
        return f"{starts}{self.low:g}, {self.high:g}{')' if self.high == math.inf else ']'}"


class ShapesDraws(NamedTuple):
    """Marks a parameter that only shapes draws: a beam search takes no value but `neutral`."""

    neutral: float


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when to stop.

    temperature 0 is greedy. `top_k` -1 or 0, `top_p` 1 and `min_p` 0 mean all tokens. `n` sequences share the prompt
    and are told apart by their index. Stop strings are not here: the process that detokenizes owns them.

    With a `beam_width` the `n` sequences are the best hypotheses of a beam search. `length_penalty` is the power of a
    hypothesis' length that its score is divided by; `early_stopping` ends the search at `beam_width` hypotheses (True),
    when a better one is unlikely (False) or impossible ("never").
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0  # neither an end-of-sequence nor a stop token is chosen before this many output tokens
    temperature: Annotated[float, Range(0), ShapesDraws(0)] = 1.0
    top_k: Annotated[int, ShapesDraws(-1)] = -1
    top_p: Annotated[float, Range(0, 1, excludes_low=True), ShapesDraws(1)] = 1.0
    min_p: Annotated[float, Range(0, 1), ShapesDraws(0)] = 0.0  # relative to the most likely token's probability
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Range()] = 0.0
    frequency_penalty: Annotated[float, Range()] = 0.0
    repetition_penalty: Annotated[float, Range(0, excludes_low=True)] = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences whose last token is never chosen after the others
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    logprobs: int | None = None  # how many of the most likely tokens are returned with each chosen one
    prompt_logprobs: int | None = None
    beam_width: int = 0  # 0: no beam search
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    guide: Guide | None = None

    @property
    def num_sequences(self) -> int:
        """The most sequences that an engine computes at a time."""
        return max(self.n, self.beam_width)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


NO_SAMPLING = Sampling()  # of a request that chooses no token
