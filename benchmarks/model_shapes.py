"""The shapes of the models that benchmarks make, and the bytes that a token's computation reads. Knows no weights."""

from __future__ import annotations

import msgspec

EOS_ID = 258
FP32_NBYTES = 4


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A Llama without tied embeddings. The default has 125 million parameters."""

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 4
    head_dim: int = 64
    intermediate_size: int = 2048
    vocab_size: int = 32000
    max_positions: int = 2048

    def layer_linears(self) -> list[tuple[int, int]]:
        """The (out, in) features of a layer's matrices, fused if they have the same input: qkv, o, gate+up, down."""
        attention, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [
            (attention + 2 * kv, self.hidden_size),
            (self.hidden_size, attention),
            (2 * self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
        ]

    @property
    def head(self) -> tuple[int, int]:
        return self.vocab_size, self.hidden_size

    @property
    def num_parameters(self) -> int:
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.num_linear_weights + self.vocab_size * self.hidden_size + norms

    @property
    def read_nbytes(self) -> int:
        """The bytes of weights that a step of one token must read: every matrix, and one row of the embedding."""
        return FP32_NBYTES * (self.num_linear_weights + self.hidden_size)

    @property
    def num_linear_weights(self) -> int:
        per_layer = sum(out * into for out, into in self.layer_linears())
        return self.num_layers * per_layer + self.head[0] * self.head[1]

    def dump(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> ModelShape:
        return msgspec.json.decode(text, type=cls)


SMALL_SHAPE = ModelShape(  # 14 million parameters
    hidden_size=384, num_layers=8, num_heads=6, num_kv_heads=2, intermediate_size=1024, vocab_size=2048
)
QUICK_SHAPE = ModelShape(
    hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=320
)
