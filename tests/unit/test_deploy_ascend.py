"""The command lines in docs/ascend.md match this project's commands."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from pd_cluster.service.schema.completion_protocol import GenerateRequest
from pd_cluster.service.schema.request_parsing import parse
from ranktable_tools import cli as ranktable_cli
from tests.unit.test_deploy import parse_serve

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ascend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def lines() -> list[str]:
    """Returns the lines of every shell block, with continued lines joined."""
    text = "\n".join(body for language, body in BLOCKS if language == "sh").replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip()]


def commands(pattern: str) -> list[list[str]]:
    """Returns the words after `pattern` in each line that begins with it."""
    found = [re.match(rf"{pattern} (.*)", line) for line in lines()]
    return [shlex.split(match[1], comments=True) for match in found if match]


def test_start_lines_have_known_flags_and_commands_exist() -> None:
    started = [parse_serve(argv) for argv in commands(r"sh \S*/PD_separate/start_servers\.sh")]
    assert [options["port"] for options in started] == [8088, 8089, 9000]
    assert {options["tensor_parallel_size"] for options in started} == {2}
    import typer.main

    from pd_cluster.commands import cli

    group = typer.main.get_command(cli.app)
    named = {argv[0] for argv in commands("pd-cluster")}
    assert named == {"check", "instances"}
    assert named <= set(group.commands)  # type: ignore[attr-defined]
    check = group.commands["check"]  # type: ignore[attr-defined]
    given = [argv[1:] for argv in commands("pd-cluster") if argv[0] == "check"]
    assert [check.make_context("check", argv).params["network"] for argv in given if argv] == [True]


def test_a_rank_table_line_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the page's lines in order, on a machine whose cards have addresses, beside another machine's table."""
    monkeypatch.chdir(tmp_path)
    cards = [f"--device-ip={card}=10.1.0.{card}" for card in (4, 5, 6, 7)]
    here = ["--server-ip", "10.0.0.18", "--device", "npu", *cards]
    tool = r"python \$\{LLM_TOOLS_PATH\}/PD_separate/pd_ranktable_tools\.py"
    gen, merge = commands(tool)
    assert ranktable_cli.reference_main([*gen, *here]) == 0
    (tmp_path / "ranktable").mkdir()
    own = tmp_path / "save_dir" / "global_ranktable_10.0.0.18.json"
    (tmp_path / "ranktable" / own.name).write_bytes(own.read_bytes())
    other = ["gen", "--prefill-server-list", "0,1", "--device", "cpu", "--server-ip", "10.0.0.19"]
    assert ranktable_cli.main([*other, "--save-dir", "ranktable"]) == 0
    assert ranktable_cli.reference_main(merge) == 0
    assert (tmp_path / "save_dir" / "global_ranktable_merge.json").is_file()
    shown = commands("pd-ranktable")
    assert [argv[0] for argv in shown] == ["show", "check"]
    assert all(ranktable_cli.main(argv) == 0 for argv in shown)
    assert "ok: 1 scheduler, 1 prefill, 1 decode" in capsys.readouterr().out


def test_every_request_is_one() -> None:
    from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
    from pd_cluster.service.schema.completion_protocol import CompletionRequest

    of = {
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/completions": CompletionRequest,
        "/generate": GenerateRequest,
    }
    text = "\n".join(body for language, body in BLOCKS if language == "sh")
    requests = re.findall(r"curl -X POST http://10\.0\.0\.18:9000(\S+).*?-d '(.*?)'$", text, re.MULTILINE | re.DOTALL)
    assert [path for path, _ in requests] == list(of)
    for path, body in requests:
        parse(body.encode(), of[path])


def test_a_worker_s_container_has_hccn_conf_and_two_cards_of_its_own() -> None:
    started = [line for line in lines() if line.startswith("docker run -itd ")]
    cards = [re.findall(r"--device=/dev/davinci(\d)\b", line) for line in started]
    assert cards == [["4", "5"], ["6", "7"], []]
    assert all("-v /etc/hccn.conf:/etc/hccn.conf:ro" in line for line in started[:2])
    assert not re.search(r"-v \S*:/home/ma-user", PAGE)


# Devices in the guide's docker run lines for workers, besides the cards.
DEVICES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
MOUNTS = (
    "/etc/localtime:/etc/localtime",
    "/usr/local/Ascend/driver:/usr/local/Ascend/driver",
    "/etc/ascend_install.info:/etc/ascend_install.info",
    "/var/log/npu/:/usr/slog",
    "/usr/local/sbin/npu-smi:/usr/local/sbin/npu-smi",
    "/sys/fs/cgroup:/sys/fs/cgroup",
)


def test_a_worker_s_container_has_what_the_guide_gives_it() -> None:
    """Checks the page and the Compose file, which mounts the driver's files read-only."""
    for line in [line for line in lines() if line.startswith("docker run -itd ")][:2]:
        assert all(f"--device={device} " in line for device in DEVICES)
        assert all(f"-v {mount}" in line for mount in MOUNTS)
    services = yaml.safe_load((ROOT / "deploy" / "compose.npu.yaml").read_text(encoding="utf-8"))["services"]
    for name in ("prefill", "decode"):
        assert set(DEVICES) <= set(services[name]["devices"])
        assert {mount.removesuffix(":ro") for mount in services[name]["volumes"]} >= set(MOUNTS)


def test_the_table_making_container_has_what_npu_smi_needs_and_no_card() -> None:
    # A later docker line, for the network check, has all cards.
    line, _ = [line for line in lines() if line.startswith("docker run --rm -it ")]
    given = re.findall(r"--device=(\S+)", line)
    assert given == ["/dev/davinci_manager", "/dev/hisi_hdc"]
    mounted = {mount.partition(":")[0] for mount in re.findall(r"-v (/\S+)", line)}
    local = "/usr/local"
    assert mounted == {f"{local}/Ascend/driver", f"{local}/dcmi", f"{local}/sbin/npu-smi", "/etc/hccn.conf"}
    assert " --net=host " in line


def test_the_vnpu_line_is_taken(tmp_path: Path) -> None:
    section = PAGE.partition("### vNPUs")[2].partition("\n## ")[0]
    lists, address = (re.findall(rf"`({option} [^`]*)`", section)[0] for option in (r"--prefill\S*", "--device-ip"))
    argv = ["gen", "--device", "npu", "--server-ip", "10.0.0.18", *shlex.split(lists), *shlex.split(address)]
    assert ranktable_cli.main([*argv, "--device-ip", "116=10.0.0.18", "--save-dir", str(tmp_path)]) == 0
    assert (tmp_path / "local_ranktable_10.0.0.18_100.json").is_file()
