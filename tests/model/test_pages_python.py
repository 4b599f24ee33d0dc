"""The Python of the pages about adapters and images runs unchanged, except for the paths: one block after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pd_cluster import LLM
from pd_cluster.settings.engine import SHIPPED_MODEL
from tests.support.clips import clip, file_of
from tests.support.prompt_adapters import make_prompt_adapter

ROOT = Path(__file__).parents[2]
SEES = SHIPPED_MODEL.parent / "tiny-vision"

pytestmark = pytest.mark.usefixtures("one_thread")


def run(page: str, names: dict[str, Path]) -> dict[str, Any]:
    """Returns what the page's blocks define."""
    defined: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text("utf-8"), re.DOTALL)
    assert len(blocks) > 1
    for block in blocks:
        for name, path in names.items():
            block = block.replace(f'"{name}"', f'"{path}"')
        exec(compile(block, page, "exec"), defined)
    return defined


@pytest.mark.slow
def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64), "red").save("cat.jpg")
    Path("clip.mp4").write_bytes(file_of(clip(1, 6, 64, 64)))
    found = run("multimodal.md", {"Qwen2.5-VL-7B-Instruct": SEES, "Qwen2-VL-7B-Instruct": SEES})
    found["llm"].close()
    found["pipe"].close()
    assert not [message for message in caplog.messages if "failed" in message]


def test_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    polite = make_prompt_adapter(tmp_path / "polite", SHIPPED_MODEL, num_tokens=20)
    answers: list[Any] = []
    generate = LLM.generate
    monkeypatch.setattr(LLM, "generate", lambda *given, **named: answers.extend(generate(*given, **named)))
    names = {"MODEL": SHIPPED_MODEL, "/adapters/french": SHIPPED_MODEL.parent / "pirate", "/adapters/polite": polite}
    run("adapters.md", names)
    assert not [message for message in caplog.messages if "failed" in message]
    assert len(answers) == 3
    assert all(answer.outputs[0].token_ids for answer in answers)
