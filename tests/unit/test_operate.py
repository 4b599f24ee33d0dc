"""`pd-cluster instances` against a fake admin port without sockets: requests, waits and output."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from pd_cluster.client import admin_client, instance_commands
from pd_cluster.client.admin_client import Admin
from pd_cluster.cluster.members.cluster_credentials import admin_token_of
from pd_cluster.cluster.members.rank_table_place import find_place
from pd_cluster.commands.cli import app
from pd_cluster.errors import ConfigError, PdClusterError, Unauthorized
from pd_cluster.settings.process_settings import KeyFiles
from ranktable_tools import generate, write
from ranktable_tools.cluster_keys import write_keys
from ranktable_tools.table_files import PRIVATE

VARIABLES = [f"PD_CLUSTER_{way}{what}_FILE" for way in ("", "SERVE_") for what in ("ADMIN_TOKEN", "SECRET")]
TOKEN = "a-token-of-some-length"
Answer = Callable[[httpx.Request], httpx.Response]
Answers = Callable[[Answer], list[httpx.Request]]


def entry(**changes: Any) -> dict[str, Any]:
    known = {"instance_id": "decode-0", "role": "decode", "next_role": None, "service": "in", "drain_timeout_s": 0.0}
    known |= {"instance_ids": ["decode-0"], "unit": None}
    return {**known, "state": "ready", "reason": None, "num_outstanding": 0, "kv_sent_nbytes": 0, **changes}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Answers every request with this answer, and records the requests."""
    asked: list[httpx.Request] = []

    def use(answer: Answer) -> list[httpx.Request]:
        def note(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            return answer(request)

        def client(**options: Any) -> httpx.AsyncClient:
            return real(transport=httpx.MockTransport(note), **options)

        monkeypatch.setattr(admin_client.httpx, "AsyncClient", client)
        return asked

    real = httpx.AsyncClient
    monkeypatch.setattr(instance_commands, "POLL_S", 0.0)
    for name in (*VARIABLES, "GLOBAL_RANK_TABLE_FILE_PATH"):
        monkeypatch.delenv(name, raising=False)
    return use


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    return file


def states(*entries: dict[str, Any] | None) -> Answer:
    """Returns an answer that lists these states, one per query; the last one repeats. Accepts commands."""
    left = itertools.chain(entries, itertools.repeat(entries[-1]))

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return httpx.Response(200, json=entry())
        found = next(left)
        return httpx.Response(200, json={"instances": [found] if found is not None else []})

    return answer


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["instances", *words])


def test_a_drain_is_waited_for(answers: Answers, token_file: Path) -> None:
    busy = entry(service="out", state="draining", num_outstanding=2)
    asked = answers(states(busy, busy, {**busy, "num_outstanding": 1}, entry(service="out", state="drained")))
    done = invoke("drain", "decode-0", "--timeout=7", f"--admin-token-file={token_file}")
    assert done.exit_code == 0
    assert done.stdout == "decode-0 is drained; `drain --undo` puts it back in service\n"
    assert done.stderr.splitlines() == ["decode-0: draining, 2 requests there", "decode-0: draining, 1 request there"]
    assert (asked[0].method, asked[0].url.path) == ("POST", "/instances/decode-0/drain")
    assert asked[0].read() == b'{"force":false,"timeout_s":7.0}'
    assert {request.headers["authorization"] for request in asked} == {f"Bearer {TOKEN}"}


def test_one_line_says_that_it_is_done(answers: Answers) -> None:
    commands: list[tuple[str, dict[str, Any] | None, str]] = [
        ("remove decode-0", None, "decode-0 has left; you can end its process now"),
        ("role decode-0 prefill", entry(role="prefill"), "decode-0 is prefill"),
        ("add decode-0 --port=8090", entry(), "decode-0 is here"),
        ("drain decode-0 --undo", entry(), "decode-0 is in service"),
        ("drain decode-0 --no-wait", entry(), "decode-0: requested; `pd-cluster instances` shows the progress"),
    ]
    for words, then, said in commands:
        answers(states(entry(state="unreachable", next_role="prefill"), then))
        done = invoke(*words.split())
        assert (done.exit_code, done.stdout) == (0, said + "\n")


def test_a_command_for_one_of_a_unit_is_over_when_all_have_followed(answers: Answers) -> None:
    unit = {"instance_ids": ["decode-0", "decode-1"], "unit": "decode-0..1", "service": "out"}
    lists = iter([["drained", "draining"], ["drained", "drained"]])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return httpx.Response(200, json=entry(**unit))
        names = zip(unit["instance_ids"], next(lists), strict=True)
        return httpx.Response(
            200, json={"instances": [entry(**unit, instance_id=name, state=state) for name, state in names]}
        )

    answers(answer)
    done = invoke("drain", "decode-0")
    assert done.stdout.splitlines() == [
        f"{name} is drained; `drain --undo` puts it back in service" for name in unit["instance_ids"]
    ]
    assert done.stderr.splitlines() == [
        "decode-0 is in decode-0..1; its whole unit changes with it",
        "decode-1: draining, 0 requests there",
    ]


def test_what_does_not_end_is_given_up(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(states(entry(state="connecting"), entry(state="failed", reason="it serves another model")))
    done = invoke("add", "decode-0", "--port=8090")
    assert str(done.exception) == "decode-0 is in the list but cannot serve: it serves another model"
    answers(states(entry(service="out", state="draining", num_outstanding=1)))
    monkeypatch.setattr(instance_commands, "MARGIN_S", 0.0)
    done = invoke("drain", "decode-0", "--timeout=0")
    assert isinstance(done.exception, PdClusterError)
    assert str(done.exception) == "decode-0 is not done after 0 s: draining, 1 request there"


def test_refusals_are_passed_on(answers: Answers) -> None:
    for response, kind, said in (
        (httpx.Response(401, json={"error": {"message": "x"}}), Unauthorized, "--admin-token-file FILE"),
        (httpx.Response(409, json={"error": {"message": "it is the last"}}), PdClusterError, "it is the last"),
        (httpx.Response(500, text="?"), PdClusterError, "does not answer as a scheduler's admin address (HTTP 500)"),
        (httpx.Response(404, json=[]), PdClusterError, "does not answer as a scheduler's admin address (HTTP 404)"),
    ):
        answers(lambda request, response=response: response)  # type: ignore[misc]
        done = invoke("remove", "decode-0")
        assert isinstance(done.exception, kind)
        assert said in str(done.exception)
    for more in ("--force", "--timeout=1"):
        assert str(invoke("drain", "decode-0", "--undo", more).exception).startswith("--undo: not with --force")


def test_where_the_token_comes_from(token_file: Path, tmp_path: Path) -> None:
    """It comes from the named file, or the file next to the table; if keys are derived, --derive-secret's applies."""
    assert Admin("u").token() == ""
    folder = tmp_path / "tables"
    made = generate(prefill=[[0]], decode=[[1]], api_server=True, server_ip="127.0.0.1", device_kind="cpu")
    table, *_, local = write(made, folder)
    env = {"GLOBAL_RANK_TABLE_FILE_PATH": str(table), "RANK_TABLE_FILE_PATH": str(local)}
    assert Admin("u", str(token_file), env).token() == TOKEN
    assert Admin("u", env=env).token() == admin_token_of(find_place(env), KeyFiles(derives=True))
    write_keys(folder, PRIVATE)
    beside = (folder / "admin.token").read_text().strip()
    assert Admin("u", env=env).token() == admin_token_of(find_place(env), KeyFiles()) == beside
    assert Admin("u", str(token_file), env).token() == TOKEN
    (folder / "admin.token").unlink()
    with pytest.raises(ConfigError, match=r"admin\.token: no such file; .* or name it with --admin-token-file FILE"):
        Admin("u", env=env).token()
    with pytest.raises(ConfigError, match=r"--admin-token-file /nowhere: .*No such file"):
        Admin("u", "/nowhere").token()


def test_options_before_the_command_hold_for_it(answers: Answers, token_file: Path) -> None:
    asked = answers(states(None))
    invoke("--admin=http://one:1", f"--admin-token-file={token_file}", "remove", "decode-0")
    invoke("--admin=http://one:1", "remove", "decode-0", "--admin=http://two:2")
    assert [str(request.url.host) for request in asked] == ["one", "one", "two", "two"]
    assert asked[0].headers["authorization"] == f"Bearer {TOKEN}"
