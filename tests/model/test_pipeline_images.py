"""LMDeploy's pipeline with images: tuples, conversations and sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pd_cluster import AsyncEngine, GenerationConfig, VisionConfig, pipeline
from pd_cluster.errors import RequestError
from pd_cluster.vl import load_image
from tests.support.pictures import Shown, data_url, file_of, ids_of, make_vision, picture, png_of_size, reference_answer

NUM_TOKENS = 12
GREEDY = GenerationConfig(max_new_tokens=NUM_TOKENS, top_k=1, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision(tmp_path_factory.mktemp("model"), "qwen2_vl")


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Iterator[AsyncEngine]:
    with pipeline(str(folder), vision_config=VisionConfig(max_batch_size=1)) as made:
        yield made


def expected(folder: Path, texts: list[str], *seeds: int) -> list[int]:
    return reference_answer(folder, Shown(ids_of(*texts), [picture(seed) for seed in seeds]), NUM_TOKENS)


def ids(found: Any) -> list[int]:
    assert found.error is None
    return list(found.token_ids)


def test_a_text_with_its_images(pipe: AsyncEngine, folder: Path) -> None:
    one, two = picture(1), picture(2)
    alone = pipe(("what?", one), gen_config=GREEDY)
    assert ids(alone) == expected(folder, ["<|user|>", "what?<|assistant|>"], 1)
    several = pipe([("what?", one), ("what?", [two, one]), ("a<IMAGE_TOKEN>b", two)], gen_config=GREEDY)
    assert [ids(each) for each in several] == [  # type: ignore[union-attr]
        expected(folder, ["<|user|>", "what?<|assistant|>"], 1),
        expected(folder, ["<|user|>", "", "what?<|assistant|>"], 2, 1),
        expected(folder, ["<|user|>a", "b<|assistant|>"], 2),
    ]
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": data_url(one)}}]
    (chat,) = pipe([[{"role": "user", "content": parts}]], gen_config=GREEDY)  # type: ignore[misc]
    assert ids(chat) == expected(folder, ["<|user|>x", "<|assistant|>"], 1)


def test_a_session_goes_on_about_its_image(pipe: AsyncEngine, folder: Path) -> None:
    async def turns() -> list[list[int]]:
        found = []
        for at, prompt in enumerate([("what?", picture(1)), "why?"]):
            options = {"sequence_start": not at, "sequence_end": bool(at), "stream_response": False}
            (out,) = [each async for each in pipe.generate(prompt, 7, gen_config=GREEDY, **options)]  # type: ignore[arg-type]
            found.append((list(out.token_ids or ()), out.response))
        return found  # type: ignore[return-value]

    (first, said), (second, _) = asyncio.run(turns())
    assert first == expected(folder, ["<|user|>", "what?<|assistant|>"], 1)
    assert second == expected(folder, ["<|user|>", f"what?<|assistant|>{said}<|user|>why?<|assistant|>"], 1)


def test_what_is_wrong_is_said_before_any_work(pipe: AsyncEngine, tmp_path: Path) -> None:
    for given, said in (
        (("what?", "cat.png"), r"prompts\[1\]\[0\]: str; must be a PIL.Image.Image"),
        (("what?",), "prompts: a tuple is a text and a picture, or a list of pictures"),
        (("<IMAGE_TOKEN><IMAGE_TOKEN>", picture(1)), "prompts: 2 times <IMAGE_TOKEN> for 1 pictures"),
    ):
        with pytest.raises(RequestError, match=said):
            pipe(given, gen_config=GREEDY)


def test_load_image(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(file_of(picture(1)))
    for given in (picture(1), str(file), file, f"file://{file}", data_url(picture(1))):
        found = load_image(given)
        assert isinstance(found, Image.Image)
        assert found.tobytes() == picture(1).tobytes()
    broken = tmp_path / "b.png"
    broken.write_bytes(png_of_size(4000, 4000))
    for given, said in (
        (str(tmp_path / "no.png"), "cannot be read: No such file"),
        (str(broken), "broken or cut short"),
        (data_url(b"hello"), "no picture in"),
        ("http://127.0.0.1:1/a.png", "its address is not a public one"),
        ("http://localhost/a.png", "its address is not a public one"),
        ("http:///a.png", "not a plain"),
    ):
        with pytest.raises(RequestError, match=said):
            load_image(given)
