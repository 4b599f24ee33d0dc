"""Lists the versions of the weights that computed an answer's tokens, for every API. Knows nothing of formats."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from pd_cluster.service.generation.prompt_generation import Generation

DEFAULT_WEIGHTS = "default"  # the name of weights without a name


class WeightVersionSpan(Struct):
    """The weights of this name computed the output tokens [start, end)."""

    version: str
    start: int
    end: int


OfWeights = Annotated[
    list[WeightVersionSpan] | None,
    Meta(
        description="Present with return_weight_versions; also in answers with token ids or logprobs, if the weights "
        "have a name. A stream sends it when the answer ends."
    ),
]


def weights_of(generation: Generation, is_wanted: bool, tells_tokens: bool, choice: int = 0) -> OfWeights:
    """Returns the spans of a choice of the generation.

    None if the client did not ask for them (`is_wanted`), unless the answer lists tokens (`tells_tokens`) and the
    weights have a name. Also None for choices that are the best of several.
    """
    stream = generation.stream
    if stream is None or not (is_wanted or (tells_tokens and stream.weight_marks)):
        return None
    if len(stream.sequences) != generation.num_choices:
        return None
    return [WeightVersionSpan(name or DEFAULT_WEIGHTS, *span) for name, *span in stream.weight_spans(choice)]
