"""scripts/vllm_parser_cases runs hand-written cases like vLLM's tests; vLLM itself is not needed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "vllm_parser_cases" / "run.py"
CASES = """
import pytest
from vllm.parser.some_engine import its_own_function
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager

REPLY = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_call():
    parser = ToolParserManager.get_tool_parser("hermes")(get_tokenizer("any"))
    found = parser.extract_tool_calls(REPLY)
    assert found.content == "Let me see."
    assert [(call.function.name, call.function.arguments) for call in found.tool_calls] == [("add", '{"a":1}')]


def test_internal():
    its_own_function()
"""


def _run(source: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(source), "-k", "test_", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_two_cases_pass_and_fail(tmp_path: Path) -> None:
    for name in ("tool_parsers", "reasoning", "parser", "tool_use", "entrypoints/tool_parsers"):
        (tmp_path / "tests" / name).mkdir(parents=True)
    (tmp_path / "tests" / "tool_parsers" / "test_two.py").write_text(CASES)
    told = _run(tmp_path)
    assert told.returncode == 1, told.stderr
    assert "passed 1, failed 1, excluded 0" in told.stdout
    assert "failed: tool_parsers/test_two.py::test_internal" in told.stdout
    assert "its_own_function" in told.stdout


def test_a_folder_without_the_tests_is_refused(tmp_path: Path) -> None:
    told = _run(tmp_path)
    assert told.returncode == 1
    assert "has no folder tool_parsers" in told.stderr
