"""Tasks that the model of `benchmarks speculative` learns and is asked: streams of token ids without a language.

A prompt is a task's token, its content, and the task's token again; the answer follows. Every task has one right
answer, but for CHAT, which is answered by words at random. Pure.
"""

from __future__ import annotations

import random
from typing import NamedTuple

VOCAB_SIZE = 1280
END, COPY, CORRECT, CALL, CHAT = range(5)
WORDS = range(8, 488)
TYPOS = range(WORDS.stop, WORDS.stop + len(WORDS))  # a misspelt form of each word
NUM_TOOLS, NUM_FIELDS, FIELD_LEN, SPAN = 6, 4, 3, 7  # SPAN: tokens of a call between two fields, always the same
TOOL_LEN = 2 + 2 * NUM_FIELDS + SPAN * (NUM_FIELDS + 1)  # ids of its own: begin and end, keys, ends of fields, spans
FIRST_TOOL = TYPOS.stop
FIRST_CHARACTER = 0x4E00  # a token's text is one character, so that texts and ids are the same


class Task(NamedTuple):
    prompt: list[int]
    answer: list[int]  # ends before the task's token, which the model says then


def misspelt(word: int) -> int:
    return word + len(WORDS)


def copied(rng: random.Random, length: int) -> Task:
    """Asks for a document as it is. No word occurs twice, so that the last word alone says which is next."""
    document = rng.sample(WORDS, length)
    return Task([COPY, *document, COPY], document)


def corrected(rng: random.Random, length: int, share: float = 0.05) -> Task:
    """Asks for a document in which a share of the words is misspelt, without the mistakes."""
    answer = rng.sample(WORDS, length)
    wrong = set(rng.sample(range(length), round(share * length)))
    document = [misspelt(word) if at in wrong else word for at, word in enumerate(answer)]
    return Task([CORRECT, *document, CORRECT], answer)


def called(rng: random.Random, num_calls: int) -> Task:
    """Asks for calls of tools whose fields are given: what is between the fields is a tool's own, known by heart."""
    given, answer = list[int](), list[int]()
    values = rng.sample(WORDS, num_calls * NUM_FIELDS * FIELD_LEN)
    for tool in rng.sample(range(NUM_TOOLS), num_calls):
        first = FIRST_TOOL + tool * TOOL_LEN
        spans = first + 2 + 2 * NUM_FIELDS
        given.append(first)
        answer += [first, *range(spans, spans + SPAN)]
        for field in range(NUM_FIELDS):
            filled = [first + 2 + 2 * field, *(values.pop() for _ in range(FIELD_LEN)), first + 3 + 2 * field]
            given += filled
            answer += [*filled, *range(spans + (field + 1) * SPAN, spans + (field + 2) * SPAN)]
        given.append(first + 1)
        answer.append(first + 1)
    return Task([CALL, *given, CALL], answer)


def chatted(rng: random.Random, length: int) -> Task:
    prompt, answer = rng.choices(WORDS, k=length), rng.choices(WORDS, k=length)
    return Task([CHAT, *prompt, CHAT], answer)


def text_of(token_ids: list[int]) -> str:
    return "".join(chr(FIRST_CHARACTER + each) for each in token_ids)
