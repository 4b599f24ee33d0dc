"""Each documented field of LMDeploy's engine configurations visibly changes a real engine, or is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import LLM, AsyncEngine, SamplingParams, pipeline, pytorch, turbomind
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.messages import GenerationConfig, PytorchEngineConfig, Response, TurbomindEngineConfig
from tests.support.checkpoints import make_tokenizer, reference_greedy
from tests.support.quantized import FORMATS, rewritten
from tests.support.watched import Watched, watching

NAMES: dict[Any, str] = {  # `pytorch.EngineConfig` and PytorchEngineConfig may be one class
    pytorch.EngineConfig: "early pytorch",
    turbomind.EngineConfig: "early turbomind",
    TurbomindEngineConfig: "turbomind",
    PytorchEngineConfig: "pytorch",
}
KINDS = tuple(NAMES)
TURBOMIND = (turbomind.EngineConfig, TurbomindEngineConfig)
PYTORCH = tuple(kind for kind in KINDS if kind not in TURBOMIND)
NUM_TOKENS = 12
GREEDY = GenerationConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True)
TEXTS = [f"{at} prompts of a few tokens each" for at in range(6)]

pytestmark = pytest.mark.usefixtures("one_thread")
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def reference(path: Path) -> list[list[int]]:
    """Returns the answers to TEXTS."""
    return [reference_greedy(path, make_tokenizer().encode(text).ids, NUM_TOKENS)[:NUM_TOKENS] for text in TEXTS]


@pytest.fixture
def opened(path: Path) -> Open:
    """`with opened(**arguments) as (pipe, watched)` calls `pipeline` with these arguments."""

    @contextmanager
    def opening(**arguments: Any) -> Iterator[tuple[AsyncEngine, Watched]]:
        with watching() as made, pipeline(str(path), **arguments) as pipe:
            yield pipe, made[0]

    return opening


def of(*kinds: Any) -> Any:
    return pytest.mark.parametrize("kind", kinds, ids=[NAMES[kind] for kind in kinds])


def small(kind: Any, **fields: Any) -> Any:
    """Returns a configuration with a pool that is made quickly."""
    if "num_gpu_blocks" in fields or "cache_max_entry_count" in fields:
        return kind(**fields)
    return kind(**fields, **({"num_gpu_blocks": 64} if kind in PYTORCH else {"cache_max_entry_count": 0.001}))


def ask(pipe: AsyncEngine, texts: list[str]) -> list[Response]:
    found = pipe(texts, gen_config=GREEDY, do_preprocess=False)
    assert isinstance(found, list)
    return found


# ---- what the engine has of each


@of(*KINDS)
def test_fields_that_are_not_given_have_their_defaults(opened: Open, reference: list[list[int]], kind: Any) -> None:
    """The cache has half of the memory, which is among them."""
    with opened(backend_config=kind()) as (pipe, watched):
        assert watched.runner.pool.layout.block_size == (64 if kind in PYTORCH else 128)
        assert watched.runner.pool.layout.dtype == "float32", "quant_policy 0: the cache has the model's dtype"
        assert watched.scheduler.max_num_seqs == 128
        assert pipe.session_len == watched.runner.max_model_len == 512
        assert watched.runner.swap.num_blocks == 0, "eviction_type recompute"
        assert [each.token_ids for each in ask(pipe, TEXTS)] == reference


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (small(turbomind.EngineConfig, quant_policy=4), "int8"),
        (small(turbomind.EngineConfig, quant_policy=4, kv_bits=8), "int8"),
        (small(TurbomindEngineConfig, quant_policy=4, kv_bits=4), "int4"),
        (small(PytorchEngineConfig, quant_policy=8), "int8"),
        (small(TurbomindEngineConfig, quant_policy=16), "fp8_e4m3"),
    ],
)
def test_quant_policy_and_kv_bits_are_the_cache_s(opened: Open, path: Path, config: Any, dtype: str) -> None:
    """The pool holds codes, and answers are those of an engine that was asked for them by name."""
    with opened(backend_config=config) as (pipe, watched):
        assert watched.runner.pool.layout.dtype == watched.runner.numerics.kv_cache_dtype == dtype
        found = [each.token_ids for each in ask(pipe, TEXTS)]
    with LLM(str(path), kv_cache_dtype=dtype, num_blocks=64, generation_config="vllm") as llm:
        outputs = llm.generate(
            TEXTS, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False
        )
    assert found == [list(output.outputs[0].token_ids) for output in outputs]


@of(*KINDS)
def test_session_len_bounds_prompt_and_answer(opened: Open, kind: Any) -> None:
    with opened(backend_config=small(kind, session_len=64)) as (pipe, _):
        assert pipe.session_len == 64
        fits, none = ask(pipe, ["x" * 60, "x" * 65])
    assert (fits.generate_token_len, fits.finish_reason) == (4, "length")
    assert (none.generate_token_len, none.error) == (
        0,
        "65 prompt tokens leave no room for an answer; session_len is 64",
    )


@of(*KINDS)
@pytest.mark.parametrize("max_batch_size", [2, 4])
def test_max_batch_size_bounds_a_step(opened: Open, reference: list[list[int]], kind: Any, max_batch_size: int) -> None:
    with opened(backend_config=small(kind, max_batch_size=max_batch_size), instance_num=6) as (pipe, watched):
        assert [each.token_ids for each in ask(pipe, TEXTS)] == reference
        assert max(watched.num_seqs) == max_batch_size


@pytest.mark.parametrize("maker", [pipeline, AsyncEngine])
def test_instance_num_is_how_many_are_answered_at_once(path: Path, reference: list[list[int]], maker: Any) -> None:
    with watching() as made, maker(str(path), backend_config=small(TurbomindEngineConfig), instance_num=3) as pipe:
        assert [each.token_ids for each in ask(pipe, TEXTS)] == reference
        assert max(made[0].num_seqs) == 3


@of(*PYTORCH, turbomind.EngineConfig)
def test_blocks_have_so_many_tokens(opened: Open, kind: Any) -> None:
    """Whole blocks of a prompt are found again in the cache."""
    name = "block_size" if kind in PYTORCH else "cache_block_seq_len"
    with opened(backend_config=small(kind, **{name: 24})) as (pipe, watched):
        assert watched.runner.pool.layout.block_size == 24
        ask(pipe, ["y" * 60])
        assert watched.scheduler.num_prefix_hit_tokens == 0
        ask(pipe, ["y" * 60])
        assert watched.scheduler.num_prefix_hit_tokens == 48


@of(*PYTORCH)
def test_num_gpu_blocks_is_the_pools_size(opened: Open, kind: Any) -> None:
    with opened(backend_config=kind(num_gpu_blocks=9)) as (_, watched):
        assert watched.runner.pool.num_blocks == watched.scheduler.blocks.num_blocks == 9
    with opened(backend_config=kind(num_gpu_blocks=0)) as (_, watched):
        assert watched.runner.pool.num_blocks > 1000, "0: half of the machine's memory"


@of(*TURBOMIND)
def test_cache_max_entry_count_is_a_share_of_the_memory(opened: Open, kind: Any) -> None:
    num_blocks = []
    for share in (0.001, 0.004):
        with opened(backend_config=kind(cache_max_entry_count=share)) as (_, watched):
            num_blocks.append(watched.runner.pool.num_blocks)
    assert num_blocks[1] == pytest.approx(4 * num_blocks[0], rel=0.4), "other programs take memory meanwhile"


@of(*PYTORCH)
@pytest.mark.parametrize("eviction_type", ["recompute", "copy"])
def test_eviction_type_is_what_happens_when_the_cache_is_full(opened: Open, kind: Any, eviction_type: str) -> None:
    """Requests are recomputed, or copied to the host and back; their answers stay the same."""
    config = kind(eviction_type=eviction_type, session_len=128, num_gpu_blocks=32, block_size=4)
    gen_config = GenerationConfig(max_new_tokens=40, ignore_eos=True)
    with opened(backend_config=config) as (pipe, watched):
        found = [each.token_ids for each in pipe(TEXTS, gen_config, do_preprocess=False)]
        assert watched.scheduler.num_preemptions > 0
        assert (sum(watched.num_moves) > 0) == (eviction_type == "copy")
    with opened(backend_config=small(kind)) as (pipe, watched):
        assert found == [each.token_ids for each in pipe(TEXTS, gen_config, do_preprocess=False)]
        assert watched.scheduler.num_preemptions == 0


@of(*PYTORCH)
def test_num_cpu_blocks_is_the_room_to_copy_to(opened: Open, reference: list[list[int]], kind: Any) -> None:
    """Where a request does not fit into it, the request is recomputed; 0 is as much as the machine allows."""
    gen_config = GenerationConfig(max_new_tokens=40, ignore_eos=True)
    for given, moves in ((3, False), (64, True), (0, True)):
        config = kind(eviction_type="copy", session_len=128, num_gpu_blocks=32, block_size=4, num_cpu_blocks=given)
        with opened(backend_config=config) as (pipe, watched):
            found = watched.runner.swap.num_blocks
            assert watched.scheduler.swap.num_blocks == found
            assert found == given if given else found > 1000
            answers = [each.token_ids[:NUM_TOKENS] for each in pipe(TEXTS, gen_config, do_preprocess=False)]
            assert answers == reference
            assert watched.scheduler.num_preemptions > 0
            assert (sum(watched.num_moves) > 0) == moves


@pytest.mark.parametrize("name", ["max_context_token_num", "num_tokens_per_iter"])
def test_a_step_has_no_more_tokens_than_asked_for(opened: Open, name: str) -> None:
    most = []
    for fields in ({name: 20}, {}):
        with opened(backend_config=small(turbomind.EngineConfig, **fields)) as (pipe, watched):
            (response,) = ask(pipe, ["z" * 90])
            assert response.generate_token_len == NUM_TOKENS
            most.append(max(watched.num_tokens))
    assert most == [20, 90]


@of(*TURBOMIND)
def test_hugging_face_weights_are_read(opened: Open, reference: list[list[int]], kind: Any) -> None:
    """Also where the document's name of a model's family is given, and bits for a KV cache that has no codes."""
    for fields in ({"model_format": "hf"}, {"model_format": "llama", "kv_bits": 4}):
        with opened(backend_config=small(kind, **fields)) as (pipe, _):
            assert [each.token_ids for each in ask(pipe, TEXTS)] == reference


@of(*TURBOMIND)
def test_awq_weights_are_read(tmp_path: Path, path: Path, kind: Any) -> None:
    folder, plain = rewritten(path, tmp_path, FORMATS["awq"])
    found = []
    for model, model_format in ((folder, "awq"), (plain, "hf")):
        with pipeline(str(model), backend_config=small(kind, model_format=model_format)) as pipe:
            found.append([each.token_ids for each in ask(pipe, TEXTS)])
    assert found[0] == found[1]


@of(*TURBOMIND)
def test_plain_weights_are_not_awq_s(path: Path, kind: Any) -> None:
    with pytest.raises(ModelError, match=r"^model_format awq: .* has plain weights"):
        pipeline(str(path), backend_config=small(kind, model_format="awq"))


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


# ---- refused options, and options with no effect, which are reported


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TurbomindEngineConfig(quant_policy=42), "quant_policy 42: expected 0"),
        (turbomind.EngineConfig(kv_bits=2), "kv_bits 2: the KV cache has codes of 4 or 8 bits"),
        (turbomind.EngineConfig(kv_bits=4, quant_policy=8), "kv_bits 4: only with quant_policy=4, not 8"),
        *((kind(model_format="int4"), "model_format 'int4': ") for kind in TURBOMIND),
        (PytorchEngineConfig(adapters={"a": "/a"}), "/a: no such folder"),
    ],
)
def test_what_is_asked_for_and_not_here_is_refused(path: Path, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline(str(path), backend_config=config)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (small(pytorch.EngineConfig, prefill_interval=4), "prefill_interval=4"),
        (small(PytorchEngineConfig, prefill_interval=4), "prefill_interval=4"),
        (small(turbomind.EngineConfig, cache_chunk_size=8), "cache_chunk_size=8"),
        (small(turbomind.EngineConfig, max_prefill_iters=3), "max_prefill_iters=3"),
        (small(turbomind.EngineConfig, use_context_fmha=0), "use_context_fmha=0"),
        (small(turbomind.EngineConfig, group_size=64), "group_size=64"),
    ],
)
def test_what_has_no_effect_is_told(path: Path, config: Any, told: str) -> None:
    with (
        pytest.warns(UserWarning, match=rf"without effect here: {told} \("),
        pipeline(str(path), backend_config=config),
    ):
        pass


def test_a_converted_model_is_refused(tmp_path: Path) -> None:
    """TurboMind's folders have a config.ini and one file for each weight."""
    weights = tmp_path / "triton_models" / "weights"
    weights.mkdir(parents=True)
    (weights / "config.ini").write_text("[llama]\nmodel_name = llama2\n")
    (weights / "tok_embeddings.weight").write_bytes(b"\0" * 64)
    for folder in (tmp_path, weights):
        with pytest.raises(ConfigError, match=r"config\.json: missing; the model folder needs config\.json"):
            pipeline(str(folder))
