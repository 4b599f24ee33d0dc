"""Seeded faults in latent attention are refused at load or change tokens, so that the comparisons detect them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ModelError
from pd_cluster.model.language_model import fuse_attention, fuse_model
from pd_cluster.model.layers.attention import latent_attention
from pd_cluster.model.layers.gated_mlp import Routing
from pd_cluster.types import Request, RequestSpec, Sampling, Status
from tests.model.test_latents import rewritten
from tests.support.checkpoints import prefers
from tests.support.engines import generate, make_core, random_prompt

pytestmark = pytest.mark.slow
Checkpoints = Callable[..., Path]
GREEDY = Sampling(max_tokens=12, temperature=0.0)
PROMPTS = [random_prompt(random.Random(length), length) for length in (9, 40)]
REFUSAL = "fusing the layers changed the logits"
ROPES, NORM_OF = fuse_model.RopeTables, fuse_attention.norm_of
ATTEND, WEIGH, WANTED = latent_attention.weigh_latents, Routing.weigh, Routing.choice_scores


def is_right(folder: Path, core: EngineCore) -> bool:
    return prefers(folder, PROMPTS, generate(core, PROMPTS, GREEDY), [GREEDY.max_tokens] * len(PROMPTS))


def halves_for_pairs(*given: Any, **named: Any) -> Any:
    """Rotates features half a head apart, where the model rotates adjacent ones."""
    modules, kinds, (width, _), *rest = given
    return ROPES(modules, kinds, (width, False), *rest, **named)


def bias_in_weights(self: Routing, logits: torch.Tensor, dtype: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    weights, chosen = WEIGH(replace(self, renormalise=False, scale=1.0), logits, dtype)
    assert self.choice_bias is not None
    weights = weights + self.choice_bias[chosen]
    return weights / weights.sum(-1, keepdim=True) * self.scale, chosen


def masked_with_zero(self: Routing, scores: torch.Tensor) -> torch.Tensor:
    """Masks groups by 0, so that a masked group wins over negative biased scores."""
    return WANTED(self, scores).nan_to_num(neginf=0.0)


def values_of_all_numbers(
    absorbed: torch.Tensor, rotated: torch.Tensor, latents: torch.Tensor, ropes: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Takes values from the whole row, beginning with its rotated part."""
    queries = torch.cat((rotated, absorbed), dim=-1)
    rows = torch.cat((ropes, latents), dim=-1)
    scores = queries @ rows.T * scaling
    at = torch.arange(len(rows))
    scores = scores.masked_fill(at > at[len(rows) - queries.shape[1] :, None], float("-inf"))
    return scores.softmax(-1) @ rows[:, : latents.shape[1]]


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "halves for pairs": (fuse_model, "RopeTables", halves_for_pairs),
    "bias in the weights": (Routing, "weigh", bias_in_weights),
    "masked groups are 0": (Routing, "choice_scores", masked_with_zero),
    "values of all numbers": (latent_attention, "weigh_latents", values_of_all_numbers),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_layers(fault: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_CLUSTER_CPU_KERNELS", "0")  # uses Python code, into which each fault can be inserted
    folder = checkpoint("deepseek_v3")
    if fault == "values of all numbers":
        assert is_right(folder, make_core(folder, num_blocks=32))
    monkeypatch.setattr(*FAULTS[fault])
    try:
        core = make_core(folder, num_blocks=32)
    except ModelError as error:
        assert REFUSAL in str(error)  # noqa: PT017
        return
    assert not is_right(folder, core)


def test_an_eps_of_the_config_in_the_norm_of_latents(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms of queries and latents have their own eps, not the config's."""
    folder = checkpoint("deepseek_v3", rms_norm_eps=0.05)
    assert is_right(folder, make_core(folder, num_blocks=32))
    monkeypatch.setattr(fuse_attention, "norm_of", lambda *given: replace(NORM_OF(*given), eps=0.05))
    with pytest.raises(ModelError, match=REFUSAL):
        make_core(folder, num_blocks=32)


@pytest.mark.parametrize("fault", [False, True])
def test_index_keys_that_do_not_travel(checkpoint: Checkpoints, fault: bool) -> None:
    """Decode gets all planes of a prompt's blocks, or (the fault) all except index keys."""
    folder, prompt = checkpoint("glm_moe_dsa"), random_prompt(random.Random(3), 61)
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 32, "max_model_len": 128}
    prefill, decode = make_core(folder, **settings), make_core(folder, **settings)
    source, request = (Request("r", RequestSpec(prompt, GREEDY)) for _ in range(2))
    source.leg, request.leg = "prefill", "decode"
    prefill.scheduler.add(source)
    while source.status is not Status.EXPORTING:
        prefill.step()
    decode.scheduler.land(request, len(prompt))
    pools = [core.runner.pool for core in (prefill, decode)]  # type: ignore[attr-defined]
    for theirs, own in zip(source.tables[0], request.tables[0], strict=True):
        pools[1].flat()[own] = pools[0].flat()[theirs]
    for layer in range(4) if fault else ():
        for plane in pools[1].planes(layer)[2:]:
            plane.zero_()
    request.output_token_ids += source.output_token_ids
    decode.scheduler.landed(request)
    while decode.scheduler.requests:
        decode.step()
    assert prefers(folder, [prompt], [request.output_token_ids], [GREEDY.max_tokens]) is not fault


@pytest.mark.parametrize("fault", [False, True])
def test_a_layer_that_predicts_further_tokens_taken_for_a_layer(
    checkpoint: Checkpoints, tmp_path: Path, fault: bool
) -> None:
    """An MTP layer has all tensors of a decoder layer, so only its number distinguishes it."""
    folder = checkpoint("deepseek_v3")
    config = {**json.loads((folder / "config.json").read_text()), "num_nextn_predict_layers": 1}
    weights = load_file(folder / "model.safetensors")
    further = {key.replace("layers.2.", "layers.3."): value.clone() for key, value in weights.items() if "rs.2." in key}
    if fault:
        config |= {"num_hidden_layers": 4}
    rewritten(folder, tmp_path, config, {**weights, **further})
    assert is_right(folder, make_core(tmp_path, num_blocks=32)) is not fault
