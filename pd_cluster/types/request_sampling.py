"""The parameters by which a client determines how tokens are chosen."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

import msgspec

GuideKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag", "reply", "budget"]
MAX_SEQUENCES = 128  # per request
MAX_GUIDE_NUM_CHARS = 256 << 10
MAX_EXTRA_ARGS_NUM_CHARS = 16 << 10


class Guide(msgspec.Struct, frozen=True):
    """A constraint on the output. `text` is canonical, so equal guides have equal texts. Its content depends on `kind`:

    - json: a JSON schema; json_object: empty; choice: a JSON array of strings
    - regex: an expression that the whole output must match; grammar: EBNF (GBNF's or Lark's dialect)
    - structural_tag: a JSON object with "structures" and "triggers"
    - reply: JSON made by parsers/reply_guides.py, which may include the other kinds
    - budget: JSON made by text/thinking_budget.py, which may include any other kind
    """

    kind: GuideKind
    text: str = ""


class Range(NamedTuple):
    """The finite numbers from `low` to `high`; `low` itself is outside if `excludes_low`."""

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
    """Marks a parameter that only affects random draws: a beam search accepts no value but `neutral`."""

    neutral: float


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when to stop.

    temperature 0 is greedy. `top_k` -1 or 0, `top_p` 1 and `min_p` 0 keep all tokens. The `n` sequences share the
    prompt and are distinguished by their index. Stop strings are not here: the process that detokenizes checks them.

    With a `beam_width` the `n` sequences are the best hypotheses of a beam search. Scores are divided by the
    hypothesis' length to the power of `length_penalty`. `early_stopping` ends the search when there are `beam_width`
    hypotheses (True), or when a better one is unlikely (False) or impossible ("never").
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0  # no end-of-sequence or stop token is chosen before this many output tokens
    temperature: Annotated[float, Range(0), ShapesDraws(0)] = 1.0
    top_k: Annotated[int, ShapesDraws(-1)] = -1
    top_p: Annotated[float, Range(0, 1, excludes_low=True), ShapesDraws(1)] = 1.0
    min_p: Annotated[float, Range(0, 1), ShapesDraws(0)] = 0.0  # relative to the probability of the most likely token
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Range()] = 0.0
    frequency_penalty: Annotated[float, Range()] = 0.0
    repetition_penalty: Annotated[float, Range(0, excludes_low=True)] = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # a bad word's last token is never chosen after its others
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    logprobs: int | None = None  # the number of most likely tokens that are returned with each chosen token
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # returned with each chosen token in place of the most likely ones
    # For each prompt token but the first: tokens whose logprobs are returned after those of the most likely tokens
    # there.
    prompt_logprob_token_ids: tuple[tuple[int, ...], ...] = ()
    beam_width: int = 0  # 0: no beam search
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    guide: Guide | None = None
    extra_args: str = ""  # a JSON object for logits processors; "": none

    @property
    def num_sequences(self) -> int:
        """The most sequences that an engine computes at the same time."""
        return max(self.n, self.beam_width)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


NO_SAMPLING = Sampling()  # for a request that chooses no token
