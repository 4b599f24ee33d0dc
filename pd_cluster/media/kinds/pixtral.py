"""Pictures of Pixtral and Mistral 3: whole patches, with a token at the end of each row."""

from __future__ import annotations

import math

from pd_cluster.media.folder_fields import FolderFields, part
from pd_cluster.media.image_rules import ImageRules, ImageView
from pd_cluster.types import Image


class RowRules(ImageRules, frozen=True):
    """A picture has rows and columns of squares of `side` x `side` pixels; its longer side is at most `longest` before
    rounding.

    Each row's tokens end with `row_end`, the last row's with `picture_end`.
    """

    side: int
    longest: int
    row_end: int
    picture_end: int

    def sized(self, height: int, width: int) -> tuple[Image, tuple[ImageView, ...]]:
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        num_rows, num_columns = (max(1, -(-each // self.side)) for each in (height, width))
        return Image(num_rows, num_columns), (ImageView((num_rows * self.side, num_columns * self.side)),)

    def shape(self, image: Image) -> tuple[int, int, int]:
        return 1, image.num_rows * self.side, image.num_columns * self.side

    def num_tokens(self, image: Image) -> int:
        return image.num_rows * (image.num_columns + 1)

    def tokens(self, image: Image) -> list[int]:
        row = [self.token_id] * image.num_columns + [self.row_end]
        return [*(row * image.num_rows)[:-1], self.picture_end]

    def most(self) -> Image:
        most = -(-self.longest // self.side)
        return Image(most, most)

    def size_problem(self, image: Image) -> str:
        most = self.most().num_rows
        if min(image.num_rows, image.num_columns) < 1 or max(image.num_rows, image.num_columns) > most:
            return f"pictures of this model have 1 to {most} rows and columns"
        return ""


def mistral3(given: FolderFields) -> RowRules:
    return pixtral_rules(given, given.count("spatial_merge_size", 2))


def pixtral_rules(given: FolderFields, merge_size: int) -> RowRules:
    """Raises ModelError."""
    size = part(given.preprocessor, "size")
    longest = (
        given.edge("size", "longest_edge", 1024)
        if "height" not in size
        else max(given.height_and_width("size", (1, 1)))
    )
    return RowRules(
        token_id=given.token_id("image_token_id", "image_token_index", default=10),
        side=given.count("patch_size", 16, of_tower=True) * merge_size,
        longest=longest,
        row_end=given.control_token("image_break_token", "[IMG_BREAK]"),
        picture_end=given.control_token("image_end_token", "[IMG_END]"),
    )
