"""Tasks that the model of `benchmarks speculative` is trained and measured with. They are token ids, not language.

A prompt is a task's token, its content, and the task's token again; the answer follows. Every task has exactly one
right answer, except CHAT, whose answers are random words. Pure.
"""

from __future__ import annotations

import random
from typing import NamedTuple

VOCAB_SIZE = 1280
END, COPY, CORRECT, CALL, CHAT = range(5)
WORDS = range(8, 488)
TYPOS = range(WORDS.stop, WORDS.stop + len(WORDS))  # a misspelt form of each word
NUM_TOOLS, NUM_FIELDS, FIELD_LEN, SPAN = 6, 4, 3, 7  # SPAN: fixed tokens of a call between two fields
TOOL_LEN = 2 + 2 * NUM_FIELDS + SPAN * (NUM_FIELDS + 1)  # a tool's ids: begin and end, keys, ends of fields, spans
FIRST_TOOL = TYPOS.stop
FIRST_CHARACTER = 0x4E00  # each token's text is one character, so that texts and ids correspond


class Task(NamedTuple):
    prompt: list[int]
    answer: list[int]  # without the task's token, with which the model ends it


def copied(rng: random.Random, length: int) -> Task:
    """Asks for a copy of a document. No word occurs twice, so the last word determines the next one."""
    document = rng.sample(WORDS, length)
    return Task([COPY, *document, COPY], document)


def corrected(rng: random.Random, length: int, share: float = 0.05) -> Task:
    """Asks for the corrected copy of a document in which a share of the words is misspelt."""
    answer = rng.sample(WORDS, length)
    wrong = set(rng.sample(range(length), round(share * length)))
    document = [TYPOS[word - WORDS.start] if at in wrong else word for at, word in enumerate(answer)]
    return Task([CORRECT, *document, CORRECT], answer)


def called(rng: random.Random, num_calls: int, num_changing: int = NUM_FIELDS) -> Task:
    """Asks for tool calls with given fields, the first `num_changing` of them new, between a tool's fixed texts."""
    given, answer = list[int](), list[int]()
    pool = WORDS if num_changing == NUM_FIELDS else WORDS[NUM_TOOLS * NUM_FIELDS * FIELD_LEN :]
    values = rng.sample(pool, num_calls * NUM_FIELDS * FIELD_LEN)
    for tool in rng.sample(range(NUM_TOOLS), num_calls):
        first = FIRST_TOOL + tool * TOOL_LEN
        spans = first + 2 + 2 * NUM_FIELDS
        given.append(first)
        answer += [first, *range(spans, spans + SPAN)]
        for field in range(NUM_FIELDS):
            same = WORDS[(tool * NUM_FIELDS + field) * FIELD_LEN :][:FIELD_LEN]
            value = [values.pop() for _ in same] if field < num_changing else same
            filled = [first + 2 + 2 * field, *value, first + 3 + 2 * field]
            given += filled
            answer += [*filled, *range(spans + (field + 1) * SPAN, spans + (field + 2) * SPAN)]
        given.append(first + 1)
        answer.append(first + 1)
    return Task([CALL, *given, CALL], answer)


def chatted(rng: random.Random, length: int) -> Task:
    prompt, answer = rng.choices(WORDS, k=length), rng.choices(WORDS, k=length)
    return Task([CHAT, *prompt, CHAT], answer)
