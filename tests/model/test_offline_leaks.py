"""Everything that an offline engine holds of the system is released by its end, not by the garbage collector."""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cluster import LLM, GenerationConfig, GuidedDecodingParams, SamplingParams, pipeline
from pd_cluster.errors import Closed, ModelError
from pd_cluster.fastdeploy import LLM as FastDeployLLM
from tests.support.adapters import make_adapter
from tests.support.held import held, more_than

GUIDED = SamplingParams(max_tokens=4, temperature=0, guided_decoding=GuidedDecodingParams(regex="[ab]{4}"))
PARAMS = SamplingParams(max_tokens=4, temperature=0)
NOTHING: Counter[str] = Counter()


def one_llm(model: Path) -> None:
    with LLM(str(model), num_blocks=64, max_model_len=64) as llm:
        assert llm.generate("Hello", PARAMS, use_tqdm=False)[0].outputs[0].text


def one_with_a_guide(model: Path) -> None:
    """A guide has threads of its own, and a process that checks it."""
    with LLM(str(model), num_blocks=64, max_model_len=64) as llm:
        assert len(llm.generate("Hello", GUIDED, use_tqdm=False)[0].outputs[0].text) == 4


def one_pipeline(model: Path) -> None:
    with pipeline(str(model)) as pipe:
        assert pipe(["Hello"], gen_config=GenerationConfig(max_new_tokens=2))


def one_fastdeploy(model: Path) -> None:
    with FastDeployLLM(str(model), num_blocks=64, max_model_len=64) as llm:
        assert llm.generate(["Hello"], use_tqdm=False)


def one_that_cannot_start(model: Path) -> None:
    """Its adapter is of a wider model, which is found when the pool exists."""
    adapter = model.parent / "wide-adapter"
    with pytest.raises(ModelError, match="wide-adapter"):
        LLM(str(model), num_blocks=64, max_model_len=64, enable_lora=True, lora_modules=[f"wide={adapter}"])


@pytest.fixture
def uncollected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the garbage collector, and with temporary folders that only this test makes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def check_rounds(one: Callable[[Path], None], model: Path, num_rounds: int) -> None:
    one(model)  # imports, libraries' threads and caches stay
    before = held()
    for _ in range(num_rounds):
        one(model)
    assert more_than(before) == NOTHING


@pytest.mark.usefixtures("uncollected", "one_thread")
@pytest.mark.parametrize("one", [one_llm, one_with_a_guide, one_pipeline, one_fastdeploy, one_that_cannot_start])
def test_an_engine_in_this_process_leaves_nothing(one: Callable[[Path], None], checkpoint: Callable[..., Path]) -> None:
    if one is one_that_cannot_start:
        make_adapter(checkpoint("llama").parent / "wide-adapter", checkpoint("llama", hidden_size=128), only="q_proj")
    check_rounds(one, checkpoint("llama"), 1)


@pytest.mark.usefixtures("uncollected")
def test_closed_but_kept_it_holds_nothing(checkpoint: Callable[..., Path]) -> None:
    one_llm(checkpoint("llama"))
    before = held()
    llm = LLM(str(checkpoint("llama")), num_blocks=64, max_model_len=64)
    llm.close()
    llm.close()
    assert more_than(before) == NOTHING
    with pytest.raises(Closed, match="make a new one"):
        llm.generate("Hello", PARAMS, use_tqdm=False)
