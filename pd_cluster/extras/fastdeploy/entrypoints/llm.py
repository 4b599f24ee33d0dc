"""FastDeploy's LLM, documented at https://paddlepaddle.github.io/FastDeploy/offline_inference"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pd_cluster.errors import ConfigError
from pd_cluster.extras.fastdeploy.engine.request import RequestOutput
from pd_cluster.extras.fastdeploy.engine.sampling_params import SamplingParams
from pd_cluster.offline import offline_llm
from pd_cluster.output_files import open_output

log = logging.getLogger(__name__)

BLOCK_SIZE = 64  # tokens
LOG_FILE = "fastdeploy.log"
Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """A model, its tokenizer and the memory for its KV cache. A context manager; `close` releases everything.

    `arguments`: FastDeploy's documented parameters, those of `pd_cluster.LLM`, or flags of `pd-cluster serve` by their
    Python names. Each is honoured, ignored with one warning if it cannot matter, or refused with the reason.

    The number of KV cache blocks is written to log/fastdeploy.log, as FastDeploy does; `FD_LOG_DIR` names another
    folder. Raises ConfigError or ModelError, in one line that names the argument.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        self._llm = offline_llm.LLM(model, **{"block_size": BLOCK_SIZE, **arguments})
        for num_blocks in self._llm.nums_blocks:
            _write_log(f"Doing profile, the total_block_num:{num_blocks}")

    def generate(
        self,
        prompts: Any,
        sampling_params: Params | None = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continues prompts without a chat template. Returns one output per prompt, in the same order.

        `prompts`: a str, a list of token ids, a dict with "prompt" or "prompt_token_ids", or a list of these.
        `others`: further arguments of `pd_cluster.LLM.generate`. Raises RequestError before any work.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        return _own(self._llm.generate(prompts, params, use_tqdm=use_tqdm, **others))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several. `others`: further arguments of `pd_cluster.LLM.chat`.

        `chat_template_kwargs` are the template's variables, such as {"enable_thinking": False}. Raises RequestError.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        return _own(self._llm.chat(messages, params, use_tqdm, chat_template_kwargs=chat_template_kwargs, **others))

    def close(self) -> None:
        """Ends the engine; further calls do nothing."""
        self._llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _own(found: list[Any]) -> list[RequestOutput]:
    return [RequestOutput.of(each, at) for at, each in enumerate(found)]


def _write_log(line: str) -> None:
    """Writes the log file; if that fails, logs the line as a warning."""
    folder = Path(os.environ.get("FD_LOG_DIR") or "log")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_output(str(folder / LOG_FILE), "FD_LOG_DIR", wait_s=0), "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} INFO {line}\n")
    except (OSError, ConfigError) as error:
        log.warning("%s: cannot be written: %s; %s", folder / LOG_FILE, error, line)
