"""`pd-cluster run-batch`: its settings and its own parameters. Imports nothing heavy at the top."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import typer

from pd_cluster.commands.settings_flags import HELP_ALL, takes
from pd_cluster.settings.media_settings import MediaSettings
from pd_cluster.settings.request_settings import RequestSettings
from pd_cluster.settings.serve_options import ServeOptions, settings
from pd_cluster.settings.setting import DeclaredSetting, Panel

# The settings that apply here -> help texts where they differ from `serve`'s.
SETTINGS = {
    "model": "Model folder, or a model of a hub; required.",
    "served_model_name": "The model's name in requests.",
    "max_model_len": "",
    "num_blocks": "",
    "block_size": "",
    "max_num_seqs": "",
    "dtype": "auto, float32, float16 or bfloat16.",
    "chat_template": "File of a chat template, or the template itself.",
    "allow_control_tokens": "Messages may have control tokens; see serve.",
    "default_chat_template_kwargs": "JSON object; see serve.",
    "chat_template_content_format": "auto, string or openai; see serve.",
    "tool_call_parser": "How the model writes tool calls; see serve.",
    "tool_parser_plugin": "",
    "reasoning_parser": "How the model marks its reasoning; see serve.",
    "try_unlisted": "Serve this model_type as unproven; repeatable.",
    "language_model_only": "",
    "speculative_config": "JSON object; see serve.",
    "generation_config": "auto, vllm or a folder; see serve.",
    "override_generation_config": "JSON object; see serve.",
}

USUAL = ("model", "served_model_name", "max_model_len", "max_num_seqs", "dtype", "tool_call_parser", "reasoning_parser")


def _settings() -> Iterator[DeclaredSetting]:
    for name, said in SETTINGS.items():
        each = settings()[name]
        setting = replace(each.setting, help=said or each.setting.help, panel=Panel.BASIC)
        default = "{}" if name == "override_generation_config" else each.default
        yield replace(each, setting=setting, default=default)


@takes(_settings(), after="output_file", show_envvar=True, usual=USUAL)
def run_batch(
    input_file: Annotated[str, typer.Option("--input-file", "-i", help="Requests as JSON lines; - for stdin.")],
    output_file: Annotated[str, typer.Option("--output-file", "-o", help="Answers as JSON lines; - for stdout.")],
    prefill: Annotated[int, typer.Option(min=0, help="Prefill processes; 0: one engine does all the work.")] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Decode processes, with --prefill.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight at a time.")] = 256,
    help_all: Annotated[bool, HELP_ALL] = False,
    **given: Any,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Each line is answered as a POST to its url would be. After a Ctrl-C or a kill, run it again: it continues where
    it stopped.
    """
    from pd_cluster.offline.batch_job import BatchJob
    from pd_cluster.offline.offline_service import OfflineConfig
    from pd_cluster.text.template_source import with_source

    options = ServeOptions(**given)
    answers = options.read(RequestSettings)
    config = OfflineConfig(
        engine=options.engine(),
        chat=with_source(options.chat()),
        media=options.read(MediaSettings),
        prefill=prefill,
        decode=decode,
        sampling_override=answers.sampling_override,
        served_model_names=tuple(answers.served_model_names),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM has the same effect as Ctrl-C
    raise typer.Exit(BatchJob(input_file, output_file, config, concurrency).run())
