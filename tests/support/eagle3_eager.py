"""EAGLE-3 by its definition, in float64 and over whole sequences: no pool, no chunks, no cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Pairs = tuple[torch.Tensor, torch.Tensor]  # logits [num_pairs, head's vocab_size], states [num_pairs, hidden_size]


class EagerEagle3:
    """Loads a head from one folder for the model of another folder."""

    def __init__(self, folder: Path, target_folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.fields: dict[str, Any] = {**config, **config.get("eagle_config", {})}
        self.layer: dict[str, Any] = config.get("transformer_layer_config", config)
        stored = load_file(folder / "model.safetensors")
        names = {key.removeprefix("model.").replace("midlayer.", "layers.0."): key for key in stored}
        self.weights = {name.removesuffix(".weight"): stored[key].double() for name, key in names.items()}
        target = load_file(target_folder / "model.safetensors")
        self.embedding = self.weights.get("embed_tokens", target["model.embed_tokens.weight"].double())
        self.weights.setdefault("lm_head", target.get("lm_head.weight", self.embedding).double())
        offsets = self.weights.get("d2t")
        self.token_ids = None if offsets is None else (offsets.long() + torch.arange(len(offsets))).tolist()

    def project(self, tapped: Sequence[torch.Tensor]) -> torch.Tensor:
        """Projects the tapped layers' hidden states, each [num_tokens, model's hidden_size], to the head's states."""
        states = [each.double() for each in tapped]
        if not self.fields.get("use_aux_hidden_state", True):
            return states[0]
        if self.fields.get("fc_norm"):
            states = [self._norm(each, f"fc_norm.{at}") for at, each in enumerate(states)]
        joined = torch.cat(states, dim=-1)
        if self.fields.get("norm_before_fc"):
            joined = self._norm(joined, "input_norm")
        return joined @ self.weights["fc"].T

    def __call__(self, token_ids: Sequence[int], states: torch.Tensor) -> Pairs:
        """Pair j (from 1 on) joins token_ids[j] and states[j - 1]. Returns logits and states of all pairs."""
        ids = torch.tensor(token_ids[1:])
        states = states[: len(ids)].double()
        normed = self._norm(states, "layers.0.hidden_norm")
        residual = normed if self.fields.get("norm_before_residual") else states
        both = torch.cat((self._norm(self.embedding[ids], "layers.0.input_layernorm"), normed), dim=-1)
        residual = residual + self._attended(both) @ self.weights["layers.0.self_attn.o_proj"].T
        inner = self._norm(residual, "layers.0.post_attention_layernorm")
        gate, up = (inner @ self.weights[f"layers.0.mlp.{name}_proj"].T for name in ("gate", "up"))
        output = residual + (torch.nn.functional.silu(gate) * up) @ self.weights["layers.0.mlp.down_proj"].T
        normed = self._norm(output, "norm")
        return normed @ self.weights["lm_head"].T, normed if self.fields.get("norm_output") else output

    def drafts(self, token_ids: Sequence[int], states: torch.Tensor, depth: int) -> tuple[list[int], list[Pairs]]:
        """Drafts greedily after the last token; returns the drafts, and each draft's logits and state."""
        known, found = [*token_ids], []
        for _ in range(depth):
            logits, own = self(known, states)
            found.append((logits[-1], own[-1]))
            best = int(logits[-1].argmax())
            known.append(best if self.token_ids is None else self.token_ids[best])
            states = torch.cat((states, own[-1:]))
        return known[len(token_ids) :], found

    def _attended(self, x: torch.Tensor) -> torch.Tensor:
        dim, num_pairs = self.layer["head_dim"], len(x)
        query, key, value = (
            (x @ self.weights[f"layers.0.self_attn.{name}_proj"].T).view(num_pairs, -1, dim) for name in "qkv"
        )
        if self.layer["model_type"] == "qwen3":
            query, key = (
                self._norm(each, f"layers.0.self_attn.{name}_norm") for each, name in ((query, "q"), (key, "k"))
            )
        positions = torch.arange(1, num_pairs + 1)
        query, key = self._rotated(query, positions), self._rotated(key, positions)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * dim**-0.5
        behind = positions[:, None] - positions
        window = self.layer["sliding_window"] if "sliding_attention" in self.layer.get("layer_types", ()) else num_pairs
        scores = scores.masked_fill((behind < 0) | (behind >= window), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(num_pairs, -1)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rope, dim = self.layer["rope_parameters"], x.shape[-1]
        frequencies = rope["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = positions[:, None] * frequencies / rope.get("factor", 1.0)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.layer["rms_norm_eps"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.weights[name]
