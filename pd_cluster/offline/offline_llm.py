"""`LLM`: generate, chat and embed from Python, with the names and forms of TACO-LLM, FastDeploy and vLLM.

It uses the text service of the HTTP API, so parameters have the same meaning, and the same code checks them.
FastDeploy's own modules and forms are in pd_cluster/extras/fastdeploy/.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from pd_cluster.errors import RequestError
from pd_cluster.offline.llm_adapters import LoRARequest, PromptAdapterRequest, paired_lora, paired_prompt_adapters
from pd_cluster.offline.llm_answers import answers
from pd_cluster.offline.llm_arguments import config_of, in_python_names
from pd_cluster.offline.llm_outputs import RequestOutput
from pd_cluster.offline.llm_pooling import (
    EmbeddingRequestOutput,
    PoolingParams,
    PoolingRequestOutput,
    check_task,
    embeddings,
    encoded,
    paired_pooling,
)
from pd_cluster.offline.llm_prompts import Prompt, paired, pictures_of, read_conversations, read_prompts, refuse
from pd_cluster.offline.llm_requests import (
    ChatAbilities,
    LLMRequest,
    check_have_text,
    named,
    requests_for_chats,
    requests_for_prompts,
    with_adapters,
)
from pd_cluster.offline.llm_sampling import SamplingParams, guided_fields
from pd_cluster.offline.llm_streaming import growing
from pd_cluster.offline.offline_service import OfflineService
from pd_cluster.offline.progress_bar import Progress
from pd_cluster.offline.weight_commands import WeightCommands

log = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams]
Lora = LoRARequest | Sequence[LoRARequest | None] | None
PromptAdapter = PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None


class LLM:
    """A model, its tokenizer and the memory for its KV cache, in this process or in worker processes.

    `prefill` and `decode` are the numbers of worker processes that compute prompts and that compute outputs.
    Without them the engine runs in this process. A context manager; `close` releases everything.

    A forked process must make its own LLM. `del` ends the engine as `close` does.

    Every other argument is TACO-LLM's, FastDeploy's, or a flag of `pd-cluster serve` by its Python name
    (docs/flags.md). Each is honoured, ignored with one warning if it cannot matter, or refused with the reason. Note:

    - `dtype` "auto" is the checkpoint's dtype, except on the CPU, where it is float32, because 16-bit computation is
      slow. Unlike in TACO-LLM's documentation, a float32 checkpoint does not become float16. Warnings report both
      cases. "float16" and "bfloat16" are honoured.
    - `gpu_memory_utilization` 0.9, the default, has no effect: the pool then gets a size that suits a CPU, whose memory
      other processes also use. Any other value is honoured, as are `num_blocks` and `kv_cache_memory`.
    - `seed` determines the seeds of requests without a seed, in the order of the input, so that the same script gives
      the same output; None: random seeds.
    - `skip_tokenizer_init` True: prompts must be token ids, and outputs have no text. Stop strings and guides still
      need the folder's tokenizer.json.
    - Without `prefill` and `decode`, `tensor_parallel_size` above 1 starts a prefill and a decode instance with that
    many ranks each. `data_parallel_size` above 1 starts that many instances of each role, which share a model's
    experts. A warning says so.

    Raises ConfigError or ModelError, in one line that names the argument.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int | None = 0,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 4,
        cpu_offload_gb: float = 0,
        enforce_eager: bool | None = None,
        max_context_len_to_capture: int | None = None,
        max_seq_len_to_capture: int = 8192,
        disable_custom_all_reduce: bool = False,
        disable_async_output_proc: bool = False,
        *,
        prefill: int = 0,
        decode: int = 0,
        **kwargs: Any,
    ) -> None:
        given = {
            "model": model,
            "tokenizer": tokenizer,
            "tokenizer_mode": tokenizer_mode,
            "skip_tokenizer_init": skip_tokenizer_init,
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "quantization": quantization,
            "revision": revision,
            "tokenizer_revision": tokenizer_revision,
            "seed": seed,
            "gpu_memory_utilization": gpu_memory_utilization,
            "swap_space": swap_space,
            "cpu_offload_gb": cpu_offload_gb,
            "enforce_eager": enforce_eager,
            "max_context_len_to_capture": max_context_len_to_capture,
            "max_seq_len_to_capture": max_seq_len_to_capture,
            "disable_custom_all_reduce": disable_custom_all_reduce,
            "disable_async_output_proc": disable_async_output_proc,
        }
        config = config_of(given | kwargs, prefill, decode)
        self._has_text = not skip_tokenizer_init
        self._has_tool_parser = bool(config.chat.tool_parser)
        self._seeds: random.Random = random.SystemRandom() if seed is None else random.Random(seed)
        with in_python_names():
            self._offline = OfflineService(config)
        self._say_what_it_became(dtype)

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Params | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: Lora = None,
        prompt_adapter_request: PromptAdapter = None,
        guided_options_request: Any = None,
        *,
        inputs: Any = None,
    ) -> list[RequestOutput]:
        """Continues prompts without a chat template. Returns one output per prompt, in the same order.

        `prompts`, or `inputs`: a str, a list of token ids, a dict with "prompt" or "prompt_token_ids", or a list of
        these. A dict may have "multi_modal_data": {"image": …}, a PIL image or a list of them, if the model takes
        images; its prompt has one placeholder for each. `prompt_token_ids`: one list, or several. `sampling_params`:
        one for all, or one for each. `lora_request`: the adapter of all prompts, or one for each (None: the model
        itself), which needs enable_lora=True. `prompt_adapter_request` needs enable_prompt_adapter=True; a prompt may
        have only one of the two. `guided_options_request`: the guide of all outputs, a dict or an object with
        guided_json and so on.

        Raises RequestError, before any work, for errors that do not depend on the model: the shape of the input, a
        value of a parameter, an unsupported argument. Errors that depend on the model (a prompt that is too long, an
        unusable guide) and later failures are reported in the `error_code` and `error_msg` of the prompt's output.
        """
        if inputs is not None:
            refuse({"prompts": prompts}, "inputs are also given")
            prompts = inputs
        read = read_prompts(prompts, prompt_token_ids)
        params, adapters = paired(sampling_params, len(read)), paired_lora(lora_request, len(read))
        guided = guided_options_request
        guide = {} if guided is None else guided_fields("guided_options_request", guided)
        asks = requests_for_prompts(read, params, guide, self._new_seed, self._has_text)
        variants = self._offline.adapters.variants(adapters, paired_prompt_adapters(prompt_adapter_request, len(read)))
        return self._answered(with_adapters(asks, adapters, variants), use_tqdm)

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Returns one prompt's outputs as they grow, for the engine's event loop: see AsyncLLMEngine.

        Raises RequestError for errors that do not depend on the model.
        """
        read = read_prompts(prompt, None)
        if len(read) != 1:
            raise RequestError(f"prompt: {len(read)} prompts; give one for each request", param="prompt")
        if not isinstance(sampling_params, SamplingParams):
            raise RequestError(f"sampling_params: {sampling_params!r}; expected SamplingParams", "sampling_params")
        asks = requests_for_prompts(read, [sampling_params], {}, self._new_seed, self._has_text)
        adapters, prompt_adapters = paired_lora(lora_request, 1), paired_prompt_adapters(prompt_adapter_request, 1)
        (ask,) = with_adapters(asks, adapters, self._offline.adapters.variants(adapters, prompt_adapters))
        return growing(self._offline.service, named(ask, request_id, priority), sampling_params.output_kind)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | None = None,
        use_tqdm: bool = True,
        lora_request: Lora = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        *,
        tool_choice: str | dict[str, Any] | None = None,
        allow_control_tokens: bool | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several. Raises as `generate` does.

        `chat_template`: a template's source; None: the model's template. `chat_template_kwargs`: its variables,
        such as {"enable_thinking": False}. `tools` need LLM(…, tool_call_parser=…), or a `tool_choice`.
        `allow_control_tokens` True: the text of a control token in a message, such as "<|im_end|>", becomes that token;
        None: as LLM(…, allow_control_tokens=…) says, which is False by default, as over HTTP. Prompts of `generate` may
        always contain control tokens.
        """
        if not self._has_text:
            raise RequestError("messages: need a tokenizer; leave skip_tokenizer_init out", "messages")
        conversations = read_conversations(messages)
        template = {
            "chat_template": chat_template,
            "add_generation_prompt": False if continue_final_message else add_generation_prompt,
            "continue_final_message": continue_final_message or None,
            "tools": tools,
            "tool_choice": tool_choice,
            "chat_template_kwargs": chat_template_kwargs,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        params = paired(sampling_params, len(conversations))
        adapters = paired_lora(lora_request, len(conversations))
        asks = requests_for_chats(
            conversations,
            params,
            template,
            self._new_seed,
            ChatAbilities(self._has_tool_parser, self._offline.checkpoint.vision is not None),
            allow_control_tokens,
        )
        asks = with_adapters(asks, adapters, self._offline.adapters.variants(adapters))
        return self._answered(asks, use_tqdm)

    def embed(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Lora = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns an output for each prompt, in order, with its vector in `.outputs.embedding`.

        A vector is the final hidden state (after the last norm) of the prompt's last token, or the mean over all tokens
        if the checkpoint's `1_Pooling/config.json` says so. The vector is cut to `dimensions` values and, unless
        `normalize` is False, divided by its norm.

        `prompts`: as for `generate`. `pooling_params`: one for all, or one for each. Raises RequestError, before any
        work, for errors that do not depend on the model; the prompt's `error_code` and `error_msg` report other errors.
        """
        read = read_prompts(prompts, None)
        if any(map(pictures_of, read)):
            raise RequestError("prompts: images cannot be embedded; leave them out", param="prompts")
        check_have_text(read, self._has_text)
        params = paired_pooling(pooling_params, len(read))
        variants = self._offline.adapters.variants(paired_lora(lora_request, len(read)))
        return self._embedded(read, params, variants, use_tqdm)

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Lora = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Works like `embed`, with each vector as an array in `.outputs.data`. `pooling_task` can only be "embed"."""
        check_task("pooling_task", pooling_task)
        outputs = self.embed(prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request)
        return [encoded(output) for output in outputs]

    @property
    def weights(self) -> WeightCommands:
        """The commands that replace the weights: `start_weight_update` and the methods below it."""
        return self._offline.weights

    def start_weight_update(self, mode: str = "wait") -> None:
        """Begins an update. `mode`: running requests finish first (wait), continue with the new weights (keep) or end
        (abort). Raises Refused, as the following methods do.
        """
        self.weights.start_weight_update(mode)

    def update_weights(self, request: Mapping[str, Any]) -> None:
        """Checks the folder in {"update_info": {"folder": …}}, or receives the tensors in its three lists from the
        trainer's group.

        Raises RequestError that names the faulty tensor, without changing anything.
        """
        self.weights.update_weights(request)

    def finish_weight_update(self, weight_version: str | None = None) -> str:
        """Changes the weights of all instances; returns the version's name."""
        return self.weights.finish_weight_update(weight_version)

    def update_weight_version(self, new_version: str) -> None:
        self.weights.update_weight_version(new_version)

    def get_weight_version(self) -> str:
        return self.weights.get_weight_version()

    def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        """Joins the torch.distributed group that {"init_info": {"master_address": …, "master_port": …}} names."""
        self.weights.init_weight_transfer_engine(request)

    @property
    def nums_blocks(self) -> list[int]:
        """The number of KV cache blocks of each instance."""
        instances = self._offline.service.router.membership.instances
        return [instance.info.num_blocks for instance in instances if instance.info is not None]

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer as a transformers object. Raises ModelError."""
        from pd_cluster.model.loading.transformers_tokenizer import (
            transformers_tokenizer,  # imports transformers, which few callers need
        )

        checkpoint = self._offline.checkpoint
        return transformers_tokenizer(checkpoint.tokenizer_path or checkpoint.path)

    @property
    def offline(self) -> OfflineService:
        """The offline service, for other classes that wrap this one."""
        return self._offline

    def close(self) -> None:
        """Ends the engine; further calls do nothing."""
        self._offline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _say_what_it_became(self, dtype: str) -> None:
        """Logs the number of blocks, and the dtype chosen by "auto" where other engines' documentation differs."""
        own = self._offline.checkpoint.config
        on_disk = used = own.get("dtype") or own.get("torch_dtype") or "float32"
        for instance in self._offline.service.router.membership.instances:
            if (info := instance.info) is not None and info.layout is not None:
                used = info.numerics.dtype
                size = info.layout.block_size
                log.info("%s: %d KV cache blocks of %d tokens", instance.name, info.num_blocks, size)
        if dtype != "auto":
            return
        if on_disk == "float32":
            log.warning('dtype "auto": the checkpoint is float32 and stays so; give dtype="float16" for float16')
        elif used != on_disk:
            log.warning(
                'dtype "auto": the checkpoint is %s, but the CPU computes in %s; give dtype="%s" to change that',
                on_disk,
                used,
                on_disk,
            )

    def _answered(self, asks: list[LLMRequest], shows_progress: bool) -> list[RequestOutput]:
        with Progress(len(asks), shows_progress) as progress:

            def ended(output: RequestOutput) -> None:
                progress.add(len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.outputs))

            return self._offline.run(answers(self._offline.service, asks, ended))

    def _embedded(
        self, prompts: list[Prompt], params: list[PoolingParams], variants: list[str], shows_progress: bool
    ) -> list[EmbeddingRequestOutput]:
        with Progress(len(prompts), shows_progress) as progress:

            def ended(output: EmbeddingRequestOutput) -> None:
                progress.add(len(output.prompt_token_ids), 0)

            return self._offline.run(embeddings(self._offline.service, prompts, params, variants, ended))

    def _new_seed(self) -> int:
        return self._seeds.getrandbits(63)
