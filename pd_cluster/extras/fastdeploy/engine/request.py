"""The results of FastDeploy's `LLM`, in the shapes that FastDeploy documents."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pd_cluster.offline import llm_outputs as shapes


@dataclass(slots=True, kw_only=True)
class CompletionOutput(shapes.CompletionOutput):
    """One answer. `index` is the position of its prompt in the call."""


@dataclass(slots=True, kw_only=True)
class RequestMetrics(shapes.RequestMetrics):
    """Times in seconds. `arrival_time` and `inference_start_time` are Unix times, the others durations.

    `first_token_time` and `model_forward_time` count from the start of inference, `time_in_queue` and
    `model_execute_time` from the request's arrival. None: unknown.
    """

    @classmethod
    def of(cls, found: shapes.RequestMetrics) -> RequestMetrics:
        metrics = cls(**_values(found))
        if metrics.first_token_time is not None and metrics.time_in_queue is not None:
            metrics.first_token_time = max(0.0, metrics.first_token_time - metrics.time_in_queue)
        return metrics


@dataclass(slots=True, kw_only=True)
class RequestOutput(shapes.RequestOutput):
    """The result of one prompt. `outputs` is its answer, or a list if `n` requests several.

    `error_code` is 200, or an HTTP status; then `error_msg` gives the reason, and the answer has no text.
    """

    outputs: CompletionOutput | list[CompletionOutput]  # type: ignore[assignment]

    @classmethod
    def of(cls, found: shapes.RequestOutput, at: int) -> RequestOutput:
        """Converts an output. `at`: the prompt's position in the call."""
        answers = [CompletionOutput(**_values(each) | {"index": at}) for each in found.outputs]
        metrics = None if found.metrics is None else RequestMetrics.of(found.metrics)
        own = {"outputs": answers[0] if len(answers) == 1 else answers, "metrics": metrics}
        return cls(**_values(found) | own)


def _values(found: Any) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in fields(found)}
