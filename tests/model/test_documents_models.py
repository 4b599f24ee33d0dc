"""The model, version and tokenizer selected by the documents' arguments, with a real engine.

A local cache replaces the Hugging Face hub; huggingface_hub itself reads it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from pd_cluster import LLM, SamplingParams, pipeline
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.messages import GenerationConfig, Response, TurbomindEngineConfig
from tests.support.checkpoints import make_tokenizer, reference_greedy
from tests.support.copies import copy_of
from tests.support.hub import Hub

NAME = "internlm/internlm-chat-7b"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = TurbomindEngineConfig(cache_max_entry_count=0.002)
ROOM: dict[str, Any] = {"max_model_len": 128, "num_blocks": 64}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def other(checkpoint: Callable[..., Path]) -> Path:
    """Returns another version of the model."""
    return checkpoint("llama", seed=1)


@pytest.fixture(scope="module")
def swapped(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy whose tokenizer swaps "a" and "b"."""
    folder = copy_of(path, tmp_path_factory.mktemp("swapped"), {})
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns `hub(revision=folder)`, which stores versions of NAME in the local cache, the only source of models."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def keep(**folders: Path) -> None:
        kept = tmp_path / f"models--{NAME.replace('/', '--')}"
        for name in ("refs", "snapshots"):
            (kept / name).mkdir(parents=True, exist_ok=True)
        for at, (revision, folder) in enumerate(folders.items()):
            commit = f"{at:040x}"
            (kept / "refs" / revision).write_text(commit)
            (kept / "snapshots" / commit).symlink_to(folder)

    return keep


def ids(text: str) -> list[int]:
    found: list[int] = make_tokenizer().encode(text).ids
    return found


def answer(model: str | Path, prompt: str = "ab", **arguments: Any) -> list[int]:
    with LLM(str(model), **ROOM, **arguments) as llm:
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    return output.outputs.token_ids


def greedy(folder: Path, prompt: str) -> list[int]:
    return reference_greedy(folder, ids(prompt), 6)[:6]


def test_a_model_by_its_id(hub: Callable[..., None], path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Works with both tokenizer modes: there is one tokenizer, and requesting the other logs a warning."""
    hub(main=path)
    for mode in ("auto", "slow"):
        assert answer(NAME, "Größe", tokenizer_mode=mode) == greedy(path, "Größe")
        said = "tokenizer_mode has no effect: fast and slow tokenizers give the same token ids"
        assert (said in caplog.messages) == (mode == "slow")
    with pipeline(NAME, backend_config=SMALL) as pipe:
        response = pipe("ab", GenerationConfig(max_new_tokens=6, ignore_eos=True), do_preprocess=False)
    assert isinstance(response, Response)
    assert response.token_ids == greedy(path, "ab")
    with pytest.raises(ModelError, match=r"^model internlm/other: no such folder, and no model of that name in"):
        LLM("internlm/other")
    with pytest.raises(ConfigError, match=r"^model_path internlm/other: no such folder, and no model of that name in"):
        pipeline("internlm/other")


def test_a_model_is_fetched_from_the_hub(path: Path, tmp_path: Path) -> None:
    """Runs the document's script in a process whose hub is on this machine.

    A script that ends during a stream without closing its pipeline exits without errors.
    """
    script = (
        "import sys\n"
        "from pd_cluster import GenerationConfig, pipeline\n"
        f"pipe = pipeline({NAME!r})\n"
        "response = pipe(['ab'], GenerationConfig(max_new_tokens=6, ignore_eos=True), do_preprocess=False)\n"
        "print(response[0].token_ids)\n"
        "for part in pipe.stream_infer('ab'): sys.exit(3)\n"
    )
    with Hub({NAME: {"main": path}}) as running:
        env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        env |= running.environment(tmp_path)
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.strip() == str(greedy(path, "ab"))


def test_revision_is_a_version_of_the_model(hub: Callable[..., None], path: Path, other: Path) -> None:
    hub(main=path, v1=other)
    assert answer(NAME, revision="v1") == greedy(other, "ab") != greedy(path, "ab")
    assert answer(NAME, revision=f"{1:040x}") == greedy(other, "ab"), "it may name a commit"
    assert answer(NAME, revision=None) == greedy(path, "ab")
    with pytest.raises(ModelError, match=r"^model internlm/internlm-chat-7b, revision v2: no such folder, and no mod"):
        answer(NAME, revision="v2")


def test_tokenizer_is_a_folder_or_an_id_of_some_revision(hub: Callable[..., None], path: Path, swapped: Path) -> None:
    hub(main=path, v1=swapped)
    assert answer(path, tokenizer=str(swapped)) == greedy(path, "ba") != greedy(path, "ab")
    assert answer(path, tokenizer=None) == answer(path, tokenizer=NAME) == greedy(path, "ab")
    assert answer(path, tokenizer=NAME, tokenizer_revision="v1") == greedy(path, "ba")
    assert answer(NAME, tokenizer_revision="v1") == greedy(path, "ba")
    with pytest.raises(
        ModelError, match=r"^tokenizer_revision v1: .* is a folder, which has one version; leave it out"
    ):
        LLM(str(path), tokenizer_revision="v1", **ROOM)


def test_a_folder_without_a_tokenizer_answers_token_ids(path: Path, tmp_path: Path) -> None:
    folder = copy_of(path, tmp_path, {})
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        LLM(str(folder), **ROOM)
    with LLM(str(folder), skip_tokenizer_init=True, **ROOM) as llm:
        (output,) = llm.generate(prompt_token_ids=ids("ab"), sampling_params=GREEDY, use_tqdm=False)
    assert (output.prompt, output.outputs.text) == (None, "")
    assert output.outputs.token_ids == greedy(path, "ab")
