"""Lists each role's imports at its start, and how long they take. Knows no cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

from pd_cluster.errors import GenerationError

ROLES = {
    "up": "import pd_cluster.commands.cli, pd_cluster.cluster.processes.launcher",
    "worker's parent": "import pd_cluster.commands.cli, pd_cluster.commands.serve, pd_cluster.api.worker_app",
    "scheduler": "import pd_cluster.commands.cli, pd_cluster.commands.serve, pd_cluster.api.scheduler_app",
    "rank process": (
        "from pd_cluster.engine.start.process import import_engine; import_engine(light=True)\n"
        "from pd_cluster.model.light_transformers import import_architecture; import_architecture('llama')"
    ),
    "rank process with a driver": (
        "from pd_cluster.engine.start.process import import_engine; import_engine(light=False)"
    ),
}
WITHOUT_COLLECTOR = "import gc; gc.disable()\n"  # as these processes do
LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \| *(\S+)")
DEADLINE_S = 120.0


def import_times_s(role: str) -> dict[str, float]:
    """Returns top-level package -> seconds for its own modules, the longest first. Raises GenerationError."""
    command = [sys.executable, "-X", "importtime", "-c", WITHOUT_COLLECTOR + ROLES[role]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise GenerationError(f"the imports of the {role} fail: {done.stderr.strip()[-300:]}")
    times_us: Counter[str] = Counter()
    for found in LINE.finditer(done.stderr):
        name = found[2].split(".")[0]
        times_us["Python's own" if name in sys.stdlib_module_names else name] += int(found[1])
    return {name: us / 1e6 for name, us in times_us.most_common()}
