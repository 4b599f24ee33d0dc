"""Suggests the known flag that a user means by an unknown flag, from its words and from other servers' names.

Two flags that share only words such as "config" or "max" mean different things, however many letters they share.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence

ALIKE = 0.84  # similarity of two words that may differ by a typing error
LEAST_LETTERS = 5  # minimum length of such words
LEAST_PART = 3  # minimum length of a word that matches as the beginning or end of another word
WHOLE = 0.85  # similarity of two flags without their hyphens
LEAST = 0.55  # minimum share of both flags' weight in matching words
# Other servers' names for settings.
MEANT = {
    "--batch-size": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--max-len": "--max-model-len",
    "--max-seq-len": "--max-model-len",
    "--model-name": "--served-model-name",
    "--prefix-cache": "--enable-prefix-caching",
    "--max-batch-size": "--max-num-seqs",
    "--max-prefill-tokens": "--max-num-batched-tokens",
    "--max-running-requests": "--max-num-seqs",
    "--max-total-tokens": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--model-path": "--model",
    "--session-len": "--max-model-len",
    "--tokenizer-path": "--tokenizer",
    "--tool-parser": "--tool-call-parser",
    "--tp": "--tensor-parallel-size",
    "--cache-max-entry-count": "--gpu-memory-utilization",
}

# SGLang's flags that have no equivalent, and the advice for each.
ANSWERS = {
    "--dp-size": "give --data-parallel-size N to each of N instances of a role, which then share a model's experts",
    "--enable-dp-attention": "give --data-parallel-size N to each of N instances of a role: each computes "
    "attention "
    "for its own requests, and all share the experts",
    "--ep-size": "give --enable-expert-parallel; --data-parallel-size times --tensor-parallel-size ranks share the "
    "experts",
    "--moe-a2a-backend": "leave it out; rows are gathered from all instances that share experts",
    "--tp-size": "did you mean --tensor-parallel-size? SGLang's flag counts the ranks of all data-parallel instances, "
    "this one the ranks of each instance: divide the value by --dp-size",
}


def meant_by(flag: str, known: Sequence[str]) -> str | None:
    """Returns the known flag that is nearest in meaning, or None."""
    if (name := MEANT.get(flag)) in known:
        return name
    weights = _weights(known)
    scored = [(_score(_words(flag), _words(each), weights), _ratio(flag, each), each) for each in known]
    score, ratio, best = max(scored, default=(0.0, 0.0, ""))
    if score >= LEAST:
        return best
    ratio, best = max(((ratio, each) for _, ratio, each in scored), default=(0.0, ""))
    return best if ratio >= WHOLE else None


def _words(flag: str) -> list[str]:
    return [word for word in flag.lstrip("-").split("-") if word != "no"]


def _weights(known: Sequence[str]) -> Mapping[str, float]:
    """Returns each word's weight: the more flags contain the word, the lower its weight."""
    found = Counter(word for each in {*known} for word in {*_words(each)})
    return {word: 1 / number for word, number in found.items()}


def _score(asked: Sequence[str], known: Sequence[str], weights: Mapping[str, float]) -> float:
    """Returns the share of both flags' weight in matching words; 0 unless the asked flag's rarest word matches.

    A word that no flag contains weighs as much as a word in a single flag.
    """
    pairs = {word: near for word in asked if (near := _matching_word(word, known))}
    own = {word: weights.get(pairs.get(word, word), 1.0) for word in asked}
    if not own or max(own, key=lambda word: own[word]) not in pairs:
        return 0.0
    agreed = 2 * sum(own[word] * _ratio(word, pairs[word]) for word in pairs)
    return agreed / (sum(own.values()) + sum(weights.get(word, 1.0) for word in known))


def _matching_word(word: str, known: Sequence[str]) -> str:
    """Returns the known word that a given word matches, or ""."""
    if word in known:
        return word
    for each in known:
        short, long = sorted((word, each), key=len)
        if len(short) >= LEAST_PART and (long.startswith(short) or long.endswith(short)):
            return each
    near = [each for each in known if min(len(each), len(word)) >= LEAST_LETTERS]
    return (difflib.get_close_matches(word, near, 1, ALIKE) or [""])[0]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.replace("-", ""), other.replace("-", "")).ratio()
