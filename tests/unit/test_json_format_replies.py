"""What is special to the formats with JSON, Python or Gemma's braces means what their cards say, in any pieces."""

from __future__ import annotations

import pytest

from tests.support.json_cases import CASES
from tests.support.reply_cases import Case, must_mean, must_not_depend_on_cuts, parts_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.tools}-{case.thinking}")
def test_a_reply_means_what_its_card_says(case: Case) -> None:
    for reply in case.replies:
        must_mean(parts_of(case, [reply.text]), reply)
        must_not_depend_on_cuts(case, reply, 5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.tools}-{case.thinking}")
def test_no_split_changes_a_reply(case: Case) -> None:
    for reply in case.replies:
        must_not_depend_on_cuts(case, reply, 200)
