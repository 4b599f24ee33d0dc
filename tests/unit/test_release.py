"""scripts/release.sh shares all packages of .venv with its trial environments."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "release.sh"
SITE = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")


def test_packages_of_the_python_below_are_shared(tmp_path: Path) -> None:
    """Covers an environment layered on another, as by scripts/setup.sh, with the package only in the lower one."""
    (code,) = re.findall(r"""^sites=\$\("\$python" -c '(.*)'\)$""", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    for name in ("base", "own", "trial"):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / name], check=True, timeout=60)
    (tmp_path / "base" / SITE / "below.py").write_text("")
    (tmp_path / "own" / SITE / "zz-base-environment.pth").write_text(f"{tmp_path / 'base' / SITE}\n")
    (tmp_path / "own" / SITE / "editable.pth").write_text(f"{tmp_path}\n")

    def run(name: str, code: str) -> str:
        command = [tmp_path / name / "bin" / "python", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    sites = run("own", code)
    assert sites.splitlines() == [str(tmp_path / name / SITE) for name in ("own", "base")], "nothing editable is shared"
    (tmp_path / "trial" / SITE / "needs.pth").write_text(sites)
    assert run("trial", "import below; print(below.__file__)").strip() == str(tmp_path / "base" / SITE / "below.py")
