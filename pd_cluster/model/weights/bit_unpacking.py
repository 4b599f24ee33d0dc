"""Unpacks integers and small floats from the words into which quantizers pack them. Independent of layers."""

from __future__ import annotations

import torch

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the slots of eight columns, in order
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the values of the codes 0 to 7; bit 3 is the sign


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the unsigned fields of int32 words [..., W], lowest bits first: [..., W * 32 / bits] int32.

    Fields of three bits may span two words: 32 fields take three words.
    """
    if bits == 3:
        return _three(words)
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    found = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return found.flatten(-2)


def _three(words: torch.Tensor) -> torch.Tensor:
    first, second, third = (
        each.to(torch.int64) & 0xFFFFFFFF for each in words.reshape(*words.shape[:-1], -1, 3).unbind(-1)
    )
    low, high = first | (second & 0xFFFF) << 32, second >> 16 | third << 16  # each has 48 bits, 16 fields
    shifts = torch.arange(0, 48, 3, dtype=torch.int64, device=words.device)
    halves = [(half.unsqueeze(-1) >> shifts) & 7 for half in (low, high)]
    return torch.cat(halves, dim=-1).flatten(-2).to(torch.int32)


def awq_fields(words: torch.Tensor) -> torch.Tensor:
    """Returns the columns of AWQ's gemm words [..., W], whose slots are in another order: [..., 8 W] int32."""
    slots = fields(words, 4).reshape(*words.shape, 8)
    return slots[..., list(AWQ_ORDER)].flatten(-2)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Returns the two fields of each byte [..., B] uint8, the low one first: [..., 2 B] uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def e2m1_doubled(packed: torch.Tensor) -> torch.Tensor:
    """Returns twice the values of the four-bit floats in bytes [..., B] uint8: [..., 2 B] int8."""
    table = torch.tensor([*E2M1_DOUBLED, *(-each for each in E2M1_DOUBLED)], dtype=torch.int8, device=packed.device)
    return table[nibbles(packed).to(torch.int64)]
