"""Measures how well a draft head predicts the target's greedy answers to prompts not used in training; writes its card.

A draft counts only if all drafts before it are right. Chains can therefore be computed from the answer's own tokens and
states, so all chains of an answer are computed at once.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from draft_head_answers import BATCH_SIZE, Sequence, answer
from draft_head_model import WEIGHTS, Eagle3Head, tapped_by
from rich.console import Console
from rich.table import Table
from tiny_model_eval import (
    Case,
    Examiner,
    completion_cases,
    conversation_cases,
    result_cases,
    skill_cases,
    tool_cases,
    unfitting_cases,
)
from tiny_model_text import SKILLS
from tiny_model_tools import TOOL_SKILLS
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

NUM_CASES = 20  # of each kind
NUM_DRAFTS = 4  # of a chain


@dataclass(frozen=True)
class DraftScore:
    """`num_right` single drafts of `num_places` are right; `num_chains` chains have `num_accepted` accepted drafts."""

    kind: str
    num_answers: int
    num_places: int
    num_right: int
    num_chains: int
    num_accepted: int

    @classmethod
    def of(cls, kind: str, foreseen: list[list[int]]) -> "DraftScore":
        """`foreseen`: num_foreseen's result for each answer."""
        places = [each for answer in foreseen for each in answer]
        chains = [each for answer in foreseen for each in chains_of(answer)]
        return cls(kind, len(foreseen), len(places), sum(each > 0 for each in places), len(chains), sum(chains))

    @property
    def acceptance(self) -> float:
        return self.num_right / max(1, self.num_places)

    @property
    def accepted_length(self) -> float:
        return self.num_accepted / max(1, self.num_chains)

    def cells(self) -> tuple[str, ...]:
        counts = (f"{self.num_answers}", f"{self.num_places}", f"{self.acceptance:.1%}", f"{self.num_chains}")
        return self.kind, *counts, f"{self.accepted_length:.2f}"


def held_out_cases(examiner: Examiner, num_cases: int) -> dict[str, list[Case]]:
    """Returns the first prompts of each kind in the target's evaluation; held-out ones, where the kind has any."""
    render, ask = examiner.render, examiner.render_tools
    kinds = {skill: skill_cases(render, skill, held_out=True) for skill in SKILLS}
    kinds["conversation, 3 turns between"] = conversation_cases(render, 3, held_out=True)
    kinds |= {f"call, {skill}": tool_cases(ask, skill, held_out=True) for skill in TOOL_SKILLS}
    kinds["answer with a tool's result"] = result_cases(ask, held_out=True)
    kinds["tools offered, none fits"] = unfitting_cases(ask, held_out=True)
    kinds["plain completion"] = completion_cases()
    return {kind: cases[:num_cases] for kind, cases in kinds.items()}


@torch.no_grad()
def num_foreseen(head: Eagle3Head, target: PreTrainedModel, ids: list[int], start: int) -> list[int]:
    """Returns, for each of ids[start:-1], how many of the next tokens a chain of NUM_DRAFTS predicts correctly."""
    embeddings, tapped, _ = tapped_by(target, head.taps, torch.tensor([ids]))
    steps = head(embeddings, tapped, torch.arange(start, len(ids) - 1)[None], NUM_DRAFTS)
    drafts = [head.token_ids[head.logits(outputs[0]).argmax(-1)].tolist() for outputs in steps]
    found = []
    for chain in range(len(ids) - 1 - start):
        after = ids[start + chain + 1 :][:NUM_DRAFTS]
        is_right = [drafts[step][chain] == token_id for step, token_id in enumerate(after)]
        found.append([*is_right, False].index(False))
    return found


def chains_of(foreseen: list[int]) -> list[int]:
    """Returns how many drafts of each chain are accepted, given num_foreseen's result for the answer."""
    accepted, at = list[int](), 0
    while at < len(foreseen):
        accepted.append(foreseen[at])
        at += foreseen[at] + 1  # one token of the target's follows the accepted drafts
    return accepted


def evaluate(target_folder: Path, folder: Path, num_cases: int = NUM_CASES) -> list[DraftScore]:
    """Returns a score for each kind of prompt, then one for all prompts."""
    head, target = Eagle3Head.load(folder), AutoModelForCausalLM.from_pretrained(target_folder, dtype="float32").eval()
    tokenizer = Tokenizer.from_file(str(target_folder / "tokenizer.json"))
    kinds = held_out_cases(Examiner(target_folder), num_cases)
    asked = [(kind, Sequence(tokenizer.encode(case.prompt).ids)) for kind, cases in kinds.items() for case in cases]
    by_length = sorted((each for _, each in asked), key=lambda each: len(each.ids))
    for start in range(0, len(by_length), BATCH_SIZE):
        answer(target, by_length[start : start + BATCH_SIZE])
    foreseen = {kind: list[list[int]]() for kind in kinds}
    for kind, sequence in asked:
        foreseen[kind].append(num_foreseen(head, target, sequence.ids, sequence.answers[0][0]))
    scores = [DraftScore.of(kind, answers) for kind, answers in foreseen.items()]
    return [*scores, DraftScore.of("all", [each for answers in foreseen.values() for each in answers])]


HEADER = ("prompts", "answers", "places", "one draft accepted", "chains of 4", "accepted of a chain")


def print_scores(scores: list[DraftScore]) -> None:
    table = Table(*HEADER)
    for score in scores:
        table.add_row(*score.cells())
    Console().print(table)


def head_card(folder: Path, scores: list[DraftScore], command: str, train_s: float) -> str:
    size = (folder / WEIGHTS).stat().st_size
    rows = "\n".join("| " + " | ".join(score.cells()) + " |" for score in scores)
    return f"""# tiny-chat-eagle3

An EAGLE-3 draft head for tiny-chat, in the usual format (`LlamaForCausalLMEagle3`): one layer that reads the
model's states and predicts the next tokens. It has no embedding of its own and predicts only a part of the vocabulary.
It has the project's license.

Made by `{command}` ({train_s:.0f} s, one thread on a busy host), from tiny-chat's own
greedy and sampled answers to prompts that `scripts/tiny_model_text.py` and `scripts/tiny_model_tools.py` make; no
other data. `{WEIGHTS}`: {size:,} bytes, float16.

The same run evaluated the head on greedy answers to prompts that it was not trained on. Every token after an answer's
first is a place. One draft is accepted at a place if, given the correct text before it, the draft equals the model's
token. A chain has up to {NUM_DRAFTS} drafts, and the drafts before the first wrong one are accepted. The next chain
begins after the token that the model then generates. So a step of the model gives one token more than the last column
says.

| {" | ".join(HEADER)} |
|---|{"---:|" * (len(HEADER) - 1)}
{rows}
"""
