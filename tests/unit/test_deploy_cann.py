"""start_servers.sh sources an installed CANN's environment once, in any shell."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = ("PD_CLUSTER_SERVE_GENERATION_CONFIG", "PD_CLUSTER_SERVE_REQUIRE_MODEL")
LASTING = ("PD_CLUSTER_SERVE_RESUME_WINDOW", "PD_CLUSTER_SERVE_RESUME_SCHEDULER_ONLY")
SHOWN = ("TOOLKIT", "ATB", "LD_LIBRARY_PATH", *DEFAULTS, *LASTING)
# Like CANN's scripts: they break under `set -eu`, their exit status is meaningless, and ATB's needs bash.
TOOLKIT = """\
export ASCEND_TOOLKIT_HOME={home}
export LD_LIBRARY_PATH=$ASCEND_TOOLKIT_HOME/lib64:$LD_LIBRARY_PATH
export TOOLKIT="${{TOOLKIT}}{name}$NOT_SET_ANYWHERE"
false
"""
ATB = """\
path="${BASH_SOURCE[0]}"
if [[ -f "$path" ]] && [[ "$path" =~ 'set_env.sh' ]]; then
    export ATB_HOME_PATH=$(dirname "$path")/latest
    export LD_LIBRARY_PATH=$ATB_HOME_PATH/lib:$LD_LIBRARY_PATH
    export ATB="${ATB}atb$NOT_SET_ANYWHERE"
fi
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Returns start_servers.sh in a tree whose `pd-cluster` prints its arguments and environment."""
    for name in ("scripts/start_servers.sh", "deploy/ascend_env.sh"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shows = "".join(f'echo "{name}=${name}"\n' for name in SHOWN)
    command = tmp_path / "bin" / "pd-cluster"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@"\n{shows}')
    command.chmod(0o755)
    return tmp_path / "scripts" / "start_servers.sh"


def install(root: Path, folder: str = "ascend-toolkit") -> Path:
    """Installs a fake CANN with ATB; returns the toolkit's home."""
    home = root / folder / "latest"
    home.mkdir(parents=True)
    (root / folder / "set_env.sh").write_text(TOOLKIT.format(home=home, name=folder))
    atb = root / "nnal" / "atb"
    atb.mkdir(parents=True, exist_ok=True)
    (atb / "set_env.sh").write_text(ATB)
    return home


def start(script: Path, shell: str = "sh", *flags: str, **env: str) -> dict[str, str]:
    path = f"{script.parents[1] / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [shell, str(script), *flags], env={"PATH": path, **env}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    arguments, *shown = done.stdout.splitlines()
    assert arguments.split() == ["serve", *flags]
    return dict(line.split("=", 1) for line in shown)


@pytest.mark.parametrize(("shell", "folder"), [("sh", "ascend-toolkit"), ("bash", "cann")])
def test_cann_is_sourced_where_it_is(script: Path, tmp_path: Path, shell: str, folder: str) -> None:

    root = tmp_path / "Ascend"
    home = install(root, folder)
    found = start(script, shell, "--port=1", ASCEND_ROOT=str(root))
    assert (found["TOOLKIT"], found["ATB"]) == (folder, "atb")
    assert found["LD_LIBRARY_PATH"].split(":")[:2] == [str(root / "nnal/atb/latest/lib"), str(home / "lib64")]


def test_nothing_is_sourced_where_it_is_absent(script: Path) -> None:
    found = start(script, ASCEND_ROOT="/nowhere", LD_LIBRARY_PATH="mine")
    assert (found["TOOLKIT"], found["ATB"], found["LD_LIBRARY_PATH"]) == ("", "", "mine")


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
def test_ascend_toolkit_home_names_the_toolkit(script: Path, tmp_path: Path, inside: bool) -> None:
    """The set_env.sh of ASCEND_TOOLKIT_HOME takes precedence over that of ASCEND_ROOT."""
    install(tmp_path / "Ascend")
    home = install(tmp_path / "elsewhere", "mine")
    if inside:
        (home.parent / "set_env.sh").rename(home / "set_env.sh")
    found = start(script, ASCEND_ROOT=str(tmp_path / "Ascend"), ASCEND_TOOLKIT_HOME=str(home))
    assert found["TOOLKIT"] == "mine"


@pytest.mark.parametrize(
    ("flags", "env", "window"),
    [
        ((), {"USE_OPENAI": "1"}, ["30", "1"]),
        ((), {"USE_OPENAI": "0"}, ["", ""]),
        ((), {LASTING[0]: "0"}, ["0", ""]),
        (("--port=1", "--resume-window=5"), {}, ["", ""]),
        (("--resume_window", "5"), {}, ["", ""]),
    ],
)
def test_streams_outlive_their_scheduler_unless_the_operator_says_otherwise(
    script: Path, flags: tuple[str, ...], env: dict[str, str], window: list[str]
) -> None:
    found = start(script, "sh", *flags, ASCEND_ROOT="/nowhere", **env)
    assert [found[name] for name in LASTING] == window
