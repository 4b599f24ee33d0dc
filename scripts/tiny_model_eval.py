"""Asks the tiny model questions, counts exact answers and thin margins, and writes the model card.

Knows nothing of training. A margin is the distance between the two best logits of a greedy step: if it is wide, every
kernel, batch size and device picks the same token.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tiny_model_calls import ToolTurn
from tiny_model_text import SKILLS, SUMS, Conversation, Turn, draw, is_held_out, raw_text
from tiny_model_tools import TOOL_SKILLS, ToolConversation
from transformers import AutoModelForCausalLM, AutoTokenizer

THIN_MARGIN = 1e-2  # logits
NUM_CASES = 200  # of each skill
NUM_TOOL_CASES = 50  # of each tool skill
BATCH_SIZE = 100


@dataclass(frozen=True)
class Case:
    """A prompt as text, and its only right answer; None if only the margins are measured."""

    prompt: str
    expected: str | None


@dataclass(frozen=True)
class Score:
    skill: str
    num_cases: int
    num_exact: int | None
    num_tokens: int
    num_thin: int
    wrong: tuple[tuple[str, str], ...] = ()  # (prompt, answer) of the first few mistakes

    def cells(self) -> tuple[str, ...]:
        accuracy = "-" if self.num_exact is None else f"{self.num_exact / self.num_cases:.1%}"
        return self.skill, str(self.num_cases), accuracy, str(self.num_tokens), f"{self.num_thin}"


Render = Callable[[list[Turn], str | None], str]
Ask = Callable[[ToolConversation, list[ToolTurn], int], str]


def addition_cases(render: Render, most: int, held_out: bool) -> list[Case]:
    """Returns every pair up to `most` in every phrasing that was (or was not) taught."""
    pairs = [(first, second) for first in range(most + 1) for second in range(most + 1)]
    asked = [(sums.format(*pair), str(sum(pair))) for sums in SUMS for pair in pairs]
    return [Case(render([Turn(ask, "")], None), answer) for ask, answer in asked if is_held_out(ask) == held_out]


def skill_cases(render: Render, skill: str, held_out: bool) -> list[Case]:
    rng = random.Random(f"{skill} {held_out}")
    turns = [draw(rng, skill, held_out) for _ in range(NUM_CASES)]
    return [Case(render([turn], Conversation(rng).system()), turn.assistant) for turn in turns]


def conversation_cases(render: Render, num_between: int, held_out: bool) -> list[Case]:
    """Returns conversations in which the user tells a fact, other turns follow, and then the user asks for it."""
    rng = random.Random(num_between)
    cases = []
    for _ in range(NUM_CASES):
        conversation = Conversation(rng)
        turns = [conversation.tell(held_out)]
        what = next(iter(conversation.facts))
        turns += [draw(rng, rng.choice(list(SKILLS))) for _ in range(num_between)]
        turns.append(conversation.ask(what))
        cases.append(Case(render(turns, conversation.system()), turns[-1].assistant))
    return cases


def tool_cases(ask: Ask, skill: str, held_out: bool = False, is_new: bool = False) -> list[Case]:
    """Returns questions with one or two tools; the answer is a call. `is_new`: with names never used in training."""
    rng = random.Random(f"{skill} {held_out} {is_new}")
    cases = []
    for _ in range(NUM_TOOL_CASES):
        skills = [skill] if rng.random() < 0.5 else rng.sample([skill, "weather" if skill != "weather" else "time"], 2)
        conversation = ToolConversation(rng, skills, is_new)
        turn = conversation.call(skill, held_out)
        cases.append(Case(ask(conversation, [turn], 1), turn.call()))
    return cases


def result_cases(ask: Ask, held_out: bool) -> list[Case]:
    """Returns calls with results, to be answered with the results."""
    rng = random.Random(f"results {held_out}")
    cases = []
    for _ in range(NUM_CASES):
        conversation = ToolConversation(rng, [rng.choice(list(TOOL_SKILLS))])
        turn = conversation.call(conversation.skills[0], held_out)
        cases.append(Case(ask(conversation, [turn], 3), turn.answer))
    return cases


def unfitting_cases(ask: Ask, held_out: bool) -> list[Case]:
    """Returns questions that no offered tool fits."""
    rng = random.Random(f"unfitting {held_out}")
    cases = []
    for _ in range(NUM_CASES):
        conversation = ToolConversation(rng, [rng.choice(list(TOOL_SKILLS))])
        turn = conversation.missing(held_out) if rng.random() < 0.4 else conversation.plain()
        cases.append(Case(ask(conversation, [turn], 1), turn.answer))
    return cases


def tool_sets(ask: Ask) -> dict[str, list[Case]]:
    sets = {}
    for skill in TOOL_SKILLS:
        sets[f"call, {skill}: taught"] = tool_cases(ask, skill)
        sets[f"call, {skill}: questions held out"] = tool_cases(ask, skill, held_out=True)
        sets[f"call, {skill}: tool and parameter names never taught"] = tool_cases(ask, skill, is_new=True)
    sets["answer with a tool's result, taught"] = result_cases(ask, False)
    sets["answer with a tool's result, held out"] = result_cases(ask, True)
    sets["tools offered, none fits, taught"] = unfitting_cases(ask, False)
    sets["tools offered, none fits, held out"] = unfitting_cases(ask, True)
    return sets


def completion_cases() -> list[Case]:
    rng = random.Random("raw")
    cases = []
    for text in (raw_text(rng) for _ in range(NUM_CASES)):
        spaces = [at for at, letter in enumerate(text) if letter == " "]
        cut = spaces[min(2 + len(spaces) // 3, len(spaces) - 1)]
        cases.append(Case(text[:cut], text[cut:]))
    return cases


class Examiner:
    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()

    def render(self, turns: list[Turn], system: str | None) -> str:
        """Renders the conversation up to the last question."""
        messages = [{"role": "system", "content": system}] if system is not None else []
        for turn in turns:
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
        text: str = self._tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        return text

    def render_tools(self, conversation: ToolConversation, turns: list[ToolTurn], num_messages: int) -> str:
        """Renders the conversation with its tools, without the message that the model has to generate."""
        messages: list[dict[str, object]] = []
        if conversation.system is not None:
            messages.append({"role": "system", "content": conversation.system})
        said = [{"role": role, "content": text} for turn in turns for role, text in turn.messages()]
        text: str = self._tokenizer.apply_chat_template(
            messages + said[:num_messages],
            tools=[tool.schema() for tool in conversation.tools],
            tokenize=False,
            add_generation_prompt=True,
        )
        return text

    def score(self, skill: str, cases: list[Case], forced_tokens: int = 0) -> Score:
        cases = sorted(cases, key=lambda case: len(case.prompt) + 3 * len(case.expected or ""))
        exact = num_tokens = num_thin = 0
        wrong: list[tuple[str, str]] = []
        for start in range(0, len(cases), BATCH_SIZE):
            batch = cases[start : start + BATCH_SIZE]
            most = max(len(self._tokenizer(case.expected or "")["input_ids"]) for case in batch) + 8
            answers, margins = self._generate([case.prompt for case in batch], forced_tokens or most, forced_tokens > 0)
            num_tokens += margins.numel()
            num_thin += int((margins < THIN_MARGIN).sum())
            missed = [
                (case.prompt, answer) for case, answer in zip(batch, answers, strict=True) if answer != case.expected
            ]
            exact += len(batch) - len(missed)
            wrong += missed
        num_exact = None if cases[0].expected is None else exact
        return Score(skill, len(cases), num_exact, num_tokens, num_thin, tuple(wrong[:10]))

    @torch.inference_mode()
    def _generate(self, prompts: list[str], max_tokens: int, ignore_eos: bool) -> tuple[list[str], torch.Tensor]:
        """Returns the answers, and the margins of all their tokens, concatenated."""
        inputs = self._tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        end = {"eos_token_id": None} if ignore_eos else {}
        made = self._model.generate(
            **inputs,
            **end,
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = made.sequences[:, inputs["input_ids"].shape[1] :]  # [num_prompts, num_new]
        best = torch.stack(made.logits, dim=1).topk(2).values  # [num_prompts, num_new, 2]
        ends = torch.isin(new, torch.tensor(self._model.generation_config.eos_token_id)).int()
        alive = torch.ones_like(ends) if ignore_eos else (ends.cumsum(1) - ends == 0).int()
        answers: list[str] = self._tokenizer.batch_decode(new, skip_special_tokens=True)
        return answers, (best[..., 0] - best[..., 1])[alive.bool()]


def evaluate(folder: Path) -> list[Score]:
    examiner = Examiner(folder)
    render = examiner.render
    sets = {
        "addition 0..10, every pair, taught phrasings": addition_cases(render, 10, False),
        "addition 0..20, every pair, taught phrasings": addition_cases(render, 20, False),
        "addition 0..20, held out (pair, phrasing)": addition_cases(render, 20, True),
    }
    for skill in [skill for skill in SKILLS if skill != "addition"]:
        sets[f"{skill}, taught"] = skill_cases(render, skill, False)
        if skill not in ("greeting", "modest fallback"):
            sets[f"{skill}, held out"] = skill_cases(render, skill, True)
    sets["conversation, held out, asked at once"] = conversation_cases(render, 0, True)
    sets["conversation, held out, 3 turns between"] = conversation_cases(render, 3, True)
    sets["conversation, held out, 10 turns between"] = conversation_cases(render, 10, True)
    sets |= tool_sets(examiner.render_tools)
    sets["plain completion"] = completion_cases()
    scores = [examiner.score(name, cases) for name, cases in sets.items()]
    forced = [Case(render([draw(random.Random(seed), "greeting")], None), None) for seed in range(20)]
    scores.append(examiner.score("made to go on after the end, 400 tokens", forced, forced_tokens=400))
    print_table(scores)
    return scores


HEADER = ("prompts", "number", "exact answers", "tokens", f"margin < {THIN_MARGIN:g}")


def print_table(scores: list[Score]) -> None:
    table = Table(*HEADER)
    for score in scores:
        table.add_row(*score.cells())
    console = Console()
    console.print(table)
    for score in scores:
        for prompt, answer in score.wrong if score.num_exact is not None else ():
            console.print(f"wrong: {prompt[-120:]!r} -> {answer[:80]!r}", markup=False, highlight=False)


def model_card(folder: Path, scores: list[Score], command: str, train_s: float) -> str:
    size = (folder / "model.safetensors").stat().st_size
    num_tokens, num_thin = sum(s.num_tokens for s in scores), sum(s.num_thin for s in scores)
    lines = [
        "# tiny-chat",
        "",
        "A chat model with Qwen3's architecture, small enough for the repository: the default of `pd-cluster up`,",
        "and for checks that need trained weights. It greets, counts, adds numbers up to 20, repeats, answers in JSON",
        "on request, remembers what users said about themselves, and calls tools. It has learned nothing else, and",
        "says so. It answers in English, with a few words of Chinese. It has the project's license.",
        "",
        "Tool calls have the format of Hermes (`<tool_call>` and a JSON object). tokenizer_config.json names it, so no",
        "`--tool-call-parser` is needed. The chat template shows a tool's name and its required parameters, or all",
        "parameters if none is required. The model cannot use descriptions, nested schemas or several calls at once.",
        "",
        f"Made by `{command}` ({train_s:.0f} s of training on two cores), from text that",
        "`scripts/tiny_model_text.py` makes; no other data. `model.safetensors`: "
        f"{size:,} bytes, float32. Trained on conversations of up to 1024 tokens.",
        "",
        'The same run evaluated it greedily. "Held out" is a twentieth of the prompts, chosen by checksum, that was',
        "never in the training data.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|---|---:|---:|---:|---:|",
        *("| " + " | ".join(score.cells()) + " |" for score in scores),
        "",
        f"Steps whose two best logits are less than {THIN_MARGIN:g} apart: {num_thin} of {num_tokens:,}.",
    ]
    return "\n".join(lines) + "\n"
