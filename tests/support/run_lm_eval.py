"""Evaluates tasks with lm-evaluation-harness's API, in a separate program because the harness sets seeds and logging.

`python -m tests.support.run_lm_eval TASKS ARGUMENTS CHAT BATCH_SIZE`: TASKS is the folder of the tasks' YAML files,
and ARGUMENTS has the arguments of local-completions, as JSON. CHAT has those that differ for local-chat-completions,
which runs the text tasks one request at a time. Prints JSON: the batch size or "chat" -> task -> the record of each
question.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager


def main(folder: str, arguments: str, chat: str, several: str) -> None:
    tasks = sorted(path.stem for path in Path(folder).glob("*.yaml"))
    manager = TaskManager(include_path=folder, include_defaults=False)  # indexing its thousands of tasks takes seconds
    found: dict[str, Any] = {}
    for batch_size in (several, "chat"):
        is_chat = batch_size == "chat"
        results = lm_eval.simple_evaluate(
            model="local-chat-completions" if is_chat else "local-completions",
            model_args=json.loads(arguments) | (json.loads(chat) if is_chat else {}),
            tasks=[task for task in tasks if task.endswith("text")] if is_chat else tasks,
            task_manager=manager,
            batch_size=1 if is_chat else int(batch_size),
            apply_chat_template=is_chat,
            log_samples=True,
        )
        found[batch_size] = results["samples"]
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
