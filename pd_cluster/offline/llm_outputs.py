"""`LLM`'s results, with the fields of both vLLM and FastDeploy. Knows nothing of how an answer is computed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pd_cluster.offline.llm_adapters import LoRARequest

OK = 200  # error_code of an answer without error


class Logprob(NamedTuple):
    """The logprob of a token at one position; `rank` 1: the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # token id -> its logprob; the chosen token first


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer. A chat's `text` is its content; `reasoning_content` and `tool_calls` need parsers.

    `cumulative_logprob` and `logprobs` are set if logprobs are requested. `finish_reason` is stop, length, tool_calls,
    or error; `stop_reason`: the stop string or stop token that ended the answer.
    """

    index: int = 0  # among the answers of its prompt
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def send_idx(self) -> int:
        """The index of the last token, from 0, under FastDeploy's name."""
        return max(len(self.token_ids) - 1, 0)

    def finished(self) -> bool:
        return self.finish_reason is not None


class CompletionOutputs(list[CompletionOutput]):
    """The n answers of a prompt, best first. Attribute access reads the first answer.

    So vLLM's `outputs[0].text` and FastDeploy's `outputs.text` both work. `index`, too, is the first answer's index and
    not the method of lists.
    """

    @property
    def index(self) -> int:  # type: ignore[override]
        return self[0].index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not self:  # copying looks up such names
            raise AttributeError(name)
        return getattr(self[0], name)


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Times in seconds. `arrival_time` and the next three fields are Unix times (`time.time()`), the others durations.

    None: unknown. A step computes tokens of many requests, so `model_forward_time` includes simultaneous work on other
    requests. vLLM's `first_token_time` is a Unix time; here, as in FastDeploy, it is the time to the first token.
    """

    arrival_time: float
    inference_start_time: float | None = None
    finished_time: float | None = None
    first_token_time: float | None = None  # the time from arrival to the first token
    time_in_queue: float | None = None
    model_forward_time: float | None = None  # the time from the start of inference to the last token
    model_execute_time: float | None = None  # the total: preprocessing, queue, forward

    @property
    def first_scheduled_time(self) -> float | None:
        """The start of inference, under vLLM's name."""
        return self.inference_start_time


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The result of one prompt. `prompt`: its original or rendered text; None for token ids.

    `error_code` is 200, or the API's status for the error: 400 for a prompt that is too long or an unusable guide, 5xx
    for later failures. After an error `error_msg` gives the reason, and `outputs` has one answer without text whose
    finish_reason is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: CompletionOutputs
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error_code: int = OK
    error_msg: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    lora_request: LoRARequest | None = None

    def without_text(self) -> RequestOutput:
        """Returns a copy whose answers have no text and no tokens."""
        outputs = [replace(each, text="", token_ids=[], logprobs=None) for each in self.outputs]
        return replace(self, outputs=CompletionOutputs(outputs))
