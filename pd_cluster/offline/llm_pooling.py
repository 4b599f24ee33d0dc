"""`LLM.embed` and `LLM.encode`: their parameters and outputs, with vLLM's names, and the work that turns prompts into
outputs.

A request's failure is never raised: its output reports it, and other requests are not affected.
"""

from __future__ import annotations

import dataclasses
import logging
import reprlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import PdClusterError, RequestError
from pd_cluster.offline.llm_answers import MAX_RUNNING
from pd_cluster.offline.llm_outputs import OK
from pd_cluster.offline.llm_prompts import Known, Prompt
from pd_cluster.offline.llm_sampling import SamplingParams
from pd_cluster.service.generation.merged_streams import together
from pd_cluster.service.pooling.embedder import EmbeddingInput
from pd_cluster.service.schema.error_bodies import status_of
from pd_cluster.service.text_service import TextService

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

log = logging.getLogger(__name__)

NAME = "pooling_params"
EMBED = "embed"


@dataclass(slots=True, kw_only=True)
class PoolingParams:
    """vLLM's parameters for vectors.

    `dimensions`: how many of a vector's first values are kept, for models trained for it (Matryoshka); None: all.
    `normalize` and its later name `use_activation`: False skips the final division by the vector's length (L2); None
    and True keep it. `truncate_prompt_tokens`: how many of the prompt's last tokens are kept; -1: as many as fit the
    context; None: a prompt that is too long is an error. `task`: only "embed".

    A value is checked when it is used, before any work; a wrong value raises RequestError with the parameter's name.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    task: str | None = None

    def checked(self) -> PoolingParams:
        """Checks the parameters and returns them. Raises RequestError."""
        for name in ("dimensions", "truncate_prompt_tokens"):
            value, least = getattr(self, name), -1 if name == "truncate_prompt_tokens" else 1
            if value is not None and (type(value) is not int or value < least or not value):
                most = "-1 or an integer of at least 1" if least < 0 else "an integer of at least 1"
                raise RequestError(f"{name}: {reprlib.repr(value)}; must be {most}", param=name)
        for name in ("normalize", "use_activation"):
            if (value := getattr(self, name)) not in (None, True, False):
                raise RequestError(f"{name}: {reprlib.repr(value)}; must be true or false", param=name)
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise RequestError(
                f"use_activation: {self.use_activation}, but normalize is {self.normalize}; they mean the same for "
                f"vectors; give one of them",
                param="use_activation",
            )
        check_task("task", self.task)
        return self

    @property
    def normalizes(self) -> bool:
        return False not in (self.normalize, self.use_activation)


def check_task(name: str, task: Any) -> None:
    """Raises RequestError for every task except "embed"."""
    if task not in (None, EMBED):
        raise RequestError(
            f'{name}: {reprlib.repr(task)} is not supported; give "{EMBED}", which makes one vector for each prompt',
            param=name,
        )


def paired_pooling(params: Any, num_prompts: int) -> list[PoolingParams]:
    """Returns the checked parameters of each prompt. Raises RequestError, also for SamplingParams."""
    if params is None:
        params = PoolingParams()
    if isinstance(params, PoolingParams | SamplingParams):
        return [_checked(NAME, params)] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise RequestError(f"{NAME}: {type(params).__name__}; must be PoolingParams, or a list of them", param=NAME)
    if len(params) != num_prompts:
        raise RequestError(
            f"{NAME}: {len(params)} for {num_prompts} prompts; give one for all, or one for each", param=NAME
        )
    return [_checked(f"{NAME}[{at}]", each) for at, each in enumerate(params)]


def _checked(name: str, given: Any) -> PoolingParams:
    if isinstance(given, SamplingParams):
        set_ = [f.name for f in dataclasses.fields(given) if getattr(given, f.name) != f.default]
        which = f"SamplingParams with {', '.join(set_)}" if set_ else "SamplingParams"
        raise RequestError(f"{name}: {which}; no token is sampled for a vector, give PoolingParams", param=NAME)
    if not isinstance(given, PoolingParams):
        raise RequestError(f"{name}: {type(given).__name__}; must be PoolingParams", param=NAME)
    return given.checked()


# ---- outputs


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float] = field(default_factory=list)

    @property
    def hidden_size(self) -> int:
        """The number of dimensions, under vLLM's name."""
        return len(self.embedding)


@dataclass(slots=True)
class PoolingOutput:
    """The vector of a prompt as a numpy array, float32 [dimensions]; in vLLM it is a tensor."""

    data: npt.NDArray[np.float32]


@dataclass(slots=True, kw_only=True)
class _Pooled:
    """`prompt`: the original text; None for token ids.

    `error_code` is 200, or the API's status for the error; then `error_msg` gives the reason, and the vector is empty.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error_code: int = OK
    error_msg: str | None = None


@dataclass(slots=True, kw_only=True)
class EmbeddingRequestOutput(_Pooled):
    """The result of one prompt of `LLM.embed`."""

    outputs: EmbeddingOutput


@dataclass(slots=True, kw_only=True)
class PoolingRequestOutput(_Pooled):
    """The result of one prompt of `LLM.encode`."""

    outputs: PoolingOutput


def encoded(output: EmbeddingRequestOutput) -> PoolingRequestOutput:
    """Returns the result in the form of `encode`."""
    import numpy as np

    given = {each.name: getattr(output, each.name) for each in dataclasses.fields(_Pooled)}
    return PoolingRequestOutput(**given, outputs=PoolingOutput(np.array(output.outputs.embedding, dtype=np.float32)))


# ---- from prompts to outputs


async def embeddings(
    service: TextService,
    prompts: list[Prompt],
    params: list[PoolingParams],
    variants: list[str],
    tell: Callable[[EmbeddingRequestOutput], None] = lambda output: None,
) -> list[EmbeddingRequestOutput]:
    """Returns the outputs in the order of `prompts`; `tell` receives each when complete. `variants`: the adapters."""
    found: dict[int, EmbeddingRequestOutput] = {}
    waiting = iter(enumerate(zip(prompts, params, variants, strict=True)))

    async def work() -> None:
        for at, (prompt, each, variant) in waiting:
            found[at] = await _embedded(service, prompt, each, variant)
            tell(found[at])

    await together([work() for _ in range(min(MAX_RUNNING, len(prompts)))])
    outputs = [found[at] for at in range(len(prompts))]
    if failed := [output for output in outputs if output.error_msg is not None]:
        log.warning("%d of %d requests failed: %s", len(failed), len(prompts), failed[0].error_msg)
    return outputs


async def _embedded(
    service: TextService, prompt: Prompt, params: PoolingParams, variant: str
) -> EmbeddingRequestOutput:
    ask = EmbeddingInput(
        prompt=list(prompt) if isinstance(prompt, list) else prompt,
        dimensions=params.dimensions,
        normalizes=params.normalizes,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        variant=variant,
        client_id=f"embd-{secrets.token_hex(12)}",
        received_s=time.monotonic(),
    )
    output = EmbeddingRequestOutput(
        request_id=ask.client_id,
        prompt=prompt.text if isinstance(prompt, Known) else prompt if isinstance(prompt, str) else None,
        prompt_token_ids=list(prompt) if isinstance(prompt, list) else [],
        outputs=EmbeddingOutput(),
    )
    try:
        embedding = await service.embedder.embed(ask)
    except Exception as error:  # as in the API, an error affects only its own request
        if not isinstance(error, PdClusterError):
            log.error("%s: unexpected error", ask.client_id, exc_info=error)
        output.error_code = status_of(error)
        output.error_msg = str(error) if isinstance(error, PdClusterError) else f"{type(error).__name__}: {error}"
        return output
    output.prompt_token_ids, output.num_cached_tokens = embedding.prompt_token_ids, embedding.num_cached_tokens
    output.outputs.embedding = embedding.values
    return output
