"""Maps vLLM's names of classes and constants to this project's formats and texts."""

from __future__ import annotations

from typing import Any

# vLLM's class -> our call format and our reasoning format
CLASSES = {
    "ApertusToolParser": ("apertus", ""),
    "CohereCommand3ReasoningParser": ("", "cohere_command3"),
    "CohereCommand4ReasoningParser": ("", "cohere_command4"),
    "DeepSeekR1ReasoningParser": ("", "deepseek_r1"),
    "DeepSeekV31ToolParser": ("deepseek_v31", ""),
    "DeepSeekV32EngineToolParser": ("deepseek_v32", ""),
    "DeepSeekV3ReasoningParser": ("", "deepseek_v3"),
    "DeepSeekV3ReasoningWithThinkingParser": ("", "holo2"),
    "DeepSeekV3ToolParser": ("deepseek_v3", ""),
    "DeepSeekV41EngineToolParser": ("deepseek_v41", ""),
    "DeepSeekV4EngineToolParser": ("deepseek_v4", ""),
    "DotsToolParser": ("dots", ""),
    "Ernie45ToolParser": ("ernie45", ""),
    "FunctionGemmaToolParser": ("functiongemma", ""),
    "Gemma4EngineToolParser": ("gemma4", ""),
    "Glm47MoeModelToolParser": ("glm47", ""),
    "Granite4ToolParser": ("granite4", ""),
    "GraniteEngineToolParser": ("granite", ""),
    "HYV3ReasoningParser": ("", "hy_v3"),
    "HYV3ToolParser": ("hy_v3", ""),
    "HarmonyParser": ("openai", "openai_gptoss"),
    "Hermes2ProToolParser": ("hermes", ""),
    "Internlm2ToolParser": ("internlm", ""),
    "JambaToolParser": ("jamba", ""),
    "KimiK2ReasoningParser": ("", "kimi_k2"),
    "KimiK2ToolParser": ("kimi_k2", ""),
    "KimiK3Parser": ("kimi_k3", "kimi_k3"),
    "KimiK3ReasoningParser": ("", "kimi_k3"),
    "KimiK3ToolParser": ("kimi_k3", ""),
    "Llama3JsonToolParser": ("llama3_json", ""),
    "LongcatFlashToolParser": ("longcat", ""),
    "MiMoToolParser": ("mimo", ""),
    "MiniCPM5XMLToolParser": ("minicpm5", ""),
    "MiniMaxM3ReasoningParser": ("", "minimax_m3"),
    "MinimaxM2ToolParser": ("minimax_m2", ""),
    "MinimaxM3ToolParser": ("minimax_m3", ""),
    "MistralParser": ("mistral", "mistral"),
    "MistralToolParser": ("mistral", ""),
    "Plamo3EngineToolParser": ("plamo3", ""),
    "PoolsideV1ToolParser": ("poolside_v1", ""),
    "Qwen3EngineToolParser": ("qwen3_coder", ""),
    "Step3p5ToolParser": ("step3p5", ""),
    "xLAMToolParser": ("xlam", ""),
}
# vLLM's class for calls and reasoning, which has an adapter for each -> the format's name in vLLM, our formats
ENGINES = {
    "DeepSeekV32Parser": ("deepseek_v32", "deepseek_v32", "deepseek_v3"),
    "DeepSeekV4Parser": ("deepseek_v4", "deepseek_v4", "deepseek_v4"),
    "DeepSeekV41Parser": ("deepseek_v41", "deepseek_v41", "deepseek_v41"),
    "Gemma4Parser": ("gemma4", "gemma4", "gemma4"),
    "Glm47MoeParser": ("glm47_moe", "glm47", "glm47"),
    "GraniteParser": ("granite", "granite", ""),
    "GraniteThinkingParser": ("granite_thinking_parser", "qwen3_coder", "granite_thinking_parser"),
    "KimiK2Parser": ("kimi_k2", "kimi_k2", "kimi_k2"),
    "MiMoParser": ("mimo", "mimo", "mimo"),
    "MinimaxM2Parser": ("minimax_m2", "minimax_m2", "minimax_m2"),
    "MinimaxM3Parser": ("minimax_m3", "minimax_m3", "minimax_m3"),
    "NemotronV3Parser": ("nemotron_v3", "qwen3_coder", "nemotron_v3"),
    "Plamo3Parser": ("plamo3", "plamo3", "plamo3"),
    "Qwen3Parser": ("qwen3", "qwen3_coder", "qwen3"),
    "SeedOssParser": ("seed_oss", "seed_oss", "seed_oss"),
    "Step3p5Parser": ("step3p5", "step3p5", "step3p5"),
}
PLAMO, DSML, TOOL_CALL, THINK = "plamo", "｜DSML｜", ("<tool_call>", "</tool_call>"), ("<think>", "</think>")
MINIMAX = "]<]minimax[>["
# module -> the texts of its constants
CONSTANTS: dict[str, dict[str, Any]] = {
    "vllm.parser.deepseek_v32": {
        "DSML_FUNC_START": f"<{DSML}function_calls>",
        "DSML_FUNC_END": f"</{DSML}function_calls>",
    },
    "vllm.parser.deepseek_v4": {
        "DSML_INVOKE_PREFIX": f'<{DSML}invoke name="',
        "DSML_INVOKE_NAME_END": '">',
        "DSML_INVOKE_END": f"</{DSML}invoke>",
        "DSML_THINK_START": THINK[0],
        "DSML_THINK_END": THINK[1],
        "DSML_TOOL_START": f"<{DSML}tool_calls>",
        "DSML_TOOL_END": f"</{DSML}tool_calls>",
        "DSML_TOOL_START_VARIANTS": (f"<{DSML}tool_calls>", f"<{DSML}toolcalls>"),
    },
    "vllm.parser.gemma4": {
        "TOOL_CALL_START": "<|tool_call>",
        "TOOL_CALL_END": "<tool_call|>",
        "STRING_DELIM": '<|"|>',
    },
    "vllm.parser.glm47_moe": {
        "THINK_START": THINK[0],
        "THINK_END": THINK[1],
        "TOOL_CALL_START": TOOL_CALL[0],
        "TOOL_CALL_END": TOOL_CALL[1],
    },
    "vllm.parser.minimax_m2": {
        "THINK_END": THINK[1],
        "TOOL_CALL_START": "<minimax:tool_call>",
        "TOOL_CALL_END": "</minimax:tool_call>",
    },
    "vllm.parser.minimax_m3": {
        "NAMESPACE": MINIMAX,
        "INVOKE_END": f"{MINIMAX}</invoke>",
        "TOOL_CALL_START": f"{MINIMAX}<tool_call>",
        "TOOL_CALL_END": f"{MINIMAX}</tool_call>",
    },
    "vllm.parser.qwen3": {"TOOL_CALL_START": TOOL_CALL[0], "TOOL_CALL_END": TOOL_CALL[1]},
    "vllm.parser.plamo3": {
        **{
            f"{'BEGIN' if side == 'begin' else 'END'}_{part.upper()}": f"<|{PLAMO}:{side}_{part}:{PLAMO}|>"
            for side in ("begin", "end")
            for part in ("think", "tool_requests", "tool_request", "tool_name", "tool_arguments")
        },
        "BEGIN_TOOL_ARGUMENTS": "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
        "EOT": "<|plamo:tag|>",
        "PLAMO_MARKER_TOKENS": {"<|plamo:begin_", "<|plamo:end_", ":plamo|>"},
    },
    "vllm.tool_parsers.apertus_tool_parser": {
        "TOOL_CALLS_PREFIX": "<|tools_prefix|>",
        "TOOL_CALLS_SUFFIX": "<|tools_suffix|>",
    },
}
