"""`LLM` with a real engine: the example of a thinking model, seeds, metrics, and what a model's folder may not do."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import LLM, SamplingParams
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device
from pd_cluster.devices.kinds import DeviceKind
from pd_cluster.model import loader
from pd_cluster.model.loader import resolve_dtype
from tests.support.checkpoints import reference_greedy
from tests.support.scripted_scenarios import FAMILIES

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9], list(range(20, 60)), [1, 2]]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(checkpoint: Any) -> Path:
    folder: Path = checkpoint("llama")
    return folder


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(model=str(path), max_model_len=512, block_size=4, num_blocks=600, max_num_seqs=4) as made:
        yield made


@pytest.mark.parametrize("parser", ["qwen3", "ernie-45-vl"])
def test_the_example_of_a_thinking_model(tmp_path: Path, parser: str) -> None:
    family = FAMILIES["qwen3"]
    PATH = str(family.make(tmp_path))
    question = [{"role": "user", "content": "Is it sunny?"}]
    with LLM(model=PATH, tensor_parallel_size=1, max_model_len=4096, reasoning_parser=parser) as llm:
        outputs = llm.chat(messages=family.ask(tmp_path, "reasoning, content", question))
        for output in outputs:
            assert output.outputs.text.strip() == "It shines."
            assert output.outputs.reasoning_content.strip() == "They ask for the sun."
        outputs = llm.chat(
            messages=family.ask(tmp_path, "content", question, enable_thinking=False),
            chat_template_kwargs={"enable_thinking": False},
        )
        for output in outputs:
            assert output.prompt is not None
            assert output.prompt.endswith("<think>\n\n</think>\n\n")
            assert output.outputs.text == "It is sunny in Zürich. ☀"
            assert output.outputs.reasoning_content is None


def test_seeds_make_it_the_same_again(path: Path) -> None:
    def texts(**arguments: Any) -> list[str]:
        with LLM(str(path), max_model_len=128, num_blocks=64, **arguments) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(n=2), use_tqdm=False)
            return [each.text for output in outputs for each in output.outputs]

    assert texts() == texts(seed=0) != texts(seed=1)


def test_the_metrics_of_a_request_are_in_order(llm: LLM) -> None:
    before_s = time.time()
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    (output,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    metrics, after_s = output.metrics, time.time()
    assert metrics is not None
    assert metrics.inference_start_time is not None
    assert metrics.finished_time is not None
    assert metrics.first_token_time is not None
    assert metrics.time_in_queue is not None
    assert metrics.model_forward_time is not None
    assert metrics.model_execute_time is not None
    arrived_s = metrics.arrival_time
    assert before_s <= arrived_s <= metrics.inference_start_time <= arrived_s + metrics.first_token_time
    assert arrived_s + metrics.first_token_time <= metrics.finished_time <= after_s + 0.1  # two clocks' drift
    assert metrics.first_scheduled_time == metrics.inference_start_time
    assert metrics.time_in_queue == pytest.approx(metrics.inference_start_time - arrived_s, abs=1e-3)
    assert metrics.time_in_queue + metrics.model_forward_time == pytest.approx(metrics.model_execute_time, abs=1e-3)


@pytest.mark.parametrize(("kind", "wanted"), [("cpu", "float32"), ("cuda", "bfloat16"), ("npu", "bfloat16")])
def test_auto_is_the_checkpoints_dtype_but_on_the_cpu(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: DeviceKind, wanted: str
) -> None:
    """On a processor without products in bfloat16; test_bf16_cpu has the others."""
    monkeypatch.setattr(loader, "multiplies_bf16", lambda: False)
    checkpoint = Checkpoint.open(str(copied(path, tmp_path, dtype=None, torch_dtype="bfloat16")))
    assert resolve_dtype("auto", checkpoint, Device(kind)) == wanted


def test_no_code_of_a_model_folder_is_run(path: Path, tmp_path: Path) -> None:
    """This holds even if its config asks for it."""
    folder = copied(path, tmp_path, auto_map={"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"})
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')")
    for trusts in (False, True):
        with LLM(str(folder), trust_remote_code=trusts, max_model_len=64, num_blocks=16) as llm:
            (output,) = llm.generate([9], GREEDY, use_tqdm=False)
        assert output.outputs.token_ids == reference_greedy(path, [9], 12)[:12]
    assert not (tmp_path / "was run").exists()


def copied(path: Path, to: Path, **config: Any) -> Path:
    folder = to / "model"
    shutil.copytree(path, folder)
    (folder / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | config))
    return folder
