"""`pd-cluster run-batch`: the signature is its command line. Imports nothing heavy at the top."""

from __future__ import annotations

import signal
from typing import Annotated

import typer


def run_batch(
    input_file: Annotated[str, typer.Option("--input-file", "-i", help="JSON lines: requests; - for stdin.")],
    output_file: Annotated[str, typer.Option("--output-file", "-o", help="JSON lines: answers; - for stdout.")],
    model: Annotated[str, typer.Option(help="Model folder; default: the model that the project ships.")] = "",
    served_model_name: Annotated[list[str] | None, typer.Option(help="What requests call the model.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and output together.")] = None,
    num_blocks: Annotated[
        int | None, typer.Option("--num-blocks", "--num-gpu-blocks-override", help="Blocks in the KV pool.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in a KV cache block; 16, on NPUs 128 when not given.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences in one step.")] = 256,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    chat_template: Annotated[str, typer.Option(help="File of a chat template, or the template itself.")] = "",
    allow_control_tokens: Annotated[
        bool, typer.Option("--allow-control-tokens", help="Messages may have control tokens; as of serve.")
    ] = False,
    tool_call_parser: Annotated[str, typer.Option(help="How the model writes tool calls; as of serve.")] = "",
    reasoning_parser: Annotated[str, typer.Option(help="How the model marks its reasoning; as of serve.")] = "",
    try_unlisted: Annotated[
        list[str] | None, typer.Option(metavar="TYPE", help="Serve this model_type as unproven; may be given again.")
    ] = None,
    language_model_only: Annotated[
        bool, typer.Option("--language-model-only", help="Of a multimodal model, serve the text model alone.")
    ] = False,
    generation_config: Annotated[str, typer.Option(help="auto, vllm or a folder; as of serve.")] = "auto",
    override_generation_config: Annotated[str, typer.Option(help="JSON object; as of serve.")] = "{}",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill processes; none: one engine does it all.")] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Decode processes, as many as you like beside --prefill.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that are worked at at once.")] = 256,
) -> None:
    """Answer a file of requests in OpenAI's batch format, without a server.

    Each line's answer or error is the HTTP API's. Run it again after a Ctrl-C or a kill: it goes on where it stopped.
    """
    from pd_cluster.checkpoint import SHIPPED_MODEL
    from pd_cluster.config import ChatConfig, EngineConfig
    from pd_cluster.offline.batch_job import Job
    from pd_cluster.offline.session import OfflineConfig
    from pd_cluster.options import template_given
    from pd_cluster.parsers.reply import ReplyFormat
    from pd_cluster.sampling_defaults import parse_override

    ReplyFormat(tool_call_parser, reasoning_parser)  # raises for names that are not known
    config = OfflineConfig(
        engine=EngineConfig(
            model=model or str(SHIPPED_MODEL),
            dtype=dtype,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            try_unlisted=tuple(try_unlisted or ()),
            language_model_only=language_model_only,
            generation_config=generation_config,
        ),
        sampling_override=parse_override(override_generation_config),
        chat=ChatConfig(
            template=template_given(chat_template) if chat_template else "",
            allows_control_tokens=allow_control_tokens,
            tool_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        ),
        prefill=prefill,
        decode=decode,
        served_model_names=tuple(served_model_name or ()),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    raise typer.Exit(Job(input_file, output_file, config, concurrency).run())
