"""Models that would answer wrongly are refused at load, with the reason."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from pd_cluster import LLM
from pd_cluster.errors import ModelError
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers import packed_modules
from pd_cluster.model.layers.attention import sdpa
from pd_cluster.model.loading.load_proof import prove_every_layer_writes
from pd_cluster.model.loading.unlisted_model_check import ConfigLengths
from pd_cluster.numerics import RopeScaling
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from pd_cluster.types import Sampling
from tests.support import checkpoints
from tests.support.engines import assert_all_same, generate, make_core, random_prompt
from tests.support.quantized import FORMATS, Format, Written, rewritten
from tests.support.ranks import ranks
from tests.support.unlisted import FAILED, SERVED, make

Checkpoints = Callable[..., Path]

# Unlisted architectures, and why each must not be listed.
OUTSIDE: dict[str, tuple[dict[str, Any], str]] = {
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 3}, "mpt cannot run with paged attention"),
    "doge": ({}, "DogeAttention attends with attention_mask, which paged attention does not support"),
    "jamba": ({}, r"layer_types \['linear_attention'\]: only full, sliding and indexed attention and the states of"),
}


@pytest.mark.parametrize("architecture", OUTSIDE)
def test_an_architecture_outside_the_list(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, reason = OUTSIDE[architecture]
    monkeypatch.setitem(checkpoints.CONFIGS, architecture, own)
    folder = checkpoints.make_checkpoint(tmp_path, architecture)
    with pytest.raises(ModelError, match=f"model_type '{architecture}' is not supported"):
        make_core(folder)
    monkeypatch.setattr("pd_cluster.checkpoints.checkpoint.SUPPORTED_MODEL_TYPES", (architecture,))
    with pytest.raises(ModelError, match=reason):
        make_core(folder, num_blocks=512)


@pytest.mark.parametrize(
    ("architecture", "ignored"),
    [
        ("qwen2_moe", "sliding_window"),
        ("gpt_oss", "sinks"),
        ("cohere2", "sliding_window"),
    ],
)
def test_what_the_attention_ignores_is_noticed(
    checkpoint: Checkpoints, architecture: str, ignored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = sdpa.write_and_attend

    def careless(*arguments: Any) -> torch.Tensor:
        return attend(*arguments[:-1], dataclasses.replace(arguments[-1], **{ignored: None}))

    monkeypatch.setattr(sdpa, "write_and_attend", careless)
    monkeypatch.setattr(
        "pd_cluster.model.loading.model_loader.can_fuse", lambda *_: False
    )  # another check compares fused layers
    with pytest.raises(ModelError, match=f"{architecture}: with paged attention the logits differ"):
        make_core(checkpoint(architecture))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_pass(checkpoint: Checkpoints, dtype: str) -> None:
    for architecture in ("gpt_oss", "gemma3_text", "opt"):
        make_core(checkpoint(architecture), dtype=dtype)


def test_windows_and_attention_are_as_before(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_cluster.model.loading.model_loader.can_fuse", lambda *_: False)
    model = make_core(checkpoint("exaone4")).runner.model.model  # type: ignore[attr-defined]
    assert model.config.sliding_window == 24
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [24, 24, 24]
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {
        sdpa.NAME
    }


# ---- arguments that a module may pass to attention


def call(module: Any = None, mask: torch.Tensor | None = None, **keywords: Any) -> ForwardBatch:
    batch = SimpleNamespace()
    x = torch.zeros(1, 2, 1, 16)
    module = module or SimpleNamespace(layer_idx=0)
    sdpa.forward(module, x, x, x, mask, scaling=1.0, forward_batch=batch, **keywords)  # type: ignore[arg-type]
    raise AssertionError("not refused")


def test_an_unknown_keyword_a_mask_dropout_or_sight_of_the_future() -> None:
    given: dict[str, dict[str, Any]] = {"alibi": {"alibi": torch.ones(1)}, "dropout": {"dropout": 0.1}}
    given["attention_mask"] = {"mask": torch.zeros(1, 1, 1, 1)}
    for name, keywords in given.items():
        with pytest.raises(ModelError, match=f"attends with {name}, which"):
            call(**keywords)
    with pytest.raises(ModelError, match="is not causal"):
        call(SimpleNamespace(layer_idx=0, is_causal=False))


# ---- every layer, once, in order


class Writes:
    """A model that only reports these layers as written."""

    config = SimpleNamespace(model_type="strange")
    kernels = "none"

    def __init__(self, *layers: int) -> None:
        self._layers = layers

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        for layer in self._layers:
            batch.layer_written(layer, None)
        return torch.zeros(1, 8)


@pytest.mark.parametrize("layers", [(), (0, 1), (0, 1, 1), (1, 0, 2), (0, 1, 2, 3), (0, 1, 2, 0)])
def test_layers_that_do_not_write_once_and_in_order(layers: tuple[int, ...]) -> None:
    pool = KVPool(KVLayout(3, 1, keys_and_values(16), 4, "float32"), num_blocks=1)
    prove_every_layer_writes(Writes(0, 1, 2), pool)
    with pytest.raises(ModelError, match=r"strange: layers .* wrote to the KV pool, but each of 3 must do so once"):
        prove_every_layer_writes(Writes(*layers), pool)


@pytest.mark.parametrize(("architecture", "value"), [("llama", float("nan")), ("olmo2", float("inf"))])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, architecture: str, value: float) -> None:
    """Covers fused layers and transformers' modules."""
    folder = checkpoints.make_checkpoint(tmp_path, architecture)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="logits in float32 contain NaN or infinity: either the weights contain them"):
        make_core(folder, num_blocks=64)


# ---- codes in another order than config.json says


WARNING = "cannot continue 1, 2, 3"
ORDERS = {"as it is": list(range(8)), "even ones first": [0, 2, 4, 6, 1, 3, 5, 7], "backwards": list(range(7, -1, -1))}


def reordered(form: Format, order: list[int]) -> Format:
    """Returns the format with the codes in each word, zero points included, in another order."""

    def write(weight: torch.Tensor, group: int) -> Written:
        parts, numbers = form.write(weight, group)
        for name, words in parts.items():
            if words.dtype == torch.int32 and words.dim() == 2:
                codes = torch.stack([words >> 4 * field & 15 for field in order], -1)
                parts[name] = sum(codes[..., at] << 4 * at for at in range(8)).to(torch.int32)
        return parts, numbers

    return dataclasses.replace(form, write=write)


@pytest.mark.parametrize(
    ("name", "order"),
    [("awq", "as it is"), ("awq", "even ones first"), ("gptq 4", "even ones first"), ("packed 4", "backwards")],
)
def test_another_order_of_the_codes(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, order: str) -> None:
    folder, _ = rewritten(SHIPPED_MODEL, tmp_path, reordered(FORMATS[name], ORDERS[order]))
    make_core(folder, num_blocks=128)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    if order == "as it is":
        assert not warnings
    else:
        (warning,) = warnings
        assert warning.startswith(f"{folder}: ")
        assert WARNING in warning
        assert "quantization_config" in warning


def test_what_is_not_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture, checkpoint: Checkpoints) -> None:
    """Models are not warned about if their tokenizer pads (a calibration may leave that), if their weights are plain,
    even untrained ones, or if they compute vectors and so need not continue a count.
    """
    folder, _ = rewritten(SHIPPED_MODEL, tmp_path / "padding", FORMATS["awq"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(length=256)
    tokenizer.enable_truncation(1)
    tokenizer.save(str(folder / "tokenizer.json"))
    vectors, _ = rewritten(SHIPPED_MODEL, tmp_path / "vectors", reordered(FORMATS["awq"], ORDERS["backwards"]))
    (vectors / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer"}]')
    for each in (folder, vectors, checkpoint("llama")):
        make_core(each, num_blocks=128)
    assert WARNING not in caplog.text


def test_ranks_ask_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = rewritten(SHIPPED_MODEL, tmp_path, reordered(FORMATS["awq"], ORDERS["backwards"]))
    with ranks(folder, 2, num_blocks=128):
        pass
    (warning,) = [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]
    assert "chance loses 6.9" in warning  # the chance loss for 1,024 tokens


# ---- --try-unlisted: unlisted types that transformers has


GREEDY = Sampling(max_tokens=20, temperature=0.0)
LENGTHS = (1, 2, 16, 17, 40, 41, 100, 70)
QUICK_UNLISTED = ("helium", "mellum")
ALL_UNLISTED = [pytest.param(name, marks=() if name in QUICK_UNLISTED else pytest.mark.slow) for name in SERVED]


@pytest.mark.parametrize("architecture", ALL_UNLISTED)
def test_one_that_may_be_tried(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs prompts in chunks, batched, then from the prefix cache."""
    folder = make(tmp_path, architecture, monkeypatch)
    core = make_core(
        folder, block_size=16, max_num_batched_tokens=40, num_blocks=96, try_unlisted=("falcon", architecture)
    )
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    for _ in range(2):
        assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


def test_the_flag_is_needed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path, "helium", monkeypatch)
    with pytest.raises(ModelError, match=r"'helium' is not supported: .*; --try-unlisted helium serves it as unproven"):
        make_core(folder)
    with pytest.raises(ModelError, match="try_unlisted helium serves it as unproven"):
        LLM(str(folder))
    with LLM(str(folder), try_unlisted=["helium"], num_blocks=64) as llm:
        assert llm.generate([[1, 2, 3]], use_tqdm=False)[0].outputs


@pytest.mark.parametrize("architecture", FAILED)
def test_one_that_fails_the_proof(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path, architecture, monkeypatch)
    why = f"^--try-unlisted {architecture}: the proof at load failed: .*{FAILED[architecture][1]}"
    with pytest.raises(ModelError, match=why):
        make_core(folder, num_blocks=512, try_unlisted=(architecture,))


def test_ranks_that_share_it_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.ranks import ranks

    folder = make(tmp_path, "helium", monkeypatch)
    with (
        pytest.raises(ModelError, match="--tensor-parallel-size 2: no check would detect a wrong split; use 1"),
        ranks(folder, 2, num_blocks=64, try_unlisted=("helium",)),
    ):
        pass


# ---- lengths


def test_what_changes_beyond_a_length_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detects attention that is right for 12 tokens with windows shortened to 3, but wrong beyond a window of 100."""
    folder = make(tmp_path, "mellum", monkeypatch, sliding_window=100)
    attend = sdpa.write_and_attend

    def careless(*arguments: Any) -> torch.Tensor:
        window = arguments[-1].sliding_window
        forgotten = {"sliding_window": None} if window == 100 else {}
        return attend(*arguments[:-1], dataclasses.replace(arguments[-1], **forgotten))

    make_core(folder, num_blocks=64, try_unlisted=("mellum",))
    monkeypatch.setattr(sdpa, "write_and_attend", careless)
    with pytest.raises(ModelError, match="mellum: beyond sliding_window 100 the logits differ from transformers' own"):
        make_core(folder, num_blocks=64, try_unlisted=("mellum",))
    make_core(folder, num_blocks=64, try_unlisted=("mellum",), max_model_len=100)


LONGROPE = {"original_max_position_embeddings": 64, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "longrope", **LONGROPE}],
    ids=["dynamic", "longrope"],
)
def test_positions_by_length(
    tmp_path: Path, rope: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With --max-model-len beyond the trained length, the check at load also runs there."""
    folder = make(
        tmp_path, "helium", monkeypatch, rope_parameters={**rope, "rope_theta": 1e4}, max_position_embeddings=128
    )
    length = 128 if rope["rope_type"] == "dynamic" else 64
    with caplog.at_level(logging.WARNING, "pd_cluster"):
        make_core(folder, num_blocks=64, try_unlisted=("helium",), max_model_len=length)
        make_core(folder, num_blocks=64, try_unlisted=("helium",), max_model_len=2 * length)
    proven = [message for message in caplog.messages if "proven at load" in message]
    assert [str(length) in message for message in proven] == [False, True]
    monkeypatch.setattr(RopeScaling, "length", lambda self, num_tokens: 0)
    with pytest.raises(ModelError, match=f"helium: beyond .* {length} the logits differ from transformers' own"):
        make_core(folder, num_blocks=64, try_unlisted=("helium",), max_model_len=2 * length)


class Settings:
    """A config with three lengths."""

    num_attention_heads = 4

    def to_dict(self) -> dict[str, Any]:
        rope = {"original_max_position_embeddings": 16384}
        return {"sliding_window": 64, "block_size": 4096, "rope_parameters": rope}


def test_lengths_within_the_work_that_a_load_may_cost() -> None:
    small = ConfigLengths.of(Settings(), 1_000_000, 32768, "cpu", RopeScaling())
    assert (list(small.proven), list(small.skipped)) == ([64, 4096], [16384])  # scores of 16,384 tokens are too large
    large = ConfigLengths.of(Settings(), 8_000_000_000, 32768, "cpu", RopeScaling())
    assert (list(large.proven), list(large.skipped)) == ([64], [4096, 16384])
    assert list(ConfigLengths.of(Settings(), 8_000_000_000, 32768, "cuda", RopeScaling()).proven) == [64, 4096]
    short = ConfigLengths.of(Settings(), 1_000_000, 4096, "cpu", RopeScaling())
    assert (list(short.proven), list(short.skipped)) == ([64], [])


def test_packing_that_changes_a_module_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load uses packed modules on both sides, so packing is compared with the original modules first."""
    folder = make(tmp_path, "helium", monkeypatch)
    pack = packed_modules.pack_modules

    def careless(model: torch.nn.Module) -> int:
        with torch.no_grad():
            model.model.norm.weight.mul_(torch.linspace(0.5, 1.5, 64))  # type: ignore[union-attr, operator]
        return pack(model)

    monkeypatch.setattr("pd_cluster.model.loading.unlisted_model_check.pack_modules", careless)
    with pytest.raises(ModelError, match="helium: with packed modules the logits differ"):
        make_core(folder, num_blocks=64, try_unlisted=("helium",))
