"""Pictures of InternVL: tiles of one size, whose number depends on the picture's shape, and a small copy."""

from __future__ import annotations

from pd_cluster.errors import ModelError
from pd_cluster.media.folder_fields import CONFIG, FolderFields
from pd_cluster.media.image_rules import ImageRules, ImageView
from pd_cluster.types import Image


class TileRules(ImageRules, frozen=True):
    """A picture has rows and columns of square tiles, `side` pixels wide, and `fewest` to `most_tiles` tiles in all.

    Each tile takes `num_each` tokens; so does the copy, which follows if there are several tiles.
    """

    side: int
    num_each: int
    fewest: int
    most_tiles: int

    def sized(self, height: int, width: int) -> tuple[Image, tuple[ImageView, ...]]:
        num_rows, num_columns = self._grid(height, width)
        tile = (self.side, self.side)
        tiles = ImageView((num_rows * self.side, num_columns * self.side), tile=tile)
        return Image(num_rows, num_columns), (tiles,) if num_rows * num_columns == 1 else (tiles, ImageView(tile))

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns whose shape is nearest to the picture's.

        If two grids have equally near shapes, takes the larger one if its area is less than twice the picture's.
        """
        best, least = (1, 1), float("inf")
        sides = range(1, self.most_tiles + 1)
        grids = [(tall, wide) for wide in sides for tall in sides if self.fewest <= tall * wide <= self.most_tiles]
        for tall, wide in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            difference = abs(width / height - wide / tall)
            is_filled = height * width > 0.5 * self.side * self.side * tall * wide
            if difference < least or (difference == least and is_filled):
                best, least = (tall, wide), difference
        return best

    def shape(self, image: Image) -> tuple[int, int, int]:
        num_tiles = image.num_rows * image.num_columns
        return num_tiles + (num_tiles > 1), self.side, self.side

    def num_tokens(self, image: Image) -> int:
        return self.shape(image)[0] * self.num_each

    def most(self) -> Image:
        return Image(1, self.most_tiles)

    def size_problem(self, image: Image) -> str:
        is_one = (image.num_rows, image.num_columns) == (1, 1)
        if min(image.num_rows, image.num_columns) < 1:
            return "pictures have at least one tile"
        if not is_one and not self.fewest <= image.num_rows * image.num_columns <= self.most_tiles:
            return f"pictures of this model have {self.fewest} to {self.most_tiles} tiles"
        return ""


def internvl(given: FolderFields) -> TileRules:
    """Returns the rules of a folder. Raises ModelError."""
    side = _side(given, "image_size", 448)
    if given.height_and_width("size", (384, 384)) != (side, side):
        raise ModelError(f"{given.file}: size {given.preprocessor.get('size')}: {CONFIG} has image_size {side}")
    per_side = side // _side(given, "patch_size", 14)
    ratio = given.config.get("downsample_ratio", 0.5)
    if ratio != 0.5 or per_side % 2:
        raise ModelError(
            f"{given.folder / CONFIG}: downsample_ratio {ratio}: must be 0.5, and the {per_side} patches a side even"
        )
    if given.config.get("vision_feature_select_strategy", "default") != "default":
        raise ModelError(f"{given.folder / CONFIG}: vision_feature_select_strategy: only default is supported")
    return TileRules(
        token_id=given.token_id("image_token_id", default=151667),
        before=(given.control_token("start_image_token", "<img>"),),
        after=(given.control_token("end_image_token", "</img>"),),
        side=side,
        num_each=(per_side // 2) ** 2,
        fewest=given.number("min_patches", 1),
        most_tiles=given.number("max_patches", 12),
    )


def _side(given: FolderFields, name: str, default: int) -> int:
    """Returns the side of a square in the tower's config, which is one number or two equal ones."""
    value = given.tower.get(name, default)
    sides = list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in sides) or len(set(sides)) != 1:
        raise ModelError(
            f"{given.folder / CONFIG}: vision_config.{name} {value!r}: must be one number, or two equal ones"
        )
    return int(sides[0])
