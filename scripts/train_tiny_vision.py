#!/usr/bin/env python3
"""Trains the small vision model that pd-cluster ships, on pictures and clips that scripts/tiny_pictures.py draws.

    python scripts/train_tiny_vision.py --out pd_cluster/models/tiny-vision

The model names the number, color and shape of drawn things ("two red circles"), and the order of colors in a short
clip. Training takes minutes on two cores and downloads nothing. It ends with an evaluation on drawings that were not
used in training, which it prints and writes into the model card. Knows nothing of pd_cluster.
"""

import argparse
import json
import random
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tiny_pictures import CLIP_SIZE, SIZES, Scene, draw_clip
from tokenizers import Tokenizer
from train_tiny_model import CHAT_TEMPLATE, IM_END, SPECIAL_TOKENS, make_optimizers, save, train, train_tokenizer
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl import modeling_qwen2_vl

VISION_TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END = range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + 4)
VOCAB_SIZE = 400
PATCH, MERGE, PAIR = 8, 2, 2  # side of a patch in pixels; side of a token in patches; frames that are joined into one
AREA = {"shortest_edge": 48 * 48, "longest_edge": 64 * 64}  # pixels of a resized picture
CLIP_AREA = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32}  # of a frame
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)
NUM_PAIRS = (2, 3, 4, 6, 8, 12, 16)  # of a clip's frames
NUM_CASES = 300
PLACEHOLDERS = """\
            {%- elif part['type'] == 'image' -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part['type'] == 'video' -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- endif -%}
        {%- endfor -%}
"""
TEMPLATE = CHAT_TEMPLATE.replace("            {%- endif -%}\n        {%- endfor -%}\n", PLACEHOLDERS)
DESCRIBE = (
    "What is in the picture?",
    "What is in this image?",
    "What do you see?",
    "What is this?",
    "Describe the picture.",
    "Describe this image.",
)
PARTS = {
    "number": ("How many are there?", "How many things are there?"),
    "color": ("What color is it?", "Which color do you see?"),
    "shape": ("What shape is it?", "Which shape do you see?"),
}
CLIP = ("Which colors come in which order?", "What happens in the video?", "Describe the video.", "What do you see?")
BLIND = ("Hello", "Hi", "Hello!", "What do you see?", "Who are you?", "What is 3 + 4?")
SORRY = "Show me a picture or a short clip."
SYSTEM = "You are a helpful assistant."


class Sheet(NamedTuple):
    """Cases of one question about pictures or clips of one size.

    `frames`: [num_cases, num_frames, height, width, 3] of uint8, or None without pictures.
    """

    question: str
    frames: np.ndarray | None
    answers: list[str]
    kind: str
    is_first: bool = True  # whether the picture comes before the question
    system: str = ""


def fitted(picture: Image.Image, area: dict[str, int]) -> np.ndarray:
    """Resizes a drawing as Qwen2-VL's processor does."""
    side = PATCH * MERGE
    width, height = picture.size
    tall, wide = round(height / side) * side, round(width / side) * side
    if tall * wide > area["longest_edge"]:
        beta = (height * width / area["longest_edge"]) ** 0.5
        tall, wide = (max(side, int(each / beta / side) * side) for each in (height, width))
    return np.asarray(picture.resize((wide, tall), Image.Resampling.BICUBIC))


def patches(frames: np.ndarray) -> np.ndarray:
    """Converts [num_cases, num_frames, height, width, 3] to the vision tower's rows, in the order of merged patches."""
    cases, count, height, width, _ = frames.shape
    values = (frames.astype(np.float32) / 255 - MEAN) / STD
    if count == 1:
        values, count = np.repeat(values, PAIR, axis=1), PAIR
    shape = (cases, count // PAIR, PAIR, height // PATCH // MERGE, MERGE, PATCH, width // PATCH // MERGE, MERGE, PATCH)
    blocks = values.reshape(*shape, 3).transpose(0, 1, 3, 6, 4, 7, 9, 2, 5, 8)
    return np.ascontiguousarray(blocks.reshape(-1, 3 * PAIR * PATCH * PATCH))


def picture_sheet(rng: random.Random, num_patches: int, kind: str = "") -> Sheet:
    kind = kind or rng.choices(["all", *PARTS], [0.7, 0.1, 0.1, 0.1])[0]
    size = rng.choice(SIZES)
    scenes = [Scene.of(rng) for _ in range(num_patches // 64)]
    answers = [scene.words if kind == "all" else getattr(scene, kind) for scene in scenes]
    frames = np.stack([fitted(scene.draw(rng, size), AREA)[None] for scene in scenes])
    asked = DESCRIBE if kind == "all" else PARTS[kind]
    return Sheet(rng.choice(asked), frames, answers, "image", rng.random() < 0.7, rng.choice(["", "", SYSTEM]))


def clip_sheet(rng: random.Random, num_patches: int) -> Sheet:
    num_pairs = rng.choice(NUM_PAIRS)
    clips = [draw_clip(rng, PAIR * num_pairs) for _ in range(max(1, num_patches // (16 * num_pairs)))]
    frames = np.stack([np.stack([fitted(each, CLIP_AREA) for each in clip]) for clip, _ in clips])
    answers = [", then ".join(colors) for _, colors in clips]
    return Sheet(rng.choice(CLIP), frames, answers, "video", rng.random() < 0.7, rng.choice(["", "", SYSTEM]))


def blind_sheet(rng: random.Random, num_cases: int) -> Sheet:
    return Sheet(rng.choice(BLIND), None, [SORRY] * num_cases, "", True, rng.choice(["", "", SYSTEM]))


class Learner:
    """Converts sheets to tokens and positions, and runs the model."""

    def __init__(self, model: Qwen2VLForConditionalGeneration, tokenizer: Tokenizer) -> None:
        self.model, self._tokenizer = model, tokenizer

    def _encode(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text).ids
        return found

    def tokens(self, sheet: Sheet) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (input_ids [num_cases, length], mask of the answers' tokens, positions [3, num_cases, length])."""
        grid, pads = (0, 0, 0), []
        if sheet.frames is not None:
            _, count, height, width, _ = sheet.frames.shape
            grid = (max(1, count // PAIR), height // PATCH // MERGE, width // PATCH // MERGE)
            pad = IMAGE_PAD if sheet.kind == "image" else VIDEO_PAD
            pads = [VISION_START, *[pad] * int(np.prod(grid)), VISION_END]
        before = f"<|im_start|>system\n{sheet.system}<|im_end|>\n" if sheet.system else ""
        head = self._encode(f"{before}<|im_start|>user\n")
        asked = self._encode(sheet.question)
        shown = head + pads + asked if sheet.is_first else head + asked + pads
        prompt = shown + self._encode("<|im_end|>\n<|im_start|>assistant\n")
        rows = [[*self._encode(answer), IM_END] for answer in sheet.answers]
        longest = max(map(len, rows))
        ids = torch.tensor([[*prompt, *row, *[0] * (longest - len(row))] for row in rows])
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for at, row in enumerate(rows):
            mask[at, len(prompt) : len(prompt) + len(row)] = True
        at = prompt.index(VISION_START) + 1 if pads else 0
        positions = _positions(ids.shape[1], at, grid)
        return ids, mask, positions[:, None].expand(3, *ids.shape)

    def logits(self, sheet: Sheet, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the logits that predict the answers' tokens, [num_answer_tokens, vocab]."""
        embeddings = self.model.get_input_embeddings()(ids)
        if sheet.frames is not None:
            cases, count, height, width, _ = sheet.frames.shape
            grid = torch.tensor([[max(1, count // PAIR), height // PATCH, width // PATCH]] * cases)
            features = self.model.model.visual(torch.from_numpy(patches(sheet.frames)), grid_thw=grid).pooler_output
            pads = (ids == IMAGE_PAD) | (ids == VIDEO_PAD)
            embeddings = embeddings.masked_scatter(pads[..., None], features)
        hidden = self.model.model.language_model(
            inputs_embeds=embeddings, position_ids=positions, use_cache=False
        ).last_hidden_state
        found: torch.Tensor = self.model.lm_head(hidden[:, :-1][mask[:, 1:]])
        return found

    def losses(self, sheets: Iterator[Sheet]) -> Iterator[torch.Tensor]:
        for sheet in sheets:
            ids, mask, positions = self.tokens(sheet)
            yield F.cross_entropy(self.logits(sheet, ids, mask, positions), ids[mask])

    @torch.inference_mode()
    def num_right(self, sheet: Sheet) -> int:
        """Counts cases with exact greedy answers: each token of the right answer is the likeliest at its place."""
        ids, mask, positions = self.tokens(sheet)
        right = torch.zeros_like(mask)
        right[mask] = self.logits(sheet, ids, mask, positions).argmax(-1) == ids[mask]
        return int((right | ~mask).all(-1).sum())


def _positions(length: int, at: int, grid: tuple[int, int, int]) -> torch.Tensor:
    """Returns M-RoPE's positions, [3, length]: text continues after the largest position before it."""
    num_tokens = int(np.prod(grid))
    before = torch.arange(at).expand(3, at)
    inside = torch.cartesian_prod(*map(torch.arange, grid)).T + at if num_tokens else before[:, :0]
    start = int(inside.max()) + 1 if num_tokens else at
    after = torch.arange(length - at - num_tokens).expand(3, -1) + start
    return torch.cat([before, inside, after], dim=1)


def sheets(rng: random.Random, num_steps: int, num_patches: int, clips: float) -> Iterator[Sheet]:
    """`clips`: the share of sheets with clips."""
    for _ in range(num_steps):
        kind = rng.choices(["image", "video", "blind"], [0.98 - clips, clips, 0.02])[0]
        if kind == "image":
            yield picture_sheet(rng, num_patches)
        else:
            yield clip_sheet(rng, num_patches) if kind == "video" else blind_sheet(rng, 4)


def even_attention(
    self: torch.nn.Module, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, position_embeddings, **_
) -> torch.Tensor:
    """The tower's attention for pictures of one size, in one product; transformers computes one picture at a time."""
    heads, length = self.num_heads, int(cu_seqlens[1])
    query, key, value = self.qkv(hidden_states).reshape(len(hidden_states), 3, heads, -1).unbind(1)
    query, key = modeling_qwen2_vl.apply_rotary_pos_emb_vision(query, key, *position_embeddings)
    query, key, value = (
        each.reshape(-1, length, heads, each.shape[-1]).transpose(1, 2) for each in (query, key, value)
    )
    found = F.scaled_dot_product_attention(query, key, value, scale=self.scaling)
    return self.proj(found.transpose(1, 2).reshape(len(hidden_states), -1))


def make_model() -> Qwen2VLForConditionalGeneration:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    text = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rope_parameters": rope,
        "initializer_range": 0.05, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": IM_END,
        "pad_token_id": 0,
    }  # fmt: skip
    tower = {
        "depth": 4, "embed_dim": 96, "num_heads": 4, "mlp_ratio": 3, "hidden_size": 128, "patch_size": PATCH,
        "temporal_patch_size": PAIR, "spatial_merge_size": MERGE, "initializer_range": 0.05,
    }  # fmt: skip
    ids = {"image_token_id": IMAGE_PAD, "video_token_id": VIDEO_PAD}
    ids |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    config = Qwen2VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)
    return Qwen2VLForConditionalGeneration(config).float()


def evaluate(learner: Learner) -> dict[str, tuple[int, int]]:
    """Returns (exact answers, cases) for drawings that were not used in training."""
    found = {}
    for name in ("all", *PARTS, "video"):
        rng = random.Random(f"held out {name}")
        right = asked = 0
        while asked < NUM_CASES:
            sheet = clip_sheet(rng, 1024) if name == "video" else picture_sheet(rng, 1024, name)
            right += learner.num_right(sheet)
            asked += len(sheet.answers)
        found[name] = (right, asked)
    return found


def write_processor(out: Path) -> None:
    common = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": PAIR}
    common |= {"image_mean": MEAN.tolist(), "image_std": STD.tolist()}
    picture = {**common, "image_processor_type": "Qwen2VLImageProcessor", "size": AREA}
    clip = {**common, "video_processor_type": "Qwen2VLVideoProcessor", "size": CLIP_AREA}
    for name, fields in (("preprocessor_config", picture), ("video_preprocessor_config", clip)):
        (out / f"{name}.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


TITLES = {
    "all": "a picture: number, color and shape",
    "number": "a picture: number",
    "color": "a picture: color",
    "shape": "a picture: shape",
    "video": "a clip: its colors in order",
}


def card(out: Path, scores: dict[str, tuple[int, int]], command: str, train_s: float) -> str:
    size = (out / "model.safetensors").stat().st_size
    rows = "\n".join(f"| {TITLES[name]} | {asked} | {right / asked:.1%} |" for name, (right, asked) in scores.items())
    return f"""# tiny-vision

A vision model with Qwen2-VL's architecture, small enough for the repository, for checks that need trained weights.
For a drawing of one to four equal shapes, it says their number, color and shape ("two red circles"). For a short clip
in which a shape changes its color, it lists the colors in order ("red, then blue").
Colors: red, green, blue, yellow, purple, black. Shapes: circle, square, triangle. It has learned nothing else, and
gives such answers about other pictures, too. It has the project's license; docs/multimodal.md says how to use it.

Made by `{command}` ({train_s:.0f} s of training on a busy machine), from drawings that
`scripts/tiny_pictures.py` makes; no other data. `model.safetensors`: {size:,} bytes, float32. Clips of 4 to 32 frames.

The same run evaluated it greedily on drawings that were not in its training data.
Clips have {CLIP_SIZE[0]} x {CLIP_SIZE[1]} pixels.

| question about | drawings | exact answers |
|---|---:|---:|
{rows}
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_out = Path(__file__).resolve().parent.parent / "pd_cluster" / "models" / "tiny-vision"
    parser.add_argument("--out", type=Path, default=default_out, help="folder to write (default: the shipped model)")
    parser.add_argument("--start", type=Path, help="folder of a model to train further; default: none")
    parser.add_argument("--steps", type=int, default=4500, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--patches-per-step", type=int, default=768, help="default: %(default)s")
    parser.add_argument("--clips", type=float, default=0.4, help="share of clips (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="the weights depend on it (default: %(default)s)")
    return parser.parse_args()


def make_tokenizer() -> Tokenizer:
    scenes = random.Random(0)
    texts = [Scene.of(scenes).words for _ in range(500)] * 4
    texts += [", then ".join(draw_clip(scenes, 6)[1]) for _ in range(100)]
    asked = [*DESCRIBE, *CLIP, *BLIND, *(each for several in PARTS.values() for each in several)]
    texts += [*asked, SORRY, SYSTEM, "system user assistant\n"] * 50
    return train_tokenizer(texts, [*SPECIAL_TOKENS, *VISION_TOKENS], VOCAB_SIZE)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    modeling_qwen2_vl.VisionAttention.forward = even_attention
    tokenizer, model = make_tokenizer(), make_model()
    if args.start is not None:
        model = Qwen2VLForConditionalGeneration.from_pretrained(args.start, dtype=torch.float32)
    print(f"{model.num_parameters():,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    learner = Learner(model, tokenizer)
    given = sheets(random.Random(args.seed + 1), args.steps, args.patches_per_step, args.clips)
    train_s = train(learner.losses(given), list(model.parameters()), make_optimizers(model, args.lr), args)
    args.out.mkdir(parents=True, exist_ok=True)
    save(model.eval(), tokenizer, args.out, TEMPLATE)
    write_processor(args.out)
    scores = evaluate(learner)
    for name, (right, asked) in scores.items():
        print(f"{TITLES[name]}: {right} of {asked}", flush=True)
    command = shlex.join(["python", "scripts/train_tiny_vision.py", *sys.argv[1:]])
    (args.out / "README.md").write_text(card(args.out, scores, command, train_s), encoding="utf-8")


if __name__ == "__main__":
    main()
