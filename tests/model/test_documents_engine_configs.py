"""What LMDeploy's engine configurations and the arguments of `pipeline` change in a real engine.

tests/unit/test_offline_pipeline_configs.py has the engine's settings of each field; their effect is tested with `LLM`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import AsyncEngine, pipeline, pytorch, turbomind
from pd_cluster.errors import ConfigError
from pd_cluster.messages import GenerationConfig, PytorchEngineConfig, Response, TurbomindEngineConfig
from tests.support.checkpoints import make_tokenizer, reference_greedy
from tests.support.watched import watching

NAMES: dict[Any, str] = {  # `pytorch.EngineConfig` and PytorchEngineConfig may be one class
    pytorch.EngineConfig: "early pytorch",
    turbomind.EngineConfig: "early turbomind",
    TurbomindEngineConfig: "turbomind",
    PytorchEngineConfig: "pytorch",
}
TURBOMIND = (turbomind.EngineConfig, TurbomindEngineConfig)
NUM_TOKENS = 12
GREEDY = GenerationConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True)
TEXTS = [f"{at} prompts of a few tokens each" for at in range(6)]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def reference(path: Path) -> list[list[int]]:
    """Returns the answers to TEXTS."""
    return [reference_greedy(path, make_tokenizer().encode(text).ids, NUM_TOKENS)[:NUM_TOKENS] for text in TEXTS]


def small(kind: Any, **fields: Any) -> Any:
    """Returns a configuration with a pool that is made quickly."""
    return kind(**fields, **({"num_gpu_blocks": 64} if kind not in TURBOMIND else {"cache_max_entry_count": 0.001}))


def ask(pipe: AsyncEngine, texts: list[str], config: GenerationConfig = GREEDY) -> list[Response]:
    found = pipe(texts, gen_config=config, do_preprocess=False)
    assert isinstance(found, list)
    return found


# ---- what the engine has of each


@pytest.mark.parametrize("maker", [pipeline, AsyncEngine])
def test_instance_num_is_how_many_are_answered_at_once(path: Path, reference: list[list[int]], maker: Any) -> None:
    with watching() as made, maker(str(path), backend_config=small(TurbomindEngineConfig), instance_num=3) as pipe:
        assert [each.token_ids for each in ask(pipe, TEXTS)] == reference
        assert max(made[0].num_seqs) == 3


def test_num_cpu_blocks_is_the_room_to_copy_to(path: Path, reference: list[list[int]]) -> None:
    """Where a request does not fit into it, the request is recomputed; 0 is as much as the machine allows."""
    gen_config = GenerationConfig(max_new_tokens=40, ignore_eos=True)
    for given, moves in ((3, False), (64, True), (0, True)):
        config = PytorchEngineConfig(
            eviction_type="copy", session_len=128, num_gpu_blocks=32, block_size=4, num_cpu_blocks=given
        )
        with watching() as made, pipeline(str(path), backend_config=config) as pipe:
            watched = made[0]
            found = watched.runner.swap.num_blocks
            assert watched.scheduler.swap.num_blocks == found
            assert found == given if given else found > 1000
            answers = [each.token_ids[:NUM_TOKENS] for each in ask(pipe, TEXTS, gen_config)]
            assert answers == reference
            assert watched.scheduler.num_preemptions > 0
            assert (sum(watched.num_moves) > 0) == moves


# ---- what chat template a name asks for

VICUNA = "USER: hi ASSISTANT: "
WAYS_TO_NAME_IT: dict[str, Callable[[str], AsyncEngine]] = {
    "pipeline": lambda path: pipeline(path, "vicuna", backend_config=small(TurbomindEngineConfig)),
    "AsyncEngine": lambda path: AsyncEngine(path, model_name="vicuna", backend_config=small(TurbomindEngineConfig)),
    **{
        name: lambda path, kind=kind: pipeline(path, backend_config=small(kind, model_name="vicuna"))  # type: ignore[misc]
        for kind, name in NAMES.items()
    },
}


@pytest.mark.parametrize("way", WAYS_TO_NAME_IT)
def test_model_name_asks_for_a_chat_template(path: Path, way: str) -> None:
    token_ids = make_tokenizer().encode(VICUNA).ids
    with WAYS_TO_NAME_IT[way](str(path)) as pipe:
        response = pipe("hi", gen_config=GREEDY)
        assert isinstance(response, Response)
        assert response.input_token_len == len(token_ids)
        assert response.token_ids == reference_greedy(path, token_ids, NUM_TOKENS)[:NUM_TOKENS]


# ---- the other arguments of pipeline


@pytest.mark.parametrize("maker", [pipeline, AsyncEngine])
@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_either_backend_answers_alike(path: Path, reference: list[list[int]], maker: Any, backend: str) -> None:
    with watching() as made, maker(str(path), backend=backend) as pipe:
        assert made[0].runner.pool.layout.block_size == {"turbomind": 128, "pytorch": 64}[backend]
        assert [each.token_ids for each in ask(pipe, TEXTS)] == reference
    with pytest.raises(ConfigError, match="backend 'vllm': expected turbomind or pytorch"):
        maker(str(path), backend="vllm")


def test_log_level_is_what_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The default logs errors alone; a lower level logs what this package says when it loads a model."""
    logs = [logging.getLogger(name) for name in ("pd_cluster", "pd_cluster.offline.lmdeploy")]
    before = [log.level for log in logs]
    try:
        for level, is_logged in (("ERROR", False), ("INFO", True)):
            caplog.clear()
            with pipeline(str(path), log_level=level, backend_config=small(TurbomindEngineConfig)):
                pass
            assert any(record.levelno == logging.INFO for record in caplog.records) == is_logged
            assert logs[1].getEffectiveLevel() == logging.ERROR
    finally:
        for log, each in zip(logs, before, strict=True):
            log.setLevel(each)


def test_a_converted_model_is_refused(tmp_path: Path) -> None:
    """TurboMind's folders have a config.ini and one file for each weight."""
    weights = tmp_path / "triton_models" / "weights"
    weights.mkdir(parents=True)
    (weights / "config.ini").write_text("[llama]\nmodel_name = llama2\n")
    (weights / "tok_embeddings.weight").write_bytes(b"\0" * 64)
    for folder in (tmp_path, weights):
        with pytest.raises(ConfigError, match=r"config\.json: missing; the model folder needs config\.json"):
            pipeline(str(folder))
