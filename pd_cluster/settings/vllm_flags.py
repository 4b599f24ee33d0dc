"""vLLM's command line flags in this project: honoured, accepted without effect, or refused with a reason.

docs/flags.md publishes the three lists (a test compares them). A flag in none of the lists is an error that names the
nearest known flag. Honoured flags are the settings (serve_options.py); vllm_flags_without_setting.py lists the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pd_cluster.errors import ConfigError, flag_of, told
from pd_cluster.settings.flag_suggestions import ANSWERS, meant_by
from pd_cluster.settings.flags_without_setting import FlagWithoutSetting, Takes
from pd_cluster.settings.serve_options import settings
from pd_cluster.settings.setting import DeclaredSetting
from pd_cluster.settings.value_spellings import IN_OTHER_UNITS
from pd_cluster.settings.vllm_flags_without_setting import FOREIGN, OFF, foreign

# flags that accept an explicit True or False
SWITCHES = tuple(each.flag for each in settings().values() if each.default is True)
# flags that accept several values, such as `--served-model-name a b`, as argparse does with nargs="+"
MANY_VALUES = tuple(flag_of(name) for each in settings().values() if each.setting.is_several for name in each.names)
BARE = {each.flag: each for each in settings().values() if each.bare}  # flags whose value may be left out
OPTIMIZATION = re.compile(r"-O=?([0-9])")
ALIASES = {
    "-O": "--optimization-level",
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}


def normalize(argv: Sequence[str]) -> list[str]:
    """Translates vLLM's spellings: --max_model_len, -tp, several values after each flag of MANY_VALUES."""
    result: list[str] = []
    repeated = flag = bare = ""
    for argument in argv:
        if argument.startswith("-") and not _is_number(argument):
            if (level := OPTIMIZATION.fullmatch(argument)) is not None:
                argument = f"--optimization-level={level[1]}"
            flag, equals, value = argument.partition("=")
            short, dot, member = flag.partition(".")
            short = ALIASES.get(short, short)
            flag = (short.replace("_", "-") if short.startswith("--") else short) + dot + member
            repeated = flag if flag in MANY_VALUES else ""
            is_first = bool(repeated) and not equals
            is_switch = flag in SWITCHES and value in ("True", "False")
            bare = BARE[flag].bare if flag in BARE and not equals else ""
            result.append(_switch(flag, value) if is_switch else f"{flag}={bare}" if bare else flag + equals + value)
            continue
        if repeated and not is_first:
            result.append(repeated)
        is_first = False
        if bare and _is_read(BARE[flag], argument):
            result[-1], bare = f"{flag}={argument}", ""
            continue
        if argument in ("True", "False") and result and result[-1] in SWITCHES:
            argument = _switch(result.pop(), argument)
        result.append(argument)
    return result


def _is_read(setting: DeclaredSetting, written: str) -> bool:
    try:
        setting.read(written)
    except ConfigError:
        return False
    return True


def _switch(flag: str, value: str) -> str:
    """Translates `--enable-prefix-caching False` to `--no-enable-prefix-caching`."""
    return flag if value == "True" else f"{OFF}{flag[2:]}"


def split_keys(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns normalized flags without --api-key, and the keys."""
    return split_values(flags, "--api-key")


def split_values(flags: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """Returns the normalized flags without the named flag, and that flag's values."""
    rest: list[str] = []
    values: list[str] = []
    following = iter(flags)
    for argument in following:
        flag, equals, value = argument.partition("=")
        if flag != name:
            rest.append(argument)
        else:
            values.append(value if equals else next(following, ""))
    return rest, values


def choice_of_model(try_unlisted: Sequence[str], language_model_only: bool) -> list[str]:
    """Returns the flags that choose the model to serve."""
    given = {"try_unlisted": list(try_unlisted), "language_model_only": language_model_only}
    return ["=".join(flag) for name, written in given.items() for flag in settings()[name].flags(written)]


def judge(extras: Sequence[str], honoured: Iterable[str]) -> list[str]:
    """Checks arguments that are not parameters of `serve`. Returns warnings; raises ConfigError."""
    warnings: list[str] = []
    rest = list(extras)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        flag, dot, _ = name.partition(".")  # vLLM's `--compilation-config.mode 3`
        known = foreign(flag)
        if known is None:
            raise ConfigError(unknown(argument, [*honoured, *IN_OTHER_UNITS, *FOREIGN]))
        each, is_off = known
        values = ["False"] if is_off else [value] if equals else _values_of(each, rest)
        is_accepted = each.values is None or (not dot and bool(values) and all(map(each.accepts, values)))
        if not values and (is_accepted or each.values) and not each.is_prefix:
            raise ConfigError(f"{flag}: needs a value")
        if not is_accepted:
            raise ConfigError(refusal(each, flag, "" if is_off else " ".join(values)))
        warnings.append(f"{flag} has no effect: {told(each.why)}")
    return list(dict.fromkeys(warnings))


def _values_of(each: FlagWithoutSetting, rest: list[str]) -> list[str]:
    """Removes a flag's values from the arguments that follow it, and returns them."""
    if each.takes is Takes.SWITCH:
        is_given = bool(rest) and (rest[0] in ("True", "False") or (each.values is not None and _is_value(rest[0])))
        return [rest.pop(0)] if is_given else ["True"]  # older versions write `--enable-chunked-prefill False`
    found: list[str] = []
    while rest and _is_value(rest[0]) and (each.takes is Takes.SEVERAL or not found):
        found.append(rest.pop(0))
    return found or (["True"] if each.values and "True" in each.values else [])


def refusal(each: FlagWithoutSetting, name: str, value: str, way_out: str = "") -> str:
    """Returns the error for a refused value of a flag or argument."""
    is_on = each.takes is Takes.SWITCH and value == "True"
    shown = f" {value}" if value and not is_on and not each.is_secret else ""
    if each.takes is Takes.SWITCH or not each.values or each.is_secret:
        return f"{name}{shown}: {each.why}{way_out}"
    return f"{name}{shown}: not supported ({each.why}); leave it out"


def unknown(argument: str, known: Sequence[str]) -> str:
    """Returns the error for a flag in none of the lists, with the nearest known flag."""
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected argument {argument!r}; give the model by --model"
    if answer := ANSWERS.get(flag):
        return f"unknown flag {flag}; {answer}"
    near = meant_by(flag, known)
    return f"unknown flag {flag}{f'; did you mean {near}?' if near else '; see pd-cluster serve --help'}"


def _is_value(text: str) -> bool:
    return not text.startswith("-") or _is_number(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
