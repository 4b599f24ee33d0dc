"""FastDeploy's image examples on a model that takes images, with changed import and path, and data URLs."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pd_cluster import AsyncEngine, GenerationConfig, VisionConfig, pipeline
from pd_cluster.errors import ConfigError, RequestError
from pd_cluster.fastdeploy.engine.sampling_params import SamplingParams
from pd_cluster.fastdeploy.entrypoints.llm import LLM
from pd_cluster.fastdeploy.input.ernie_tokenizer import ErnieBotTokenizer
from pd_cluster.media.frame_sampling import FrameSampling
from pd_cluster.media.video_files import frames_of
from pd_cluster.vl import load_image
from tests.support import clips
from tests.support.clips import make_seer
from tests.support.pictures import Shown, data_url, file_of, ids_of, make_vision, picture, png_of_size, reference_answer

NUM_TOKENS = 12
TEXT = "what is it?"
VIDEO = clips.file_of(clips.clip(11, 9))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_seer(tmp_path_factory.mktemp("model"), "qwen2_5_vl"))


@pytest.fixture(scope="module")
def llm(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    settings = {"max_model_len": 256, "enable_mm": True, "limit_mm_per_prompt": {"image": 2}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FD_LOG_DIR", str(tmp_path_factory.mktemp("log")))
        made = LLM(model=path, tensor_parallel_size=1, **settings)
    with made:
        yield made


def messages(*seeds: int) -> list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": data_url(picture(seed))}} for seed in seeds]
    return [{"role": "user", "content": [*images, {"type": "text", "text": TEXT}]}]


def expected(path: str, *seeds: int) -> list[int]:
    texts = ["<|user|>", *[""] * (len(seeds) - 1), f"{TEXT}<|assistant|>"]
    prompt = Shown(ids_of(*texts), [picture(seed) for seed in seeds])
    return reference_answer(Path(path), prompt, NUM_TOKENS)


def params(path: str, *seeds: int) -> SamplingParams:
    """Returns sampling parameters; `max_tokens` includes the prompt."""
    num_prompt = len(ids_of("<|user|>", *[""] * (len(seeds) - 1), f"{TEXT}<|assistant|>")) + 5 * len(seeds)
    return SamplingParams(temperature=0.0, max_tokens=num_prompt + NUM_TOKENS)


@pytest.mark.parametrize("seeds", [(1,), (1, 2), (2, 1)])
def test_a_chat_with_images(llm: LLM, path: str, seeds: tuple[int, ...]) -> None:
    """Runs the first example: a question about a picture given by URL."""
    (output,) = llm.chat(
        messages=messages(*seeds),
        sampling_params=params(path, *seeds),
        use_tqdm=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert output.error_msg is None
    assert list(output.outputs.token_ids) == expected(path, *seeds)  # type: ignore[union-attr]


def opened(asked: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Makes `multimodal_data` from messages as in the document's second example, with data URLs."""
    images: list[Any] = []
    videos: list[Any] = []
    for part in asked[0]["content"]:
        if part["type"] == "image_url":
            image_bytes = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            images.append(Image.open(io.BytesIO(image_bytes)))
        elif part["type"] == "video_url":
            video_bytes = base64.b64decode(part["video_url"]["url"].partition(",")[2])
            videos.append({"video": video_bytes, "max_frames": 4})
    return {"image": images, "video": videos}


def test_a_prompt_of_the_tokenizer_with_images(llm: LLM, path: str) -> None:
    """Runs the second example: the tokenizer renders the prompt, and Pillow opens the pictures."""
    asked = messages(1, 2)
    prompt = ErnieBotTokenizer.from_pretrained(path).apply_chat_template(asked, tokenize=False)
    outputs = llm.generate(
        prompts={"prompt": prompt, "multimodal_data": opened(asked)},
        sampling_params=params(path, 1, 2),
        use_tqdm=False,
    )
    assert list(outputs[0].outputs.token_ids) == expected(path, 1, 2)  # type: ignore[union-attr]


def test_arguments_about_images(llm: LLM, path: str) -> None:
    """A request with more images than `limit_mm_per_prompt` fails alone."""
    three, one = llm.chat([messages(1, 2, 3), messages(1)], params(path, 1), use_tqdm=False)
    assert three.error_code == 400
    assert three.error_msg is not None
    assert "3 images; this server takes 2 in a prompt" in three.error_msg
    assert list(one.outputs.token_ids) == expected(path, 1)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="limit_mm_per_prompt: audio 1: only images and videos are supported"):
        LLM(model=path, enable_mm=True, limit_mm_per_prompt={"image": 1, "audio": 1})
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs: backend: not known; known are size, min_pixels"):
        LLM(model=path, enable_mm=True, mm_processor_kwargs={"backend": "torchvision_npu"})


def test_videos(llm: LLM, path: str) -> None:
    """Runs the examples with videos: by URL in a chat, and as bytes with `max_frames` beside a prompt."""
    url = {"type": "video_url", "video_url": {"url": clips.data_url(VIDEO)}}
    asked = [{"role": "user", "content": [url, {"type": "text", "text": TEXT}]}]
    settings = SamplingParams(temperature=0.0, max_tokens=200)
    (chat,) = llm.chat(asked, sampling_params=settings, use_tqdm=False)
    assert chat.error_msg is None
    prompt = ErnieBotTokenizer.from_pretrained(path).apply_chat_template(asked, tokenize=False)
    data = {"prompt": prompt, "multimodal_data": opened(asked)}
    (four,) = llm.generate(prompts=data, sampling_params=settings, use_tqdm=False)
    found = [list(each.outputs.token_ids)[:NUM_TOKENS] for each in (chat, four)]  # type: ignore[union-attr]
    ids = [*ids_of("<|user|>"), 302, 301, 303, *ids_of(f"{TEXT}<|assistant|>")]
    for answer, most in zip(found, ((), (4,)), strict=True):
        film = clips.Filmed(ids, [frames_of(VIDEO, FrameSampling(), *most)])
        assert answer == clips.reference_answer(Path(path), film, NUM_TOKENS)
    assert found[0] != found[1]


# ---- LMDeploy's pipeline with images: tuples, conversations and sessions


GREEDY = GenerationConfig(max_new_tokens=NUM_TOKENS, top_k=1, temperature=0.0)


@pytest.fixture(scope="module")
def lmdeploy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision(tmp_path_factory.mktemp("model"), "qwen2_vl")


@pytest.fixture(scope="module")
def pipe(lmdeploy_folder: Path) -> Iterator[AsyncEngine]:
    with pipeline(str(lmdeploy_folder), vision_config=VisionConfig(max_batch_size=1)) as made:
        yield made


def lmdeploy_expected(lmdeploy_folder: Path, texts: list[str], *seeds: int) -> list[int]:
    return reference_answer(lmdeploy_folder, Shown(ids_of(*texts), [picture(seed) for seed in seeds]), NUM_TOKENS)


def lmdeploy_ids(found: Any) -> list[int]:
    assert found.error is None
    return list(found.token_ids)


def test_a_text_with_its_images(pipe: AsyncEngine, lmdeploy_folder: Path) -> None:
    one, two = picture(1), picture(2)
    alone = pipe(("what?", one), gen_config=GREEDY)
    assert lmdeploy_ids(alone) == lmdeploy_expected(lmdeploy_folder, ["<|user|>", "what?<|assistant|>"], 1)
    several = pipe([("what?", one), ("what?", [two, one]), ("a<IMAGE_TOKEN>b", two)], gen_config=GREEDY)
    assert [lmdeploy_ids(each) for each in several] == [  # type: ignore[union-attr]
        lmdeploy_expected(lmdeploy_folder, ["<|user|>", "what?<|assistant|>"], 1),
        lmdeploy_expected(lmdeploy_folder, ["<|user|>", "", "what?<|assistant|>"], 2, 1),
        lmdeploy_expected(lmdeploy_folder, ["<|user|>a", "b<|assistant|>"], 2),
    ]
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": data_url(one)}}]
    (chat,) = pipe([[{"role": "user", "content": parts}]], gen_config=GREEDY)  # type: ignore[misc]
    assert lmdeploy_ids(chat) == lmdeploy_expected(lmdeploy_folder, ["<|user|>x", "<|assistant|>"], 1)


def test_a_session_goes_on_about_its_image(pipe: AsyncEngine, lmdeploy_folder: Path) -> None:
    async def turns() -> list[list[int]]:
        found = []
        for at, prompt in enumerate([("what?", picture(1)), "why?"]):
            options = {"sequence_start": not at, "sequence_end": bool(at), "stream_response": False}
            (out,) = [each async for each in pipe.generate(prompt, 7, gen_config=GREEDY, **options)]  # type: ignore[arg-type]
            found.append((list(out.token_ids or ()), out.response))
        return found  # type: ignore[return-value]

    (first, said), (second, _) = asyncio.run(turns())
    assert first == lmdeploy_expected(lmdeploy_folder, ["<|user|>", "what?<|assistant|>"], 1)
    assert second == lmdeploy_expected(
        lmdeploy_folder, ["<|user|>", f"what?<|assistant|>{said}<|user|>why?<|assistant|>"], 1
    )


def test_what_is_wrong_is_said_before_any_work(pipe: AsyncEngine, tmp_path: Path) -> None:
    for given, said in (
        (("what?", "cat.png"), r"prompts\[1\]\[0\]: str; must be a PIL.Image.Image"),
        (("what?",), "prompts: a tuple must have a text, and a picture or a list of pictures"),
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
        ("http://127.0.0.1:1/a.png", "its address is not public"),
        ("http://localhost/a.png", "its address is not public"),
        ("http:///a.png", "not a plain"),
    ):
        with pytest.raises(RequestError, match=said):
            load_image(given)
