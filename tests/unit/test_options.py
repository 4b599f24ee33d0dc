"""`pd-cluster serve`: flags for chats and for the HTTP layers before the API, and refusals."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import plan_cluster
from pd_cluster.cluster.processes.rank_process import environment
from pd_cluster.errors import ConfigError
from pd_cluster.settings.http_settings import KEYS_VARIABLE
from pd_cluster.settings.request_settings import ChatConfig
from pd_cluster.settings.routing_settings import AdminSettings
from pd_cluster.settings.serve_options import SECRET_VARIABLES, ServeOptions, without_keys
from pd_cluster.settings.vllm_flags import normalize
from pd_cluster.text.template_source import with_source
from tests.support.serve_command import serve_command, settings_in


def options(*argv: str) -> ServeOptions:
    context = serve_command().make_context(
        "serve", normalize(["serve", *argv])[1:], auto_envvar_prefix="PD_CLUSTER_SERVE", resilient_parsing=False
    )
    return ServeOptions(**settings_in(context))


def chat_of(*argv: str) -> ChatConfig:
    return with_source(options(*argv).chat())


@contextlib.contextmanager
def refused(start: str) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    with pytest.raises(ConfigError) as caught:
        yield caught
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


# ---- before the API


def test_keys_of_the_command_line_come_before_the_variable() -> None:
    env = {"VLLM_API_KEY": "sk-env"}
    assert options().http(env).api_keys == ("sk-env",)
    assert options("--api-key", "a", "b", "a").http(env).api_keys == ("a", "b")
    assert options("--api-key=a", "--api-key=b").http({}).api_keys == ("a", "b")


def test_keys_that_nobody_can_send_are_refused_unseen() -> None:
    wrong: list[tuple[list[str], dict[str, str], str]] = [
        (["--api-key="], {}, "--api-key: empty"),
        (["--api-key", "sk-good", ""], {}, "--api-key, key 2 of 2: empty"),
        ([], {"VLLM_API_KEY": ""}, "VLLM_API_KEY: empty"),
        (["--api-key", "sk-\xe9"], {}, "--api-key: keys may contain only printable ASCII characters"),
        ([], {"VLLM_API_KEY": "sk-1\n"}, "VLLM_API_KEY: keys may contain only printable ASCII characters"),
        # tenants
        (["--api-key", "sk-1", "sk-2", "--api-key-tenant=a"], {}, "--api-key-tenant: 1 for 2 of --api-key; give"),
        (["--api-key-tenant=a"], {}, "--api-key-tenant: 1 for 0 of VLLM_API_KEY; give"),
        (["--api-key=sk-1", "--api-key-tenant="], {}, "--api-key-tenant '': "),
        (["--api-key=sk-1", "--api-key-tenant=a b"], {}, "--api-key-tenant 'a b': "),
        (
            ["--api-key", "sk-1", "sk-1", "--api-key-tenant", "a", "b"],
            {},
            "--api-key-tenant 'b': key 2 of --api-key already belongs to",
        ),
        # other keys and related flags
        (["--max-connections=0"], {}, "--max-connections 0: must be at least 1"),
        (["--api-key=a", "--metrics-key=a"], {}, "--metrics-key: is also one of the API keys"),
        (["--ssl-keyfile=k"], {}, "--ssl-keyfile k: needs --ssl-certfile FILE"),
        (["--ssl-certfile=c", "--ssl-cert-reqs=3"], {}, "--ssl-cert-reqs 3: expected 0, 1 or 2"),
        (["--metrics-key=a b"], {}, "--metrics-key: keys may contain only printable ASCII characters"),
    ]
    for argv, env, start in wrong:
        with refused(start) as caught:
            options(*argv).http(env)
        assert "sk-" not in str(caught.value)


def test_keys_have_tenants_in_their_order() -> None:
    given = ("--api-key", "sk-old", "sk-b", "sk-new", "--api-key-tenant", "a", "b", "a")
    http = options(*given).http({})
    assert (http.api_keys, http.tenants) == (("sk-old", "sk-b", "sk-new"), ("a", "b", "a"))
    assert not http.shares_prefix_cache
    twice = options("--api-key", "sk-a", "sk-a", "--api-key-tenant", "a", "a").http({})
    assert (twice.api_keys, twice.tenants) == (("sk-a",), ("a",))
    assert options("--api-key-tenant=a").http({"VLLM_API_KEY": "sk-a"}).tenants == ("a",)
    assert options("--api-key=sk-a", "--shared-prefix-cache").http({}).shares_prefix_cache


def test_keys_are_on_no_command_line_and_at_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *workers, scheduler = plan_cluster(Launch(api_keys=["sk-a", "sk-b"], metrics_key="sk-m"), tmp_path)
    assert not any("sk-" in part for member in (*workers, scheduler) for part in member.command)
    assert not any("sk-" in value for member in workers for value in member.env.values())
    monkeypatch.setenv(KEYS_VARIABLE, scheduler.env[KEYS_VARIABLE])
    assert options().http({}).api_keys == ("sk-a", "sk-b")
    assert "sk-secret" not in repr(options("--api-key=sk-secret"))
    assert "sk-secret" not in repr(Launch(api_keys=["sk-secret"], metrics_key="sk-secret"))
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, "sk-1")
    assert "sk-1" not in without_keys(os.environ).values()
    assert "sk-1" not in environment(1, os.environ).values()


def test_cors_is_closed_where_there_are_keys_and_has_json_lists() -> None:
    assert options().http({}).allowed_origins == ("*",)
    assert options("--api-key=sk-1").http({}).allowed_origins == ()
    assert options().http({"VLLM_API_KEY": "sk-1"}).allowed_origins == ()
    given = """--allowed-origins=["*"]"""
    assert options("--api-key=sk-1", given).http({}).allowed_origins == ("*",)
    argv = ['--allowed-origins=["https://a.example", "http://localhost:3000"]', "--allow-credentials"]
    http = options(*argv, "--allowed-methods", '["GET"]', "--allowed-headers", "[]").http({})
    assert http.allowed_origins == ("https://a.example", "http://localhost:3000")
    assert (http.allowed_methods, http.allowed_headers, http.allow_credentials) == (("GET",), (), True)
    assert options("--allowed-origins=[]").http({}).allowed_origins == ()


def test_names_of_the_admin_port() -> None:
    given = options("--admin-allowed-hosts", " pd.Example,10.0.0.5,[fd00::5] ")
    assert given.read(AdminSettings).admin_hosts == {"pd.example", "10.0.0.5", "[fd00::5]"}
    with pytest.raises(ConfigError, match="--admin-allowed-hosts 'pd:9001': expected names without a port"):
        options("--admin-allowed-hosts=pd:9001").read(AdminSettings)


@pytest.mark.parametrize("flag", ["--allowed-origins", "--allowed-methods", "--allowed-headers"])
def test_what_is_no_list_of_strings_names_the_flag_and_a_way_out(flag: str) -> None:
    for value in ("*", '"*"', "[1]", "{}", "['*']", "", '["a b"]', '["\\n"]', '[""]'):
        with pytest.raises(ConfigError, match=rf"^{flag} .*: expected ") as caught:
            options(f"{flag}={value}").http({})
        assert '"*"' in str(caught.value)


def test_origins_and_paths_that_no_browser_sends() -> None:
    for origin in ("https://a.example/", "https://a.example/page", "a.example"):
        with refused(f"--allowed-origins {origin!r}: "):
            options(f'--allowed-origins=["{origin}"]').http({})
    for given in ("api", "//api", "/a b", "/a?b", "/a#b", "/%61", "http://a/b", "/<script>"):
        with refused(f"--root-path {given!r}: expected a path such as /api"):
            options(f"--root-path={given}").http({})


# ---- chats


def test_chat_flags() -> None:
    argv = ["--tool-call-parser=hermes", "--enable-auto-tool-choice", "--reasoning-parser", "qwen3"]
    chat = chat_of(*argv, "--enable-reasoning", "--response-role=bot", "--trust-request-chat-template")
    assert chat == ChatConfig(
        trusts_request_templates=True, tool_parser="hermes", reasoning_parser="qwen3", response_role="bot"
    )
    assert options("--return-tokens-as-token-ids")["return_tokens_as_token_ids"]


def test_a_switch_without_its_parser() -> None:
    for flag, needed in (
        *(("--enable-auto-tool-choice", "--tool-call-parser"), ("--enable-reasoning", "--reasoning-parser")),
    ):
        with refused(f"{flag}: needs {needed} NAME"):
            chat_of(flag)


def test_a_reasoning_parser_in_a_config_of_vllm() -> None:
    for flag in ("--reasoning-config", "--structured-outputs-config"):
        named = f'{flag}={{"reasoning_parser": "qwen3"}}'
        assert options(named).chat().reasoning_parser == "qwen3"
        assert options(named, "--reasoning-parser=qwen3", "--enable-reasoning").chat().reasoning_parser == "qwen3"
        with refused(f"{flag}: reasoning_parser 'qwen3' differs from --reasoning-parser glm45"):
            options(named, "--reasoning-parser=glm45").chat()


def test_the_marks_of_reasoning_in_a_config_of_vllm() -> None:
    """Accepts reasoning markers in the form of vLLM's server flags."""
    marks = '--reasoning-config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'
    assert options(marks, "--reasoning-parser=qwen3").chat().reasoning_parser == "qwen3"
    with refused("--reasoning-config: reasoning_start_str '<think>': --reasoning-parser mistral has [THINK]"):
        options(marks, "--reasoning-parser=mistral").chat()


def test_names_of_parsers_that_vllm_has_too() -> None:
    for name in ("phi4_mini_json", "qwen3_json", "llama4_json", "glm47"):
        assert options(f"--tool-call-parser={name}").chat().tool_parser == name
    for name in ("gemma4", "glm47"):
        assert options(f"--reasoning-parser={name}").chat().reasoning_parser == name


def test_what_is_wrong_with_a_config_of_vllm() -> None:
    for flag, message in (
        ('--structured-outputs-config={"backend": "mine"}', "backend 'mine': expected one of auto"),
        ('--structured-outputs-config={"disable_any_whitespace": 1}', "expected `bool`, got `int`"),
        (
            '--reasoning-config={"reasoning_start": "<t>"}',
            "unknown field `reasoning_start`; known are reasoning_parser",
        ),
        ('--reasoning-config={"reasoning_start_str": "<t>"}', "'<t>': no reasoning parser has none; leave it out"),
        ('--pooler-config={"pooling_type": "CLS"}', "invalid enum value 'CLS'; known are task, pooling_type"),
        ('--default-chat-template-kwargs={"tools": []}', "tools: is a field of requests"),
        ("--chat-template-content-format=xml", "expected one of auto, string, openai"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            options(flag).chat()
        assert flag.partition("=")[0] in str(caught.value)


SOURCE = "{% for m in messages %}{{ m.content }}\n{% endfor %}gr\xfc\xdfe \U0001f600"


def test_a_template_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(SOURCE, encoding="utf-8")
    assert chat_of(f"--chat-template={file}").template == SOURCE
    # workers get the same flags, but need not have the file
    assert options("--model=m", f"--chat-template={tmp_path / 'nothing'}").engine().block_size is None
    wrong = tmp_path / "wrong.jinja"
    wrong.write_bytes(b"\xff\xfe{{ }}")
    for path in (tmp_path / "nothing.jinja", tmp_path, wrong):
        with refused(f"--chat-template {path}: cannot be read: "):
            chat_of(f"--chat-template={path}")
    with refused("--chat-template: the one-line template has an invalid escape"):
        chat_of("--chat-template={{ 1 }}\\x")
