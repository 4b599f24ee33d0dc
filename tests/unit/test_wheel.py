"""The wheel contains everything needed to serve, and nothing that only contributors run."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the wheel's installed files."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def python(site: Path, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, cwd=site, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def test_the_wheel_has_all_that_serves(site: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "pd_cluster", "ranktable_tools"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    wanted = set(tracked.stdout.split())
    found = {str(file.relative_to(site)) for file in site.rglob("*") if file.is_file()}
    assert len(wanted) > 300
    assert wanted <= found
    assert {name.split("/")[0].split("-")[0] for name in found} == {"pd_cluster", "ranktable_tools"}


@pytest.mark.slow
def test_what_is_installed_serves_and_generates(site: Path) -> None:
    """Runs the quickstart's cluster, and `LLM`, whose answer is the same unsplit and split."""
    done = python(site, "-m", "pd_cluster.commands.quickstart", "--once", timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    script = (
        "import pd_cluster\n"
        "model = pd_cluster.__file__.replace('__init__.py', 'models/tiny-chat')\n"
        "def ask(**split):\n"
        "    with pd_cluster.LLM(model, max_model_len=64, **split) as llm:\n"
        "        return llm.generate(['1 2 3'])[0].outputs[0].token_ids\n"
        "if __name__ == '__main__':\n"
        "    print(pd_cluster.__file__, ask() == ask(prefill=1, decode=1))\n"
    )
    (site / "script.py").write_text(script, "utf-8")
    done = python(site, "script.py", timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [str(site / "pd_cluster" / "__init__.py"), "True"]
