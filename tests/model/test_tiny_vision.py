"""The shipped model that sees: its answers are generate()'s, they depend on the picture, and most are right."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pd_cluster import LLM, SamplingParams
from pd_cluster.settings.engine import SHIPPED_VISION_MODEL
from tests.support import clips

QUESTION, IN_ORDER = "What is in the picture?", "Which colors come in which order?"
NUM_PICTURES, NUM_CLIPS = 16, 8
PARAMS = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def drawings() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(__file__).parents[2] / "scripts"), *sys.path])
        import tiny_pictures

        yield tiny_pictures


def prompt(kind: str, question: str) -> str:
    shown = f"<|vision_start|><|{kind}_pad|><|vision_end|>"
    return f"<|im_start|>user\n{shown}{question}<|im_end|>\n<|im_start|>assistant\n"


def generated(pictures: list[Any]) -> list[str]:
    """generate()'s answers, with pictures prepared by transformers' processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(SHIPPED_VISION_MODEL, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(SHIPPED_VISION_MODEL)
    processor: Any = Qwen2VLImageProcessorPil.from_pretrained(SHIPPED_VISION_MODEL)
    answers = []
    for picture in pictures:
        found = processor(images=[picture], return_tensors="pt")
        pads = "<|image_pad|>" * int(found["image_grid_thw"].prod() // 4)
        text = prompt("image", QUESTION).replace("<|image_pad|>", pads)
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        more = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == model.config.image_token_id).int()}
        output = model.eval().generate(input_ids=ids, **found, **more, max_new_tokens=24, do_sample=False)
        answers.append(str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)))
    return answers


def test_it_sees(drawings: Any) -> None:
    scenes = [drawings.Scene.of(random.Random(f"test {at}")) for at in range(NUM_PICTURES)]
    pictures = [scene.draw(random.Random(f"test {at}"), (128, 96)) for at, scene in enumerate(scenes)]
    films = [drawings.draw_clip(random.Random(f"clip {at}"), 12) for at in range(NUM_CLIPS)]
    asked: list[Any] = [
        {"prompt": prompt("image", QUESTION), "multi_modal_data": {"image": picture}} for picture in pictures
    ]
    asked += [{"prompt": prompt("video", IN_ORDER), "multi_modal_data": {"video": frames}} for frames, _ in films]
    files = [clips.file_of([np.asarray(each) for each in frames], fps=4) for frames, _ in films]
    asked += [{"prompt": prompt("video", IN_ORDER), "multi_modal_data": {"video": file}} for file in files]
    with LLM(str(SHIPPED_VISION_MODEL), max_model_len=512, num_blocks=256) as llm:
        found = llm.generate(asked, PARAMS, use_tqdm=False)
    assert [each.error_msg for each in found] == [None] * len(asked)
    said = [each.outputs[0].text for each in found]
    seen, told, read = said[:NUM_PICTURES], said[NUM_PICTURES:-NUM_CLIPS], said[-NUM_CLIPS:]
    assert seen == generated(pictures)
    assert sum(words == scene.words for words, scene in zip(seen, scenes, strict=True)) >= 3 * NUM_PICTURES // 4
    assert sum(scene.color in words for words, scene in zip(seen, scenes, strict=True)) >= NUM_PICTURES - 1
    orders = [", then ".join(colors) for _, colors in films]
    assert sum(words == order for words, order in zip(told, orders, strict=True)) >= NUM_CLIPS - 1
    assert sum(words == order for words, order in zip(read, orders, strict=True)) >= NUM_CLIPS - 1
