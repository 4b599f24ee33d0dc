"""A link state's text in /instances is stable, and can be parsed back."""

from __future__ import annotations

import pytest

from pd_cluster.types import LinkState


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (LinkState("up", ("shm",)), "up (shm)"),
        (LinkState("up", ("dist", "shm"), "int8"), "up (dist+shm, int8)"),
        (LinkState("opening"), "opening"),
        (LinkState("waiting", reason="shm: up (again): no"), "waiting: shm: up (again): no"),
        (LinkState("refused", reason="dtype: float32, bfloat16"), "refused: dtype: float32, bfloat16"),
    ],
)
def test_text_and_back(state: LinkState, text: str) -> None:
    assert str(state) == text
    assert LinkState.parse(text) == state


@pytest.mark.parametrize("text", ["", "up", "up: no", "upward", "closed"])
def test_no_other_text_is_a_state(text: str) -> None:
    with pytest.raises(ValueError, match="not a link state"):
        LinkState.parse(text)
