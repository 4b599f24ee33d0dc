"""Lets the shipped chat model answer prompts, greedily or by sampling. Its draft head is trained on these answers.

The text generator's answers serve as drafts: one forward pass over a whole conversation finds the first token at which
the model would differ, and the model generates only from there on. The result is the same as if it had generated every
token.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from tiny_model_calls import system_text
from tiny_model_text import Conversation, raw_text
from tiny_model_tools import ToolConversation
from tokenizers import Tokenizer
from transformers import PreTrainedModel

ENDOFTEXT, IM_START, IM_END = range(3)
ENDS = (ENDOFTEXT, IM_END)
TOOL_SHARE, RAW_SHARE = 0.4, 0.06  # of the conversations
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
LENGTHS = (48, 96, 192, 384)  # approximate number of tokens in a conversation
MOST_TOKENS = 100  # generated per call of `answer`
BATCH_SIZE = 64


@dataclass
class Sequence:
    """Tokens, and the ranges [start, stop) of the target's own answers, including their end tokens."""

    ids: list[int]
    answers: list[tuple[int, int]] = field(default_factory=list)


def answer(target: PreTrainedModel, sequences: list[Sequence], temperature: float = 0.0) -> None:
    """Appends an answer to each sequence, or completes its unfinished answer; a temperature of 0 is greedy."""
    longest = max(len(each.ids) for each in sequences)
    padded = torch.tensor([[ENDOFTEXT] * (longest - len(each.ids)) + each.ids for each in sequences])
    mask = torch.tensor([[0] * (longest - len(each.ids)) + [1] * len(each.ids) for each in sequences])
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.inference_mode():
        made = target.generate(input_ids=padded, attention_mask=mask, max_new_tokens=MOST_TOKENS, **drawn)
    for sequence, row in zip(sequences, made[:, longest:].tolist(), strict=True):
        length = next((at + 1 for at, token_id in enumerate(row) if token_id in ENDS), len(row))
        start = len(sequence.ids)
        if sequence.answers and sequence.answers[-1][1] == start:
            start, _ = sequence.answers.pop()
        sequence.ids += row[:length]
        sequence.answers.append((start, len(sequence.ids)))


def conversation(tokenizer: Tokenizer, rng: random.Random) -> Sequence:
    """Returns a conversation from the text generator, with the generator's answers."""
    said, length = messages(rng), rng.choice(LENGTHS)
    sequence = Sequence([])
    if rng.random() < RAW_SHARE:
        sequence.ids = [*tokenizer.encode(raw_text(rng)).ids, ENDOFTEXT]
        sequence.answers.append((1 + len(sequence.ids) // 3, len(sequence.ids)))
    while len(sequence.ids) < length or not sequence.answers:
        role, text = next(said)
        sequence.ids += [IM_START, *tokenizer.encode(f"{role}\n").ids]
        start = len(sequence.ids)
        sequence.ids += [*tokenizer.encode(text).ids, IM_END]
        if role == "assistant":
            sequence.answers.append((start, len(sequence.ids)))
        sequence.ids += tokenizer.encode("\n").ids
    return sequence


def messages(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yields (role, text) endlessly."""
    if rng.random() < TOOL_SHARE:
        offered = ToolConversation(rng)
        if offered.tools or offered.system is not None:
            yield "system", system_text(offered.system, offered.tools) if offered.tools else offered.system
        while True:
            yield from offered.next_turn().messages()
    chat = Conversation(rng)
    if (system := chat.system()) is not None:
        yield "system", system
    while True:
        turn = chat.next_turn()
        yield "user", turn.user
        yield "assistant", turn.assistant


def batched(sequences: list[Sequence]) -> Iterator[list[Sequence]]:
    for start in range(0, len(sequences), BATCH_SIZE):
        yield sequences[start : start + BATCH_SIZE]


@torch.inference_mode()
def cut(target: PreTrainedModel, sequences: list[Sequence], temperature: float) -> list[Sequence]:
    """Cuts each sequence at the first answer token that differs from the target's choice, which replaces it.

    Returns the sequences whose last answer is now unfinished.
    """
    longest = max(len(each.ids) for each in sequences)
    rows = torch.tensor([each.ids + [ENDOFTEXT] * (longest - len(each.ids)) for each in sequences])
    logits = target(input_ids=rows, use_cache=False).logits
    drawn = logits.argmax(-1)
    if temperature:
        drawn = (logits / temperature).softmax(-1).flatten(0, 1).multinomial(1).view_as(drawn)
    unfinished = []
    for sequence, own in zip(sequences, drawn.tolist(), strict=True):
        for number, (start, stop) in enumerate(sequence.answers):
            places = (at for at in range(start, stop) if own[at - 1] != sequence.ids[at])
            if (at := next(places, None)) is not None:
                sequence.ids[at:] = [own[at - 1]]
                sequence.answers[number:] = [(start, at + 1)]
                if own[at - 1] not in ENDS:
                    unfinished.append(sequence)
                break
    return unfinished


def own_answers(
    target: PreTrainedModel, tokenizer: Tokenizer, rng: random.Random, num_conversations: int
) -> Iterator[list[Sequence]]:
    """Yields conversations with the target's answers, a group per temperature; each ends at its first new answer."""
    for temperature in TEMPERATURES:
        drawn = (conversation(tokenizer, rng) for _ in range(num_conversations // len(TEMPERATURES)))
        sequences = sorted(drawn, key=lambda each: len(each.ids))
        unfinished = [each for batch in batched(sequences) for each in cut(target, batch, temperature)]
        for batch in batched(sorted(unfinished, key=lambda each: len(each.ids))):
            answer(target, batch, temperature)
        yield sequences
