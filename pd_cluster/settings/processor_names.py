"""The form of `--logits-processors`: the operator's classes, MODULE:CLASS. Imports none of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.setting import TEXTS, Form

CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def _classes(name: str, written: Sequence[str]) -> tuple[str, ...]:
    found = tuple(each.strip() for text in written for each in text.split(","))
    for each in found:
        if not CLASS.fullmatch(each):
            raise ConfigError(f"{called(name)} {each!r}: expected MODULE:CLASS, such as my_module:MyProcessor")
    return found


PROCESSORS = Form(list[str], _classes, TEXTS.write)
