"""Instances on hosts without the folder of versions: they get copies, and serve the version that their answers name.

Each instance has a mount namespace in which that folder is empty, and a temporary folder of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.cluster.processes.launcher import Member
from pd_cluster.engine.lifecycle.weight_copies import PREFIX
from tests.cluster.test_control import Steered
from tests.cluster.test_weight_updates import ask, assert_named, info_of, streamed, update
from tests.support.engines import assert_all_same
from tests.support.weight_versions import make_version

pytestmark = pytest.mark.slow
Checkpoints = Callable[..., Path]
UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
HIDE = 'mount -t tmpfs none "$0" && exec "$@"'
PROMPT = [7] * 60


class Apart(Steered):
    """A cluster in which only the scheduler sees the files in `hidden`."""

    def __init__(self, hidden: Path, *given: Any, **settings: Any) -> None:
        self._hidden = hidden
        super().__init__(*given, **settings)

    def plan(self) -> list[Member]:
        return [each if each.is_scheduler else self._apart(each) for each in super().plan()]

    def _apart(self, member: Member) -> Member:
        own = self.temporary(member.name)
        own.mkdir(exist_ok=True)
        command = [*UNSHARE, "sh", "-c", HIDE, str(self._hidden), *member.command]
        return replace(member, command=command, env={**member.env, "TMPDIR": str(own)})

    def temporary(self, name: str) -> Path:
        return self.folder / f"tmp-{name}"

    def copies(self, name: str) -> list[Path]:
        """Returns the folders of copies in an instance's temporary folder."""
        return [each for each in self.temporary(name).glob(f"{PREFIX}*/*") if each.is_dir()]

    def sources(self, name: str) -> list[str]:
        """Returns the senders of an instance's copies, in order."""
        text = self.log_file(name).read_text(errors="replace")
        return [found.partition("@")[0] for found in re.findall(r"got weights \S+ from (.+)$", text, re.MULTILINE)]

    def revive(self, *names: str) -> None:
        for name in names:
            self.kill(name)
            self.await_exit(name)
        self.wait_until("the loss is noticed", lambda: not {*names} & {*info_of(self)["instances"]})
        for name in names:
            self.start_member(name)


@pytest.fixture(scope="module")
def versions(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("versions")
    for seed in (1, 2):
        make_version(checkpoint("llama", max_position_embeddings=4096), root / f"step-{seed}", seed)
    return root


@pytest.fixture(scope="module")
def apart(checkpoint: Checkpoints, versions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    """Yields 1P2D; the prefill instance and one decode instance have two ranks."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not make mount namespaces")
    flags = ["--spawn", "--max-model-len=4096", "--num-blocks=640", f"--weights-dir={versions}", "--max-attempts=20"]
    model, sizes = checkpoint("llama", max_position_embeddings=4096), {"prefill-0": 2, "decode-0": 2}
    with Apart(versions, tmp_path_factory.mktemp("apart"), model, 1, 2, flags, tp_sizes=sizes) as cluster:
        yield cluster
        cluster.assert_home()


def test_every_instance_gets_a_copy(apart: Apart, versions: Path) -> None:
    update(apart, "step-1")
    tokens, _, spans = ask(apart)
    assert spans == [{"version": "step-1", "start": 0, "end": 6}]
    assert_all_same(versions / "step-1", [PROMPT], [tokens], 6)
    names = ("prefill-0", "decode-0", "decode-1")
    assert all(len(apart.sources(name)) == 1 for name in names)
    assert "the scheduler" in {apart.sources(name)[0] for name in names}
    assert all(len(apart.copies(name)) == 1 for name in names)
    update(apart, "step-2")
    assert all(len(apart.copies(name)) == 1 for name in names), "old copies must be removed"


def test_an_instance_that_restarts_gets_its_copy_from_a_peer(apart: Apart, versions: Path) -> None:
    """With the scheduler's files hidden, one instance restarts, then the other two; peers send them their copies."""
    update(apart, "step-1")
    expected = ask(apart)
    (own,) = versions.glob("received-*")
    own.rename(versions / "hidden")
    try:
        apart.revive("decode-0")
        apart.await_ready()
        assert apart.sources("decode-0")[-1] in ("prefill-0", "decode-1")
        assert ask(apart)[::2] == expected[::2]
        apart.revive("prefill-0", "decode-1")
        apart.await_ready()
        assert {apart.sources(name)[-1] for name in ("prefill-0", "decode-1")} <= {"decode-0", "prefill-0", "decode-1"}
        assert ask(apart)[::2] == expected[::2]
    finally:
        (versions / "hidden").rename(own)
    assert all(len(apart.copies(name)) == 1 for name in ("prefill-0", "decode-0", "decode-1")), "old copies are left"


def test_nobody_has_the_files_any_more(apart: Apart, versions: Path) -> None:
    update(apart, "step-2")
    expected = ask(apart)
    (own,) = versions.glob("received-*")
    own.rename(versions / "hidden")
    for name in ("prefill-0", "decode-1"):
        for copy in apart.copies(name):
            shutil.rmtree(copy)
    apart.revive("decode-0")

    def says_why() -> bool:
        found = apart.instance("decode-0")
        why = f"it cannot load weights step-2, and tries again: {own}"
        reason = found["reason"] or ""
        return found["state"] == "connecting" and reason.startswith(why) and "no source is left" in reason

    try:
        apart.wait_until("the instance says why it is not ready", says_why)
    finally:
        (versions / "hidden").rename(own)
    apart.await_ready()
    assert apart.sources("decode-0")[-1] == "the scheduler"
    assert ask(apart)[::2] == expected[::2]


@pytest.mark.timeout(900)
def test_every_token_is_of_the_version_that_its_answer_names(apart: Apart, versions: Path) -> None:
    """Runs 100 streams during six updates; three instances are killed, two of them during an update."""
    folders = {f"v{number}": f"step-{number % 2 + 1}" for number in range(7)}
    update(apart, folders["v0"], weight_version="v0")
    choices: list[dict[str, Any]] = []

    def stream(at: int) -> None:
        choices.append(streamed(apart.url, [at % 7 + 3] * 40, 120))

    def change(number: int) -> None:
        update(apart, folders[f"v{number}"], ("keep", "wait")[number % 2], weight_version=f"v{number}")

    with ThreadPoolExecutor(8) as pool, ThreadPoolExecutor(1) as commander:
        streams = [pool.submit(stream, at) for at in range(100)]
        for number in range(1, 7):
            if number in (2, 4, 6):
                apart.await_ready()  # waits for the previous victim, so that streams can continue
            changing = commander.submit(change, number)
            if (name := {2: "decode-1", 4: "prefill-0", 6: "decode-0"}.get(number)) is not None:
                if number == 6:
                    changing.result(300)
                apart.kill(name)
                apart.await_exit(name)
                apart.start_member(name)
            changing.result(300)
        for each in streams:
            each.result(500)
    assert len(choices) == 100
    assert len({span["version"] for choice in choices for span in choice["weight_versions"]}) > 4
    for choice in choices:
        for span in choice["weight_versions"]:
            span["version"] = folders[span["version"]]
    assert_named(versions, choices)
    apart.await_ready()
    apart.assert_home()
