"""Pictures of models other than Qwen's are resized, split and counted as by transformers' processors."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from PIL import Image as Pictures

from pd_cluster.checkpoints.vision_config import VisionPart
from pd_cluster.errors import ModelError, RequestError
from pd_cluster.media.image_files import fitted
from pd_cluster.media.image_rules import BILINEAR, ImageRules, ImageView, place
from pd_cluster.media.kinds.glm import FrameRules
from pd_cluster.media.kinds.image_kinds import KINDS, WrittenRules
from pd_cluster.media.kinds.internvl import TileRules
from pd_cluster.media.kinds.llava import SquareRules
from pd_cluster.media.kinds.pixtral import RowRules
from pd_cluster.media.kinds.qwen import GridRules
from pd_cluster.media.video_rules import TimestampStyle, VideoRules
from pd_cluster.model.vision.pixel_values import Pixels
from pd_cluster.types import Image

TILES = TileRules(side=448, num_each=256, fewest=1, most_tiles=12)
ROWS = RowRules(side=28, longest=1540, row_end=12, picture_end=13, token_id=10)
FRAMES = FrameRules(14, 2, 112 * 112, 28 * 28 * 15000)
SQUARE = SquareRules(side=336, num_each=576, crops=True, shortest=336)
WHOLE = SquareRules(side=896, num_each=256, resample=BILINEAR)


def sizes(num: int, most: int) -> list[tuple[int, int]]:
    rng = random.Random(0)
    edges = [(1, 1), (1, 200), (200, 1), (27, 28), (28, 28), (448, 448), (449, 447), (1540, 1540), (1541, 3), (3, 4000)]
    return [*edges, *((rng.randrange(1, most), rng.randrange(1, most)) for _ in range(num))]


def test_tiles_are_those_of_transformers() -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    for height, width in sizes(300, 3000):
        num_columns, num_rows = get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
        image, views = TILES.sized(height, width)
        assert (image.num_rows, image.num_columns) == (num_rows, num_columns)
        assert TILES.num_tokens(image) == 256 * (num_rows * num_columns + (len(views) - 1))


def test_rows_are_those_of_transformers() -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    for height, width in sizes(300, 4000):
        blank = np.broadcast_to(np.zeros((), np.uint8), (height, width, 3))
        expected = get_resize_output_image_size(blank, 1540, 28, "channels_last")
        image, views = ROWS.sized(height, width)
        if 0 in expected:  # transformers would resize to 0 there
            assert min(image.num_rows, image.num_columns) == 1
            continue
        assert views == (ImageView(expected),)
        assert ROWS.num_tokens(image) == len(ROWS.tokens(image)) == expected[0] // 28 * (expected[1] // 28 + 1)


def test_grids_of_frames_are_those_of_transformers() -> None:
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    for height, width in sizes(300, 4000):
        try:
            expected = smart_resize(2, height, width, min_pixels=112 * 112, max_pixels=28 * 28 * 15000)
        except ValueError:
            with pytest.raises(RequestError, match="one side is more than 200 times the other"):
                FRAMES.resized(height, width)
            continue
        assert FRAMES.resized(height, width) == expected


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


PROCESSORS: list[tuple[str, str, ImageRules, dict[str, Any]]] = [
    ("clip", "CLIP", SQUARE, {"size": {"shortest_edge": 336}, "crop_size": square(336)}),
    ("gemma3", "Gemma3", WHOLE, {"size": square(896), "do_pan_and_scan": False}),
    ("got_ocr2", "GotOcr2", TILES, {"size": square(448), "crop_to_patches": True}),
    ("pixtral", "Pixtral", ROWS, {"size": {"longest_edge": 1540}, "patch_size": square(28)}),
]


@pytest.mark.parametrize(("name", "prefix", "rules", "settings"), PROCESSORS, ids=[each[0] for each in PROCESSORS])
def test_pixels_are_those_of_transformers(name: str, prefix: str, rules: ImageRules, settings: dict[str, Any]) -> None:
    """Normalized pixels equal those of transformers' processors bit for bit."""
    module = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    processor = getattr(module, f"{prefix}ImageProcessorPil")(**settings)
    mean, std = processor.image_mean, processor.image_std
    pixels = Pixels(VisionPart(name, rules, tuple(mean), tuple(std), 1 / 255, ()))
    rng = np.random.default_rng(0)
    for height, width in [(1, 1), (20, 90), (501, 337), (335, 337), (200, 1000), (1700, 30), (448, 896)]:
        picture = Pictures.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8))
        expected = np.stack(processor(images=[picture], return_tensors="np")["pixel_values"])
        image, _ = fitted(picture, rules)
        found = pixels.planes(image)
        assert found.shape == expected.shape
        assert (found == expected).all()
        assert not rules.problem(image)


@pytest.mark.parametrize("rules", [TILES, ROWS, FRAMES, SQUARE, WHOLE])
def test_largest_pictures_and_other_processes(rules: ImageRules) -> None:
    largest = rules.largest()
    assert not rules.problem(largest)
    for height, width in sizes(60, 9000):
        try:
            image, _ = rules.sized(height, width)
        except RequestError:
            continue
        assert rules.num_bytes(image) <= len(largest.pixels) * 1.01
        assert not rules.problem(image)
    assert rules.problem(Image(largest.num_rows * 20, largest.num_columns * 20))
    assert rules.problem(Image(0, 1))
    assert WrittenRules.of(rules).read() == rules


def test_a_pictures_tokens_have_others_among_them() -> None:
    """Each row ends with a special token, and tokens surround the picture."""
    image = (Image(2, 3), b"d")
    placed = place([1, 10, 2, 10], [image, image], ROWS, "prompt")
    picture = [10, 10, 10, 12, 10, 10, 10, 13]
    assert placed.token_ids == [1, *picture, 2, *picture]
    assert [(span.start, span.stop) for span in placed.spans] == [(1, 9), (10, 18)]
    assert ROWS.places(image[0]) == [0, 1, 2, 4, 5, 6]
    assert placed.rope_positions is None
    tiles = TileRules(side=4, num_each=1, fewest=1, most_tiles=4, token_id=7, before=(8,), after=(9,))
    placed = place([1, 7], [(Image(1, 2), b"d")], tiles, "prompt")
    assert placed.token_ids == [1, 8, 7, 7, 7, 9]
    assert [(span.start, span.stop) for span in placed.spans] == [(2, 5)]


def test_marks_belong_to_their_picture() -> None:
    """ERNIE's picture experts also compute the markers around a picture, which have text positions."""
    rules = GridRules(4, 2, 256, 1024, token_id=7, marks=(8, 9))
    image = (Image(2, 4), b"d")
    placed = place([1, 8, 7, 9, 8, 7, 9], [image, image], rules, "prompt")
    assert placed.token_ids == [1, 8, 7, 7, 9, 8, 7, 7, 9]
    assert [(span.start, span.stop) for span in placed.spans] == [(1, 5), (5, 9)]
    assert rules.places(image[0]) == [1, 2]
    assert placed.rope_positions is not None
    assert placed.rope_positions.rows == (
        (0, 1, 2, 2, 4, 5, 6, 6, 8),
        (0, 1, 2, 2, 4, 5, 6, 6, 8),
        (0, 1, 2, 3, 4, 5, 6, 7, 8),
    )
    assert placed.rope_positions.delta == 0
    for wrong in ([1, 7, 9], [8, 7, 8], [9, 7, 8], [8, 7, 9, 8], [8, 8, 7, 9], [9, 8, 7, 9, 1]):
        with pytest.raises(RequestError, match="tokens 8 and 9 must enclose the placeholder of an image, and"):
            place(wrong, [image], rules, "prompt")
    with pytest.raises(RequestError, match="and nothing else"):
        place([1, 8, 2], [], rules, "prompt")


TOKENS = {"added_tokens": [{"id": 40, "content": "[IMG_BREAK]"}, {"id": 41, "content": "[IMG_END]"}]}
TOKENS["added_tokens"] += [{"id": 42, "content": "<img>"}, {"id": 43, "content": "</img>"}]
CLIP = {"image_size": 336, "patch_size": 14, "model_type": "clip_vision_model"}
GEMMA_TEXT = ("\n\n", "<start_of_image>", "", "<image_soft_token>", "", "<end_of_image>", "\n\n")
WITHOUT_A_FONT = (
    "preprocessor_config.json: draw_on_frames: times are drawn into frames with Roboto-Regular.ttf, which "
    "the folder lacks; add that font, or set draw_on_frames to false"
)
VIDEOS = VideoRules(token_id=151344, start_id=151339, end_id=151340, min_pixels=12544, max_pixels=9633792)
VIDEOS = structs.replace(VIDEOS, shares_area=True, stamps=TimestampStyle.BEHIND, pad_id=151343)
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], ImageRules]] = {
    "llava": (
        {"image_token_index": 32000, "vision_config": CLIP},
        {"crop_size": 336, "size": {"shortest_edge": 336}},
        SquareRules(side=336, num_each=576, crops=True, shortest=336, token_id=32000),
    ),
    "internvl": (
        {"vision_config": {"image_size": [448, 448]}},
        {"size": {"height": 448, "width": 448}, "crop_to_patches": False, "max_patches": 12},
        TileRules(side=448, num_each=256, fewest=1, most_tiles=12, token_id=151667, before=(42,), after=(43,)),
    ),
    "mistral3": (
        {"image_token_index": 10, "spatial_merge_size": 2, "vision_config": {"patch_size": 14}},
        {"size": {"longest_edge": 1540}, "patch_size": 14},
        RowRules(side=28, longest=1540, row_end=40, picture_end=41, token_id=10),
    ),
    "gemma3": (
        {"vision_config": {"image_size": 896, "patch_size": 14}},
        {"size": {"height": 896, "width": 896}, "resample": 2, "do_pan_and_scan": None},
        structs.replace(WHOLE, token_id=262144, text="<start_of_image>", text_becomes=GEMMA_TEXT, sees_whole=True),
    ),
    "ernie4_5_vl_moe": (
        {"image_token_id": 100295, "vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
        {"size": {"shortest_edge": 3136, "longest_edge": 4842768}},
        GridRules(
            *(14, 2, 3136, 4842768), num_frames=1, token_id=100295, marks=(101304, 101305), no_videos=WITHOUT_A_FONT
        ),
    ),
    "glm4v": (
        {"image_token_id": 151343, "vision_config": {"patch_size": 14}},
        {"size": {"shortest_edge": 12544, "longest_edge": 9633792}},
        FrameRules(14, 2, 12544, 9633792, token_id=151343, video=VIDEOS),
    ),
}


def part_of(folder: Path, name: str, config: dict[str, Any], preprocessor: dict[str, Any]) -> VisionPart:
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENS))
    return VisionPart.of(folder, {"model_type": name, **config})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_folders(tmp_path: Path, name: str) -> None:
    config, preprocessor, rules = PUBLISHED[name]
    assert part_of(tmp_path, name, config, preprocessor).rules == rules
    assert {each for each in KINDS if not each.startswith("qwen")} == {*PUBLISHED}, "every kind must be tested"


@pytest.mark.parametrize(
    ("name", "config", "preprocessor", "said"),
    [
        ("llava", {}, {"do_pad": True}, "do_pad true: pictures that are padded are not supported"),
        ("llava", {}, {"do_center_crop": False}, "do_center_crop false: pictures of several sizes"),
        ("llava", {}, {"crop_size": 224}, "crop_size 224: config.json has image_size 336"),
        ("llava", {"text_config": {"vocab_size": 9}}, {}, "image_token_id 32000: beyond vocab_size 9"),
        ("internvl", {"downsample_ratio": 0.25}, {}, "downsample_ratio 0.25: must be 0.5"),
        ("internvl", {"vision_config": {"image_size": [1, 2]}}, {}, r"image_size \[1, 2\]: must be one number"),
        ("gemma3", {}, {"do_pan_and_scan": True}, "do_pan_and_scan true: only whole pictures are supported"),
        ("mistral3", {}, {"size": {"longest_edge": 0}}, "size.longest_edge 0: must be a whole number"),
    ],
)
def test_folders_that_are_refused(
    tmp_path: Path, name: str, config: dict[str, Any], preprocessor: dict[str, Any], said: str
) -> None:
    whole, own, _ = PUBLISHED[name]
    with pytest.raises(ModelError, match=said):
        part_of(tmp_path, name, {**whole, **config}, {**own, **preprocessor})
    if name == "mistral3":
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_break_token": "<none>"}))
        with pytest.raises(ModelError, match=r"no token '<none>'; pictures need it \(image_break_token\)"):
            part_of(tmp_path, name, whole, own)
