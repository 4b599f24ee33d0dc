"""Shows what each documented argument of `LLM` changes in a real engine, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import LLM, SamplingParams, fastdeploy
from pd_cluster.devices.device import Device
from pd_cluster.devices.kinds import DeviceKind
from pd_cluster.errors import ConfigError
from pd_cluster.fastdeploy.engine.request import CompletionOutput
from pd_cluster.model.sizing import check_offload
from tests.support.checkpoints import reference_greedy
from tests.support.copies import copy_of
from tests.support.watched import watching

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
MAX_MODEL_LEN = 256

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


def test_the_logged_number_of_blocks_is_the_caches(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The number follows from the memory: blocks of twice the size are half as many, and hold as many tokens."""
    num_tokens = []
    for block_size in (32, 64):
        with (
            caplog.at_level(logging.INFO, "pd_cluster.offline.llm"),
            watching() as made,
            LLM(str(path), max_model_len=MAX_MODEL_LEN, block_size=block_size, kv_cache_memory=0.01),
        ):
            pool = made[0].runner.pool
        assert pool.layout.block_size == block_size
        assert f"engine: {pool.num_blocks} KV cache blocks of {block_size} tokens" in caplog.messages
        num_tokens.append(pool.num_blocks // (64 // block_size))
    assert num_tokens[0] == num_tokens[1]


def test_fastdeploys_blocks_have_64_tokens(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log has their number, found automatically."""
    monkeypatch.setenv("FD_LOG_DIR", str(tmp_path))
    with watching() as made, fastdeploy.LLM(str(path), max_model_len=MAX_MODEL_LEN) as llm:
        (output,) = llm.generate([[5, 6]], fastdeploy.SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        assert isinstance(output.outputs, CompletionOutput)
        assert output.outputs.token_ids == reference_greedy(path, [5, 6], 6)[:6]
        pool = made[0].runner.pool  # gone when it closes
    assert pool.layout.block_size == 64
    (line,) = (tmp_path / "fastdeploy.log").read_text(encoding="utf-8").splitlines()
    assert line.endswith(f"Doing profile, the total_block_num:{pool.num_blocks}")


def test_what_changes_nothing_here_leaves_the_answers_as_they_are(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The call has every value that asks for nothing, or for what has no effect on this engine."""
    with LLM(
        str(path),
        tokenizer_mode="auto",
        trust_remote_code=False,
        quantization=None,
        swap_space=0,
        cpu_offload_gb=0,
        enforce_eager=True,
        disable_custom_all_reduce=True,
        disable_async_output_proc=True,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=64,
        port=9001,
        metrics_port=9002,
    ) as llm:
        outputs = llm.generate(["ab"], GREEDY, use_tqdm=False)
    (output,) = outputs
    assert output.outputs.token_ids == reference_greedy(path, output.prompt_token_ids, 6)[:6]
    told = [record.getMessage().split()[0] for record in caplog.records if record.levelno >= logging.WARNING]
    assert sorted(told) == [
        *("disable_async_output_proc", "disable_custom_all_reduce", "dtype"),
        *("metrics_port", "port"),
    ]


def test_cpu_offload_gb_is_host_memory_which_a_cpu_has(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(path), cpu_offload_gb=2, max_model_len=MAX_MODEL_LEN, num_blocks=64) as llm:
        (output,) = llm.generate(["ab"], GREEDY, use_tqdm=False)
    assert output.outputs.token_ids == reference_greedy(path, output.prompt_token_ids, 6)[:6]
    assert "--cpu-offload-gb 2 changes nothing: on a CPU all weights are in host memory" in caplog.messages


def test_the_older_name_of_a_limit_of_graphs_is_accepted_with_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(path), max_context_len_to_capture=99, max_model_len=MAX_MODEL_LEN, num_blocks=64) as llm:
        (output,) = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=GREEDY)
    assert list(output.outputs[0].token_ids) == reference_greedy(path, [5, 6, 7], 6)
    said = "max_context_len_to_capture is the older name of max_seq_len_to_capture, which goes before it"
    assert caplog.messages.count(said) == 1


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_cpu_offload_gb_is_refused_on_accelerators(kind: DeviceKind) -> None:
    with pytest.raises(ConfigError, match="--cpu-offload-gb 2: weights stay on the device; leave it out, and give"):
        check_offload(2, Device(kind))


def test_gpu_memory_utilization_is_a_share_of_the_memory(path: Path) -> None:
    """The memory is the host's, since the engine computes on the CPU."""
    num_blocks = []
    for share in (0.0005, 0.002):
        with (
            watching() as made,
            LLM(str(path), gpu_memory_utilization=share, max_model_len=MAX_MODEL_LEN) as llm,
        ):
            num_blocks.append(made[0].runner.pool.num_blocks)
            (output,) = llm.generate(["ab"], GREEDY, use_tqdm=False)
            assert len(output.outputs.token_ids) == 6
    assert num_blocks[1] == pytest.approx(4 * num_blocks[0], rel=0.4), "other programs take memory meanwhile"


def test_arguments_of_the_engine_act(path: Path) -> None:
    """They bound the sequences and tokens of a step, size the pool, and switch the prefix cache on and off."""
    prompts = [list(range(5 * at, 5 * at + 40)) for at in range(6)]
    wanted = [reference_greedy(path, prompt, 6)[:6] for prompt in prompts]
    for caches in (True, False):
        with (
            watching() as made,
            LLM(
                str(path),
                max_num_seqs=3,
                max_num_batched_tokens=50,
                block_size=8,
                num_gpu_blocks_override=70,
                enable_prefix_caching=caches,
                max_model_len=200,
                max_logprobs=2,
            ) as llm,
        ):
            for _ in range(2):
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                assert [output.outputs.token_ids for output in outputs] == wanted
            assert {output.num_cached_tokens for output in outputs} == {32 if caches else 0}
            (output,) = llm.generate(["a"], SamplingParams(logprobs=3), use_tqdm=False)
            assert (output.error_msg or "").startswith("logprobs: 3 is more than this server's 2")
            (output,) = llm.generate([7] * 198, SamplingParams(ignore_eos=True, max_tokens=9), use_tqdm=False)
            assert len(output.outputs.token_ids) == 2, "max_model_len"
            pool = made[0].runner.pool
        assert (max(made[0].num_seqs), max(made[0].num_tokens)) == (3, 50)
        assert (pool.layout.block_size, pool.num_blocks) == (8, 70)
        assert (made[0].scheduler.num_prefix_hit_tokens > 0) == caches


def test_swap_space_holds_requests_with_several_candidates(path: Path) -> None:
    """The pool is too small for them; preemption_mode "swap" moves them out, without it 0 is enough."""
    params = SamplingParams(n=2, best_of=4, seed=3, max_tokens=40, ignore_eos=True)
    answers, num_moves, room = [], [], []
    for swap_space, mode in ((0.001, "swap"), (0.002, "swap"), (0, "recompute")):
        with (
            watching() as made,
            LLM(
                str(path),
                swap_space=swap_space,
                preemption_mode=mode,
                num_blocks=32,
                block_size=4,
                max_model_len=100,
            ) as llm,
        ):
            outputs = llm.generate([[5] * 20, [6] * 20], params, use_tqdm=False)
            (one,) = llm.generate([[7]], GREEDY, use_tqdm=False)
            room.append(made[0].runner.swap.num_blocks)
        assert one.outputs.token_ids == reference_greedy(path, [7], 6)[:6]
        answers.append([each.token_ids for output in outputs for each in output.outputs])
        num_moves.append(sum(made[0].num_moves))
    assert answers[0] == answers[1] == answers[2]
    assert room[0] > 0
    assert room[1] == pytest.approx(2 * room[0], abs=1)
    assert room[2] == 0
    assert num_moves[0] > num_moves[2], "what forks moves blocks, too"


@pytest.mark.parametrize("dtype_on_disk", ["float32", "float16"])
def test_a_float32_checkpoint_stays_float32_and_this_is_said(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype_on_disk: str
) -> None:
    folder = copy_of(path, tmp_path, {"config.json": {"dtype": dtype_on_disk}})
    with watching() as made, LLM(str(folder), max_model_len=64, num_blocks=16):
        assert made[0].runner.pool.layout.dtype == "float32"
    said = 'dtype "auto": the checkpoint is float32 and stays so; say dtype="float16" to have that'
    assert (said in caplog.messages) == (dtype_on_disk == "float32")


ENGINE_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer_mode": "fastest"}, "tokenizer_mode 'fastest': not supported"),
    ({"quantization": "int3"}, "quantization 'int3': expected one of awq, gptq"),
    ({"cpu_offload_gb": -2}, "cpu_offload_gb -2"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization 1.5: must be in 0 to 1"),
    ({"gpu_memory_utilization": -0.1}, "gpu_memory_utilization -0.1: must be in 0 to 1"),
    ({"enable_mm": True}, "enable_mm: "),
    ({"kv_cache_ratio": 0.6}, "kv_cache_ratio 0.6: blocks are not divided between prompts and answers"),
    ({"speculative_model": "x"}, "speculative_model 'x'"),
    ({"max_model_length": 9}, "max_model_length: unknown argument; did you mean max_model_len?"),
]


@pytest.mark.parametrize(("arguments", "error"), ENGINE_ARGUMENTS)
def test_a_real_model_is_refused_what_it_cannot_have(path: Path, arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(path), **arguments)
    assert str(caught.value).startswith(error)
