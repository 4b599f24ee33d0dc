"""Adapters of embeddings, output layers, routers, experts and whole modules give PEFT's tokens.

If the embedding and the output layer are tied, PEFT applies an adapter of one of them to that one only, but merging
would change both. So the reference is PEFT's unmerged model; the merged one is used, too, if they are not tied.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ModelError
from pd_cluster.model.layers.expert_weights import ExpertLayers
from pd_cluster.model.lora.device_addition import ActivationDevice
from pd_cluster.model.runner.model_adapters import ModelAdapters
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.adapters import digest_of, linear_modules, loaded, logits_of, outputs_of
from tests.support.checkpoints import CONFIGS
from tests.support.engines import make_core, random_prompt
from tests.support.ranks import ranks
from tests.support.sparse_files import MANY_NBYTES, num_bytes_read
from tests.support.usual import slow_but

Checkpoints = Callable[..., Path]
NUM_TOKENS = 6
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
WEIGHTS = "adapter_model.safetensors"


def ends_of(model: Any) -> tuple[str, str]:
    """Returns the names of a model's embedding and output layer."""
    names = {id(module): name for name, module in model.named_modules()}
    return names[id(model.get_input_embeddings())], names[id(model.get_output_embeddings())]


def written(folder: Path, base: Path, seed: int = 1, only: str = "", **config: Any) -> Any:
    """Writes an adapter with random matrices; returns PEFT's model."""
    import peft  # takes seconds

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    own = [name for name in linear_modules(model) if only in name]
    config.setdefault("target_modules", own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **config})
        )
        torch.manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.2)
            elif "modules_to_save" in name:
                parameter.data.add_(torch.randn_like(parameter) * parameter.std().clamp(min=0.3))
        adapted.save_pretrained(folder)
    return adapted.eval()


def assert_said_by(model: Any, outputs: list[list[int]]) -> None:
    """Asserts that these are the model's greedy outputs for PROMPTS, by one pass over each prompt and output."""
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt + output[:-1]])
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output


PROMPTS = [random_prompt(random.Random(1), n) for n in (1, 16, 41)]


def plain_of(base: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def assert_each_says_its_own(base: Path, folders: list[Path], models: list[Any]) -> list[list[list[int]]]:
    """Compares adapters and the base model, batched and in chunks, with PEFT's models; returns the outputs."""
    variants = [*(digest_of(each) for each in folders), ""]
    core = make_core(base, adapters=loaded(*folders), max_num_batched_tokens=40, num_blocks=64)
    found = outputs_of(core, PROMPTS, variants, GREEDY)
    for variant, model in zip(variants, [*models, plain_of(base)], strict=True):
        assert_said_by(model, found[variant])
    assert len({str(each) for each in found.values()}) == len(variants)
    return list(found.values())


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers.\d+.mlp.up_proj": 2}}),
        ("llama", {"layers_to_transform": [1], "target_modules": ["q_proj", "up_proj"]}),
        ("gpt2", {"fan_in_fan_out": True, "rank_pattern": {"h.0.attn.c_attn": 3}}),
        ("ernie4_5", {"target_modules": "all-linear"}),
    ],
)
def test_tokens_are_those_of_its_merged_model(
    checkpoint: Checkpoints, architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    base = checkpoint(architecture)
    model = written(tmp_path / "a", base, **config)
    found = assert_each_says_its_own(base, [tmp_path / "a"], [model])
    assert_said_by(model.merge_and_unload(), found[0])


@pytest.mark.parametrize("architecture", slow_but({"gemma2", "gpt2"}, CONFIGS))
def test_embedding_and_output_layer(checkpoint: Checkpoints, architecture: str, tmp_path: Path) -> None:
    """Covers two adapters of all linear layers, the embedding and the output layer."""
    base = checkpoint(architecture)
    plain = plain_of(base)
    first, last = ends_of(plain)
    linear, folders = list(linear_modules(plain)), [tmp_path / "a", tmp_path / "b"]
    models = [
        written(folders[0], base, 1, target_modules=[*linear, first, last], rank_pattern={first: 3}),
        written(folders[1], base, 2, target_modules=[*linear, last], alpha_pattern={last: 20}),
    ]
    found = assert_each_says_its_own(base, folders, models)
    if not plain.config.tie_word_embeddings:
        assert_said_by(models[0].merge_and_unload(), found[0])


@pytest.mark.parametrize("architecture", slow_but({"gemma2"}, ["llama", "gemma2", "granite", "gpt2", "olmo2"]))
@pytest.mark.parametrize("which", slow_but({"norms"}, ["embed_tokens", "lm_head", "norms", "embed_tokens lm_head"]))
def test_whole_modules(checkpoint: Checkpoints, architecture: str, which: str, tmp_path: Path) -> None:
    """Covers an adapter with its own embedding, output layer and norms, beside one without them."""
    base = checkpoint(architecture)
    plain = plain_of(base)
    saved = which.split()
    if architecture == "gpt2":
        saved = [{"embed_tokens": "wte", "norms": "ln_f"}.get(each, each) for each in saved]
    elif saved == ["norms"]:
        names = [name for name, module in plain.named_modules() if "Norm" in type(module).__name__]
        saved = [name for name in names if not name.endswith(("q_norm", "k_norm"))]
    only = "attn" if architecture == "gpt2" else "mlp"
    folders = [tmp_path / "a", tmp_path / "b"]
    model = written(folders[0], base, only=only, modules_to_save=saved)
    if saved == ["ln_f"]:
        with pytest.raises(ModelError, match=r"ln_f.bias: not a matrix of a LoRA adapter"):
            make_core(base, adapters=loaded(folders[0]), num_blocks=64)
        return
    assert_each_says_its_own(base, folders, [model, written(folders[1], base, 2, only=only)])


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("architecture", slow_but({"gpt_oss"}, WITH_EXPERTS))
@pytest.mark.parametrize("which", slow_but({"router"}, ["gate_up_proj", "down_proj", "both", "router"]))
def test_experts_as_one_tensor(checkpoint: Checkpoints, architecture: str, which: str, tmp_path: Path) -> None:
    """With `target_parameters`, PEFT stores A's rows expert by expert, but B's columns rank by rank."""
    base = checkpoint(architecture)
    parameters = [each for each in EXPERTS if which in ("both", "router") or each.endswith(which)]
    if which == "router":
        parameters.append("mlp.router.weight" if architecture == "gpt_oss" else "mlp.gate.weight")
    patterns = {"rank_pattern": {"mlp.experts.down_proj": 3}, "alpha_pattern": {"mlp.experts.gate_up_proj": 5}}
    model = written(tmp_path / "a", base, target_parameters=parameters, **patterns)
    folders = [tmp_path / "a", tmp_path / "b"]
    found = assert_each_says_its_own(base, folders, [model, written(folders[1], base, 2)])
    assert_said_by(model.merge_and_unload(), found[0])


def expert_by_expert(folder: Path, source: Path, forms: dict[str, str], num_experts: int, rank: int) -> Path:
    """Writes the same adapter for transformers 4's modules: separate gate, up and down of each expert."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        path, _, rest = name.partition(".experts.")
        if not rest:
            tensors[name.replace(".mlp.", f".{forms['block']}.") if "self_attn" not in name else name] = tensor
            continue
        is_a, is_gate_up = "lora_A" in rest, rest.startswith("base_layer.")
        each = tensor.view(num_experts, rank, -1) if is_a else tensor.view(-1, rank, num_experts).permute(2, 0, 1)
        before = path.replace(".mlp", f".{forms['block']}") + ".experts"
        side = "A" if is_a else "B"
        for index in range(num_experts):
            if not is_gate_up:
                tensors[f"{before}.{index}.{forms['down']}.lora_{side}.weight"] = each[index].contiguous()
                continue
            halves = (each[index], each[index]) if is_a else each[index].chunk(2)
            for part, half in zip((forms["gate"], forms["up"]), halves, strict=True):
                tensors[f"{before}.{index}.{part}.lora_{side}.weight"] = half.clone()
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    settings = (source / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(settings)
    return folder


@pytest.mark.parametrize(
    ("architecture", "forms"),
    [
        ("mixtral", {"block": "block_sparse_moe", "gate": "w1", "up": "w3", "down": "w2"}),
        pytest.param(
            "qwen3_moe",
            {"block": "mlp", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_experts_one_by_one(checkpoint: Checkpoints, architecture: str, forms: dict[str, str], tmp_path: Path) -> None:
    """An adapter in transformers 4's form equals the stacked one, on one rank and on two."""
    base = checkpoint(architecture)
    model = written(tmp_path / "a", base, target_parameters=EXPERTS)
    apart = expert_by_expert(tmp_path / "b", tmp_path / "a", forms, 4, 4)
    assert any(f".experts.3.{forms['up']}." in name for name in load_file(apart / WEIGHTS))
    variants = [digest_of(tmp_path / "a"), digest_of(apart)]
    core = make_core(base, adapters=loaded(tmp_path / "a", apart), max_num_batched_tokens=40, num_blocks=64)
    found = outputs_of(core, PROMPTS, variants, GREEDY)
    assert_said_by(model, found[variants[0]])
    assert found[variants[1]] == found[variants[0]]
    with ranks(base, 2, adapters=loaded(tmp_path / "a", apart), max_num_batched_tokens=40, num_blocks=64) as split:
        assert outputs_of(split, PROMPTS, variants, GREEDY) == found


@pytest.mark.parametrize("architecture", slow_but({"qwen2_moe"}, ["llama", "gemma2", "qwen2_moe"]))
def test_two_ranks(checkpoint: Checkpoints, architecture: str, tmp_path: Path) -> None:
    """Covers embedding, output layer, experts and whole modules on each rank's share, with an odd vocabulary size."""
    base = checkpoint(architecture, vocab_size=319)
    plain = plain_of(base)
    targets = [*linear_modules(plain), "lm_head", "embed_tokens"]
    parameters = {"target_parameters": EXPERTS} if architecture == "qwen2_moe" else {}
    folders = [tmp_path / "a", tmp_path / "b"]
    models = [
        written(folders[0], base, target_modules=targets, **parameters),
        written(folders[1], base, 2, modules_to_save=["lm_head", "embed_tokens", "norm", "input_layernorm"]),
    ]
    variants = [*(digest_of(each) for each in folders), ""]
    with ranks(base, 2, adapters=loaded(*folders), max_num_batched_tokens=40, num_blocks=64) as core:
        found = outputs_of(core, PROMPTS, variants, GREEDY)
    for variant, each in zip(variants, [*models, plain], strict=True):
        assert_said_by(each, found[variant])


def test_a_row_has_the_same_bits_in_any_company(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Covers inputs above 1,024 and heads of 128, beside rows of the same adapter, of others, and of none."""
    wide = {"hidden_size": 1280, "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 128}
    sparse = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 1536}
    base = checkpoint("mixtral", **wide, **sparse, num_hidden_layers=1, initializer_range=0.03)
    folders = [tmp_path / "a", tmp_path / "b"]
    attention = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
    written(folders[0], base, target_modules=[*attention, "lm_head", "embed_tokens"], target_parameters=EXPERTS)
    written(folders[1], base, 2, target_modules=attention, modules_to_save=["lm_head", "embed_tokens", "norm"])
    variants = [*(digest_of(each) for each in folders), ""]
    core = make_core(base, adapters=loaded(*folders), num_blocks=80)
    for length in (1, 7):
        orders = [
            RequestSpec(random_prompt(random.Random(i), length), GREEDY, variant=variants[i % 3]) for i in range(18)
        ]
        requests = [Request(f"r{i}", order) for i, order in enumerate(orders)]
        together = logits_of(core, requests)
        for at in (0, 1, 2):
            for company in ([at], [at, at + 3], [at + 1, at], [*range(6, 18), at]):
                row = logits_of(core, [requests[i] for i in company])[company.index(at)]
                assert torch.equal(row, together[at])


@pytest.mark.parametrize("architecture", slow_but({"qwen2_moe"}, ["qwen2_moe", "gpt_oss"]))
def test_experts_on_an_accelerator_do_not_read_their_rows(
    checkpoint: Checkpoints, architecture: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only attention is adapted on accelerators. `numpy` raises for a device's tensor, which is simulated here."""
    base = checkpoint(architecture)
    plain = plain_of(base)
    attention = [name for name in linear_modules(plain) if "self_attn" in name]
    model = written(tmp_path / "a", base, target_modules=attention)
    load_named, through = ModelAdapters.load_named, ExpertLayers.through

    def load_there(self: ModelAdapters, settings: AdapterSettings) -> None:
        self._lora_needed.places.rows.place = ActivationDevice(torch.device("cpu"), torch.float32)
        load_named(self, settings)

    def through_there(self: ExpertLayers, *given: Any) -> torch.Tensor:
        calls.append(len(given[1]))
        with monkeypatch.context() as there:
            there.setattr(torch.Tensor, "numpy", lambda _: pytest.fail("rows are read back from the device"))
            return through(self, *given)

    calls: list[int] = []
    monkeypatch.setattr(ModelAdapters, "load_named", load_there)
    monkeypatch.setattr(ExpertLayers, "through", through_there)
    core = make_core(base, adapters=loaded(tmp_path / "a"), max_num_batched_tokens=40, num_blocks=64)
    assert core.runner.model.adapters.places.experts  # type: ignore[attr-defined]
    calls.clear()
    variants = [digest_of(tmp_path / "a"), ""]
    found = outputs_of(core, PROMPTS, variants, GREEDY)
    assert sum(calls) > len(PROMPTS) * 2
    for variant, each in zip(variants, [model, plain], strict=True):
        assert_said_by(each, found[variant])
    assert found[variants[0]] != found[""]


HEAD, EMBED, EXPERT = "lm_head", "model.embed_tokens", "model.layers.0.mlp.experts"
A, B = "lora_A.weight", "lora_B.weight"
ONES = torch.ones(320, 64)


@pytest.fixture(scope="module")
def sparse(checkpoint: Checkpoints) -> EngineCore:
    return make_core(checkpoint("qwen3_moe"), adapters=loaded(), num_blocks=32)


LORA_OF_HEAD = {f"{HEAD}.{A}": (4, 64), f"{HEAD}.{B}": (320, 4)}


@pytest.mark.parametrize(
    ("saved", "tensors", "why"),
    [
        ("", {**LORA_OF_HEAD, f"{HEAD}.base_layer.weight": ONES}, "differs from this model's weight"),
        (
            "",
            {f"{EMBED}.lora_embedding_A": (4, 9), f"{EMBED}.lora_embedding_B": (64, 4)},
            r"A \[4, 9\] and B \[64, 4\] do not fit .* of 320 tokens",
        ),
        ("lm_head", {f"{HEAD}.weight": (330, 64)}, r"lm_head: shape \[330, 64\]; this model's module has \[320, 64\]"),
        ("embed_tokens", {f"{EMBED}.weight": ONES * float("nan")}, "embed_tokens: contains NaN or infinity"),
        ("lm_head", LORA_OF_HEAD, "'lm_head': the file has no weight of this module"),
        ("lm_head", {**LORA_OF_HEAD, f"{HEAD}.weight": ONES}, "lm_head: the file also contains this module as a whole"),
        (
            "q_norm",
            {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)},
            "q_norm: the adapter replaces this module",
        ),
        ("", {f"{EXPERT}.{A}": (15, 48), f"{EXPERT}.{B}": (64, 15)}, "A has 15 rows, but 4 experts of rank 4 need 16"),
        ("", {f"{EXPERT}.{A}": (16, 47), f"{EXPERT}.{B}": (64, 16)}, "fit neither product of this model's experts"),
        ("", {f"{EXPERT}.4.up_proj.{A}": (4, 64), f"{EXPERT}.4.up_proj.{B}": (48, 4)}, "experts.4.up_proj: this model"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    sparse: EngineCore, saved: str, tensors: dict[str, Any], why: str, tmp_path: Path
) -> None:
    settings = {"peft_type": "LORA", "r": 4, "modules_to_save": [saved] if saved else None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    given = {name: torch.ones(each) if isinstance(each, tuple) else each for name, each in tensors.items()}
    save_file({f"base_model.model.{name}": each for name, each in given.items()}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=why):
        sparse.runner.held.load_adapter(LoraFolder.read(tmp_path, 16))  # type: ignore[attr-defined]
    assert not sparse.runner.held.variants  # type: ignore[attr-defined]


def test_numbers_that_fit_nowhere_are_not_read(sparse: EngineCore, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    shapes = {f"model.layers.0.self_attn.q_proj.{A}": (4, 64), f"model.layers.1.self_attn.q_proj.{A}": (4, 1 << 22)}
    given = {name: torch.zeros(shape) for name, shape in shapes.items()}
    given |= {name.replace(A, B): torch.zeros(64, 4) for name in shapes}
    save_file(given, tmp_path / WEIGHTS)
    found = LoraFolder.read(tmp_path, 16)
    before = num_bytes_read()
    with pytest.raises(ModelError, match=r"layers.1.self_attn.q_proj: A \[4, 4194304\] .* do not fit"):
        sparse.runner.held.load_adapter(found)  # type: ignore[attr-defined]
    assert num_bytes_read() - before < MANY_NBYTES
