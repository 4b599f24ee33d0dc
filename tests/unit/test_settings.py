"""A setting is declared once; everything that uses settings reads that declaration."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from typer.testing import CliRunner

from pd_cluster.commands.cli import app
from pd_cluster.errors import ConfigError, ModelError, called, flag_of, told
from pd_cluster.offline.llm_arguments import config_of
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.http_settings import HttpConfig
from pd_cluster.settings.serve_options import GROUPS, USUAL, ServeOptions, settings
from pd_cluster.settings.setting import NEGATED, TEXTS, Panel, Scope, Setting, at_least, check, declared, one_of, read

ROOT = Path(__file__).parents[2]
WEB = {"typer", "fastapi", "starlette", "uvicorn"}
NEW = '    made_up: Annotated[int, ENGINE("Invented by a test.", checks=ONE)] = 3\n'
FIRST_OF_ENGINE = "    tensor_parallel_size: Annotated["


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    size_gib: Annotated[float, Setting("A size.", Panel.KV, Scope.ENGINE, checks=(at_least(1),))] = 2.0
    kind: Annotated[str, Setting("A kind.", Panel.KV, Scope.ENGINE, name="sort", checks=(one_of("ab"),))] = "a"
    is_open: Annotated[bool, Setting("Closed.", Panel.KV, Scope.SERVER, name="closed", form=NEGATED)] = True
    names: Annotated[tuple[str, ...], Setting("Names.", Panel.KV, Scope.SERVER, form=TEXTS)] = ()
    own: int = 5


def test_a_field_s_annotation_is_its_setting_by_whose_name_a_struct_is_filled() -> None:
    found = {each.name: (each.field, each.kind, each.default) for each in declared(Sample)}
    assert found == {
        "size": ("size_gib", float, 2.0),
        "sort": ("kind", str, "a"),
        "closed": ("is_open", bool, False),
        "names": ("names", list[str] | None, None),
    }
    given = {"size": 3.0, "sort": "b", "closed": True, "names": ["x"]}
    assert read(Sample, given, own=6) == Sample(size_gib=3.0, kind="b", is_open=False, names=("x",), own=6)
    assert read(Sample, {**given, "names": None}).names == ()


@pytest.mark.parametrize(
    ("sample", "told_of_it"),
    [
        (Sample(size_gib=0.5), "--size 0.5: must be at least 1"),
        (Sample(size_gib=float("nan")), "--size nan: must be at least 1"),
        (Sample(kind="c"), "--sort 'c': expected a or b"),
    ],
)
def test_a_rule_names_the_setting_and_what_was_written(sample: Sample, told_of_it: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(sample)
    assert str(caught.value) == told_of_it
    assert str(caught.value.named(str)) == told_of_it[2:]


def test_an_error_names_settings_as_its_user_wrote_them_and_has_no_marks_wherever_it_is_shown() -> None:
    error = ModelError(f"{called('max_num_seqs')} 0: give --max-num-seqs, or {called('dtype')}")
    assert str(error) == "--max-num-seqs 0: give --max-num-seqs, or --dtype"
    outer = ConfigError(f"engine: {error.text}").named({"max_num_seqs": "max_batch_size", "dtype": "dtype"}.__getitem__)
    assert str(outer) == "engine: max_batch_size 0: give --max-num-seqs, or dtype", "unmarked text must stay"
    error = ModelError(f"{called('max_num_seqs')} 0").named(lambda setting: setting.upper())
    assert repr(error) == repr(copy.copy(error)) == "ModelError('MAX_NUM_SEQS 0')"  # also after copying
    assert error.args == ("MAX_NUM_SEQS 0",)
    assert repr(ConfigError(called("dtype"))) == "ConfigError('--dtype')"
    assert told("plain") == "plain"


def test_names_are_settings_and_are_not_shared() -> None:
    """Names in errors are declared settings; a misspelt one would be shown as a flag that does not exist."""
    source = "\n".join(file.read_text("utf-8") for file in (ROOT / "pd_cluster").rglob("*.py"))
    names = re.findall(r"\bcalled\([\"'](\w+)[\"']\)", source)
    assert len(names) > 50
    assert set(names) <= set(settings())
    flags = [flag for each in settings().values() for flag in (each.flag, *map(flag_of, each.setting.also))]
    assert len(set(flags)) == len(flags) >= len(settings()) == sum(len(declared(group)) for group in GROUPS)
    fields = {field.name for field in msgspec.structs.fields(EngineConfig)}
    # Fields from the rank table, and a group of settings.
    assert fields - {each.field for each in declared(EngineConfig)} == {
        "num_local_ranks",
        "paired_tp_sizes",
        "unit_rank",
        "adapters",
    }


def test_defaults_obey_their_rules() -> None:
    """Every default satisfies its check, and is parsed again from its written form."""
    for group in GROUPS:
        made = ServeOptions(model="m").read(group)
        for each in declared(group):
            value = getattr(made, each.field)
            assert each.default is None or each.read(each.write(value)) == value, each.name


def test_a_model_must_be_given() -> None:
    """An empty model name, as from an unset variable, is refused."""
    for given in ({}, {"model": ""}):
        with pytest.raises(ConfigError, match=r"^--model: empty or missing; give a model's folder"):
            ServeOptions(**given).check()
    for model, said in (("", "^model: empty or missing"), (None, "^model None: expected a folder")):
        with pytest.raises(ConfigError, match=said):
            config_of({"model": model})


def test_flags_of_a_written_value() -> None:
    written: dict[tuple[str, Any], list[tuple[str, ...]]] = {
        ("kv_hmac", False): [("--no-kv-hmac",)],
        ("spawn", True): [("--spawn",)],
        ("spawn", False): [],
        ("dead_after", 4.0): [("--dead-after", "4.0")],
        ("num_blocks", None): [],
    }
    assert {(name, value): settings()[name].flags(value) for name, value in written} == written
    assert settings()["try_unlisted"].flags(["a", "b"]) == [("--try-unlisted", "a"), ("--try-unlisted", "b")]


def test_nothing_shows_secrets() -> None:
    secrets = {each.name for each in settings().values() if each.setting.is_secret}
    assert secrets == {"api_key", "metrics_key", "kv_shared_cache"}
    shown = repr(ServeOptions(api_key=["sk-secret", "api=sk-secret"], metrics_key="sk-secret", port=7))
    assert shown == "ServeOptions(port=7)"
    shown = repr(HttpConfig(api_keys=("sk-one",), metrics_key="sk-two", root_path="/api"))
    assert "sk-" not in shown
    assert "root_path='/api'" in shown

    class Keys(msgspec.Struct):
        key: Annotated[str, Setting("A key.", Panel.HTTP, Scope.SERVER, checks=(one_of("ab"),), is_secret=True)] = "a"

    with pytest.raises(ConfigError, match=r"^--key: expected a or b$"):
        declared(Keys)[0].check("sk-secret")


CODE = f"""if True:
    import sys, pd_cluster
    from pd_cluster.settings.engine_config import SHIPPED_MODEL
    print(pd_cluster.LLM.__name__, *({WEB} & sys.modules.keys()))
    from pd_cluster.offline.llm_arguments import config_of
    print(config_of({{"model": SHIPPED_MODEL, "num_blocks": 5, "kv_hmac": False}}, 1, 1).arguments)
    from pd_cluster.checkpoints.checkpoint import Checkpoint
    Checkpoint.of(config_of({{"model": SHIPPED_MODEL}}).engine)
    print("read", *({WEB} & sys.modules.keys()))
    from pd_cluster.errors import ConfigError
    from pd_cluster.offline.offline_service import launch_of
    from pd_cluster.settings.serve_options import ServeOptions
    print(ServeOptions(model="m", made_up=4).engine().made_up, ServeOptions(model="m").engine().made_up)
    given = {{"model": SHIPPED_MODEL, "made_up": 7}}
    print(config_of(given).engine.made_up, *launch_of(config_of(given, 1, 1)).arguments)
    try:
        config_of({{**given, "made_up": 0}})
    except ConfigError as error:
        print(error)
    from pd_cluster.commands.cli import main
    sys.argv = ["pd-cluster", "serve", "--help-all"]
    main()"""


def test_offline_needs_no_web_server_and_a_new_setting_takes_one_file(tmp_path: Path) -> None:
    """Importing `LLM` and processing its arguments, split or not, does not import the command line.

    A setting declared in a copy of the package becomes a flag, an argument of `LLM`, and a field of the engine's
    config.
    """
    source, copy = ROOT / "pd_cluster", tmp_path / "pd_cluster"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("models"))
    (copy / "models").symlink_to(source / "models")
    shutil.copytree(ROOT / "ranktable_tools", tmp_path / "ranktable_tools")
    file = copy / "settings" / "engine_config.py"
    before, found, after = file.read_text("utf-8").partition(FIRST_OF_ENGINE)
    assert found
    file.write_text(before + NEW + found + after, encoding="utf-8")
    env = {"PYTHONPATH": str(tmp_path), "PATH": "", "COLUMNS": "200"}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *imported, made, offline, refused = done.stdout.splitlines()[:6]
    assert imported == ["LLM", "('--no-kv-hmac',)", "read"]
    assert made == "4 3"
    assert offline.startswith("7 --made-up=7 ")
    assert refused == "made_up 0: must be at least 1"
    screen = done.stdout.splitlines()[6:]
    assert [line for line in screen if "--made-up" in line and "Invented by a test." in line and "3" in line]


@pytest.mark.parametrize(("flag", "shows_all"), [("--help", False), ("--help-all", True)])
def test_help_shows_usual_flags_and_help_all_all_of_them(flag: str, shows_all: bool) -> None:
    shown = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["serve", flag])
    assert shown.exit_code == 0
    seldom = [each for each in settings().values() if each.name not in USUAL]
    assert len(seldom) > 60
    found = {each.name for each in seldom if re.search(rf"{each.flag}[ ,]", shown.output)}
    assert found == ({each.name for each in seldom} if shows_all else set())
    assert all(settings()[name].flag in shown.output for name in USUAL)
