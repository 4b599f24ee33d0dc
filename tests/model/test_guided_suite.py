"""Schemas that others wrote: the JSON Schema test suite, as the source of PyPI's jsonschema carries it.

Needs the network, and so is slow and skipped without it.
"""

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

from pd_cluster.errors import GuideError
from pd_cluster.text.grammar import Compiler
from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import Guide, Order, Request, Sampling
from tests.support.checkpoints import EOS_ID, VOCAB_SIZE
from tests.support.engines import make_core, run

INDEX = "https://pypi.org/simple/jsonschema/"
SUITE = re.compile(r"jsonschema-[^/]*/json/tests/draft2020-12/[^/]*\.json")
NUM_SCHEMAS = 100

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def download() -> bytes:
    version = metadata.version("jsonschema")
    try:
        page = httpx.get(INDEX, timeout=30, follow_redirects=True)
        (link,) = set(re.findall(rf'href="([^"#]*jsonschema-{re.escape(version)}\.tar\.gz)', page.text))
        return httpx.get(page.url.join(link), timeout=60, follow_redirects=True).raise_for_status().content
    except (httpx.HTTPError, ValueError) as error:
        pytest.skip(f"the source of jsonschema {version} cannot be had: {error!r}")


def suite() -> Iterator[Any]:
    """Every schema of the suite."""
    with tarfile.open(fileobj=io.BytesIO(download())) as archive:
        for member in archive.getmembers():
            if SUITE.fullmatch(member.name) and (file := archive.extractfile(member)) is not None:
                yield from (case["schema"] for case in json.loads(file.read()))


def test_a_hundred_schemas_of_the_suite(checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Accepted schemas are followed: every output that comes to an end is valid."""
    model = checkpoint("llama")
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
    core, tokenizer = make_core(model, num_blocks=4000, max_num_seqs=128), Tokenizer(model)
    requests = []
    for at, schema in enumerate(chosen):
        sampling = Sampling(
            guide=Guide("json", json.dumps(schema)), seed=at, max_tokens=300, logit_bias=((EOS_ID, 20.0),)
        )
        requests.append(Request(f"r{at}", Order(list(b"prompt %d" % at), sampling), arrival_s=at))
    run(core, requests)
    num_ended = 0
    for schema, request in zip(chosen, requests, strict=True):
        if request.output_token_ids[-1:] == [EOS_ID]:
            num_ended += 1
            value = json.loads(tokenizer.decode(request.output_token_ids[:-1], skip_special_tokens=False))
            jsonschema.Draft202012Validator(schema).validate(value)
    with capsys.disabled():
        print(f"\n{len(found)} schemas, {len(taken)} taken, {NUM_SCHEMAS} tried, {num_ended} ended, all valid")
    assert num_ended >= NUM_SCHEMAS // 2
