"""From transformers' loaded modules to fused layers: QKV as one linear, gate and up as one, weights packed on CPU.

Known architectures only, by class; what is not recognised stays as it is. Layer by layer, and each plain weight is
dropped as soon as it is packed, so that memory stays near one copy.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from pd_cluster.model.causal_lm import FusedCausalLM, FusedLayer
from pd_cluster.model.linear import Linear, join, make_linear, packs
from pd_cluster.model.ops import Activation, Heads, Norm, Ops
from pd_cluster.model.parallel.layers import Share

log = logging.getLogger(__name__)
MLP_NBYTES_AT_ONCE = 8 << 20  # of gate and up together
MLP_LEAST_ROWS = 256  # fewer would read the weights more often than that saves

ARCHITECTURES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Mixtral", "Gemma2")
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def can_fuse(model: torch.nn.Module) -> bool:
    """Whether the architecture is known, and computes in float32 where it computes on CPU."""
    known = type(model).__name__ in [f"{name}ForCausalLM" for name in ARCHITECTURES]
    plain = all(p.dtype == torch.float32 or p.device.type != "cpu" for p in model.parameters())
    return known and plain and type(model).__module__.startswith("transformers.models.")


def fuse(model: Any, ops: Ops, share: Share | None = None) -> FusedCausalLM:
    """Takes the model apart: its linear layers are gone afterwards, and so is the mapping of the files.

    `share`: the model is one rank's share, and has been told so; the fused one does its own sums.
    """
    if share is not None:
        share.remove(model)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    layers = [_fuse_layer(layer, model.config, ops) for layer in _progress(model.model.layers)]
    head = join([model.lm_head])
    del model.lm_head
    embedding = model.model.embed_tokens
    if packs(embedding.weight):  # else the head's is this one, or one of its own
        embedding.weight = torch.nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
        if tied:
            log.info("tied embeddings: the output layer has a packed copy of the embedding's rows")
    return FusedCausalLM(
        config=model.config,
        ops=ops,
        embed=embedding if share is None else share.embedding(embedding),
        rotary=model.model.rotary_emb,
        layers=layers,
        norm=_norm(model.model.norm),
        head=head,
        vocab_size=0 if share is None else share.plan.vocab_size,
        group=None if share is None else share.group,
    )


def _progress(layers: Any) -> Iterator[Any]:
    """A bar on a terminal; else one line of log."""
    on_terminal = sys.stderr.isatty()
    if not on_terminal:
        log.info("packing the weights of %d layers", len(layers))
    yield from transformers_logging.tqdm(layers, desc="Packing weights", unit="layer", disable=not on_terminal)


def _fuse_layer(layer: Any, config: Any, ops: Ops) -> FusedLayer:
    attention = layer.self_attn
    qkv = join([attention.q_proj, attention.k_proj, attention.v_proj])
    del attention.q_proj, attention.k_proj, attention.v_proj
    output = join([attention.o_proj])
    del attention.o_proj
    fused = FusedLayer(
        heads=_heads(attention, config),
        qkv=qkv,
        output=output,
        mlp=_mlp(layer.mlp, ops),
        input_norm=_norm(layer.input_layernorm),
        **_other_norms(layer),
    )
    del layer.mlp
    return fused


def _heads(attention: Any, config: Any) -> Heads:
    if type(attention).__name__ in ("MistralAttention", "MixtralAttention"):
        window = getattr(config, "sliding_window", None)
    else:
        window = getattr(attention, "sliding_window", None)
    return Heads(
        layer_idx=attention.layer_idx,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        sliding_window=window,
        softcap=getattr(attention, "attn_logit_softcapping", None),
        q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
    )


def _norm(module: Any) -> Norm:
    if type(module).__name__ == "Gemma2RMSNorm":
        return Norm(1.0 + module.weight.detach().float(), module.eps)  # in 16 bits the sum would lose the weight
    return Norm(module.weight.detach().clone(), module.variance_epsilon)


def _other_norms(layer: Any) -> dict[str, Norm]:
    """Gemma 2's `post_attention_layernorm` comes after the attention, everybody else's before the MLP."""
    if hasattr(layer, "pre_feedforward_layernorm"):
        return {
            "post_attention_norm": _norm(layer.post_attention_layernorm),
            "mlp_norm": _norm(layer.pre_feedforward_layernorm),
            "post_mlp_norm": _norm(layer.post_feedforward_layernorm),
        }
    return {"mlp_norm": _norm(layer.post_attention_layernorm)}


def _mlp(mlp: Any, ops: Ops) -> Callable[[torch.Tensor], torch.Tensor]:
    """[num_rows, hidden_size] to the same shape."""
    config = getattr(mlp, "config", None) or mlp.experts.config
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    activation = ACTIVATIONS.get(name)
    if activation is None:  # an activation without a kernel: the module itself, on a batch of one sequence
        return lambda x: mlp(x[None])[0]
    if hasattr(mlp, "experts"):
        return _experts(mlp, ops, activation)
    intermediate_size: int = mlp.gate_proj.out_features
    gate_up, down = join([mlp.gate_proj, mlp.up_proj]), join([mlp.down_proj])
    del mlp.gate_proj, mlp.up_proj, mlp.down_proj
    return GatedMLP(gate_up, down, ops, activation, intermediate_size)


def _experts(block: Any, ops: Ops, activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    """On accelerators such that the host need not know which experts are chosen."""
    if ops.name == "Triton":
        from pd_cluster.model.cuda import experts as cuda  # Triton is only where its ops are

        return cuda.GroupedExperts.of_block(block, activation)
    if ops.name == "NPU":
        from pd_cluster.model.npu import experts as npu

        return npu.GroupedExperts(block, ops, activation)
    return Experts(block, ops, activation)


class GatedMLP:
    """down(activation(gate(x)) * up(x)), for some rows at a time.

    What lies between is a large temporary, and from 32 MiB on glibc maps each of them anew, which takes longer than to
    compute it.
    """

    def __init__(self, gate_up: Linear, down: Linear, ops: Ops, activation: Activation, intermediate_size: int) -> None:
        self._gate_up, self._down, self._ops, self._activation = gate_up, down, ops, activation
        self._num_rows = max(MLP_LEAST_ROWS, MLP_NBYTES_AT_ONCE // (2 * intermediate_size * 4))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) <= 2 * self._num_rows or not x.is_cpu:  # still below the limit, and faster whole
            return self._some(x)
        result = torch.empty_like(x)
        for start in range(0, len(x), self._num_rows):
            part = slice(start, start + self._num_rows)
            result[part] = self._some(x[part])
        return result

    def _some(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._ops.gate(self._gate_up(x), self._activation))


class Experts:
    """Mixtral's sparse block: each row goes through the `top_k` experts its router likes best."""

    def __init__(self, block: Any, ops: Ops, activation: Activation) -> None:
        self._ops, self._activation = ops, activation
        self._router = make_linear(block.gate.weight)  # to [num_rows, num_experts]
        self._top_k: int = block.gate.top_k
        gate_up, down = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
        self._experts: list[tuple[Linear, Linear]] = [
            (make_linear(gate_up[i]), make_linear(down[i])) for i in range(block.gate.num_experts)
        ]
        del block.experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        probs = self._router(x).softmax(-1)
        weights, chosen = probs.topk(self._top_k, dim=-1)  # [num_rows, top_k]
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            gate_up, down = self._experts[expert]
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            added = down(self._ops.gate(gate_up(x[rows]), self._activation))
            result.index_add_(0, rows, added.mul_(weights[rows, rank, None]))
        return result
