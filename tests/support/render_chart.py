"""Renders the Helm chart in a separate process, because Helm's library starts threads and handles signals.

Reads a JSON list of values from stdin; writes {"template": text} or {"error": text} for each, and the linter's messages
last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "pd-cluster"


def main() -> None:
    import helm_python as helm

    answers: list[Any] = []
    with helm.Chart.load(str(CHART)) as chart:
        for values in json.load(sys.stdin):
            try:
                answers.append(chart.render(values, name="pd", namespace="pd"))
            except Exception as error:
                answers.append({"error": str(error)})
    answers.append(helm.lint(str(CHART), strict=True))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
