"""Pictures of LLaVA: the middle of a picture as a square of fixed size; with Pixtral's tower, as in Pixtral."""

from __future__ import annotations

import math

from pd_cluster.errors import ModelError
from pd_cluster.media.folder_fields import CONFIG, FolderFields, part
from pd_cluster.media.image_rules import ImageRules, ImageView
from pd_cluster.media.kinds.pixtral import pixtral_rules
from pd_cluster.types import Image

CLIP = "clip_vision_model"


class SquareRules(ImageRules, frozen=True):
    """A picture is a square of `side` x `side` pixels with `num_each` tokens.

    A picture is resized to this size or, with `crops`, resized until its shorter side is `shortest` and then cropped to
    its middle.
    """

    side: int
    num_each: int
    crops: bool = False
    shortest: int = 0

    def sized(self, height: int, width: int) -> tuple[Image, tuple[ImageView, ...]]:
        square = (self.side, self.side)
        if not self.crops:
            return Image(1, 1), (ImageView(square),)
        least = min(height, width)
        tall, wide = (self.shortest if each == least else int(self.shortest * each / least) for each in (height, width))
        return Image(1, 1), (ImageView((tall, wide), canvas=square),)

    def shape(self, image: Image) -> tuple[int, int, int]:
        return 1, self.side, self.side

    def num_tokens(self, image: Image) -> int:
        return self.num_each

    def most(self) -> Image:
        return Image(1, 1)

    def size_problem(self, image: Image) -> str:
        return "" if (image.num_rows, image.num_columns) == (1, 1) else "pictures of this model are 1 x 1"


def llava(given: FolderFields) -> ImageRules:
    """Returns the rules of a folder. Raises ModelError."""
    kind = given.tower.get("model_type", CLIP)
    if kind == "pixtral":
        return pixtral_rules(given, 1)
    given.refuse(("do_pad",), True, "pictures that are padded are not supported")
    side = given.count("image_size", 336, of_tower=True)
    num_patches = (side // given.count("patch_size", 14, of_tower=True)) ** 2
    is_default = given.config.get("vision_feature_select_strategy", "default") == "default"
    rules = SquareRules(
        token_id=given.token_id("image_token_id", "image_token_index", default=32000),
        side=side,
        num_each=num_patches + (kind == CLIP) - is_default,
    )
    if {"height", "width"} <= set(part(given.preprocessor, "size")):
        return _fixed(given, rules)
    given.refuse(("do_center_crop",), False, "pictures of several sizes are not supported")
    if given.height_and_width("crop_size", (224, 224)) != (side, side):
        raise _other_size(given, "crop_size", side)
    return SquareRules(
        token_id=rules.token_id,
        side=side,
        num_each=rules.num_each,
        crops=True,
        shortest=given.edge("size", "shortest_edge", 224),
    )


def _fixed(given: FolderFields, rules: SquareRules) -> SquareRules:
    if given.height_and_width("size", (rules.side, rules.side)) != (rules.side, rules.side):
        raise _other_size(given, "size", rules.side)
    given.refuse(("do_center_crop",), True, "supported only with size.shortest_edge")
    return rules


def _other_size(given: FolderFields, name: str, side: int) -> ModelError:
    return ModelError(f"{given.file}: {name} {given.preprocessor.get(name)}: {CONFIG} has image_size {side}")


def gemma3(given: FolderFields) -> SquareRules:
    """Pictures of Gemma 3: squares, between line feeds. Raises ModelError."""
    given.refuse(("do_pan_and_scan",), True, "only whole pictures are supported")
    side = given.count("image_size", 896, of_tower=True)
    if given.height_and_width("size", (224, 224)) != (side, side):
        raise _other_size(given, "size", side)
    num_each = given.count("mm_tokens_per_image", 256)
    if math.isqrt(num_each) ** 2 != num_each:
        raise ModelError(f"{given.folder / CONFIG}: mm_tokens_per_image {num_each}: must be a square")
    first, last = (given.token_text(name, text) for name, text in GEMMA_MARKS.items())
    middle = given.token_text("image_token", "<image_soft_token>")
    return SquareRules(
        token_id=given.token_id("image_token_id", "image_token_index", default=262144),
        side=side,
        num_each=num_each,
        text=first,
        text_becomes=("\n\n", first, "", middle, "", last, "\n\n"),
        sees_whole=True,
    )


GEMMA_MARKS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
