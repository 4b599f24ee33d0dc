"""The guided requests of the reference document and of docs/clients.md, with the shipped model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pd_cluster.settings.engine_config import SHIPPED_MODEL
from tests.support.cluster import LiveCluster

ROOT = Path(__file__).parents[2]
PROMPT = (
    "Meet our valorous character, named Knight, who has reached the age of 32. Clad in impenetrable plate armor, "
    "Knight is well-prepared for any battle. Armed with a trusty sword and boasting a strength score of 90, this "
    "character stands as a formidable warrior on the field.Please provide details for this character, including "
    "their Name, Age, preferred Armor, Weapon, and Strength"
)
CHARACTER: dict[str, Any] = {
    "title": "Character",
    "type": "object",
    "properties": {
        "name": {"title": "Name", "maxLength": 10, "type": "string"},
        "age": {"title": "Age", "type": "integer"},
        "armor": {"$ref": "#/definitions/Armor"},
        "weapon": {"$ref": "#/definitions/Weapon"},
        "strength": {"title": "Strength", "type": "integer"},
    },
    "required": ["name", "age", "armor", "weapon", "strength"],
    "definitions": {
        "Armor": {
            "title": "Armor",
            "description": "An enumeration.",
            "enum": ["leather", "chainmail", "plate"],
            "type": "string",
        },
        "Weapon": {
            "title": "Weapon",
            "description": "An enumeration.",
            "enum": ["sword", "axe", "mace", "spear", "bow", "crossbow"],
            "type": "string",
        },
    },
}
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with LiveCluster(tmp_path_factory.mktemp("guided"), SHIPPED_MODEL, arguments=["--num-blocks=256"]) as running:
        yield running


def curl(cluster: LiveCluster, path: str, body: str) -> dict[str, Any]:
    """Returns the answer's single choice."""
    command = ["curl", "-sS", "--noproxy", "*", "-X", "POST", f"{cluster.url}{path}"]
    command += ["-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (choice,) = json.loads(done.stdout)["choices"]
    return dict(choice)


@pytest.mark.parametrize(
    ("prompt", "encode"),
    [(PROMPT, json.dumps), ("Describe a character.", dict)],
    ids=["as documented, in a string", "with too little information, as an object"],
)
def test_the_reference_documents_guided_json(cluster: LiveCluster, prompt: str, encode: Any) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 200, "temperature": 0, "guided_json": encode(CHARACTER)}
    choice = curl(cluster, "/v1/completions", json.dumps(body))
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"]), CHARACTER)


def test_the_pages_client_with_a_tool(cluster: LiveCluster) -> None:
    """The shipped model calls the tool, without a parser flag, and answers with its result."""
    text = (ROOT / "docs" / "clients.md").read_text("utf-8")
    block = next(each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "tools=tools" in each)
    went: dict[str, Any] = {}
    exec(block.replace("http://127.0.0.1:9000", cluster.url).replace("tiny-chat", "tiny"), went)
    function = went["call"].function
    assert (function.name, json.loads(function.arguments)) == ("get_weather", {"city": "Paris"})
    assert went["message"].tool_calls == [went["call"]]
    (answer,) = went["answer"].choices
    assert (answer.message.content, answer.finish_reason) == ("The weather in Paris: sunny.", "stop")


def test_the_pages_example(cluster: LiveCluster) -> None:
    text = (ROOT / "docs" / "clients.md").read_text("utf-8")
    body = next(each for each in re.findall(r"-d '([^']*)'", text) if "response_format" in each)
    choice = curl(cluster, "/v1/chat/completions", body)
    assert (json.loads(choice["message"]["content"]), choice["finish_reason"]) == ({"result": 7}, "stop")
