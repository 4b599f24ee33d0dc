"""The interface of logits processors that operators write: vLLM's v1 classes, under the same names.

`--logits-processors MODULE:CLASS` names a subclass, or a subclass of vLLM's own classes, or any class with these
methods. An engine calls a processor with one row of logits at a time, in the process that samples. Knows nothing of
engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

import torch

RequestProcessor: TypeAlias = (
    Callable[[list[int], torch.Tensor], torch.Tensor] | Callable[[list[int], list[int], torch.Tensor], torch.Tensor]
)
"""Takes a sequence's output tokens and its row of logits [vocab_size] float32; the second form also takes its prompt
tokens, first. The lists of tokens must not be changed.

Returns the row to sample from, which may be the same tensor, changed in place.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorParams:
    """A request's parameters by vLLM's names. `extra_args`: the request's `vllm_xargs`; None: it has none.

    `stop_token_ids` are the request's own; `all_stop_token_ids` also has the model's end tokens.
    """

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logprobs: int | None
    prompt_logprobs: int | None
    stop_token_ids: list[int]
    all_stop_token_ids: set[int]
    logit_bias: dict[int, float] | None
    allowed_token_ids: list[int] | None
    bad_words_token_ids: list[list[int]] | None
    structured_outputs: Any | None  # not None: the answer is constrained
    extra_args: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The fields of vLLM's ModelConfig that are available here. `tokenizer`: the folder or file of the tokenizer."""

    model: str
    tokenizer: str
    dtype: str
    max_model_len: int
    vocab_size: int

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """The field of vLLM's SchedulerConfig that is available here: a processor sees one sequence."""

    max_num_seqs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorConfig:
    """The fields of vLLM's VllmConfig that are available here; any other attribute raises AttributeError."""

    model_config: ModelFacts
    scheduler_config: BatchFacts = field(default_factory=BatchFacts)
    speculative_config: None = None  # logits processors switch drafts off


class MoveDirectionality(Enum):
    """The kinds of vLLM's moves within a batch. A batch of one row never has any."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUpdate:
    """Tells a processor about its sequence, at index 0: `added` has (index, params, prompt tokens, output tokens).

    The list of output tokens is the running sequence's own, and grows with it.
    """

    batch_size: int = 1
    removed: Sequence[int] = ()
    added: Sequence[tuple[int, ProcessorParams, list[int], list[int]]] = ()
    moved: Sequence[tuple[int, int, MoveDirectionality]] = ()


class _Processor(ABC):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """`vllm_config` is a ProcessorConfig; rows of logits are on `device`."""
        super().__init__()

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError for ProcessorParams that a request must not have; the client gets status 400."""
        return  # accepts all

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the most likely token stays the same; greedy sequences then skip the processor."""


class AdapterLogitsProcessor(_Processor):
    """Makes a function for each sequence that the processor applies to. An engine has one instance."""

    @abstractmethod
    def new_req_logits_processor(self, params: Any) -> RequestProcessor | None:
        """Returns the function for a sequence with these ProcessorParams; None: the sequence needs none.

        This method is called again when a sequence continues elsewhere or after a preemption, so everything that the
        function needs must follow from `params` and the tokens.
        """


class LogitsProcessor(_Processor):
    """A processor of a whole batch, which here always has one row. Each sequence has an instance of its own."""

    @abstractmethod
    def update_state(self, batch_update: Any) -> None:
        """Called with a BatchUpdate before the sequence's first row here, and with None before each later row."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits to sample from, [1, vocab_size]; may change `logits` in place."""
