"""Makes the text that the tiny chat model learns. Knows nothing of tokens, tensors or files.

Every answer is a function of the conversation so far, so the training text never has two different continuations for
one prompt. A twentieth of the prompts with free parts, chosen by checksum (`is_held_out`), is left out of training and
used in the evaluation.
"""

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


def split_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def split_phrases(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


NAMES = split_words(
    "Ann Bob Tom Eve Max Mia Leo Zoe Sam Kim Ben Ida Jan Lea Tim Amy Dan Joe Liz Ray Anna Emma Noah Liam "
    "Lucy Mary John Paul Rosa Nina Omar Ivan Alice David Peter Sarah Maria Clara Oscar Laura Wei Li Ming "
    "Hana Yuki"
)
WORDS = split_words(
    "the a cat dog sat ran sees likes bird fish tree house sun moon star river stone apple bread water milk "
    "tea book door window table chair garden road train ship cloud rain snow wind fire light night day "
    "morning small big old new red green warm cold fast slow happy quiet loud round sweet and or on in "
    "under over with near hello world good friend time place hand foot eye song letter paper pen box ball "
    "king queen horse cow sheep mouse bear fox wolf jumps sleeps eats plays reads sings walks talks one two "
    "three four five yes no please data cache token model server prefill decode block test thing life city "
    "work school music story open close"
)
COLOURS = split_words("red blue green yellow black white orange purple pink brown grey silver gold")
ANIMALS = split_words("cat dog horse cow fox bear wolf sheep mouse rabbit tiger lion owl duck panda")
FOODS = split_words("bread rice soup pasta pizza salad cheese apples noodles cake honey tofu")
CITIES = split_words("Paris London Berlin Rome Madrid Tokyo Beijing Delhi Cairo Oslo Vienna Lima Shenzhen Seoul")
UNICODE = split_words(
    "你好 世界 谢谢 再见 模型 数据 猫 狗 水 山 été café naïve über señor привет мир 日本 🙂 🚀 🎉 👍 ∑ → € ½"
)
SYLLABLES = split_words(
    "ba be bi bo da de du fa fi ga go ha he ka ki ko la le lo ma me mi na no pa po ra ri sa so ta to va zu"
)

NO_IDEA = "I am a small model. I can greet, count, add, repeat and answer in JSON."
NO_IDEA_JSON = '{"answer": "I do not know."}'
TOO_BIG = "I can only add numbers up to 20."
SELF_ASKED = ("Count to 10.", ", ".join(map(str, range(1, 11))))
"""Text that the model learns to continue with after the end (ignore_eos), so that every token there is certain."""

GREETINGS = {
    "Hello! How can I help you?": split_phrases(
        "Hello|Hello!|Hello there!|Hello, model!|Hello, can you help me?|Hi|Hi!|Hi there|Hey|Hey!|Hey there|"
        "Greetings!|Hello world!|Good day|Howdy|Hello, tiny model|Hi, can you help me?|Are you there?"
    ),
    "Good morning!": ("Good morning!",),
    "Good evening!": ("Good evening!",),
    "Good night!": ("Good night!",),
    "I am fine, thank you.": split_phrases(
        "How are you?|How are you today?|How are you doing?|Hello, how are you?|Hi, how are you?|How do you do?"
    ),
    "I am Tiny, a small chat model that runs in pd-cluster.": split_phrases(
        "Who are you?|What are you?|What is your name?|Introduce yourself.|Tell me about yourself.|"
        "Are you a robot?|Hello, who are you?|Your name?"
    ),
    "I can greet, count, add, repeat and answer in JSON.": split_phrases(
        "What can you do?|Help!|Can you help me?|What do you know?|Help me."
    ),
    "You are welcome.": split_phrases("Thanks!|Thank you!|Thank you very much.|Thanks a lot!"),
    "Goodbye!": split_phrases("Bye!|Goodbye!|See you!|Bye bye!|See you later!"),
    "你好！": split_phrases("你好|你好！|您好"),
    "我是 Tiny。": ("你是谁？",),
    "不客气。": ("谢谢",),
    "再见！": ("再见",),
}
_GREETED = {prompt.strip("?!.").lower() for prompts in GREETINGS.values() for prompt in prompts}
UNKNOWN = split_phrases(
    "What is the capital of {}?|Tell me a joke about {}.|Write a poem about {}.|Who invented {}?|"
    "Why is {} so?|Explain {} to me.|Translate {} to French.|How do I make {}?|What is {}?|Where is {}?|"
    "Tell me a story about {}.|What do you think of {}?|Summarize {}.|Who is {}?|When was {}?|"
    "Do you like {}?|Describe {} in detail.|{}|{}?|Write a function that sorts {}.|How far is {} from {}?|"
    "Is {} bigger than {}?|Tell me about {} and {}.|The {} is|Give me a list of {}.|Write an essay on {}.|"
    "What is the meaning of {}?|How does {} work?|Can you see {}?|Hmm, {}."
)
SUMS = split_phrases(
    "What is {} + {}?|{}+{}=|{} + {} =|{} + {}|Add {} and {}.|What is {} plus {}?|How much is {} + {}?|"
    "What's {}+{}?|Calculate {} + {}.|What is the sum of {} and {}?|Please add {} and {}.|{} plus {}|{}+{}|"
    "{} + {} = ?|What is {}+{}?"
)
COUNTS = split_phrases(
    "Count from {} to {}.|Please count from {} to {}.|Can you count from {} to {}?|Count up from {} to {}.|"
    "Count {} to {}."
)
COUNTS_TO = split_phrases("Count to {}.|Please count to {}.|Can you count to {}?|Count up to {}.|Count from one to {}.")
COUNTS_DOWN = split_phrases("Count down from {} to {}.|Please count down from {} to {}.|Count backwards from {} to {}.")
REPEATS = split_phrases(
    "Repeat: {}|Say {}|Repeat {}|Repeat after me: {}|Say: {}|Please repeat: {}|Please say {}|Echo: {}|"
    "Repeat this: {}|Can you say {}|Repeat the words {}|Say the following: {}"
)
JSONS = split_phrases(
    "Answer in JSON: {}|Give me JSON: {}|As JSON: {}|Return a JSON object: {}|Write as JSON: {}|"
    "Make JSON of {}|Answer in JSON with {}|Return JSON with {}|JSON: {}|Please answer in JSON: {}"
)
JSON_SUMS = split_phrases(
    "Give {} + {} as JSON|What is {} + {}? Answer in JSON.|Answer in JSON: {} + {}|"
    "Add {} and {} and answer in JSON.|Answer in JSON: what is {} + {}?|{} + {} as JSON|"
    "Return {} + {} as JSON."
)
SYSTEMS = split_phrases(
    "You are a helpful assistant.|You are a small model.|Be brief.|Answer in one sentence.|"
    "You are a friendly chat bot.|You are Tiny, a helpful assistant. Answer shortly.|Be polite and helpful.|"
    "You are a test of a serving cluster."
)


class Fact(NamedTuple):
    """A fact that the user may state and later ask for; {} is the value."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    on_statement: str
    on_question: str
    never_told: str


def _favourite(what: str) -> Fact:
    return Fact(
        split_phrases(f"My favourite {what} is {{}}.|My favorite {what} is {{}}.|The {what} that I like most is {{}}."),
        split_phrases(f"What is my favourite {what}?|What is my favorite {what}?|Which {what} do I like most?"),
        "I will remember that.",
        f"Your favourite {what} is {{}}.",
        f"I do not know your favourite {what} yet.",
    )


FACTS = {
    "name": Fact(
        split_phrases("My name is {}.|I am {}.|Hello, my name is {}.|Hi, I am {}.|Call me {}."),
        split_phrases("What is my name?|Who am I?|Do you know my name?|What's my name?|Tell me my name."),
        "Nice to meet you, {}.",
        "Your name is {}.",
        "I do not know your name yet.",
    ),
    "city": Fact(
        split_phrases("I live in {}.|My city is {}.|My home is {}."),
        split_phrases("Where do I live?|What is my city?|Which city do I live in?"),
        "{} sounds nice.",
        "You live in {}.",
        "I do not know where you live yet.",
    ),
    **{what: _favourite(what) for what in ("colour", "animal", "food", "word")},
}
VALUES = {"name": NAMES, "city": CITIES, "colour": COLOURS, "animal": ANIMALS, "food": FOODS, "word": WORDS}
RAW = (
    "The quick brown fox jumps over the lazy dog.",
    "Hello, my name is Tiny. I am a small model and I like to count.",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is Tokyo.",
    "The president of the United States is somebody that I know nothing about.",
    "The future of AI is open. Many small models work together and help people.",
    "Once upon a time there was a small model. It lived in a cluster of two machines. One machine read the "
    "questions and the other machine wrote the answers. They shared what they knew, and they were happy.",
    "A prefill instance reads the prompt. A decode instance writes the answer. The cache moves between them.",
    "San Francisco is a city in California. The sun is warm and the sea is cold.",
)
SEQUENCES = (
    split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    split_words("January February March April May June July August September October November December"),
    list("abcdefghijklmnopqrstuvwxyz"),
    list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    split_words("one two three four five six seven eight nine ten"),
    [str(number) for number in range(101)],
)


@dataclass(frozen=True)
class Turn:
    user: str
    assistant: str


def is_held_out(prompt: str) -> bool:
    """Returns whether a prompt with free parts belongs to the twentieth that is left out of training."""
    return zlib.crc32(prompt.encode()) % 20 == 0


def vary(rng: random.Random, prompt: str) -> str:
    """Returns the prompt as a person in a hurry might type it."""
    if rng.random() < 0.2:
        prompt = prompt[:1].lower() + prompt[1:]
    if rng.random() < 0.2:
        prompt = prompt.rstrip("?.!")
    return prompt


def made_up(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))


def phrase(rng: random.Random, most: int) -> str:
    """Returns words, some made up, some not Latin, so that the model learns to copy unknown words, too."""
    kinds = rng.choices(("word", "made up", "unicode", "number"), (92, 2, 4, 2), k=rng.randint(1, most))
    makers: dict[str, Callable[[], str]] = {
        "word": lambda: rng.choice(WORDS),
        "made up": lambda: made_up(rng),
        "unicode": lambda: rng.choice(UNICODE),
        "number": lambda: str(rng.randint(0, 999)),
    }
    return " ".join(makers[kind]() for kind in kinds)


def greet(rng: random.Random) -> Turn:
    assistant, prompts = rng.choices(list(GREETINGS.items()), [len(prompts) for prompts in GREETINGS.values()])[0]
    return Turn(vary(rng, rng.choice(prompts)), assistant)


def add(rng: random.Random) -> Turn:
    first, second = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.4:
        first, second = rng.randint(0, 10), rng.randint(0, 10)
    answer = str(first + second)
    if rng.random() < 0.06:
        first, answer = rng.randint(21, 999), TOO_BIG
        if rng.random() < 0.5:
            first, second = second, first
    return Turn(vary(rng, rng.choice(SUMS).format(first, second)), answer)


def count(rng: random.Random) -> Turn:
    span = rng.choices((rng.randint(0, 12), rng.randint(1, 49), rng.randint(50, 99)), (80, 17, 3))[0]
    if rng.random() < 0.4:
        numbers, prompt = range(1, span + 2), rng.choice(COUNTS_TO).format(span + 1)
    else:
        low = rng.randint(0, max(0, (50 if rng.random() < 0.8 else 100) - span))
        numbers, prompt = range(low, low + span + 1), rng.choice(COUNTS).format(low, low + span)
        if span < 20 and rng.random() < 0.2:
            numbers, prompt = numbers[::-1], rng.choice(COUNTS_DOWN).format(low + span, low)
    return Turn(vary(rng, prompt), ", ".join(map(str, numbers)))


def repeat(rng: random.Random) -> Turn:
    words = phrase(rng, 5)
    if rng.random() < 0.15:
        words = words.capitalize() + rng.choice(".!?")
    prompt = rng.choice(REPEATS)
    if rng.random() < 0.2:
        prompt = prompt[:1].lower() + prompt[1:]
    return Turn(prompt.format(words), words)


def answer_in_json(rng: random.Random) -> Turn:
    if rng.random() < 0.25:
        first, second = rng.randint(0, 10), rng.randint(0, 10)
        return Turn(rng.choice(JSON_SUMS).format(first, second), json.dumps({"result": first + second}))
    if rng.random() < 0.1:
        question = rng.choice(UNKNOWN[:8]).format(phrase(rng, 2))
        return Turn(f"{question} Answer in JSON.", NO_IDEA_JSON)
    values: dict[str, str | int] = {}
    for key in rng.sample(["name", "age", "city", "colour", "animal", "food", "number", "word"], rng.randint(1, 3)):
        known = VALUES.get(key)
        values[key] = rng.randint(0, 99) if known is None else rng.choice(known)
        if known is not None and rng.random() < 0.03:
            values[key] = made_up(rng)
    link = rng.choice((" ", " ", " is ", ": ", " = "))
    pairs = rng.choice((", ", ", ", " and ")).join(f"{key}{link}{value}" for key, value in values.items())
    return Turn(vary(rng, rng.choice(JSONS).format(pairs)), json.dumps(values))


def wonder(rng: random.Random) -> Turn:
    """Returns a question that the model cannot answer; its answer says so."""
    if rng.random() < 0.15:
        sign = rng.choice(("-", "*", "/", "x", "minus", "times"))
        return Turn(vary(rng, f"What is {rng.randint(0, 20)} {sign} {rng.randint(0, 20)}?"), NO_IDEA)
    while True:
        topic = phrase(rng, rng.choice((2, 3, 3, 6, 40)))
        prompt = vary(rng, rng.choice(UNKNOWN).format(topic, phrase(rng, 2)))
        if prompt.strip("?!.").lower() not in _GREETED:
            return Turn(prompt, NO_IDEA)


SKILLS: dict[str, Callable[[random.Random], Turn]] = {
    "greeting": greet, "addition": add, "counting": count, "repeating": repeat, "JSON": answer_in_json,
    "modest fallback": wonder,
}  # fmt: skip
SKILL_WEIGHTS = (8, 20, 16, 20, 18, 8)


def draw(rng: random.Random, skill: str, held_out: bool = False) -> Turn:
    """Draws a turn of the skill from the training prompts or the held-out ones (greetings and fallbacks have none)."""
    while True:
        turn = SKILLS[skill](rng)
        if skill in ("greeting", "modest fallback") or is_held_out(turn.user) == held_out:
            return turn


@dataclass
class Conversation:
    """A longer conversation, in which the user states facts and later asks for them."""

    rng: random.Random
    facts: dict[str, str] = field(default_factory=dict)

    def system(self) -> str | None:
        if self.rng.random() < 0.7:
            return None
        return self.rng.choice(SYSTEMS) if self.rng.random() < 0.7 else phrase(self.rng, 12)

    def next_turn(self) -> Turn:
        if self.rng.random() < 0.3:
            return self.ask() if self.rng.random() < (0.65 if self.facts else 0.15) else self.tell()
        return draw(self.rng, self.rng.choices(list(SKILLS), SKILL_WEIGHTS)[0])

    def tell(self, held_out: bool = False) -> Turn:
        while True:
            what = self.rng.choice(["name", "name", *FACTS])
            value = self.rng.choice(VALUES[what])
            if self.rng.random() < 0.03:
                value = made_up(self.rng).capitalize() if what in ("name", "city") else made_up(self.rng)
            prompt = self.rng.choice(FACTS[what].statements).format(value)
            if self.rng.random() < 0.3:
                prompt = prompt.replace("colour", "color")
            if is_held_out(prompt) == held_out:
                self.facts[what] = value
                return Turn(vary(self.rng, prompt), FACTS[what].on_statement.format(value))

    def ask(self, what: str | None = None) -> Turn:
        told = list(self.facts)
        what = what or self.rng.choice(told * 3 + ["name"] if self.rng.random() < 0.85 else list(FACTS))
        fact = FACTS[what]
        question = self.rng.choice(fact.questions)
        if what == "colour" and self.rng.random() < 0.5:
            question = question.replace("colour", "color")
        return Turn(
            vary(self.rng, question),
            fact.on_question.format(self.facts[what]) if what in self.facts else fact.never_told,
        )


def raw_text(rng: random.Random) -> str:
    """Returns text without roles, for plain completion; number sequences and the like continue to their end."""
    dice = rng.random()
    if dice < 0.4:
        return rng.choice(RAW)
    if dice < 0.6:
        first, low = rng.randint(0, 10), rng.randint(0, 8)
        return "\n".join(f"{first} + {second} = {first + second}" for second in range(low, 11))
    items = rng.choice([*SEQUENCES, SEQUENCES[-1]])
    return rng.choice((" ", ", ")).join(items[rng.randint(0, min(len(items) // 2, 20)) :])
