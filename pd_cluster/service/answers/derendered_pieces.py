"""Converts choices of token ids to an answer's pieces, as if they had just been generated. Knows nothing of HTTP."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pd_cluster.errors import RequestError
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.text_sequence import Piece, TextSequence
from pd_cluster.service.schema.tokens.derender_protocol import DerenderedAnswer, DerenderedChoice, DerenderedLogprob
from pd_cluster.types import FinishReason, Logprobs, TokenOutput


def check_token_ids(answers: Sequence[DerenderedAnswer], vocab_size: int, most: int, most_of_all: int) -> int:
    """Returns the number of all answers' tokens. `most`: the limit for one choice. Raises RequestError."""
    choices = [choice for answer in answers for choice in answer.choices]
    longest = max(len(choice.token_ids) for choice in choices)
    if longest > most:
        raise RequestError(f"choices: one has {longest} token_ids; at most {most} fit this model's context", "choices")
    if (number := sum(len(choice.token_ids) for choice in choices)) > most_of_all:
        raise RequestError(f"choices: {number} token_ids; at most {most_of_all} are allowed", param="choices")
    told = itertools.chain.from_iterable(choice.told or () for choice in choices)
    ids = {token_id for choice in choices for token_id in choice.token_ids}
    ids |= {each.id for entry in told for each in (entry, *entry.top_logprobs)}
    if max(ids, default=0) >= vocab_size:
        raise RequestError(f"choices: token id {max(ids)}; ids must be in 0 to {vocab_size - 1}", param="choices")
    return number


def pieces_of(generation: Generation, choices: Sequence[DerenderedChoice]) -> list[Piece]:
    """Returns a whole piece for each choice of a generation with as many sequences. Raises RequestError."""
    return [_piece(generation, each, choice) for each, choice in zip(generation.sequences, choices, strict=True)]


def _piece(generation: Generation, sequence: TextSequence, choice: DerenderedChoice) -> Piece:
    reason = choice.finish_reason or "length"
    text = "".join(_texts(sequence, choice, reason))
    if sequence.finish_reason is None:
        text += sequence.end(reason)
    if sequence.stop_reason is None:
        sequence.stop_reason = choice.stop_reason
    return generation.piece_of(sequence, text)


def _texts(sequence: TextSequence, choice: DerenderedChoice, reason: FinishReason) -> list[str]:
    """Adds tokens until one ends the answer; returns their texts. A stop string ends it by its text, not by its last
    token.
    """
    told, texts, num_tokens = choice.told, [], len(choice.token_ids)
    if told is not None and len(told) != num_tokens:
        raise RequestError(f"logprobs: {len(told)} for {num_tokens} token_ids; give one for each", param="logprobs")
    is_string = reason == "stop" and isinstance(choice.stop_reason, str)
    for at, token_id in enumerate(choice.token_ids):
        ends = at == num_tokens - 1 and not is_string
        logprobs = None if told is None else _logprobs(told[at])
        texts.append(sequence.add(TokenOutput("", 0, sequence.index, at, token_id, reason if ends else None, logprobs)))
        if sequence.finish_reason is not None:
            break
    return texts


def _logprobs(entry: DerenderedLogprob) -> Logprobs:
    return Logprobs(entry.logprob, entry.rank or 0, [(each.id, each.logprob) for each in entry.top_logprobs])
