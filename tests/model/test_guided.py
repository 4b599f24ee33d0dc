"""Guides with tiny checkpoints: outputs satisfy them, and are the same however the engine is disturbed."""

from __future__ import annotations

import io
import json
import random
import re
import tarfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import GuideError
from pd_cluster.text.grammar import Compiler
from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import Guide, Request, RequestSpec, Sampling
from tests.support.checkpoints import EOS_ID, VOCAB_SIZE
from tests.support.engines import make_core, run
from tests.support.schemas import random_schema

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 7]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}], "triggers": ["<f"]}
GUIDES: list[tuple[Guide, Callable[[str], bool]]] = [
    (Guide("json", json.dumps(SCHEMA)), lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    (Guide("regex", "[a-z]{3,6}-[0-9]+x"), lambda text: re.fullmatch("[a-z]{3,6}-[0-9]+x", text) is not None),
    (Guide("choice", '["positive", "négative", "n/a"]'), lambda text: text in ("positive", "négative", "n/a")),
    (
        Guide("grammar", 'root ::= "(" root ")" | pair\npair ::= [ab] "," [01]'),
        lambda text: re.fullmatch(r"\(*[ab],[01]\)*", text) is not None and text.count("(") == text.count(")"),
    ),
    (Guide("json_object"), lambda text: isinstance(json.loads(text), dict)),
    (Guide("structural_tag", json.dumps(TAG)), lambda text: "<f" not in re.sub("<f>(true|false)</f>", "", text)),
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


@pytest.fixture(scope="module")
def core(model: Path) -> EngineCore:
    return make_core(model, num_blocks=2000, max_num_seqs=128)


def outputs(core: EngineCore, requests: list[Request]) -> list[list[int]]:
    run(core, requests)
    return [request.output_token_ids for request in requests]


def requests_of(guides: list[Guide | None], **fields: Any) -> list[Request]:
    found = []
    for at, guide in enumerate(guides):
        sampling = Sampling(guide=guide, seed=at, **{"max_tokens": 60, **fields})
        found.append(Request(f"r{at}", RequestSpec(list(b"prompt %d" % at), sampling), arrival_s=at))
    return found


def mixed_requests(temperature: float) -> list[Request]:
    """Makes requests of every kind except the last two, which seldom end, alternating with unguided ones."""
    guides = [each for guide, _ in GUIDES[:4] for each in (guide, None)]
    return requests_of(guides, temperature=temperature, ignore_eos=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("guide", "fits"), GUIDES, ids=[guide.kind for guide, _ in GUIDES])
def test_every_kind(
    core: EngineCore, tokenizer: Tokenizer, guide: Guide, fits: Callable[[str], bool], temperature: float
) -> None:
    num_ended = 0
    for output in outputs(core, requests_of([guide] * 4, temperature=temperature, max_tokens=100)):
        if output[-1] == EOS_ID:
            num_ended += 1
            text = tokenizer.decode(output[:-1], skip_special_tokens=False)
            assert fits(text), text
    assert num_ended or guide.kind in ("json_object", "structural_tag")


def num_valid(core: EngineCore, tokenizer: Tokenizer, schemas: list[Any], **fields: Any) -> int:
    """Returns how many outputs ended; asserts that each of them is valid."""
    guides: list[Guide | None] = [Guide("json", json.dumps(schema)) for schema in schemas]
    num_ended = 0
    for schema, output in zip(schemas, outputs(core, requests_of(guides, max_tokens=300, **fields)), strict=True):
        if output[-1:] == [EOS_ID]:
            num_ended += 1
            value = json.loads(tokenizer.decode(output[:-1], skip_special_tokens=False))
            jsonschema.Draft202012Validator(schema).validate(value)
    return num_ended


def test_a_hundred_schemas(core: EngineCore, tokenizer: Tokenizer) -> None:
    assert num_valid(core, tokenizer, [random_schema(seed) for seed in range(100)]) >= 90


@pytest.mark.parametrize(("mode", "temperature"), [("recompute", 0.9), ("swap", 0.0)])
def test_a_full_pool_changes_no_token(model: Path, core: EngineCore, mode: str, temperature: float) -> None:
    expected = outputs(core, mixed_requests(temperature))
    small = make_core(model, num_blocks=8, max_model_len=128, preemption_mode=mode, swap_space_gib=0.01)
    assert outputs(small, mixed_requests(temperature)) == expected
    assert small.scheduler.num_preemptions > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_decode_goes_on_where_prefill_chose_the_first_tokens(core: EngineCore, temperature: float) -> None:
    """Another engine, given only the token ids, continues the guide after token one."""
    expected = outputs(core, mixed_requests(temperature))
    firsts = mixed_requests(temperature)
    for request in firsts:
        request.leg = "prefill"
        core.scheduler.add(request)
    while any(not request.output_token_ids for request in firsts):
        core.step()
    for request in firsts:
        core.scheduler.finish(request)
    seconds = mixed_requests(temperature)
    for first, second in zip(firsts, seconds, strict=True):
        second.output_token_ids = list(first.output_token_ids)
    assert outputs(core, seconds) == expected


def test_guided_rows_leave_the_others_alone(core: EngineCore) -> None:
    together = outputs(core, mixed_requests(0.9))
    unguided = outputs(core, mixed_requests(0.9)[1::2])
    assert together[1::2] == unguided


def test_logprobs_are_the_models_own(core: EngineCore) -> None:
    """A guide changes the choice of a token, not its reported logprob."""
    (request,) = requests_of([Guide("choice", '["zzz"]')], temperature=0.0, logprobs=2)
    tokens = run(core, [request])["r0"][0]
    assert tokens[0].logprobs is not None
    assert tokens[0].logprobs.rank > 1
    assert tokens[0].logprobs.top[0][0] != tokens[0].token_id


# ---- foreign schemas: the JSON Schema test suite from the source of PyPI's jsonschema


INDEX = "https://pypi.org/simple/jsonschema/"


SUITE = re.compile(r"jsonschema-[^/]*/json/tests/draft2020-12/[^/]*\.json")


NUM_SCHEMAS = 100


def download() -> bytes:
    version = metadata.version("jsonschema")
    try:
        page = httpx.get(INDEX, timeout=30, follow_redirects=True)
        (link,) = set(re.findall(rf'href="([^"#]*jsonschema-{re.escape(version)}\.tar\.gz)', page.text))
        return httpx.get(page.url.join(link), timeout=60, follow_redirects=True).raise_for_status().content
    except (httpx.HTTPError, ValueError) as error:
        pytest.skip(f"the source of jsonschema {version} cannot be had: {error!r}")


def suite() -> Iterator[Any]:
    """Yields every schema of the suite."""
    with tarfile.open(fileobj=io.BytesIO(download())) as archive:
        for member in archive.getmembers():
            if SUITE.fullmatch(member.name) and (file := archive.extractfile(member)) is not None:
                yield from (case["schema"] for case in json.loads(file.read()))


@pytest.mark.slow
def test_a_hundred_schemas_of_the_suite(model: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    """With accepted schemas, every output that ends is valid. Skipped without a network."""
    compiler = Compiler(model / "tokenizer.json", VOCAB_SIZE, {EOS_ID})
    found = [schema for schema in suite() if isinstance(schema, dict)]

    def is_taken(schema: Any) -> bool:
        try:
            compiler.compile(Guide("json", json.dumps(schema)))
        except GuideError:
            return False
        return True

    taken = [schema for schema in found if is_taken(schema)]
    chosen = random.Random(0).sample(taken, NUM_SCHEMAS)
    core = make_core(model, num_blocks=4000, max_num_seqs=128)
    num_ended = num_valid(core, tokenizer, chosen, logit_bias=((EOS_ID, 20.0),))
    with capsys.disabled():
        print(f"\n{len(found)} schemas, {len(taken)} taken, {NUM_SCHEMAS} tried, {num_ended} ended, all valid")
    assert num_ended >= NUM_SCHEMAS // 2
