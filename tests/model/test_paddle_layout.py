"""ERNIE 4.5 folders in Paddle's layout: transformers' tokens of the same model in its own folder."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster import LLM, LoRARequest, SamplingParams
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.tensor_place import TensorPlace
from pd_cluster.errors import ModelError
from pd_cluster.extras.quantize.quantize_job import QuantizeJob
from pd_cluster.extras.quantize.quantize_schemes import SCHEMES
from pd_cluster.model.loading.transformers_modules import config_of
from pd_cluster.model.parallel.parallel_plan import ParallelPlan
from pd_cluster.model.parallel.rank_tensors import RankTensors
from pd_cluster.model.parallel.weight_slices import read_shard
from pd_cluster.model.weights.stored_tensors import StoredTensor
from pd_cluster.types import Sampling
from tests.model.test_picture_kinds import SETTINGS, answer_all, expected_of, prompts
from tests.support.adapters import make_adapter, merged
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, generate, make_core, random_prompt
from tests.support.paddle_layout import as_paddle, in_bfloat16, with_sentence_pieces
from tests.support.picture_kinds import make_kind
from tests.support.ranks import ranks

GREEDY = Sampling(max_tokens=12, temperature=0.0)
WIDE: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 8, "head_dim": 128, "num_hidden_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("ernie4_5", {}),
    "untied": ("ernie4_5", {"tie_word_embeddings": False, "use_bias": False, **WIDE, "initializer_range": 0.06}),
    "experts": ("ernie4_5_moe", {}),
}
PROMPTS = [random_prompt(random.Random(1), length) for length in (1, 17, 40)]
Twins = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    """Returns `twins(name)`: a model's folder in transformers' layout, and in Paddle's; each is made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(name: str) -> tuple[Path, Path]:
        if name not in made:
            place = tmp_path_factory.mktemp(name)
            if name == "pictures":
                own = make_kind(place / "pt", "ernie4_5_vl_moe")
            else:
                architecture, changes = MODELS[name]
                own = make_checkpoint(place / "pt", architecture, **changes)
            own = in_bfloat16(own)
            made[name] = own, as_paddle(own, place / "paddle", 1 if name == "tied" else 3, has_words=name != "tied")
        return made[name]

    return of


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens(twins: Twins, name: str, caplog: pytest.LogCaptureFixture) -> None:
    own, paddle = twins(name)
    with caplog.at_level(logging.INFO):
        core = make_core(paddle, num_blocks=64, dtype="float32")
    assert "1 tensors of layers that predict further tokens are ignored" in caplog.text
    assert_all_same(own, PROMPTS, generate(core, PROMPTS, GREEDY), GREEDY.max_tokens)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_of_two_ranks_and_over_a_split(twins: Twins, name: str) -> None:
    own, paddle = twins(name)
    with ranks(paddle, 2, num_blocks=64, dtype="float32") as core:
        assert_all_same(own, PROMPTS, generate(core, PROMPTS, GREEDY), GREEDY.max_tokens)
    params = SamplingParams(temperature=0, max_tokens=12)
    for size in (1, 2):
        sizes: dict[str, Any] = {"prefill": 1, "decode": 1, "tensor_parallel_size": size, "num_blocks": 64}
        with LLM(str(paddle), dtype="float32", **sizes) as llm:
            outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=params, use_tqdm=False)
        assert_all_same(own, PROMPTS, [list(each.outputs[0].token_ids) for each in outputs], 12)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pictures(twins: Twins) -> None:
    own, paddle = twins("pictures")
    shown = prompts("ernie4_5_vl_moe")
    expected = expected_of(own, "ernie4_5_vl_moe", shown)
    assert answer_all(paddle, make_core(paddle, **SETTINGS, dtype="float32"), shown) == expected
    with ranks(paddle, 2, **SETTINGS, dtype="float32") as core:
        assert answer_all(paddle, core, shown) == expected
    alone = make_core(paddle, language_model_only=True, num_blocks=64, dtype="float32")
    texts = [each.token_ids for each in shown if not each.pictures]
    assert generate(alone, texts, GREEDY) == [expected[-1]]
    asked = [{"prompt_token_ids": each.token_ids, "multi_modal_data": {"image": each.pictures}} for each in shown[:-1]]
    params = SamplingParams(temperature=0, max_tokens=len(expected[0]))
    with LLM(str(paddle), dtype="float32", prefill=1, decode=1, num_blocks=256, enable_mm=True) as llm:
        found = llm.generate(asked, params, use_tqdm=False)
    assert [list(each.outputs[0].token_ids) for each in found] == expected[:-1]


@pytest.mark.parametrize("name", [*MODELS, "pictures"])
@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_reads_the_tensors_of_its_twin(twins: Twins, name: str, size: int) -> None:
    checkpoints = [Checkpoint.open(str(folder)) for folder in twins(name)]
    is_part = name == "pictures"
    for rank in range(size):
        own, paddle = (
            read_shard(each.weights, RankTensors(ParallelPlan(config_of(each), size), rank), is_part)
            for each in checkpoints
        )
        assert own.keys() == paddle.keys()
        for key, tensor in own.items():
            assert tensor.dtype == paddle[key].dtype
            assert torch.equal(tensor, paddle[key]), key
            assert paddle[key].is_contiguous()


class Watched:
    """A stored tensor that counts the numbers that are read of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.num_read = tensor, 0

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        found = self._tensor[index]
        self.num_read += found.numel()
        return found


def test_only_what_is_asked_for_is_read() -> None:
    stored = Watched(torch.arange(60).reshape(6, 10))
    whole = torch.cat((torch.arange(60).reshape(6, 10)[:, 1:4], torch.arange(60).reshape(6, 10)[:, 6:9]), dim=1).t()
    tensor = StoredTensor(stored, TensorPlace("a", ((1, 4), (6, 9)), 1, is_turned=True), is_bf16=False)
    assert tensor.get_shape() == [6, 6]
    assert torch.equal(tensor[:], whole)
    stored.num_read = 0
    assert torch.equal(tensor[2:5], whole[2:5])
    assert torch.equal(tensor[:, 1:3], whole[:, 1:3])
    assert stored.num_read == 3 * 6 + 6 * 2


def test_quantized_at_load_and_into_another_folder(twins: Twins, tmp_path: Path) -> None:
    outputs = [
        generate(make_core(each, num_blocks=64, dtype="float32", quantization="wint8"), PROMPTS, GREEDY)
        for each in twins("experts")
    ]
    assert outputs[0] == outputs[1]
    outputs = []
    for at, each in enumerate(twins("tied")):
        QuantizeJob(each, tmp_path / str(at), SCHEMES["w8a16"], "rtn", []).run()
        outputs.append(generate(make_core(tmp_path / str(at), num_blocks=64, dtype="float32"), PROMPTS, GREEDY))
    assert outputs[0] == outputs[1]


def test_adapters_name_the_modules_of_transformers(twins: Twins, tmp_path: Path) -> None:
    own, paddle = twins("tied")
    adapter = make_adapter(tmp_path / "a", own)
    both = merged(own, adapter, tmp_path / "merged")
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(paddle), num_blocks=64, dtype="float32", enable_lora=True) as llm:
        outputs = llm.generate(
            prompt_token_ids=PROMPTS,
            sampling_params=params,
            lora_request=LoRARequest("a", 1, str(adapter)),
            use_tqdm=False,
        )
    assert_all_same(both, PROMPTS, [list(each.outputs[0].token_ids) for each in outputs], 8)


def test_its_config_in_transformers_form(twins: Twins) -> None:
    """Fields of Paddle's training are dropped; without a model_type, `architectures` determines the type."""
    own, paddle = twins("experts")
    raw = json.loads((paddle / "config.json").read_bytes())
    assert "model_type" not in raw
    assert "fuse_rope" in raw
    found, expected = Checkpoint.open(str(paddle)), Checkpoint.open(str(own))
    assert found.config == expected.config
    assert found.identity != expected.identity, "the files differ, so caches must not be shared"
    seeing = Checkpoint.open(str(twins("pictures")[1])).config
    wanted = {"moe_num_experts": 4, "picture_intermediate_size": 32, "model_type": "ernie4_5_moe"}
    wanted |= {"moe_layer_start_index": 1, "moe_layer_end_index": 2}
    assert {name: seeing[name] for name in wanted} == wanted


def test_what_is_refused_by_name(twins: Twins, tmp_path: Path) -> None:
    paddle = as_paddle(twins("tied")[0], tmp_path / "paddle")
    file = paddle / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "num_attention_heads": 5}))
    with pytest.raises(ModelError, match=r"qkv_proj\.\w+: 128 outputs cannot be split into 5 \+ 2 \+ 2 equal parts"):
        make_core(paddle, num_blocks=8)
    (paddle / "model.safetensors").unlink()
    (paddle / "model_state.pdparams").write_bytes(b"\x80")
    with pytest.raises(
        ModelError, match=r"model_state\.pdparams: reading this format can run code, .* give the folder"
    ):
        Checkpoint.open(str(paddle))


EXAMPLE = """
from pd_cluster.fastdeploy import LLM, SamplingParams
msg1=[
    {"role": "system", "content": "I'm a helpful AI assistant."},
    {"role": "user", "content": "把李白的静夜思改写为现代诗"},
]
messages = [msg1]
# 采样参数
sampling_params = SamplingParams(top_p=0.95, max_tokens=6400)
# 加载模型
llm = LLM(model="./baidu/ERNIE-4.5-0.3B-Paddle", tensor_parallel_size=1, max_model_len=8192)
# 批量进行推理(llm内部基于资源情况进行请求排队、动态插入处理)
outputs = llm.chat(messages, sampling_params)
assert all(each.error_msg is None and each.outputs.text for each in outputs), outputs
llm.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["experts", "tied"])
def test_the_document_s_example(tmp_path: Path, name: str) -> None:
    """Runs the example as typed except for the package's name; a folder takes the place of the hub's model."""
    architecture, changes = MODELS[name]
    own = in_bfloat16(make_checkpoint(tmp_path / "pt", architecture, max_position_embeddings=8192, **changes))
    with_sentence_pieces(as_paddle(own, tmp_path / "baidu/ERNIE-4.5-0.3B-Paddle"))
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    given: dict[str, Any] = {"cwd": tmp_path, "env": where, "capture_output": True, "text": True, "timeout": 250}
    done = subprocess.run([sys.executable, "-c", EXAMPLE], check=False, **given)
    assert done.returncode == 0, done.stderr[-2000:]
