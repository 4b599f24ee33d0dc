"""FastDeploy's examples with images, on a model that takes them; import and model path changed, URLs as data."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pd_cluster.errors import ConfigError, RequestError
from pd_cluster.fastdeploy.engine.sampling_params import SamplingParams
from pd_cluster.fastdeploy.entrypoints.llm import LLM
from pd_cluster.fastdeploy.input.ernie_tokenizer import ErnieBotTokenizer
from tests.support.pictures import Shown, data_url, ids_of, make_vision, picture, reference_answer

NUM_TOKENS = 12
TEXT = "what is it?"
PARAMS = SamplingParams(temperature=0.0, min_p=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_vision(tmp_path_factory.mktemp("model"), "qwen2_5_vl"))


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


@pytest.mark.parametrize("seeds", [(1,), (2,), (1, 2), (2, 1)])
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


def test_a_prompt_of_the_tokenizer_with_images(llm: LLM, path: str) -> None:
    """The second example: the tokenizer renders the prompt, and the pictures are opened with Pillow."""
    tokenizer = ErnieBotTokenizer.from_pretrained(path)
    asked = messages(1, 2)
    prompt = tokenizer.apply_chat_template(asked, tokenize=False)
    images, videos = [], []  # type: ignore[var-annotated]
    for message in asked:
        for part in message["content"]:
            if part["type"] == "image_url":
                image_bytes = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                images.append(Image.open(io.BytesIO(image_bytes)))
    outputs = llm.generate(
        prompts={"prompt": prompt, "multimodal_data": {"image": images, "video": videos}},
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
    with pytest.raises(ConfigError, match="limit_mm_per_prompt: video 1: only images are supported"):
        LLM(model=path, enable_mm=True, limit_mm_per_prompt={"image": 1, "video": 1})


def test_videos_are_refused_by_name(llm: LLM) -> None:
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    with pytest.raises(RequestError, match=r"content\[0\]: only parts of type 'text' and 'image_url' are supported"):
        llm.chat([{"role": "user", "content": [video]}], PARAMS, use_tqdm=False)
    data = {"video": [{"video": b"bytes", "max_frames": 30}]}
    with pytest.raises(RequestError, match=r"multimodal_data.video: video and audio are not supported"):
        llm.generate({"prompt": "a", "multimodal_data": data}, PARAMS, use_tqdm=False)


def test_images_are_prepared_as_the_folder_says(path: str) -> None:
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs .*: images are prepared as the model's folder says"):
        LLM(model=path, enable_mm=True, mm_processor_kwargs={"backend": "torchvision_npu"})
