"""Makes conversations with tools for the tiny chat model. Knows nothing of tokens, tensors or files.

A call is determined by the tools and the question: it names the tool that fits the question and lists its parameters in
their order.
"""

import json
import operator
import random
import re
from collections.abc import Callable
from typing import NamedTuple

from tiny_model_calls import Args, Tool, ToolTurn, Value
from tiny_model_text import (
    CITIES,
    NAMES,
    NO_IDEA,
    SUMS,
    WORDS,
    Conversation,
    is_held_out,
    made_up,
    phrase,
    vary,
)
from tiny_model_tool_words import (
    ABOUT_THINGS,
    ADDING,
    CALCULATED,
    CALCULATING,
    CLOCK,
    DIVIDED,
    DIVIDING,
    MORE_CITIES,
    MULTIPLIED,
    MULTIPLYING,
    SEARCHED,
    SEARCHING,
    SKIES,
    SUBTRACTED,
    SUBTRACTING,
    THINGS,
    THINGS_ASKED,
    TIME_ASKED,
    TIME_HERE,
    WEATHER,
    WEATHER_ASKED,
    Vocabulary,
)


class Skill(NamedTuple):
    """A tool, and a function that draws a turn that needs it."""

    tool: Tool
    ask: Callable[[], ToolTurn]


def city(rng: random.Random) -> str:
    dice = rng.random()
    if dice < 0.15:
        return made_up(rng).capitalize()
    return rng.choice(CITIES if dice < 0.6 else MORE_CITIES)


def words_of(value: object) -> str:
    """Returns a result as words of an answer: an object's members one after another."""
    return ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)


def ended(text: str) -> str:
    return text if text[-1] in ".!?" else text + "."


def reading(rng: random.Random) -> object:
    """Returns a result of a weather tool: text or an object."""
    degrees, sky = rng.randint(-9, 39), rng.choice(SKIES)
    if rng.random() < 0.45:
        sign = rng.choice(("", "", "C", "°C", " degrees"))
        texts = (f"{sky}, {degrees}{sign}", f"{degrees}{sign}", f"{degrees}{sign} and {sky}", sky, f"It is {sky}.")
        return rng.choice((*texts, f"{sky.capitalize()}, {degrees}{sign}", phrase(rng, 5)))
    members: dict[str, Value] = {
        "temperature": degrees if rng.random() < 0.7 else f"{degrees}C",
        rng.choice(("condition", "conditions", "sky", "weather", "forecast")): sky,
        rng.choice(("wind", "humidity", "rain")): rng.randint(0, 99),
        rng.choice(("unit", "units")): rng.choice(("C", "F", "celsius", "fahrenheit")),
    }
    return dict(rng.sample(list(members.items()), rng.randint(1, 3)))


def finding(rng: random.Random) -> object:
    """Returns a result of any other tool."""
    value: Value = rng.randint(0, 9999) if rng.random() < 0.4 else phrase(rng, 4)
    dice = rng.random()
    if dice < 0.55:
        return value
    if dice < 0.62:
        return {"error": rng.choice(("not found", "unknown", "timeout", phrase(rng, 3)))}
    keys = rng.sample(["value", "result", "unit", "status", "name", "count", rng.choice(WORDS)], rng.randint(1, 2))
    return {key: rng.randint(0, 999) if rng.random() < 0.5 else phrase(rng, 2) for key in keys}


def done(question: str, tool: Tool, arguments: Args, result: object, answer: str) -> ToolTurn:
    """Makes a turn; {} in the answer is replaced by the result."""
    written = json.dumps(result, ensure_ascii=False) if isinstance(result, dict) else str(result)
    said = ended(answer.replace("{}", words_of(result))) if "{}" in answer else answer
    return ToolTurn(question, said, arguments, tool, written)


def weather(rng: random.Random, is_new: bool) -> Skill:
    name, (key,) = WEATHER.draw(rng, is_new)
    tool = Tool(name, {key: "string"})

    def ask() -> ToolTurn:
        where = city(rng)
        question = vary(rng, rng.choice(WEATHER_ASKED).format(where))
        return done(question, tool, {key: where}, reading(rng), f"The weather in {where}: {{}}")

    return Skill(tool, ask)


def clock(rng: random.Random, is_new: bool) -> Skill:
    name, (key,) = CLOCK.draw(rng, is_new)
    is_here = rng.random() < 0.25
    tool = Tool(name, {} if is_here else {key: "string"})

    def ask() -> ToolTurn:
        moment = f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
        result = rng.choice((moment, moment, {"time": moment}, moment + rng.choice((" pm", " am", ":00"))))
        if is_here:
            return done(vary(rng, rng.choice(TIME_HERE)), tool, {}, result, "It is {}")
        where = city(rng)
        question = vary(rng, rng.choice(TIME_ASKED).format(where))
        return done(question, tool, {key: where}, result, f"The time in {where}: {{}}")

    return Skill(tool, ask)


def number(rng: random.Random) -> int:
    return rng.randint(0, rng.choices((10, 20, 99, 999, 9999), (25, 20, 25, 22, 8))[0])


def outcome(rng: random.Random, value: object) -> object:
    """Returns a calculation's result, sometimes within an object."""
    return {rng.choice(("result", "sum", "answer", "value")): value} if rng.random() < 0.25 else value


class Operation(NamedTuple):
    vocabulary: Vocabulary
    asked: tuple[str, ...]
    compute: Callable[[int, int], object]


OPERATIONS = (
    Operation(ADDING, SUMS, operator.add),
    Operation(MULTIPLYING, MULTIPLIED, operator.mul),
    Operation(SUBTRACTING, SUBTRACTED, operator.sub),
    Operation(DIVIDING, DIVIDED, lambda first, second: round(first / (second or 1), 2)),
)


def of_two_numbers(rng: random.Random, is_new: bool, operation: Operation) -> Skill:
    name, (one, other) = operation.vocabulary.draw(rng, is_new, 2)
    kind = rng.choice(("integer", "number"))
    tool = Tool(name, {one: kind, other: kind})

    def ask() -> ToolTurn:
        first, second = number(rng), number(rng)
        result = operation.compute(first, second)
        question = vary(rng, rng.choice(operation.asked).format(first, second))
        return done(question, tool, {one: first, other: second}, outcome(rng, result), str(result))

    return Skill(tool, ask)


def add(rng: random.Random, is_new: bool) -> Skill:
    return of_two_numbers(rng, is_new, OPERATIONS[0])


def calculate(rng: random.Random, is_new: bool) -> Skill:
    return of_two_numbers(rng, is_new, rng.choices(OPERATIONS[1:], (50, 30, 20))[0])


def evaluate_expression(rng: random.Random, is_new: bool) -> Skill:
    name, (key,) = CALCULATING.draw(rng, is_new)
    tool = Tool(name, {key: "string"})

    def ask() -> ToolTurn:
        gap = rng.choice((" ", " ", " ", ""))
        text = str(number(rng))
        for _ in range(rng.choices((1, 2), (80, 20))[0]):
            text += f"{gap}{rng.choices('+*-/', (50, 25, 15, 10))[0]}{gap}{number(rng)}"
        result = rng.randint(0, 9999)
        question = vary(rng, rng.choice(CALCULATED).format(text))
        return done(question, tool, {key: text}, outcome(rng, result), str(result))

    return Skill(tool, ask)


def about_thing(rng: random.Random, is_new: bool) -> Skill:
    form, (key,) = ABOUT_THINGS.draw(rng, is_new)
    thing = rng.choice(THINGS) if rng.random() < 0.4 else rng.choice(WORDS) if rng.random() < 0.9 else made_up(rng)
    if rng.random() < 0.15:
        thing = f"{rng.choice(WORDS)} {thing}"
    tool = Tool(form.format(thing.replace(" ", "_")), {key: "string"})

    def ask() -> ToolTurn:
        subject = rng.choice((rng.choice(NAMES), city(rng), phrase(rng, 1), phrase(rng, 3), made_up(rng)))
        question = vary(rng, rng.choice(THINGS_ASKED).format(thing, subject))
        return done(question, tool, {key: subject}, finding(rng), f"The {thing} of {subject}: {{}}")

    return Skill(tool, ask)


def search(rng: random.Random, is_new: bool) -> Skill:
    name, (key,) = SEARCHING.draw(rng, is_new)
    tool = Tool(name, {key: "string"})

    def ask() -> ToolTurn:
        text = phrase(rng, 4)
        question = vary(rng, rng.choice(SEARCHED).format(text))
        return done(question, tool, {key: text}, finding(rng), "I found: {}")

    return Skill(tool, ask)


TOOL_SKILLS: dict[str, Callable[[random.Random, bool], Skill]] = {
    "weather": weather, "addition": add, "calculation": calculate, "expression": evaluate_expression, "time": clock,
    "property": about_thing, "search": search,
}  # fmt: skip
TOOL_WEIGHTS = (30, 18, 8, 14, 8, 16, 6)
NUMERIC = {"addition", "calculation", "expression"}
_ASKS_SUM = re.compile(r"\d\D{1,15}\d")


def some_call(rng: random.Random) -> str:
    """Returns a call with made-up names, for copying drills."""
    words = [rng.choice(WORDS) if rng.random() < 0.7 else made_up(rng) for _ in range(rng.randint(1, 3))]
    keys = [rng.choice(WORDS) if rng.random() < 0.7 else made_up(rng) for _ in range(rng.randint(1, 2))]
    values = [rng.choice((phrase(rng, 2), city(rng), number(rng), made_up(rng).capitalize())) for _ in keys]
    turn = ToolTurn("", "", dict(zip(keys, values, strict=True)), Tool("_".join(words), {}))
    return turn.call()


class ToolConversation:
    """A conversation in which up to three tools are offered; most questions need one of them."""

    def __init__(self, rng: random.Random, skills: list[str] | None = None, is_new: bool = False) -> None:
        self._rng = rng
        self._conversation = Conversation(rng)
        self.skills = self._pick() if skills is None else skills
        self._made = {skill: TOOL_SKILLS[skill](rng, is_new) for skill in self.skills}
        self.tools = [made.tool for made in self._made.values()]
        self._words = {word for tool in self.tools for word in re.findall("[a-z]{3,}", tool.name.lower())} - {"get"}
        self.system = self._conversation.system()

    def _pick(self) -> list[str]:
        """Picks different skills, at most one of them with numbers."""
        num = self._rng.choices((0, 1, 2, 3), (8, 50, 30, 12))[0]
        skills: list[str] = []
        while len(skills) < num:
            skill = self._rng.choices(list(TOOL_SKILLS), TOOL_WEIGHTS)[0]
            if skill not in skills and not (skill in NUMERIC and NUMERIC & set(skills)):
                skills.append(skill)
        return skills

    def next_turn(self) -> ToolTurn:
        dice = self._rng.random()
        if self.skills and dice < 0.7:
            return self.call(self._rng.choice(self.skills))
        return self.missing() if dice > 0.85 else self.plain()

    def call(self, skill: str, held_out: bool = False) -> ToolTurn:
        """Draws a turn for an offered tool from the training questions or the held-out ones."""
        while True:
            turn = self._made[skill].ask()
            if is_held_out(turn.user) == held_out or not turn.arguments:
                return turn

    def plain(self) -> ToolTurn:
        """Draws a turn of the skills without tools, such that no offered tool fits it."""
        while True:
            turn = self._conversation.next_turn()
            if self._is_foreign(turn.user):
                return ToolTurn(turn.user, turn.assistant)

    def missing(self, held_out: bool = False) -> ToolTurn:
        """Draws a question for a tool that isn't offered (a sum is answered without one)."""
        others = [skill for skill in TOOL_SKILLS if skill not in (*self.skills, *NUMERIC)]
        while True:
            turn = TOOL_SKILLS[self._rng.choice(others)](self._rng, False).ask()
            if self._is_foreign(turn.user) and is_held_out(turn.user) == held_out:
                return ToolTurn(turn.user, NO_IDEA)

    def _is_foreign(self, question: str) -> bool:
        """Returns whether none of the offered tools fits the question."""
        if NUMERIC & set(self.skills) and _ASKS_SUM.search(question):
            return False
        return not self._words & set(re.findall("[a-z]+", question.lower()))
