"""vLLM's environment variables that have an equivalent flag here, with that flag.

This program does not read them. The only vLLM variable that it reads is VLLM_API_KEY (http_settings.py). Another
program's variable must not silently change this program, and a variable that a script sets for this program must not be
silently ignored: a warning names the flag.
"""

from __future__ import annotations

from collections.abc import Mapping

from pd_cluster.errors import Naming, called, flag_of, told

UNSET = ("", "0", "auto", "false")  # values, in lower case, that change nothing in vLLM

VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": f"give {called('kv_cache_memory')}, in GiB",
    "VLLM_CPU_OMP_THREADS_BIND": f"give {called('bind_cores')}",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "give OMP_NUM_THREADS",
    "VLLM_TARGET_DEVICE": f"give {called('device')}",
    "VLLM_ATTENTION_BACKEND": f"give {called('attention_backend')}",
    "VLLM_BATCH_INVARIANT": f"give {called('deterministic')}",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": f"give {called('rope_scaling')}, which raises the model's limit",
    "VLLM_WORKER_MULTIPROC_METHOD": f"give {called('spawn')} for processes that are not forked",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": f"give {called('step_timeout')}",
    "VLLM_HOST_IP": f"addresses are in the rank tables, or given by {called('advertise_host')}",
    "VLLM_PORT": f"give {called('kv_port_range')}",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "addresses are in the rank tables",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": f"give {called('kv_port_range')}",
    "VLLM_LOGGING_LEVEL": f"give {called('log_level')}",
    "VLLM_LOGGING_CONFIG_PATH": f"give {called('log_config_file')}",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": f"give {called('allow_runtime_lora')} and {called('lora_root')}",
    "VLLM_ENABLE_RESPONSES_API_STORE": f"give {called('response_store')}",
    "VLLM_USE_MODELSCOPE": "models come from folders, or from the Hugging Face hub (HF_ENDPOINT)",
    "VLLM_PLUGINS": "foreign code is not loaded",
}


def warnings_of(env: Mapping[str, str], naming: Naming = flag_of) -> list[str]:
    """Returns a warning for each of these variables that is set."""
    return [f"{name} is not read: {told(why, naming)}" for name, why in VARIABLES.items() if _is_set(env.get(name, ""))]


def _is_set(value: str) -> bool:
    return value.lower() not in UNSET
