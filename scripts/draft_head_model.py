"""An EAGLE-3 draft head, its unrolled chains of drafts, and its files. Knows nothing of text or training.

Pair j joins the embedding of token j and a state of token j - 1. At a chain's first step this state is `fc` of the
target's residual stream at the input of three layers; at later steps it is the head's own output. Pair j has the rotary
position j, attends to the pairs 1 to j, and predicts token j + 1. Source: EAGLE-3 (arXiv 2503.01840); names and config
are those of its published heads.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

WEIGHTS = "model.safetensors"
UNSEEN = -1e30  # score of a masked position


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Returns EAGLE-3's layers (2, n // 2, n - 3), or the last three if the target is too shallow for these to differ.

    Raises ValueError for fewer than 3 layers.
    """
    if num_layers < 3:
        raise ValueError(f"an EAGLE-3 head reads the input of 3 layers, and the target has {num_layers}")
    taps = (2, num_layers // 2, num_layers - 3)
    return taps if taps[0] < taps[1] < taps[2] else (num_layers - 3, num_layers - 2, num_layers - 1)


Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [rows, length, head_dim] each."""
Heads = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, [rows, heads, length, head_dim] each."""


def rotated(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    cos, sin = (each[:, None] for each in rope)
    return x * cos + rotate_half(x) * sin


class HeadAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
        inputs, width = 2 * config.hidden_size, config.num_attention_heads * self.head_dim
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(inputs, width, bias=False)
        self.k_proj = nn.Linear(inputs, kv_width, bias=False)
        self.v_proj = nn.Linear(inputs, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [rows, heads, length, head_dim]

    def keys_values(self, x: torch.Tensor, rope: Rope) -> Heads:
        """Returns keys and values of pairs [rows, length, 2 * hidden], repeated for each query head."""
        keys = rotated(self._heads(self.k_proj(x)), rope)
        return keys.repeat_interleave(self.groups, 1), self._heads(self.v_proj(x)).repeat_interleave(self.groups, 1)

    def forward(self, x: torch.Tensor, rope: Rope, text: Heads, seen: torch.Tensor, chain: list[Heads]) -> torch.Tensor:
        """Attends from a pair of each chain, [rows, chains, 2 * hidden], to the text's pairs and to the chain's own.

        `seen`: whether a chain sees the text's pair, [rows, chains, length] bool. `chain`: of its steps up to this one.
        """
        query, length = rotated(self._heads(self.q_proj(x)), rope), text[0].shape[2]
        scores = [(query @ text[0].transpose(-1, -2)).masked_fill(~seen[:, None], UNSEEN)]
        scores += [(query * keys).sum(-1, keepdim=True) for keys, _ in chain]
        weights = (torch.cat(scores, -1) * self.head_dim**-0.5).softmax(-1)  # [rows, heads, chains, length + steps]
        mixed = weights[..., :length] @ text[1]
        for at, (_, values) in enumerate(chain, length):
            mixed = mixed + weights[..., at, None] * values
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MidLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn, self.mlp = HeadAttention(config), LlamaMLP(config)


class Eagle3Head(nn.Module):
    """Has no embedding of its own: `forward` takes the tokens' embeddings from the target."""

    def __init__(self, config: LlamaConfig, token_ids: torch.Tensor) -> None:
        """`token_ids`: the tokens that the head can predict, ascending, [draft_vocab_size] int64."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", token_ids - torch.arange(len(token_ids)))  # offsets
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True))
        object.__setattr__(self, "_rotary", LlamaRotaryEmbedding(config))  # not a submodule, so it is not saved

    @property
    def taps(self) -> list[int]:
        taps: list[int] = self.config.eagle_config["eagle_aux_hidden_state_layer_ids"]
        return taps

    @property
    def token_ids(self) -> torch.Tensor:
        return self.d2t + torch.arange(len(self.d2t))

    def forward(
        self, embeddings: torch.Tensor, tapped: torch.Tensor, starts: torch.Tensor, num_steps: int
    ) -> list[torch.Tensor]:
        """Unrolls chains, assuming that all drafts are right, as EAGLE-3's training-time test does.

        `embeddings` [rows, length, hidden] and `tapped` [rows, length, 3 * hidden] are of the same tokens. `starts`
        [rows, chains] are the chains' first pairs, at least 1. Returns each step's outputs, [rows, chains, hidden]:
        step s of a chain is pair start + s and predicts the token after it; steps beyond the end predict nothing.
        """
        layer, attention, length = self.midlayer, self.midlayer.self_attn, embeddings.shape[1]
        row = torch.arange(len(starts))[:, None]
        cos, sin = self._rotary(embeddings, torch.arange(length)[None])
        normed = layer.input_layernorm(embeddings)
        states = F.pad(self.fc(tapped)[:, :-1], (0, 0, 1, 0))  # states of the previous token; pair 0 is never seen
        pairs = torch.cat([normed, layer.hidden_norm(states)], -1)
        text, chain = attention.keys_values(pairs, (cos, sin)), list[Heads]()
        at = torch.arange(length)
        seen = (at >= 1) & (at <= starts[..., None])
        x, states, outputs = pairs[row, starts], states[row, starts], list[torch.Tensor]()
        for step in range(num_steps):
            places = (starts + step).clamp(max=length - 1)
            rope = (cos[0, places], sin[0, places])
            if step > 0:
                states = outputs[-1]
                x = torch.cat([normed[row, places], layer.hidden_norm(states)], -1)
                chain.append(attention.keys_values(x, rope))
            mid = states + attention(x, rope, text, seen, chain)
            outputs.append(mid + layer.mlp(layer.post_attention_layernorm(mid)))
        return outputs

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns [..., draft_vocab_size] for outputs [..., hidden]."""
        logits: torch.Tensor = self.lm_head(self.norm(outputs))
        return logits

    def save(self, folder: Path) -> None:
        """Writes config.json and the weights, as float16."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: each.half() if each.is_floating_point() else each for name, each in self.state_dict().items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        (folder / WEIGHTS).chmod(0o644)
        fields = self.config.to_diff_dict() | {"architectures": ["LlamaForCausalLMEagle3"], "dtype": "float16"}
        (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Eagle3Head":
        """Reads what `save` wrote, as float32."""
        config, tensors = LlamaConfig.from_pretrained(folder), load_file(folder / WEIGHTS)
        head = cls(config, tensors["d2t"] + torch.arange(config.draft_vocab_size))
        head.load_state_dict(tensors)
        return head.eval()


@torch.no_grad()
def tapped_by(
    target: PreTrainedModel, taps: list[int], input_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns, for [rows, length] ids, the embeddings, the states that a head reads, and the last hidden states.

    Their widths are hidden, 3 * hidden and hidden. Rows may be padded at their ends.
    """
    found = target.model(input_ids=input_ids, use_cache=False, output_hidden_states=True)
    tapped = torch.cat([found.hidden_states[layer] for layer in taps], -1)
    return target.get_input_embeddings()(input_ids), tapped, found.last_hidden_state
