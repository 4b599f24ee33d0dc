"""Removes keys and tokens from logs and environment reports, which people share."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from pd_cluster.settings.serve_options import SECRET_VARIABLES

HIDDEN = "[hidden]"
LEAST_SECRET_NUM_CHARS = 6  # minimum length of a variable's value; hiding a shorter one would hide ordinary words
SECRET_WORDS = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|COOKIE|AUTH", re.IGNORECASE)
PATTERNS = (
    (re.compile(r"(?i)(bearer\s+)[^\s\"',;]+"), rf"\1{HIDDEN}"),
    (
        re.compile(r"(?i)(\b[\w.-]*(?:api[-_]?key|token|secret|password)\b[\"']?\s*[=:]\s*[\"']?)[^\s\"',;]{4,}"),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"\b(?:sk|hf|pd)[-_][A-Za-z0-9_-]{12,}"), HIDDEN),
    (re.compile(r"(?<=://)[^\s/@:]+:[^\s/@]+(?=@)"), HIDDEN),
)


def redacted(text: str, env: Mapping[str, str] = os.environ) -> str:
    """Hides texts that look like keys, and the value of each variable that holds a key."""
    for name in SECRET_VARIABLES:
        for value in env.get(name, "").split():
            if len(value) >= LEAST_SECRET_NUM_CHARS:
                text = text.replace(value, HIDDEN)
    for pattern, shown in PATTERNS:
        text = pattern.sub(shown, text)
    return text


def shown_value(name: str, value: str) -> str:
    """Returns a variable's value, hidden if the name denotes a secret and not a secret's file."""
    is_secret = name in SECRET_VARIABLES or (SECRET_WORDS.search(name) and not name.endswith(("_FILE", "_PATH")))
    return HIDDEN if is_secret and value else redacted(value)
