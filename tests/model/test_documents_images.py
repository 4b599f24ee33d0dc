"""FastDeploy's examples with images, on a model that takes them; import and model path changed, URLs as data."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pd_cluster.errors import ConfigError
from pd_cluster.fastdeploy.engine.sampling_params import SamplingParams
from pd_cluster.fastdeploy.entrypoints.llm import LLM
from pd_cluster.fastdeploy.input.ernie_tokenizer import ErnieBotTokenizer
from pd_cluster.media.clips import frames_of
from pd_cluster.media.sampling import FrameSampling
from tests.support import clips
from tests.support.checkpoints import make_tokenizer
from tests.support.clips import make_seer
from tests.support.picture_kinds import asked, make_kind
from tests.support.picture_kinds import reference_answer as kinds_answer
from tests.support.pictures import Shown, data_url, ids_of, picture, reference_answer

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
    """`max_tokens` counts the prompt, too."""
    num_prompt = len(ids_of("<|user|>", *[""] * (len(seeds) - 1), f"{TEXT}<|assistant|>")) + 5 * len(seeds)
    return SamplingParams(temperature=0.0, max_tokens=num_prompt + NUM_TOKENS)


@pytest.mark.parametrize("seeds", [(1,), (1, 2), (2, 1)])
def test_a_chat_with_images(llm: LLM, path: str, seeds: tuple[int, ...]) -> None:
    """The first example: a question about a picture by its URL."""
    (output,) = llm.chat(
        messages=messages(*seeds),
        sampling_params=params(path, *seeds),
        use_tqdm=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert output.error_msg is None
    assert list(output.outputs.token_ids) == expected(path, *seeds)  # type: ignore[union-attr]


def opened(asked: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """As the document's second example makes `multimodal_data` of the messages; its URLs are data."""
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
    """The second example: the tokenizer renders the prompt, and the pictures are opened with Pillow."""
    asked = messages(1, 2)
    prompt = ErnieBotTokenizer.from_pretrained(path).apply_chat_template(asked, tokenize=False)
    outputs = llm.generate(
        prompts={"prompt": prompt, "multimodal_data": opened(asked)},
        sampling_params=params(path, 1, 2),
        use_tqdm=False,
    )
    assert list(outputs[0].outputs.token_ids) == expected(path, 1, 2)  # type: ignore[union-attr]


def test_arguments_about_images(llm: LLM, path: str) -> None:
    """More images than `limit_mm_per_prompt` end their request alone."""
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
    """The examples with a video instead: by its URL in a chat, and as bytes with `max_frames` beside a prompt."""
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


@pytest.mark.slow
def test_the_examples_with_ernie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's own kind of model, with all its arguments."""
    monkeypatch.setenv("FD_LOG_DIR", str(tmp_path / "log"))
    path = make_kind(tmp_path, "ernie4_5_vl_moe")
    marked = [list(make_tokenizer().encode(text).ids) for text in ("<|user|>", f"{TEXT}<|assistant|>")]
    settings: dict[str, Any] = {"max_model_len": 256, "enable_mm": True, "reasoning_parser": "ernie-45-vl"}
    with LLM(model=str(path), tensor_parallel_size=1, limit_mm_per_prompt={"image": 100}, **settings) as llm:
        for seed in (1, 2):
            shown = asked("ernie4_5_vl_moe", marked, [picture(seed)])
            wanted = kinds_answer(path, "ernie4_5_vl_moe", shown, NUM_TOKENS)
            most = len(shown.placed(path).token_ids) + NUM_TOKENS
            sampling = SamplingParams(temperature=0.0, max_tokens=most)
            (output,) = llm.chat(
                messages(seed), sampling, use_tqdm=False, chat_template_kwargs={"enable_thinking": False}
            )
            assert list(output.outputs.token_ids) == wanted  # type: ignore[union-attr]
            prompt = ErnieBotTokenizer.from_pretrained(str(path)).apply_chat_template(messages(seed), tokenize=False)
            data = {"prompt": prompt, "multimodal_data": {"image": [picture(seed)]}}
            (output,) = llm.generate(data, sampling, use_tqdm=False)
            assert list(output.outputs.token_ids) == wanted  # type: ignore[union-attr]
