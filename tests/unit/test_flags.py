"""docs/flags.md matches pd_cluster/settings and the signature of `pd-cluster serve`, and every flag takes effect.

`python tests/unit/test_flags.py --fix` rewrites the page's tables.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import typer.core

from pd_cluster.errors import MARK, ConfigError, flag_of, told
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.flag_file import expanded
from pd_cluster.settings.flags_without_setting import FlagWithoutSetting, Takes
from pd_cluster.settings.http_settings import KEY_VARIABLE
from pd_cluster.settings.serve_options import settings
from pd_cluster.settings.value_spellings import IN_OTHER_UNITS
from pd_cluster.settings.vllm_flags import ALIASES, MANY_VALUES, choice_of_model, judge, normalize, split_keys
from pd_cluster.settings.vllm_flags_without_setting import FAMILIES, FOREIGN, foreign
from pd_cluster.settings.vllm_variables import VARIABLES, warnings_of
from tests.support.serve_command import serve_command, settings_in

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "flags.md"


def options() -> list[typer.core.TyperOption]:
    found = [each for each in serve_command().params if isinstance(each, typer.core.TyperOption)]
    return [each for each in found if each.name != "help"]


def spellings(option: typer.core.TyperOption) -> list[str]:
    """Returns all names of a flag, including vLLM's short forms."""
    names = [*option.opts, *option.secondary_opts]
    return [*names, *(short for short, name in ALIASES.items() if name in names)]


HONOURED = [name for option in options() for name in option.opts]
NAMED = [each for each in FOREIGN.values() if not each.is_prefix]
THINKING = '{"enable_thinking": false}'


def page() -> str:
    tables = (
        ("Honoured", ("flag", "default", "what it does"), honoured_rows()),
        ("Accepted without effect", ("flags", "why they have none"), no_effect_rows()),
        ("Refused", ("flags", "why"), refused_rows()),
        ("Variables", ("vLLM's variable", "here"), variable_rows()),
    )
    parts = [PAGE.read_text(encoding="utf-8").partition("## Honoured")[0]]
    for title, head, rows in tables:
        lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
        parts.append("\n".join([f"## {title}\n", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines]) + "\n")
    return parts[0] + "\n".join(parts[1:])


def honoured_rows() -> Iterator[tuple[str, str, str]]:
    for option in options():
        default = option.default() if callable(option.default) else option.default
        nothing = default is None or default == "" or repr(default) == "Sentinel.UNSET"
        several = " (one or more values)" if option.opts[0] in MANY_VALUES else ""
        yield code(spellings(option)) + several, "" if nothing else f"`{default}`", option.help or ""


def no_effect_rows() -> Iterator[tuple[str, str]]:
    for family in FAMILIES:
        if found := [with_short(each) for each in family.flags() if each.values is None]:
            yield ", ".join(found), told(family.why)


def refused_rows() -> Iterator[tuple[str, str]]:
    for family in FAMILIES:
        if found := [with_exceptions(each) for each in family.flags() if each.values is not None]:
            yield ", ".join(found), told(family.why)


def variable_rows() -> Iterator[tuple[str, str]]:
    yield f"`{KEY_VARIABLE}`", f"read, as {flag_of('api_key')}"
    for name, why in VARIABLES.items():
        yield f"`{name}`", f"not read: {told(why)}"


def with_exceptions(each: FlagWithoutSetting) -> str:
    kept = [] if each.takes is Takes.SWITCH else [value for value in each.values or () if not each.is_secret]
    if each.takes is Takes.SWITCH and each.values == ("True",):
        return code([f"--no-{each.name[2:]}"])
    return with_short(each) + (f" (other than {code(kept)})" if kept else "")


def with_short(each: FlagWithoutSetting) -> str:
    return code([each.name, *(short for short, long in ALIASES.items() if long == each.name)])


def code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def parse(*argv: str) -> tuple[dict[str, object], list[str]]:
    """Parses as main() does; returns (arguments of `serve`, warnings)."""
    command = serve_command()
    context = command.make_context("serve", expanded(argv, HONOURED), resilient_parsing=False)
    return settings_in(context), judge(context.args, HONOURED)


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/unit/test_flags.py --fix"


def test_the_lists_share_nothing() -> None:
    names = [*HONOURED, *(each.name for family in FAMILIES for each in family.flags()), *IN_OTHER_UNITS]
    assert len(set(names)) == len(names)
    prefixes = [each.name[:-1] for each in FOREIGN.values() if each.is_prefix]
    assert not [(name, prefix) for name in names for prefix in prefixes if name.startswith(prefix) and name[-1] != "*"]
    assert all(foreign(name) for name in {*ALIASES.values()} - {*HONOURED})
    assert set(MANY_VALUES) <= set(HONOURED)


@pytest.mark.parametrize(
    ("argv", "rest"),
    [
        (["--port", "9", "--api_key=k_1", "k=2"], ["--port", "9"]),
        (["--api-key", "k_1", "--port=9", "--api-key=k=2"], ["--port=9"]),
    ],
)
def test_several_keys(argv: list[str], rest: list[str]) -> None:
    """`serve` takes all keys, and `up` removes them from its children's command lines."""
    assert parse(*argv)[0]["api_key"] == ["k_1", "k=2"]
    assert split_keys(normalize(argv)) == (rest, ["k_1", "k=2"])


@pytest.mark.parametrize("flag", ["--graph-sizes", "--cudagraph_capture_sizes"])
def test_several_graph_sizes(flag: str) -> None:
    """Sizes may be given as for vLLM; `up` passes them to its instances."""
    options, warnings = parse(flag, "1", "2", "64", "--port=9")
    assert warnings == []
    declared = settings()["graph_sizes"]
    assert declared.read(options["graph_sizes"]) == (1, 2, 64)
    assert declared.flags(declared.write((1, 2))) == [("--graph-sizes", "1"), ("--graph-sizes", "2")]
    with pytest.raises(ConfigError, match=r"^--graph-sizes \[1, 0\]: must be at least 1 each"):
        EngineConfig(model="m", graph_sizes=(1, 0))


def test_which_models_may_be_tried() -> None:
    """Each flag names one type; `up` passes all of them to its instances."""
    names = ["gpt_neo", "helium"]
    options, warnings = parse(*choice_of_model(names, True))
    assert (options["try_unlisted"], options["language_model_only"], warnings) == (names, True, [])


def test_no_error_shows_a_key() -> None:
    for argv in (
        ["--api-key", "sk-1", "--zzz"],
        ["--api-keys=sk-1"],
        ["--api-keys", "sk-1"],
        ["--zzz", "--api-key=sk-1"],
    ):
        assert "sk-1" not in refused(*argv)


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        ([], True),
        (["--enable_prefix_caching", "True"], True),
        (["--enable-prefix-caching=False"], False),
        (["--enable-prefix-caching", "False"], False),
    ],
)
def test_switches_may_have_a_value(argv: list[str], value: bool) -> None:
    options, warnings = parse(*argv, "--port=7")
    assert (options["enable_prefix_caching"], options["port"], warnings) == (value, 7, [])


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        ([], ""),
        (["--auto-role"], "cost"),
        (["--auto_role=rules"], "rules"),
        (["--auto-role", "rules"], "rules"),
        (["--auto-role", "--host=rules"], "cost"),
        (["--auto-role=off"], ""),
    ],
)
def test_a_value_may_be_left_out(argv: list[str], value: str) -> None:
    options, warnings = parse(*argv, "--port=7")
    assert (settings()["auto_role"].read(options["auto_role"]), options["port"], warnings) == (value, 7, [])


def test_a_wrong_value_is_named() -> None:
    with pytest.raises(ConfigError, match="'costs': expected cost or rules"):
        settings()["auto_role"].read(parse("--auto-role=costs")[0]["auto_role"])


def accepted(*argv: str) -> list[str]:
    """Parses flags between two others; returns the warnings."""
    options, warnings = parse("--port=1", *argv, "--host=h")
    assert (options["port"], options["host"]) == (1, "h")
    return warnings


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse("--port=1", *argv, "--host=h")
    return str(caught.value)


FORMS: dict[Takes, tuple[str, ...]] = {
    Takes.SWITCH: ("--{}", "--no-{}", "--{} False"),
    Takes.ONE: ("--{} 1", "--{}=1", "--{} a"),
    Takes.SEVERAL: ("--{} 1", "--{}=1", "--{} a b"),
}


def test_every_flag_without_effect_is_accepted_between_others() -> None:
    """Tries each kind of flag in each form, and every flag in one form."""
    seen = Counter[Takes]()
    for each in (each for each in NAMED if each.values is None):
        forms = FORMS[each.takes]
        argv = forms[seen[each.takes] % len(forms)].format(each.name[2:]).split()
        seen[each.takes] += 1
        assert accepted(*argv) == [f"{argv[0].partition('=')[0]} has no effect: {told(each.why)}"]
    assert all(seen[takes] >= len(forms) for takes, forms in FORMS.items())


def test_only_known_values_are_without_effect() -> None:
    for each in (each for each in NAMED if each.values):
        for value in each.values or ():
            two = ["--no-" + each.name[2:]] if value == "False" else [each.name, value]
            for argv in (two, [f"{each.name}={value}"]):
                assert accepted(*argv) == [f"{argv[0].partition('=')[0]} has no effect: {told(each.why)}"]
        said = refused(each.name, "other")
        assert said.startswith(each.name)
        assert told(each.why) in said
        assert each.is_secret != ("other" in said)


def test_a_flag_that_lacks_its_value() -> None:
    for argv in (["--nnodes"], ["--nnodes", "--port=1"]):
        with pytest.raises(ConfigError, match=r"^--nnodes: needs a value$"):
            parse(*argv)


def test_every_refusal_gives_its_reason() -> None:
    """Tries every refused flag in one of the common forms, and with one of the values that mean none."""
    forms, nothings = ("{} value", "{}=value", "{}.member=1", "{}"), ("", "{}", "None")
    for at, each in enumerate(each for each in NAMED if each.values == ()):
        name, why = each.name, told(each.why)
        said = refused(*forms[at % len(forms)].format(name).split())
        assert said.startswith(name)
        assert said.endswith(why)
        assert accepted(name, nothings[at % len(nothings)]) == [f"{name} has no effect: {why}"]


def test_a_family_of_flags_has_one_answer() -> None:
    """A refused family of flags has one answer, also for members that newer versions add."""
    for prefix in (each for each in FOREIGN.values() if each.is_prefix):
        name = f"{prefix.name[:-1]}zebra"
        for argv in ([name], [name, "1"], [f"{name}=1"], [f"{name}.a", "1"]):
            if prefix.values is None:
                assert accepted(*argv) == [f"{name} has no effect: {told(prefix.why)}"]
            else:
                assert refused(*argv).startswith(name)
                assert refused(*argv).endswith(told(prefix.why))


def test_reasons_name_flags_that_there_are() -> None:
    missing = [name for family in FAMILIES for name in family.why.split(MARK)[1::2] if name not in settings()]
    assert missing == []


def test_the_last_form_of_a_switch_counts() -> None:
    for name in (each.flag for each in settings().values() if each.kind is bool):
        off, setting = f"--no-{name[2:]}", name[2:].replace("-", "_")
        for argv, value in (([name, off], False), ([off, name], True), ([off], False)):
            options, warnings = parse(*argv, "--host=h")
            assert (options[setting], options["host"], warnings) == (value, "h", [])


def test_a_switch_on_the_command_line_goes_before_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_CLUSTER_SERVE_ENABLE_LORA", "1")
    context = serve_command().make_context("serve", ["--no-enable-lora"], auto_envvar_prefix="PD_CLUSTER_SERVE")
    assert context.params["enable_lora"] is False
    context = serve_command().make_context("serve", [], auto_envvar_prefix="PD_CLUSTER_SERVE")
    assert context.params["enable_lora"] is True


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--max-model-len=4"], "max_model_len", 4),
        (["--max_model_len", "4"], "max_model_len", 4),
        (["--seed=-1"], "seed", -1),
        (["--seed", "-1"], "seed", -1),
        (["--max-model-len", "32k"], "max_model_len", 32_000),
        (["--max-model-len=1.5k"], "max_model_len", 1500),
        (["--max-model-len", "-1"], "max_model_len", None),
        (["--kv-cache-memory-bytes", "4G"], "kv_cache_memory", 4.0),
        (["--device-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--kv-offloading-size", "8", "--kv-offloading-backend=native"], "kv_host_cache", 8.0),
        (["--cpu-distributed-timeout-seconds", "90"], "collective_timeout", 90.0),
        (["-asc", "2"], "api_workers", 2),
        (["--served_model_name=my_a", "b"], "served_model_name", ["my_a", "b"]),
        (["--served-model-name", "a", "--served-model-name", "b", "c"], "served_model_name", ["a", "b", "c"]),
        (["--hf_overrides.rope_scaling.factor", "2.5"], "hf_overrides", '{"rope_scaling": {"factor": 2.5}}'),
        (["--default-chat-template-kwargs.enable_thinking=false"], "default_chat_template_kwargs", THINKING),
    ],
)
def test_values_as_vllm_writes_them(argv: list[str], name: str, value: object) -> None:
    options, _ = parse("--port=1", *argv, "--host=h")
    assert (options[name], options["port"], options["host"]) == (value, 1, "h")


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--max-model-len=1.5K"], "--max-model-len '1.5K': expected a whole number, such as 8192, 8k or 8K"),
        (["--kv-cache-memory-bytes=4GB"], "--kv-cache-memory-bytes '4GB': expected a whole number"),
        (["--hf-overrides.a=1", "--hf-overrides.a.b=2"], "--hf-overrides.a.b: a already has a value"),
    ],
)
def test_values_that_vllm_refuses_too(argv: list[str], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert str(caught.value).startswith(error)


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("--max-model-length=4", "--max-model-len"),
        ("--max-model-lenght", "--max-model-len"),
        ("--tp=2", "--tensor-parallel-size"),
        ("--tp-size=16", "--tensor-parallel-size"),
    ],
)
def test_an_unknown_flag_names_the_nearest(argument: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown flag {argument.partition('=')[0]}; did you mean {nearest}\\?"):
        parse(argument)


def test_words_for_sharing_experts_are_answered_by_how_to_say_it_here() -> None:
    """Flags of SGLang and vLLM are refused with advice; those that ask for what is done here only warn."""
    for flag, words in (
        ("--enable-dp-attention", "--data-parallel-size N to each of N instances"),
        ("--dp-size=8", "--data-parallel-size N to each"),
        ("--ep-size=16", "--enable-expert-parallel; --data-parallel-size times --tensor-parallel-size ranks"),
        ("--moe-a2a-backend=deepep", "leave it out; rows are gathered"),
        ("--data-parallel-size-local=2", "2: not supported .*--data-parallel-rank with --join"),
        ("--data-parallel-start-rank=4", "4: not supported .*entries of a role in the rank tables"),
        ("--data-parallel-hybrid-lb", "each data-parallel rank is an instance"),
        ("--all2all-backend=deepep_low_latency", "deepep_low_latency: not supported .rows are gathered"),
        ("--enable-eplb", "--expert-placement-strategy places experts, and they do not move"),
        ("--headless", "rank tables assign its host and devices"),
        ("--pipeline-parallel-size=2", "2: not supported .models are not split into pipeline stages"),
    ):
        with pytest.raises(ConfigError, match=f"{flag.partition('=')[0]}.*{words}"):
            parse(flag)
    taken = ("--data-parallel-address=h", "--data-parallel-rpc-port=1", "--data-parallel-external-lb")
    warned = parse(*taken, "--all2all-backend=allgather_reducescatter")[1]
    assert [each.partition(" ")[0] for each in warned] == [
        "--data-parallel-address",
        "--data-parallel-rpc-port",
        "--data-parallel-external-lb",
        "--all2all-backend",
    ]


def test_the_process_says_it_in_one_line() -> None:
    """The process reports the error in one line, before it reads rank tables or loads anything."""
    command = [sys.executable, "-m", "pd_cluster", "serve", "--max-model-length=4"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "pd-cluster: unknown flag --max-model-length; did you mean --max-model-len?\n"


def test_variables_that_are_not_read_have_a_warning() -> None:
    env = dict.fromkeys(VARIABLES, "1") | {"VLLM_USE_V1": "1", "VLLM_API_KEY": "k", "HOME": "/"}
    found = warnings_of(env)
    assert [each.partition(" ")[0] for each in found] == [*VARIABLES]
    assert found[0] == "VLLM_CPU_KVCACHE_SPACE is not read: give --kv-cache-memory, in GiB"
    assert warnings_of({"VLLM_CPU_OMP_THREADS_BIND": "auto", "VLLM_BATCH_INVARIANT": "0"}) == []
    named = [name for why in VARIABLES.values() for name in why.split(MARK)[1::2]]
    assert {*named} <= {*settings()}


if __name__ == "__main__":
    if sys.argv[1:] != ["--fix"]:
        sys.exit("usage: python tests/unit/test_flags.py --fix")
    PAGE.write_text(page(), encoding="utf-8")
