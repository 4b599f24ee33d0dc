"""A picture's size in its model: pixels, patches, tokens and rotary positions.

Numbers only: knows nothing of files, of pixels or of tensors. The arithmetic is that of transformers' image processor
of Qwen2-VL, which Qwen2.5-VL and Qwen3-VL use with other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.types import Image, RopePositions, Span

MAX_ASPECT_RATIO = 200
NUM_CHANNELS = 3


class ImageRules(msgspec.Struct, frozen=True):
    """`merge_size` squared patches, of `patch_size` squared pixels, become one token.

    `min_pixels` and `max_pixels` bound a picture's area after it is resized.
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    @property
    def side(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.merge_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width of a picture for the model. Raises RequestError."""
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise RequestError(
                f"{width} x {height} pixels: one side is more than {MAX_ASPECT_RATIO} times the other; cut it"
            )
        side = self.side
        tall, wide = round(height / side) * side, round(width / side) * side
        if tall * wide > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            tall, wide = (max(side, math.floor(each / factor / side) * side) for each in (height, width))
        elif tall * wide < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            tall, wide = (math.ceil(each * factor / side) * side for each in (height, width))
        if not tall or not wide:
            raise RequestError(f"{width} x {height} pixels: too narrow for this model; give at least {side} each way")
        return tall, wide

    def largest(self) -> Image:
        """Returns a black square of the largest area."""
        num_patches = max(1, math.isqrt(self.max_pixels) // self.side) * self.merge_size
        black = Image(num_patches, num_patches)
        return Image(num_patches, num_patches, bytes(self.num_bytes(black)))

    def num_tokens(self, image: Image) -> int:
        return image.num_rows * image.num_columns // self.merge_size**2

    def num_bytes(self, image: Image) -> int:
        """Returns the size of its pixels."""
        return image.num_rows * image.num_columns * self.patch_size**2 * NUM_CHANNELS

    def problem(self, image: Image) -> str:
        """Returns why an image cannot be computed; "" if it can."""
        grid = f"{image.num_rows} x {image.num_columns} patches"
        sides = (image.num_rows, image.num_columns)
        if min(sides) < 1 or any(side % self.merge_size for side in sides):
            return f"{grid}: must be multiples of {self.merge_size}"
        if self.num_bytes(image) > max(self.max_pixels, self.side**2) * NUM_CHANNELS:
            return f"{grid}: more than {self.max_pixels} pixels"
        if len(image.pixels) not in (0, self.num_bytes(image)):
            return f"{grid}: {len(image.pixels)} bytes of pixels; they have {self.num_bytes(image)}"
        return ""


class Placed(msgspec.Struct, frozen=True):
    """A prompt with its pictures: each has as many tokens as it takes."""

    token_ids: list[int]
    spans: tuple[Span, ...] = ()
    images: tuple[Image, ...] = ()
    rope_positions: RopePositions | None = None


def place(
    token_ids: list[int], placeholder: int, images: Sequence[tuple[Image, bytes]], rules: ImageRules, param: str
) -> Placed:
    """Multiplies the placeholders of a prompt, which has one for each image; `images` come with their digests.

    Raises RequestError for another number of placeholders.
    """
    places = [at for at, token_id in enumerate(token_ids) if token_id == placeholder]
    if len(places) != len(images):
        raise RequestError(
            f"{param}: {len(places)} placeholders of images for {len(images)} images; give one for each", param=param
        )
    if not places:
        return Placed(token_ids)
    found: list[int] = []
    spans: list[Span] = []
    before = 0
    for at, (image, digest) in zip(places, images, strict=True):
        found += token_ids[before:at]
        num_tokens = rules.num_tokens(image)
        spans.append(Span(len(found), len(found) + num_tokens, digest))
        found += [placeholder] * num_tokens
        before = at + 1
    found += token_ids[before:]
    pictures = tuple(image for image, _ in images)
    return Placed(found, tuple(spans), pictures, _positions(len(found), spans, pictures, rules.merge_size))


def _positions(num_tokens: int, spans: Sequence[Span], images: Sequence[Image], merge_size: int) -> RopePositions:
    """Returns the positions of M-RoPE: time, height and width, in merged patches.

    A picture's tokens begin where the text before it ends and turn by row and column; the text behind it goes on after
    the longer side.
    """
    rows: tuple[list[int], list[int], list[int]] = ([], [], [])
    position = at = 0
    for span, image in zip(spans, images, strict=True):
        text = range(position, position + span.start - at)
        for row in rows:
            row += text
        position += len(text)
        tall, wide = image.num_rows // merge_size, image.num_columns // merge_size
        rows[0].extend([position] * (tall * wide))
        rows[1].extend(position + y for y in range(tall) for _ in range(wide))
        rows[2].extend([*range(position, position + wide)] * tall)
        position += max(tall, wide)
        at = span.stop
    text = range(position, position + num_tokens - at)
    for row in rows:
        row += text
    return RopePositions(tuple(map(tuple, rows)), text.stop - num_tokens)
