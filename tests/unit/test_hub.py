"""Models by name, downloaded by huggingface_hub's own code from a hub on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_cluster.checkpoints.hub import resolve_model
from pd_cluster.errors import ModelError
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from tests.support.hub import Hub

NAME = "nobody/tiny"
PROGRAM = """
import sys
from pd_cluster.errors import ModelError
from pd_cluster.checkpoints.hub import resolve_model
try:
    print(resolve_model(*sys.argv[1:]))
except ModelError as error:
    print("refused:", error)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Serves two revisions of the shipped model; the second has another config.json, and code files."""
    second = tmp_path / "second"
    shutil.copytree(SHIPPED_MODEL, second)
    config = json.loads((second / "config.json").read_bytes())
    (second / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    (second / "modeling_own.py").write_text("raise SystemExit('never run')")
    with Hub({NAME: {"main": SHIPPED_MODEL, "v2": second}}) as running:
        yield running


def resolved(hub: Hub, home: Path, *arguments: str, **environment: str) -> str:
    """Resolves in a separate process, because huggingface_hub reads its environment only once."""
    env = os.environ | hub.environment(home) | environment
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return found.stdout.strip()


def test_a_name_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    folder = Path(resolved(hub, home, NAME))
    for file in SHIPPED_MODEL.iterdir():
        if file.suffix in (".json", ".safetensors", ".jinja"):
            assert (folder / file.name).read_bytes() == file.read_bytes()
    asked = len(hub.asked)
    assert Path(resolved(hub, home, NAME)) == folder
    assert len(hub.asked) == asked, "cached files must not be requested again"
    assert Path(resolved(hub, home, NAME, HF_HUB_OFFLINE="1")) == folder


def test_a_revision_is_its_own_and_code_stays_away(hub: Hub, tmp_path: Path) -> None:
    home, place = tmp_path / "home", tmp_path / "models"
    first, second = Path(resolved(hub, home, NAME)), Path(resolved(hub, home, NAME, "v2", str(place)))
    assert first != second
    assert second.is_relative_to(place), "the model must be in the named folder"
    assert json.loads((second / "config.json").read_bytes())["rope_theta"] == 5.0
    assert not list(second.glob("*.py"))
    assert "revision v3: the hub has no such revision of it" in resolved(hub, home, NAME, "v3")
    hub.gated = {NAME}
    assert "set HF_TOKEN" in resolved(hub, tmp_path / "other", NAME)


def test_a_download_that_was_cut_is_finished_by_the_next_start(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    hub.broken = {file.name for file in SHIPPED_MODEL.glob("*.safetensors")}
    refusal = resolved(hub, home, NAME)
    assert refusal.startswith(f"refused: --model {NAME}: no such folder, not in the local Hugging Face cache, and it")
    assert refusal.count("\n") == 0
    hub.broken = set()
    assert list(Path(resolved(hub, home, NAME)).glob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "environment", "refusal"),
    [
        ("nobody/else", {}, "no such folder, and the hub has no model of that name (one that is private needs HF_"),
        (NAME, {"HF_HUB_OFFLINE": "1"}, "no such folder, and no model of that name in the local Hugging Face cache; "),
        ("bad name/with spaces?", {}, "no such folder, and no name that a hub's model could have"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    hub: Hub, tmp_path: Path, name: str, environment: dict[str, str], refusal: str
) -> None:
    said = resolved(hub, tmp_path / "home", name, **environment)
    assert said.startswith(f"refused: --model {name}: {refusal}")
    assert "\n" not in said


def test_a_folder_has_one_version(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^--revision v2: --model .* is a folder, which has one version; leave it"):
        resolve_model(str(tmp_path), "v2")
