"""With quantized weights, a prefill and a decode process give the same result as one process."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pd_cluster import LLM, SamplingParams
from tests.support.checkpoints import make_checkpoint, reference_greedy
from tests.support.cluster import LiveCluster
from tests.support.engines import random_prompt
from tests.support.quantized import FORMATS, W8A8, rewritten, with_outliers

pytestmark = pytest.mark.usefixtures("one_preloader")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [random_prompt(random.Random(1), n) for n in (1, 17, 40)]


def tokens_of(folder: Path, **settings: object) -> list[list[int]]:
    with LLM(str(folder), max_model_len=128, num_blocks=64, **settings) as llm:
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_four_bits_across_the_split_are_transformers_tokens(tmp_path: Path) -> None:
    folder, plain = rewritten(make_checkpoint(tmp_path / "model", "qwen2"), tmp_path, FORMATS["awq"])
    assert tokens_of(folder, prefill=1, decode=1) == [reference_greedy(plain, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("scheme", ["w4a8", pytest.param(None, marks=pytest.mark.slow)])
def test_int8_products_across_the_split_are_those_of_one_process(tmp_path: Path, scheme: str | None) -> None:
    """Covers quantizing at load and quantized folders, including the output layer."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    if scheme is None:
        folder, _ = rewritten(folder, tmp_path, W8A8)
    settings = {"quantization": scheme, "quantize_head": scheme and "int4_wo"}
    assert tokens_of(folder, **settings, prefill=1, decode=1) == tokens_of(folder, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "w4a8"])
def test_two_and_four_ranks_decode_what_one_did_the_prompts_of(tmp_path: Path, scheme: str) -> None:
    """One prefill instance of two ranks, decode instances of one and four ranks; the last rank's part has outliers."""
    folder = with_outliers(make_checkpoint(tmp_path / "model", "llama"))
    expected = tokens_of(folder, quantization=scheme)
    with LiveCluster(
        tmp_path / "cluster",
        folder,
        num_decode=2,
        arguments=["--num-blocks=128", "--max-num-batched-tokens=32", f"--quantization={scheme}"],
        tp_sizes={"prefill-0": 2, "decode-1": 4},
    ) as cluster:
        assert cluster.complete_together(PROMPTS * 4, 12, ignore_eos=True) == expected * 4
        cluster.await_received("decode-0", "decode-1")
        cluster.assert_home()
