"""Each documented sampling parameter changes a real engine's answers, in each documented form.

The expected effects are derived by hand from the logits of transformers' model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pd_cluster import LLM, SamplingParams, pipeline
from pd_cluster.extras.lmdeploy.async_engine import AsyncEngine
from pd_cluster.messages import GenerationConfig, TurbomindEngineConfig
from tests.support.checkpoints import EOS_ID, make_tokenizer, reference_greedy, reference_model
from tests.support.copies import copy_of

TEXT = "Once upon a time"
IDS: list[int] = make_tokenizer().encode(TEXT).ids
NUM_SAMPLES = 32
NUM_TOKENS = 24
END_AT = 5  # position in the greedy answer of a token that also ends answers
ONE: dict[str, Any] = {"max_tokens": 1, "ignore_eos": True, "temperature": 1.0, "top_p": 1.0}
GREEDY: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "top_k": 1, "temperature": 1.0, "top_p": 1.0}

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- calls: each takes a text, a number of answers, and options under `SamplingParams`' names


PLAIN = "{{ messages[0].content }}"  # a template whose prompt is the text itself

CONFIG_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "random_seed"}
KEYWORD_NAMES = {"max_tokens": "request_output_len"}
ORDER = ("request_output_len", "top_k", "top_p", "temperature", "repetition_penalty", "ignore_eos")
KEYWORDS = frozenset({"max_tokens", "top_k", "top_p", "temperature", "repetition_penalty", "ignore_eos"})


class Engines(NamedTuple):
    llm: LLM
    pipe: AsyncEngine


Ask = Callable[..., list[list[int]]]


class Way(NamedTuple):
    """`takes`: the options of this call; None: all options."""

    name: str
    ask: Callable[[Engines, str, int, dict[str, Any]], list[list[int]]]
    takes: frozenset[str] | None = None


def _generate(engines: Engines, text: str, num: int, options: dict[str, Any]) -> list[list[int]]:
    params = [SamplingParams(**({"seed": at} | options)) for at in range(num)]
    outputs = engines.llm.generate([text] * num, params, use_tqdm=False)
    return [output.outputs.token_ids for output in outputs]


def _by_config(engines: Engines, text: str, num: int, options: dict[str, Any]) -> list[list[int]]:
    named = {CONFIG_NAMES.get(name, name): value for name, value in options.items()}
    configs = [GenerationConfig(**({"random_seed": at} | named)) for at in range(num)]
    found = engines.pipe([text] * num, gen_config=configs, do_preprocess=False)
    return [response.token_ids for response in found]


def _by_keywords(engines: Engines, text: str, num: int, options: dict[str, Any]) -> list[list[int]]:
    named = {KEYWORD_NAMES.get(name, name): value for name, value in options.items()}
    with pytest.warns(FutureWarning, match=rf"^{', '.join(sorted(named, key=ORDER.index))}: deprecated; use gen_co"):
        found = engines.pipe([text] * num, do_preprocess=False, **named)
    return [response.token_ids for response in found]


WAYS = (
    Way("LLM.generate", _generate),
    Way("GenerationConfig", _by_config),
    Way("keywords", _by_keywords, KEYWORDS),
)
LLM_WAYS = WAYS[:1]


# ---- engines


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint whose greedy answer to TEXT ends early, unless the end of sequence is ignored."""
    made = checkpoint("llama", max_position_embeddings=1024)
    greedy = reference_greedy(made, IDS, NUM_TOKENS)
    assert len(greedy) == NUM_TOKENS
    assert greedy.index(greedy[END_AT]) == END_AT
    ends = {"generation_config.json": {"eos_token_id": [EOS_ID, greedy[END_AT]]}}
    return copy_of(made, tmp_path_factory.mktemp("ends"), ends)


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[Engines]:
    config = TurbomindEngineConfig(cache_max_entry_count=0.002)
    with LLM(str(folder), num_blocks=600) as llm, pipeline(str(folder), backend_config=config) as pipe:
        yield Engines(llm, pipe)


def ways(*options: str, among: tuple[Way, ...] = WAYS) -> Any:
    """Parametrizes `ask` over the calls that take all of these options."""
    taken = [way for way in among if way.takes is None or way.takes >= {*options}]
    assert taken
    return pytest.mark.parametrize("ask", taken, ids=[way.name for way in taken], indirect=True)


@pytest.fixture
def ask(request: pytest.FixtureRequest, engines: Engines) -> Ask:
    """Returns `ask(num, **options)`, which returns `num` answers to TEXT."""
    way: Way = request.param
    return lambda num=1, **options: way.ask(engines, TEXT, num, options)


# ---- transformers' results


def logits_after(folder: Path, ids: list[int]) -> torch.Tensor:
    """Returns the logits of the next token, [vocab_size]."""
    with torch.inference_mode():
        logits: torch.Tensor = reference_model(folder)(torch.tensor([ids])).logits[0, -1]
    return logits.clone()


def likeliest(folder: Path) -> tuple[list[int], list[float]]:
    """Returns an answer's possible first tokens by probability at temperature 1, and their probabilities."""
    found = logits_after(folder, IDS).softmax(-1).sort(descending=True)
    return found.indices.tolist(), found.values.tolist()


def adjusted_greedy(folder: Path, adjust: Callable[[torch.Tensor, list[int]], None]) -> list[int]:
    """Generates greedily from logits changed by `adjust(logits, output so far)`."""
    output: list[int] = []
    for _ in range(NUM_TOKENS):
        logits = logits_after(folder, IDS + output)
        adjust(logits, output)
        output.append(int(logits.argmax()))
    return output


def firsts(answers: list[list[int]]) -> set[int]:
    return {answer[0] for answer in answers}


# ---- length of answers


@ways("max_tokens", "ignore_eos", "top_k")
def test_max_tokens_is_the_answers_length(ask: Ask, folder: Path) -> None:
    whole = adjusted_greedy(folder, lambda logits, output: None)
    for num_tokens in (1, 7, NUM_TOKENS):
        assert ask(**GREEDY | {"max_tokens": num_tokens}) == [whole[:num_tokens]]


@ways("ignore_eos")
def test_an_answer_ends_at_its_end_of_sequence_unless_that_is_ignored(ask: Ask) -> None:
    (whole,) = ask(**GREEDY)
    (ended,) = ask(**GREEDY | {"ignore_eos": False})
    assert len(whole) == NUM_TOKENS
    assert ended == whole[: END_AT + 1]


@ways("min_tokens")
def test_no_answer_ends_before_min_tokens(ask: Ask, folder: Path) -> None:
    ends = list(reference_model(folder).generation_config.eos_token_id)

    def adjust(logits: torch.Tensor, output: list[int]) -> None:
        if len(output) < 9:
            logits[ends] = -torch.inf

    (answer,) = ask(**GREEDY | {"ignore_eos": False, "min_tokens": 9})
    assert len(answer) >= 9
    assert answer == adjusted_greedy(folder, adjust)[: len(answer)]


def test_defaults(engines: Engines, folder: Path) -> None:
    """LMDeploy's calls give 512 tokens, `generate` 16, and a chat as many as fit.

    LMDeploy's keywords sample from the 40 likeliest, its GenerationConfig is greedy, vLLM's sample from all.
    """
    assert len(engines.pipe(TEXT, gen_config=GenerationConfig(ignore_eos=True), do_preprocess=False).token_ids) == 512
    params = SamplingParams(ignore_eos=True)
    (output,) = engines.llm.generate(TEXT, params, use_tqdm=False)
    assert len(output.outputs.token_ids) == 16
    (output,) = engines.llm.chat([{"role": "user", "content": TEXT}], params, use_tqdm=False, chat_template=PLAIN)
    assert len(output.outputs.token_ids) == 1024 - len(IDS)
    (tokens, probabilities), texts = likeliest(folder), [TEXT] * NUM_SAMPLES
    with pytest.warns(FutureWarning):
        found = engines.pipe(texts, do_preprocess=False, request_output_len=1)
    assert len(firsts([each.token_ids for each in found])) > 1
    assert firsts([each.token_ids for each in found]) <= {*tokens[:40]}
    config = GenerationConfig(max_new_tokens=1)
    assert firsts([each.token_ids for each in engines.pipe(texts, config, do_preprocess=False)]) == {tokens[0]}
    outputs = engines.llm.generate(texts, use_tqdm=False)
    assert sum(probabilities[:12]) < 0.5
    assert not firsts([output.outputs.token_ids for output in outputs]) <= {*tokens[:12]}


# ---- which tokens may be drawn


@ways("top_k")
def test_top_k_leaves_the_k_likeliest(ask: Ask, folder: Path) -> None:
    tokens, _ = likeliest(folder)
    assert firsts(ask(**ONE | {"top_k": 1})) == {tokens[0]}
    assert_left(ask, {"top_k": 3}, tokens[:3])


@ways("top_p")
def test_top_p_leaves_the_likeliest_that_make_it_up(ask: Ask, folder: Path) -> None:
    tokens, probabilities = likeliest(folder)
    top_p = sum(probabilities[:3]) + probabilities[3] / 2  # needs the fourth token, but not the fifth
    assert_left(ask, {"top_k": 0, "top_p": top_p}, tokens[:4])


@ways("min_p")
def test_min_p_leaves_those_that_are_likely_enough(ask: Ask, folder: Path) -> None:
    tokens, probabilities = likeliest(folder)
    min_p = (probabilities[2] + probabilities[3]) / 2 / probabilities[0]
    assert_left(ask, {"top_k": 0, "min_p": min_p}, tokens[:3])


def assert_left(ask: Ask, options: dict[str, Any], tokens: list[int]) -> None:
    """Asserts that several of `tokens` and no others are sampled; without the options others are, too."""
    found = firsts(ask(NUM_SAMPLES, **ONE | options))
    assert len(found) > 1
    assert found <= {*tokens}
    assert not firsts(ask(NUM_SAMPLES, **ONE | {"top_k": 0})) <= {*tokens}


@ways("temperature")
def test_a_higher_temperature_is_more_random(ask: Ask, folder: Path) -> None:
    tokens, _ = likeliest(folder)
    options = ONE | {"top_k": 0}
    cold, warm = (ask(NUM_SAMPLES, **options | {"temperature": each}) for each in (0.01, 1.0))
    assert firsts(cold) == {tokens[0]}
    assert len(firsts(warm)) > 8


@ways("seed")
def test_a_seed_repeats_an_answer(ask: Ask) -> None:
    options = ONE | {"top_k": 0, "max_tokens": 9}
    assert ask(3, **options | {"seed": 5}) == 3 * ask(1, **options | {"seed": 5})
    assert ask(1, **options | {"seed": 5}) != ask(1, **options | {"seed": 6})


# ---- penalties


@ways("repetition_penalty")
@pytest.mark.parametrize("penalty", [1.5, 0.7])
def test_a_repetition_penalty_weighs_what_was_there(ask: Ask, folder: Path, penalty: float) -> None:
    def adjust(logits: torch.Tensor, output: list[int]) -> None:
        seen = sorted({*IDS, *output})
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)

    wanted = adjusted_greedy(folder, adjust)
    plain = adjusted_greedy(folder, lambda logits, output: None)
    assert ask(**GREEDY | {"repetition_penalty": penalty}) == [wanted]
    assert num_repeated(wanted) < num_repeated(plain) if penalty > 1 else num_repeated(wanted) > num_repeated(plain)


def num_repeated(output: list[int]) -> int:
    """Counts tokens that were in the prompt or earlier in the output."""
    return sum(token in IDS + output[:at] for at, token in enumerate(output))


@ways("presence_penalty", among=LLM_WAYS)
@pytest.mark.parametrize(
    ("name", "penalty"), [("presence_penalty", 2.0), ("frequency_penalty", 2.0), ("frequency_penalty", -1.0)]
)
def test_a_penalty_weighs_whether_or_how_often_a_token_was_generated(
    ask: Ask, folder: Path, name: str, penalty: float
) -> None:
    def adjust(logits: torch.Tensor, output: list[int]) -> None:
        for token in {*output} if name == "presence_penalty" else output:
            logits[token] -= penalty

    wanted = adjusted_greedy(folder, adjust)
    assert wanted != adjusted_greedy(folder, lambda logits, output: None)
    assert ask(**GREEDY | {name: penalty}) == [wanted]


@ways("bad_words")
def test_bad_words_are_never_generated(ask: Ask, folder: Path) -> None:
    """`<wordN>` is one token."""
    tokenizer = make_tokenizer()
    (plain,) = ask(**GREEDY)
    token = next(token for token in plain if token > EOS_ID)

    def adjust(logits: torch.Tensor, output: list[int]) -> None:
        logits[token] = -torch.inf

    (found,) = ask(**GREEDY | {"bad_words": [tokenizer.decode([token])]})
    assert found == adjusted_greedy(folder, adjust) != plain
