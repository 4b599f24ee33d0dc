"""Sizes, tokens and positions of pictures, and the settings for them in a model folder."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from PIL import Image as Pictures

from pd_cluster.checkpoints.vision_config import VisionPart
from pd_cluster.errors import ModelError, RequestError
from pd_cluster.media.image_files import fitted
from pd_cluster.media.image_rules import place
from pd_cluster.media.kinds.qwen import GridRules
from pd_cluster.types import Image

QWEN2 = GridRules(14, 2, 56 * 56, 28 * 28 * 1280)
QWEN3 = GridRules(16, 2, 65_536, 16_777_216, token_id=151655)
TINY = GridRules(4, 2, 256, 1024, token_id=7)
EDGES = [(1, 1), (1, 200), (27, 28), (28, 28), (42, 42), (14, 14), (56, 56), (70, 70), (1001, 1003), (1003, 1001)]


def sizes() -> list[tuple[int, int]]:
    rng = random.Random(0)
    return [*EDGES, *((rng.randrange(1, 3000), rng.randrange(1, 3000)) for _ in range(300))]


@pytest.mark.parametrize("rules", [QWEN2, QWEN3, TINY])
def test_sizes_are_those_of_transformers(rules: GridRules) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    for height, width in sizes():
        try:
            expected = smart_resize(height, width, rules.side, rules.min_pixels, rules.max_pixels)
        except ValueError:
            with pytest.raises(RequestError, match="one side is more than 200 times the other; crop it"):
                rules.resized(height, width)
            continue
        if min(expected):
            assert rules.resized(height, width) == expected


@pytest.mark.parametrize("rules", [QWEN2, TINY])
def test_pixels_are_those_of_transformers(rules: GridRules) -> None:
    """Normalized pixels, in the order of the tower's patches, equal transformers' bit for bit."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from pd_cluster.model.vision.pixel_values import Pixels

    size = {"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels}
    processor = Qwen2VLImageProcessorPil(patch_size=rules.patch_size, size=size)
    part = VisionPart("qwen2_vl", rules, tuple(processor.image_mean), tuple(processor.image_std), 1 / 255, ())
    pixels = Pixels(part)
    rng = np.random.default_rng(0)
    for height, width in [(1, 1), (20, 90), (33, 17), (200, 300), (28, 28), (7, 600)]:
        picture = Pictures.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8))
        expected = processor(images=[picture], return_tensors="np")
        image, _ = fitted(picture, rules)
        assert [1, image.num_rows, image.num_columns] == expected["image_grid_thw"][0].tolist()
        assert (pixels.patches(image) == expected["pixel_values"]).all()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_positions_are_those_of_transformers(name: str) -> None:
    import transformers

    from tests.support.pictures import MODELS

    config_class, text, vision = MODELS[name]
    kind = getattr(transformers, config_class)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForImageTextToText.from_config(kind(text_config=text, vision_config=vision))
    rng = random.Random(1)
    for _ in range(30):
        grids = [(2 * rng.randrange(1, 6), 2 * rng.randrange(1, 6)) for _ in range(rng.randrange(1, 4))]
        token_ids: list[int] = [1] * rng.randrange(3)
        for _ in grids:
            token_ids += [2, 7, 3, *[1] * rng.randrange(4)]
        images = [(Image(*grid), b"") for grid in grids]
        placed = place(token_ids, images, TINY, "prompt")
        ids = torch.tensor([placed.token_ids])
        grid_thw = torch.tensor([[1, *grid] for grid in grids])
        expected, delta = model.model.get_rope_index(ids, (ids == 7).int(), image_grid_thw=grid_thw)
        assert placed.rope_positions is not None
        assert [list(row) for row in placed.rope_positions.rows] == expected[:, 0].tolist()
        assert placed.rope_positions.delta == int(delta)
        assert [span.stop - span.start for span in placed.spans] == [tall * wide // 4 for tall, wide in grids]


def test_placeholders_and_images_must_match() -> None:
    image = (Image(2, 2), b"d")
    for token_ids, images, counts in (([7], [], "1 placeholders of images for 0"), ([1], [image], "0 placeholders")):
        with pytest.raises(RequestError, match=counts):
            place(token_ids, images, TINY, "prompt")


def test_a_problem_of_an_image() -> None:
    assert TINY.problem(Image(2, 4)) == TINY.problem(Image(2, 4, bytes(2 * 4 * 16 * 3))) == ""
    assert TINY.problem(Image(3, 4)) == "3 x 4: must be multiples of 2 patches"
    assert TINY.problem(Image(100, 100)) == "100 x 100: more than 1024 pixels"
    assert TINY.problem(Image(2, 4, b"1")) == "2 x 4: 1 bytes of pixels, but this size has 384"


@pytest.mark.parametrize("rules", [QWEN2, QWEN3, TINY])
def test_the_largest_picture(rules: GridRules) -> None:
    largest = rules.largest()
    assert not rules.problem(largest)
    assert rules.num_bytes(largest) > 0.8 * 3 * rules.max_pixels


PUBLISHED = {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "merge_size": 2, "image_mean": [0.5] * 3}


def test_a_published_folder(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PUBLISHED))
    part = VisionPart.of(tmp_path, {"model_type": "qwen2_vl", "image_token_id": 9, "vision_config": {"depth": 32}})
    assert part.rules == GridRules(14, 2, 3136, 12_845_056, token_id=9, video=part.rules.video)
    assert part.mean == (0.5, 0.5, 0.5)
    newer = {"image_processor": {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "patch_size": 16}}
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))
    third = VisionPart.of(tmp_path, {"model_type": "qwen3_vl"}).rules
    assert third == structs.replace(QWEN3, video=third.video)


def test_a_folder_s_sizes_of_videos(tmp_path: Path) -> None:
    """Sizes come from the video, processor or picture settings' file; other settings must equal the pictures'."""
    config = {"model_type": "qwen2_5_vl", "vision_config": {"tokens_per_second": 2}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PUBLISHED))

    def read() -> tuple[int, int]:
        found = VisionPart.of(tmp_path, config).rules.video
        assert found is not None
        assert (found.tokens_per_second, found.has_stamps, found.shares_area) == (2.0, False, False)
        return found.min_pixels, found.max_pixels

    assert read() == (PUBLISHED["min_pixels"], PUBLISHED["max_pixels"])
    file = tmp_path / "video_preprocessor_config.json"
    file.write_text("{}")
    assert read() == (128 * 28**2, 768 * 28**2)
    file.write_text(json.dumps({"size": {"shortest_edge": 5000, "longest_edge": 6000}}))
    assert read() == (5000, 6000)
    whole = {"video_processor": {"min_pixels": 7000, "size": {"longest_edge": 8000}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    assert read() == (7000, 8000)
    (tmp_path / "processor_config.json").unlink()
    for odd, said in (
        ({"image_mean": [0, 0, 0]}, "videos are read like images"),
        ({"min_pixels": "a"}, "min_pixels 'a'"),
    ):
        file.write_text(json.dumps(odd))
        with pytest.raises(ModelError, match=said):
            read()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"patch_size": 16}, "patch_size 16: config.json has patch_size 14"),
        ({"do_normalize": False}, "do_normalize false: pictures without this preparation are not supported"),
        ({"resample": 5}, r"resample 5: supported are 1 \(Lanczos\), 2 \(bilinear\), 3 \(bicubic\)"),
        ({"image_std": [1, 2]}, r"image_std \[1, 2\]: must be three numbers"),
    ],
)
def test_a_folder_that_cannot_be_read(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PUBLISHED, **changes}))
    for told in (said, "preprocessor_config.json: missing; a model that takes pictures needs it"):
        with pytest.raises(ModelError, match=told):
            VisionPart.of(tmp_path, {"model_type": "qwen2_vl"})
        (tmp_path / "preprocessor_config.json").unlink(missing_ok=True)
