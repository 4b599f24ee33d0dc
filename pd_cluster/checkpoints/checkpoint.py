"""Reads a model folder's architecture, limits, ids and identity, without torch."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pd_cluster.checkpoints.architectures import (
    MULTIMODAL,
    Config,
    defaults_of,
    is_native,
    null_fields,
    text_part,
    why_not,
)
from pd_cluster.checkpoints.classification_head import is_classifier
from pd_cluster.checkpoints.folder_identity import identity_of
from pd_cluster.checkpoints.hub import resolve_model
from pd_cluster.checkpoints.json_files import read_json
from pd_cluster.checkpoints.quantization_config import Quantization, asked, at_load, quantization_of
from pd_cluster.checkpoints.sentencepiece import is_made
from pd_cluster.checkpoints.tensor_layouts import Layout, WeightFolder, translated
from pd_cluster.checkpoints.vision_config import IMAGE_TYPES, VisionPart
from pd_cluster.checkpoints.weight_files import (
    QUANTIZERS_FIELDS,
    quantized,
    text_name,
)
from pd_cluster.errors import ConfigError, ModelError, called
from pd_cluster.numerics import RopeScaling, RopeStretch, canonical, overridden
from pd_cluster.settings.engine_config import EngineConfig

log = logging.getLogger(__name__)

# Types whose layers keep states of sequences.
HYBRID_MODEL_TYPES = (
    *("bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h"),
    *("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
# model_type -> its name in transformers; each is compared with generate() in tests/model
SUPPORTED_MODEL_TYPES = (
    *("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text"),
    *("phi3", "olmo2", "granite", "glm4", "gpt_neox", "gpt2", "opt", "starcoder2", "stablelm", "cohere2", "smollm3"),
    *("ernie4_5", "exaone4", "gpt_oss"),
    # only slow tests cover these
    *("apertus", "arcee", "cohere", "cohere2_moe", "cwm", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm"),
    *("glm4_moe", "gpt_bigcode", "granite_swa", "granitemoe", "granitemoeshared", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "jais2", "minimax", "minimax_m2", "ministral"),
    *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gptj", "longcat_flash", "minicpm3", "youtu"),
    *("deepseek_v32", "glm_moe_dsa"),
    *("gemma3n_text", "gemma4_text", "mimo_v2_flash"),
    *HYBRID_MODEL_TYPES,
    *("ministral3", "nanochat", "olmo", "olmo3", "olmoe", "phi", "phimoe", "seed_oss", "solar_open", "vaultgemma"),
)
# model_type -> number of positions if config.json gives none
DEFAULT_POSITIONS = {"gpt2": 1024}
GENERATION_FILE = "generation_config.json"
MODELS_OWN = ("auto", "vllm")  # values of --generation-config that take the end tokens from the model folder
POSITION_FIELDS = ("max_position_embeddings", "n_positions")
NUMBERS = (
    *("max_position_embeddings", "n_positions", "original_max_position_embeddings", "vocab_size", "hidden_size"),
    *("num_hidden_layers", "num_attention_heads"),
)
ALWAYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")  # NUMBERS that are never null
TIKTOKEN = "tiktoken.model"  # the tokenizer's file in Kimi-K2's folders
ADAPTER_FILES = ("adapter_config.json", "adapter_model*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with config.json, a tokenizer and *.safetensors.

    `config`: config.json with the overrides. `tokenizer_path`: the tokenizer's folder; None: only token ids are
    supported. `identity`: a digest of the config, the tokenizer, the weights' headers, a sample of each weight file,
    and whether only the text model is served. Processes with equal identity and Numerics can exchange KV cache.
    """

    path: Path
    config: dict[str, Any]  # the text model's config
    generation_config: dict[str, Any]
    identity: str
    tokenizer_path: Path | None
    overrides: dict[str, Any] = field(default_factory=dict)
    generation_folder: Path | None = None  # the source of generation_config, if it is another folder
    part_of: str = ""  # the whole model's model_type, if only a multimodal folder's text model is loaded
    is_unproven: bool = False  # whether its type is unlisted and served only because of --try-unlisted
    layout: Layout | None = None  # how tensors are stored; None: as in transformers, whose form `config` has
    quantization: Quantization | None = None  # how the files are quantized
    takes_adapters: bool = False  # whether LoRA adapters can be loaded
    vision: VisionPart | None = None  # how it reads pictures; None: text only
    head_scheme: str = ""  # the scheme that quantizes the output layer at load; "": none
    whole: dict[str, Any] | None = None  # the whole config.json in transformers' form, if the file's form differs

    @classmethod
    def open(cls, model: str) -> Checkpoint:
        """Opens a folder as it is. Raises ModelError that names the folder or file, and the remedy."""
        return cls.of(EngineConfig(model=model))

    @classmethod
    def of(cls, engine: EngineConfig, base: Checkpoint | None = None) -> Checkpoint:
        """Opens the model that an engine serves, with its overrides. Raises ModelError.

        `base`: the same model with all its files, if this folder has only config.json and the weights.
        """
        path = resolve_model(engine.model, engine.revision, engine.download_dir)
        tokenizer_path = _tokenizer_path(engine, path)
        overrides = engine.hf_overrides
        file = path / "config.json"
        whole = read_json(file)
        stored = whole
        whole, layout = translated(path, stored, overrides)
        if is_classifier(whole):
            whole = _without_output_layer(whole, engine)
        config, part_of = overridden(whole, overrides), ""
        takes_images = _takes_images(file, whole, engine)
        is_part = takes_images or (engine.language_model_only and not _is_listed(whole))
        if is_part and (text := _text_part(file, whole)) is not None:
            config, part_of = overridden(text, overrides), str(whole.get("model_type"))
        is_unproven = not _is_listed(config)
        if is_unproven:
            config = _unlisted(file, config, whole, engine.try_unlisted, part_of)
        quantization = quantization_of(path, whole) or quantization_of(path, config)
        if layout is not None and quantization is not None:
            raise quantized(str(path), f"{layout.name} layout")
        config = {name: value for name, value in config.items() if name not in QUANTIZERS_FIELDS}
        _check_numbers(file, config)
        own, folder = _generation_config(path, engine.generation_config)
        weights = WeightFolder(path, layout)
        names_of = _names_of(part_of, weights)
        is_plain = (lambda key: bool(names_of(key))) if quantization is None else (lambda key: False)
        quantization = asked(path, engine.quantization, quantization)
        vision = VisionPart.of(path, whole) if takes_images and base is None else None
        if base is not None:
            own, folder, vision = base.generation_config, base.generation_folder, base.vision
        identity = identity_of(weights, tokenizer_path, part_of, is_plain, () if vision is None else vision.files)
        return cls(
            path,
            config,
            own,
            identity,
            tokenizer_path,
            overrides,
            folder,
            part_of,
            is_unproven,
            layout,
            quantization,
            engine.adapters.enable_lora,
            vision,
            at_load(engine.quantize_head or ""),
            None if whole == stored else whole,
        )

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    def names_of(self, key: str) -> tuple[str, ...]:
        """Returns a stored tensor's names in transformers' model; empty if the tensor is not read."""
        return _names_of(self.part_of, self.weights)(key)

    @property
    def is_classifier(self) -> bool:
        """Whether the model is a classifier, which does not generate."""
        return is_classifier(self.config if self.whole is None else self.whole)

    @property
    def weights(self) -> WeightFolder:
        return WeightFolder(self.path, self.layout)

    @property
    def rope(self) -> RopeScaling:
        return RopeScaling.of(self.config)

    @property
    def hf_overrides(self) -> str:
        """The overrides, as Numerics holds them."""
        return canonical(self.overrides)

    def warn_if_unproven(self) -> None:
        """Warns that the check at load is this model's only test."""
        if self.is_unproven:
            log.warning(
                "unproven: model_type %s is not listed; it is served because --try-unlisted asks for it",
                self.model_type,
            )

    def warn_of_ignored_files(self) -> None:
        """Warns of files that are ignored here, but change the model's results in other programs."""
        if files := sorted(file.name for pattern in ADAPTER_FILES for file in self.path.glob(pattern)):
            log.warning("%s: %s: the model is served without them; see --lora-modules", self.path, ", ".join(files))

    @property
    def generation_file(self) -> Path:
        """The path of `generation_config`, which may not exist."""
        return (self.generation_folder or self.path) / GENERATION_FILE

    @property
    def stretch(self) -> RopeStretch | None:
        return RopeStretch.of(self.config)

    @property
    def trained_positions(self) -> int:
        """The length of a sequence for which the model was trained, before positions are stretched."""
        return _position_limit({**self.config, "rope_parameters": None, "rope_scaling": None})[1]

    @property
    def max_position_embeddings(self) -> int:
        """The default maximum length of a sequence in tokens."""
        return _position_limit(self.config)[1]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        ids = self.generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        if ids is None:
            return frozenset()
        return frozenset(ids if isinstance(ids, list) else [ids])

    def max_model_len(self, wanted: int | None) -> int:
        """Returns the context length. Raises ModelError for `wanted` below 1 or beyond the model's positions.

        If positions depend on a request's length, `wanted` may exceed the trained length.
        """
        name, limit = _position_limit(self.config)
        if self.stretch is not None:
            name = f"{self.stretch.kind}'s positions times factor,"
        if wanted is not None and wanted < 1:
            raise ModelError(f"{called('max_model_len')} {wanted}: must be at least 1")
        most = max(limit, self.rope.most)
        if wanted is not None and wanted > most:
            raise ModelError(
                f"{called('max_model_len')} {wanted}: {self.path / 'config.json'} has {name} {most}; use at most that, "
                f"or stretch rotary positions, if the model is made for that: {called('rope_scaling')} "
                f'{{"rope_type": "yarn", "factor": {math.ceil(wanted / self.trained_positions)}.0}}'
            )
        if wanted is None and most > limit:
            log.info("a context of %d tokens; with --max-model-len this model takes more", limit)
        return wanted or limit


def _takes_images(file: Path, whole: dict[str, Any], engine: EngineConfig) -> bool:
    """Whether to serve a multimodal model with its images. Raises ModelError if that is requested but not supported."""
    model_type = whole.get("model_type")
    if isinstance(model_type, str) and model_type in IMAGE_TYPES and not isinstance(whole.get("vision_config"), dict):
        raise ModelError(f"{file}: vision_config {whole.get('vision_config')!r}: must be an object; copy it again")
    takes = isinstance(model_type, str) and model_type in IMAGE_TYPES and _text_part(file, whole) is not None
    if engine.enable_mm and not takes:
        raise ModelError(
            f"{called('enable_mm')}: {file}: model_type {model_type!r} takes no images here; those that do are "
            f"{', '.join(IMAGE_TYPES)}; leave it out"
        )
    return takes and not engine.language_model_only


def _text_part(file: Path, whole: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the text model's config; None if there is none. Raises ModelError for a faulty field."""
    try:
        return text_part(whole)
    except (TypeError, ValueError, LookupError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{file}: text_config: {error!r}{null_fields(whole)}") from None


def _names_of(part_of: str, weights: WeightFolder) -> Callable[[str], tuple[str, ...]]:
    if part_of:
        return lambda key: tuple(filter(None, map(text_name, weights.names(key))))
    return weights.names


def _check_numbers(file: Path, config: dict[str, Any]) -> None:
    """Raises ModelError for fields that must be numbers but are not."""
    for name in NUMBERS:
        value = config.get(name)
        if value is None and not (name in ALWAYS and name in config):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            place = f"{file} (or {called('hf_overrides')})"
            raise ModelError(f"{place}: {name} {value!r}: must be a whole number of at least 1")
    RopeScaling.of(config)
    RopeStretch.of(config)


def _tokenizer_path(engine: EngineConfig, path: Path) -> Path | None:
    """Returns the tokenizer's folder; None if no tokenizer is wanted. Raises ModelError."""
    name, revision, place = engine.tokenizer, engine.tokenizer_revision, engine.download_dir
    if name == engine.model:
        name, revision = "", revision or engine.revision
    found, its_flag = path, called("tokenizer_revision")
    if name:
        found = resolve_model(name, revision, place, called("tokenizer"), needs_weights=False, revision_flag=its_flag)
    elif revision not in ("", engine.revision):
        found = resolve_model(engine.model, revision, place, needs_weights=False, revision_flag=its_flag)
    has_file = (found / "tokenizer.json").exists() or is_made(found)
    if engine.skip_tokenizer_init and not has_file:
        return None
    if not has_file and (found / TIKTOKEN).exists():
        raise ModelError(
            f"{found / TIKTOKEN}: tiktoken files are not supported, and there is no tokenizer.json beside it; convert "
            "it with transformers.convert_slow_tokenizer.TikTokenConverter, or give "
            f"{called('tokenizer')} another folder"
        )
    return found


def _is_listed(config: Config) -> bool:
    return config.get("model_type") in SUPPORTED_MODEL_TYPES


def _unlisted(
    file: Path, config: dict[str, Any], whole: dict[str, Any], try_unlisted: Sequence[str], part_of: str
) -> dict[str, Any]:
    """Returns the config of an unlisted type with defaults filled in. Raises ModelError with the reason."""
    model_type = config.get("model_type")
    flag = f"{called('try_unlisted')} {model_type}: " if model_type in try_unlisted else ""
    place = f"{flag}{file}: {'text_config: ' if part_of else ''}model_type {model_type!r}"
    text = None if part_of else _text_part(file, whole)
    if text is not None and _is_listed(text):
        way_out = f"{called('language_model_only')} serves its {text['model_type']} alone"
        raise ModelError(f"{place} {MULTIMODAL}; {way_out}")
    if reason := _why_never(config):
        raise ModelError(f"{place} is not supported: it {reason}; {_nearest(model_type)}")
    if not flag:
        raise ModelError(
            f"{place} is not supported: it is not listed, and no test compares it with transformers; "
            f"{called('try_unlisted')} {model_type} serves it as unproven if it passes a check when it is loaded; "
            f"{_nearest(model_type)}"
        )
    filled = defaults_of(str(model_type)) | config
    if not any(filled.get(name) for name in POSITION_FIELDS):
        raise ModelError(f"{place} has no {' or '.join(POSITION_FIELDS)}: add one, with the maximum number of tokens")
    return filled


def _nearest(model_type: object) -> str:
    """Returns the end of a refusal's text: the most similar supported types, and the page that lists all."""
    near = difflib.get_close_matches(str(model_type), SUPPORTED_MODEL_TYPES, 3, 0.0)
    return f"the most similar supported types: {', '.join(near)}; docs/models.md lists all {len(SUPPORTED_MODEL_TYPES)}"


def _why_never(config: Config) -> str | None:
    """Returns why an unlisted type cannot even be tried, as a sentence without its subject "it"; None: it can."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and is_native(model_type):
        return why_not(config)
    if config.get("auto_map"):
        return "is computed by code in its folder (auto_map), which is never run, and transformers has no code for it"
    return "is not known to the transformers that is installed"


def _position_limit(config: dict[str, Any]) -> tuple[str, int]:
    """Returns the field that limits a sequence's length, and its value.

    With longrope, the limit is the original length, because all positions of a longer request differ. If positions are
    stretched by a factor, the limit is multiplied by it.
    """
    name = next((name for name in POSITION_FIELDS if config.get(name)), "no length:")
    limit = int(config.get(name) or DEFAULT_POSITIONS.get(config["model_type"], 2048))
    if (stretch := RopeStretch.of(config)) is not None:
        return name, stretch.reach
    reach = RopeScaling.of(config).reach
    return name, min(limit, reach) if reach else limit


def _without_output_layer(config: dict[str, Any], engine: EngineConfig) -> dict[str, Any]:
    """Returns a classifier's config, without an output layer. Raises ConfigError."""
    if engine.logits_processors:
        raise ConfigError(
            f"{called('logits_processors')}: {engine.model} is a classifier, which chooses no tokens; leave it out"
        )
    return {**config, "tie_word_embeddings": True}


def _generation_config(path: Path, given: str) -> tuple[dict[str, Any], Path | None]:
    """Reads the file that --generation-config selects; a folder's file replaces the model's. Raises ModelError."""
    file = path / GENERATION_FILE
    own = read_json(file) if file.exists() else {}
    if given in MODELS_OWN:
        return own, None
    folder = Path(given).expanduser()
    if not given or not (folder / GENERATION_FILE).is_file():
        raise ModelError(
            f"{called('generation_config')} {given!r}: no folder with a {GENERATION_FILE}; "
            f"give such a folder, auto or vllm"
        )
    # Answers must be able to end: if the file has no eos_token_id, the model's own is kept.
    ends = {"eos_token_id": own["eos_token_id"]} if "eos_token_id" in own else {}
    return ends | read_json(folder / GENERATION_FILE), folder
