"""Quantized pools over real processes: the split, unequal ranks and blocks, a death, and pairs of different dtypes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster import LLM, SamplingParams
from tests.cluster.test_death import NUM_TOKENS, PROMPT, caught
from tests.cluster.test_unequal_pairs import links_of
from tests.support.cluster import LiveCluster
from tests.support.engines import random_prompt

pytestmark = pytest.mark.usefixtures("one_preloader")

Checkpoints = Callable[..., Path]
PROMPTS = [random_prompt(random.Random(8), n) for n in (1, 7, 16, 25, 64, 100)]
MAX_TOKENS = 10


def alone(model: Path, prompts: list[list[int]], dtype: str, max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    """Returns the tokens of a single process."""
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(str(model), num_blocks=512, kv_cache_dtype=dtype) as llm:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=greedy, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4", "int8", "fp8_e4m3"])
def test_the_split_and_ranks_compute_what_one_process_does(checkpoint: Checkpoints, dtype: str) -> None:
    model = checkpoint("llama")
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(
        str(model),
        kv_cache_dtype=dtype,
        num_blocks=128,
        prefill=1,
        decode=1,
        tensor_parallel_size=2,
        kv_transport="shm",
    ) as llm:
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=greedy, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == alone(model, PROMPTS, dtype)


def test_unequal_pools_and_a_pair_that_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Heads and blocks are rearranged without changing codes; over gloo, codes are sent unchanged."""
    model = checkpoint("llama")
    unlike = {
        "decode-0": ["--kv-transport=shm"],
        "decode-1": ["--kv-transport=dist", "--block-size=24"],
        "decode-2": ["--kv-cache-dtype=auto"],
    }
    arguments = ["--kv-cache-dtype=int8", "--kv-wire-dtype=int8", "--num-blocks=128"]
    why = "--kv-cache-dtype differs: int8 on the prefill instance and float32 on the decode instance"
    cluster = LiveCluster(
        tmp_path, model, num_decode=3, arguments=arguments, member_arguments=unlike, tp_sizes={"decode-0": 2}
    )
    try:
        cluster.start()
        cluster.wait_until("the pair is refused", lambda: why in str(cluster.health()[1].get("links")), 90)
        cluster.wait_until("the others serve", lambda: set(links_of(cluster).values()) >= {"up (shm)", "up (dist)"})
        expected = alone(model, PROMPTS, "int8")
        for _ in range(2):  # the second time with cached prefixes
            assert cluster.complete_together(PROMPTS, MAX_TOKENS, ignore_eos=True) == expected
        cluster.assert_home()
        cluster.await_received("decode-0", "decode-1")
        assert not cluster.instance("decode-2")["kv_received_nbytes"]
    finally:
        cluster.stop()


def test_a_stream_goes_on_token_for_token_after_a_death(checkpoint: Checkpoints, tmp_path: Path) -> None:
    model = checkpoint("llama", max_position_embeddings=4096)
    arguments = ["--kv-cache-dtype=int8", "--num-blocks=512"]
    with LiveCluster(tmp_path, model, num_decode=2, arguments=arguments) as cluster:
        stream, begun, victim = caught(cluster)
        cluster.kill(victim)
        (rest,) = stream.to_the_end()
        assert begun[0] + rest == alone(model, [PROMPT], "int8", NUM_TOKENS)[0]


def test_pairs_that_may_differ(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """With --allow-mixed-kv, float32 at prefill and int8 at decode: links report it; first tokens fit either."""
    model = checkpoint("llama")
    unlike = {
        "decode-0": ["--kv-cache-dtype=int8", "--kv-transport=shm"],
        "decode-1": ["--kv-cache-dtype=int8", "--kv-transport=dist"],
    }
    arguments = ["--allow-mixed-kv", "--num-blocks=128"]
    with LiveCluster(tmp_path, model, num_decode=2, arguments=arguments, member_arguments=unlike) as cluster:
        assert set(links_of(cluster).values()) == {"up (shm, float32)", "up (dist, float32)"}
        exact, coded = alone(model, PROMPTS, "auto"), alone(model, PROMPTS, "int8")
        for prompt, plain, narrow in zip(PROMPTS, exact, coded, strict=True):
            for _ in range(2):
                found = cluster.complete(prompt, MAX_TOKENS, ignore_eos=True)
                assert len(found) == MAX_TOKENS
                assert found[0] in (plain[0], narrow[0])
        cluster.await_received(*unlike)
        cluster.assert_home()
