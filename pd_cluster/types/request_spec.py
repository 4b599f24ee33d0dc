"""Everything that a request asks for, carried whole from validation to the engine."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Literal

import msgspec

from pd_cluster.types.request_sampling import Sampling

PoolingKind = Literal["last", "mean"]
PooledKind = Literal["last", "mean", "logits"]
MAX_POOLED_TOKEN_IDS = 64

MOST_TOKEN_IDS = 1 << 32  # the largest supported size of a vocabulary
BATCH_PRIORITY = 1 << 32  # the priority of batches' requests; clients' own priorities are 32-bit numbers


class Pooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a prompt becomes one vector instead of an answer.

    `kind`: the final hidden state (after the last norm) of the last token, or the mean over all tokens. `dimensions`:
    how many of the first elements are kept; None: all. Then `normalizes` divides the vector by its length (L2).

    For kind "logits", the vector has the logits that `token_ids`, in this order, have as the token after the prompt;
    the caller compares their likelihoods. This vector is neither cut nor normalized. `tells_total`: the vector ends
    with the logarithm of the sum of exp(logit) over the whole vocabulary.
    """

    kind: PooledKind = "last"
    dimensions: int | None = None
    normalizes: bool = True
    token_ids: tuple[int, ...] = ()
    tells_total: bool = False


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens [start, stop) that are placeholders for other content, whose hash is `digest`."""

    start: int
    stop: int
    digest: bytes


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt, resized for its model to a number of rows and columns of patches.

    `pixels`: 8-bit RGB, [height, width, 3]; empty for a leg that receives the image's KV from another instance. Video
    frames that a model reads together are one image with `num_frames`: [num_frames, height, width, 3]. `opens` and
    `closes`: whether it is the first and the last image of its video; a single image is both.
    """

    num_rows: int
    num_columns: int
    pixels: bytes = b""
    num_frames: int = 1
    opens: bool = True
    closes: bool = True


class RopePositions(msgspec.Struct, frozen=True, array_like=True):
    """Rotary positions of a prompt's tokens that differ from the tokens' indices.

    Each of the `rows` has a position for every prompt token: one row, or three (time, height, width) for models with
    M-RoPE. The token at index i after the prompt has position i + `delta` in every row. Slots of the KV cache, causal
    masks, windows and context limits still count tokens, regardless of these positions.
    """

    rows: tuple[tuple[int, ...], ...]
    delta: int = 0

    def between(self, start: int, stop: int) -> list[list[int]]:
        """Returns [num_rows][stop - start]: the positions of tokens [start, stop) of prompt and output together."""
        num_prompt = len(self.rows[0])
        later = range(max(start, num_prompt) + self.delta, max(stop, num_prompt) + self.delta)
        return [[*row[start:stop], *later] for row in self.rows]


def largest_id(token_ids: Sequence[int]) -> int:
    """Returns the largest token id, -1 without any; MOST_TOKEN_IDS if one is negative or has more than 32 bits."""
    try:
        struct.pack(f"{len(token_ids)}I", *token_ids)  # three times as fast as `min`
    except struct.error:
        return MOST_TOKEN_IDS
    return max(token_ids, default=-1)


class RequestSpec(msgspec.Struct, frozen=True, omit_defaults=True, dict=True, weakref=True):
    """A request's parameters, carried whole from validation to the engines and never changed.

    A field that is added here reaches every sequence of every attempt. Requests share cached KV only if they have the
    same `cache_salt` and `variant`, and only of blocks with equal `spans` and rotary positions.
    """

    prompt_token_ids: list[int]
    sampling: Sampling
    cache_salt: str = ""
    variant: str = ""  # names an adapted form of the model (variants.py); "": the model itself
    session: str = ""  # requests of one session prefer the instance that has their KV cache
    priority: int = 0  # lower values come first; batches' are above BATCH_PRIORITY / 2
    gathers: bool = False  # the client does not read tokens one by one, so several may be sent together
    batch: str = ""  # names a group of answers that the caller needs only together; "": not in a group
    spans: tuple[Span, ...] = ()  # in order and disjoint
    images: tuple[Image, ...] = ()  # one for each span; without images, the tokens of spans are computed as they are
    rope_positions: RopePositions | None = None  # None: each token's rotary position is its index
    prediction: tuple[int, ...] = ()  # tokens that the answer is expected to have; wrong tokens cost only time
    may_draft: bool = True  # False: each step computes one token of the request
    reports_drafts: bool = False  # outputs report the drafts of every step; see DraftReport
    retention_s: float = 0.0  # during this time its cached blocks are evicted only after others
    pooling: Pooling | None = None  # the prompt becomes a vector, and `sampling` is NO_SAMPLING; None: generation

    @functools.cached_property
    def block_hashes(self) -> dict[tuple[bytes, int], list[bytes]]:
        """The hashes of the prompt's blocks that this process has computed, by their root and block size.

        kv/prefix_index.py fills this dict; a router and engines in one process share it. It is never sent.
        """
        return {}

    @functools.cached_property
    def largest_token_id(self) -> int:
        """The prompt's largest token id, as `largest_id` returns it."""
        return largest_id(self.prompt_token_ids)

    @property
    def most_output_tokens(self) -> int:
        """Returns the maximum number of output tokens that a sequence may ever have."""
        return self.sampling.max_tokens if self.pooling is None else 0

    @property
    def most_tokens(self) -> int:
        """Returns the maximum length of a sequence in tokens, which is the same in every engine and attempt."""
        return len(self.prompt_token_ids) + self.most_output_tokens

    @property
    def num_decoding(self) -> int:
        """Returns the maximum number of sequences that are decoded at the same time."""
        return self.sampling.num_sequences if self.pooling is None else 0

    @property
    def num_pixel_bytes(self) -> int:
        return sum(len(image.pixels) for image in self.images)

    def without_pixels(self) -> RequestSpec:
        """Returns the spec for an engine that receives the KV cache of its images from another one."""
        if not self.images:
            return self
        images = tuple(msgspec.structs.replace(image, pixels=b"") for image in self.images)
        return msgspec.structs.replace(self, images=images)
