"""Pictures of Qwen2-VL, Qwen2.5-VL and Qwen3-VL consist of whole patches and have a limited area.

The arithmetic is the same as in transformers' image processor of Qwen2-VL, which the others use with other parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from pd_cluster.errors import ModelError, RequestError
from pd_cluster.media.folder_fields import CONFIG, FolderFields, part
from pd_cluster.media.image_rules import ImageRules, ImageView
from pd_cluster.media.kinds.qwen_video import qwen_defaults, video_rules
from pd_cluster.media.video_rules import TimestampStyle
from pd_cluster.types import Image, RopePositions, Span

MAX_ASPECT_RATIO = 200
TOKEN_ID = 151655
SIZES = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
OLD_SIZES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}


class GridRules(ImageRules, frozen=True):
    """A square of `merge_size` x `merge_size` patches, each `patch_size` x `patch_size` pixels, becomes one token.

    `min_pixels` and `max_pixels` limit a resized picture's area. The tower reads each patch as `num_frames` frames.
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    num_frames: int = 2

    @property
    def side(self) -> int:
        """The side of a token in pixels."""
        return self.patch_size * self.merge_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width of a picture for the model. Raises RequestError."""
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise RequestError(
                f"{width} x {height} pixels: one side is more than {MAX_ASPECT_RATIO} times the other; crop it"
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

    def sized(self, height: int, width: int) -> tuple[Image, tuple[ImageView, ...]]:
        tall, wide = self.resized(height, width)
        return Image(tall // self.patch_size, wide // self.patch_size), (ImageView((tall, wide)),)

    def shape(self, image: Image) -> tuple[int, int, int]:
        return image.num_frames, image.num_rows * self.patch_size, image.num_columns * self.patch_size

    def num_tokens(self, image: Image) -> int:
        return image.num_rows * image.num_columns // self.merge_size**2 + sum(self._edges(image))

    def _edges(self, image: Image) -> tuple[int, int]:
        """Returns the numbers of a picture's tokens before and after its features."""
        return (int(image.opens), int(image.closes)) if self.marks else (0, 0)

    def tokens(self, image: Image) -> list[int]:
        token_id, marks = self.token_id, self.marks
        if image.num_frames > 1 and self.video is not None:
            token_id = self.video.token_id if self.video.pad_id is None else self.video.pad_id
            marks = marks and (self.video.start_id, self.video.end_id)
        before, behind = self._edges(image)
        pads = [token_id] * (self.num_tokens(image) - before - behind)
        return [*marks[:before], *pads, *marks[len(marks) - behind :]]

    def places(self, image: Image) -> list[int]:
        before, behind = self._edges(image)
        return [*range(before, self.num_tokens(image) - behind)]

    def _most_pixels(self, image: Image) -> int:
        if image.num_frames == 1 or self.video is None:
            return max(self.max_pixels, self.side**2)
        return max(self.video.most_frame_pixels, self.side**2)

    def most(self) -> Image:
        """Returns a square of the largest area."""
        counts = (1,) if self.video is None else (1, self.video.together)
        largest = max((Image(0, 0, b"", count) for count in counts), key=self._most_pixels)
        num_patches = max(1, math.isqrt(self._most_pixels(largest)) // self.side) * self.merge_size
        return Image(num_patches, num_patches, b"", largest.num_frames)

    def size_problem(self, image: Image) -> str:
        sides = (image.num_rows, image.num_columns)
        if min(sides) < 1 or any(side % self.merge_size for side in sides):
            return f"must be multiples of {self.merge_size} patches"
        if image.num_frames != 1 and (self.video is None or image.num_frames != self.video.together):
            return f"{image.num_frames} frames cannot be read together"
        _, height, width = self.shape(image)
        most = self._most_pixels(image)
        return f"more than {most} pixels" if height * width > most else ""

    def positions(
        self, num_tokens: int, spans: Sequence[Span], images: Sequence[Image], steps: Sequence[int]
    ) -> RopePositions:
        """Returns M-RoPE's positions: time, height and width, in merged patches.

        A picture's positions begin after the text before it and count rows and columns; text after it continues from
        its largest position. A video's later frames have the same height and width positions as the first, and are
        `steps` later in time.
        """
        rows: tuple[list[int], list[int], list[int]] = ([], [], [])
        position = at = first = 0
        for span, image, step in zip(spans, images, steps, strict=True):
            before, behind = self._edges(image)  # marks have text positions
            text = range(position, position + span.start + before - at)
            for row in rows:
                row += text
            position += len(text)
            first = first if step else position
            tall, wide = image.num_rows // self.merge_size, image.num_columns // self.merge_size
            rows[0].extend([first + step] * (tall * wide))
            rows[1].extend(first + y for y in range(tall) for _ in range(wide))
            rows[2].extend([*range(first, first + wide)] * tall)
            position = max(position, first + max(tall, wide, step + 1))
            at = span.stop - behind
        text = range(position, position + num_tokens - at)
        for row in rows:
            row += text
        return RopePositions(tuple(map(tuple, rows)), text.stop - num_tokens)


def qwen2(given: FolderFields) -> GridRules:
    return structs.replace(
        grid_rules(given, GridDefaults(14, TOKEN_ID, SIZES)), video=video_rules(given, qwen_defaults(28))
    )


def qwen2_5(given: FolderFields) -> GridRules:
    rate = float(given.count("tokens_per_second", 4, of_tower=True))
    video = video_rules(given, qwen_defaults(28), tokens_per_second=rate)
    return structs.replace(grid_rules(given, GridDefaults(14, TOKEN_ID, SIZES)), video=video)


def qwen3(given: FolderFields) -> GridRules:
    video = video_rules(given, qwen_defaults(32), stamps=TimestampStyle.BEFORE, shares_area=True)
    return structs.replace(grid_rules(given, GridDefaults(16, TOKEN_ID, SIZES)), video=video)


class GridDefaults(NamedTuple):
    """Values for folders that lack them."""

    patch_size: int
    token_id: int
    sizes: dict[str, int]
    num_frames: int = 2


def grid_rules(
    given: FolderFields,
    defaults: GridDefaults,
    rules: type[GridRules] = GridRules,
    marks: tuple[int, ...] = (),
) -> GridRules:
    """Raises ModelError."""
    sides = {
        "patch_size": ("patch_size", given.count("patch_size", defaults.patch_size, of_tower=True)),
        "merge_size": ("spatial_merge_size", given.count("spatial_merge_size", 2, of_tower=True)),
    }
    for name, (of_tower, value) in sides.items():
        if given.preprocessor.get(name, value) != value:
            found = given.preprocessor[name]
            raise ModelError(f"{given.file}: {name} {found}: {CONFIG} has {of_tower} {value}")
    return rules(
        token_id=given.token_id("image_token_id", default=defaults.token_id),
        patch_size=sides["patch_size"][1],
        merge_size=sides["merge_size"][1],
        min_pixels=area(given, "shortest_edge", defaults.sizes),
        max_pixels=area(given, "longest_edge", defaults.sizes),
        num_frames=given.count("temporal_patch_size", defaults.num_frames, of_tower=True),
        marks=marks,
    )


def area(given: FolderFields, name: str, defaults: dict[str, int]) -> int:
    """Returns a limit of a picture's area, from its present or its older name."""
    value = part(given.preprocessor, "size").get(name) or defaults[name]
    if given.preprocessor.get(OLD_SIZES[name]) is not None:
        value = given.preprocessor[OLD_SIZES[name]]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{given.file}: {OLD_SIZES[name]} {value!r}: must be a whole number of pixels")
    return value
