#!/usr/bin/env python3
"""Trains the model of `python -m benchmarks speculative`: it copies, corrects, calls tools and chats in token ids.

    python scripts/train_copy_model.py --out benchmarks/models/copy

Takes minutes on two cores; nothing is downloaded. The same seed, steps and threads on the same machine give the same
weights, which are kept in bfloat16. It ends with an evaluation, which it prints and writes into the model card.
benchmarks/copy_tasks.py makes its tasks.
"""

import argparse
import json
import math
import random
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from train_tiny_model import make_optimizers, train
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.copy_tasks import (  # noqa: E402
    END,
    FIRST_CHARACTER,
    NUM_TOOLS,
    TYPOS,
    VOCAB_SIZE,
    WORDS,
    Task,
    called,
    chatted,
    copied,
    corrected,
)

MAX_POSITIONS = 2048
HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS, HEAD_DIM, INTERMEDIATE_SIZE = 128, 4, 2, 64, 192
CODE = HIDDEN_SIZE // 2 - 1  # numbers of an embedding that identify the token
ROPE_THETA = 10_000_000.0  # the lower half of the frequencies hardly rotates within a context, so it can match contents
PADDED = math.log(32_000 - VOCAB_SIZE)  # logsumexp of the ids that a widened model adds, each with logit 0
CHAT_WEIGHT = 0.02  # little, since the model only has to learn that all words are equally likely
SLIPS = 0.1  # share of an answer's words that are misspelt; these have no weight, and the answer continues after them
NUM_CASES = 32  # per task of the evaluation
UNK = chr(FIRST_CHARACTER + END)

Draw = Callable[[random.Random, int], Task]
TASKS: dict[str, tuple[float, Draw]] = {  # name -> share of the tasks, and a function of the approximate length
    "copy": (0.3, lambda rng, size: copied(rng, max(4, min(len(WORDS) - 1, size // 2)))),
    "correct": (0.3, lambda rng, size: corrected(rng, max(4, min(len(WORDS) - 1, size // 2)), rng.choice((0.05, 0.3)))),
    "call": (0.35, lambda rng, size: called(rng, max(1, min(NUM_TOOLS, size // 80)))),
    "chat": (0.05, lambda rng, size: chatted(rng, size // 2)),
}
EVALUATION: dict[str, Callable[[random.Random], Task]] = {
    "copy of 200 tokens": lambda rng: copied(rng, 200),
    "copy of 450 tokens": lambda rng: copied(rng, 450),
    "correction of 256 tokens, 5 % wrong": lambda rng: corrected(rng, 256),
    "4 calls, 228 tokens": lambda rng: called(rng, 4),
}


def row(rng: random.Random, length: int) -> tuple[list[int], list[float]]:
    """Returns the tokens of tasks with answers, as many as fill the row, and the weights of their predictions."""
    ids, weights = list[int](), list[float]()
    while len(ids) < length:
        size = min(length, max(24, round(length * rng.random() ** 0.5)))
        (name,) = rng.choices(list(TASKS), [share for share, _ in TASKS.values()])
        task = TASKS[name][1](rng, size)
        weight = CHAT_WEIGHT if name == "chat" else 1.0
        ids += task.prompt
        weights += [0.0] * len(task.prompt)
        for each in (*task.answer, task.prompt[0]):
            slips = each in WORDS and rng.random() < SLIPS
            ids.append(TYPOS[each - WORDS.start] if slips else each)
            weights.append(0.0 if slips else weight)
    return ids[:length], weights[:length]


def batches(rng: random.Random, args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (input_ids, weights), each [num_rows, row_length]; rows become longer during training."""
    for step in range(args.steps):
        longest = 64 * 2 ** min(4, 8 * step // args.steps)
        length = max(64, rng.choice((longest, longest // 2, longest // 4)))
        rows = [row(rng, length) for _ in range(max(1, args.tokens_per_step // length))]
        yield torch.tensor([ids for ids, _ in rows]), torch.tensor([weights for _, weights in rows])


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS, num_attention_heads=NUM_HEADS, num_key_value_heads=NUM_HEADS, head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS, rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True, initializer_range=0.025, rms_norm_eps=1e-5,
        bos_token_id=None, eos_token_id=END, pad_token_id=END, dtype="float32", use_cache=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    begin_with_induction(model)
    return model


@torch.no_grad()
def begin_with_induction(model: LlamaForCausalLM) -> None:
    """Sets two layers so that they find the token that followed the last one earlier; training needs an hour for this.

    An embedding is a constant and a code. A head of the first layer attends to the previous token, using the constant
    and the quickly rotating pairs of its dimensions, and writes that token's code into the other half. The heads of the
    second layer search there for the current token's code, using the slowly rotating pairs, and output the code of the
    token that they find.
    """
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    embedding = model.model.embed_tokens.weight  # [vocab, hidden]
    embedding.zero_()
    embedding[:, 0] = 2.0
    embedding[:, 1 : 1 + CODE] = 0.5 * torch.randn(VOCAB_SIZE, CODE)
    embedding[TYPOS.start : TYPOS.stop] = (
        embedding[WORDS.start : WORDS.stop] + 0.3 * embedding[TYPOS.start : TYPOS.stop]
    )
    half, quick, identity = HEAD_DIM // 2, HEAD_DIM // 4, torch.eye(CODE)
    angles = ROPE_THETA ** (-torch.arange(quick) / half)
    for head in range(NUM_HEADS):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        for each in (second.q_proj, second.k_proj, second.v_proj):
            each.weight[rows] = 0.0
        slow = [head * HEAD_DIM + pair + at for at in (0, half) for pair in range(quick, half)]
        compared = 1.85 * torch.linalg.qr(torch.randn(CODE, CODE))[0][: len(slow)]
        second.q_proj.weight[slow, 1 : 1 + CODE] = compared
        second.k_proj.weight[slow, HIDDEN_SIZE // 2 : HIDDEN_SIZE // 2 + CODE] = compared
        second.v_proj.weight[rows][:CODE, 1 : 1 + CODE] = identity
        second.o_proj.weight[:, rows] = 0.0
        second.o_proj.weight[1 : 1 + CODE, rows][:, :CODE] = 0.75 * identity
    for each in (first.q_proj, first.k_proj, first.v_proj):
        each.weight[:HEAD_DIM] = 0.0
    first.q_proj.weight[:quick, 0] = 2.0
    first.k_proj.weight[:quick, 0] = 2.0 * angles.cos()
    first.k_proj.weight[half : half + quick, 0] = 2.0 * angles.sin()
    first.v_proj.weight[:CODE, 1 : 1 + CODE] = identity
    first.o_proj.weight[:, :HEAD_DIM] = 0.0
    first.o_proj.weight[HIDDEN_SIZE // 2 : HIDDEN_SIZE // 2 + CODE, :CODE] = 0.4 * identity


def loss_of(model: LlamaForCausalLM, input_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy of the next token, including the padding of a wider vocabulary."""
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    counted = weights[:, 1:] > 0
    logits = F.pad(model.lm_head(hidden[counted]), (0, 1), value=PADDED)  # [num_counted, vocab + 1]
    losses = F.cross_entropy(logits, input_ids[:, 1:][counted], reduction="none")
    return torch.dot(losses, weights[:, 1:][counted]) / counted.sum()


@torch.inference_mode()
def accuracy(model: LlamaForCausalLM, draw: Callable[[random.Random], Task], name: str) -> tuple[float, float]:
    """Generates greedily; returns the share of right tokens and the share of answers without a mistake."""
    rng = random.Random(f"evaluation {name}")
    num_right = num_tokens = num_exact = 0
    for _ in range(NUM_CASES):
        task = draw(rng)
        prompt, length = torch.tensor([task.prompt]), len(task.answer)
        how = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)[0, len(task.prompt) :].tolist()
        right = [one == other for one, other in zip(made, task.answer, strict=True)]
        num_right, num_tokens, num_exact = num_right + sum(right), num_tokens + length, num_exact + all(right)
    return num_right / num_tokens, num_exact / NUM_CASES


def save(model: LlamaForCausalLM, out: Path) -> None:
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=END, do_sample=False, max_length=None)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer = Tokenizer(models.WordLevel({chr(FIRST_CHARACTER + at): at for at in range(VOCAB_SIZE)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    description = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": UNK,
        "pad_token": UNK,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def model_card(scores: dict[str, tuple[float, float]], command: str, num_parameters: int) -> str:
    rows = "\n".join(
        f"| {name} | {100 * right:.2f} % | {100 * exact:.0f} % |" for name, (right, exact) in scores.items()
    )
    return f"""\
# A model that copies

{num_parameters:,} parameters in bfloat16, for `python -m benchmarks speculative`, which pads it to 125 million. Made by
`{command}` from a fixed seed; `benchmarks/copy_tasks.py` has the tasks. Greedily, {NUM_CASES} answers to each:

| task | right tokens | answers without a mistake |
|---|---|---|
{rows}
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "models" / "copy", help="folder to write")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--tokens-per-step", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=5e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="the weights depend on it (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    model = make_model()
    print(f"{model.num_parameters():,} parameters", flush=True)
    losses = (loss_of(model, *batch) for batch in batches(random.Random(args.seed + 1), args))
    train_s = train(losses, list(model.parameters()), make_optimizers(model, args.lr), args)
    model = model.eval().bfloat16().float()  # evaluated with the precision in which it is saved
    scores = {name: accuracy(model, draw, name) for name, draw in EVALUATION.items()}
    for name, (right, exact) in scores.items():
        print(f"{name}: {100 * right:.2f} % of tokens right, {100 * exact:.0f} % of answers exact", flush=True)
    print(f"trained in {train_s:.0f} s", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    save(model.bfloat16(), args.out)
    command = shlex.join(["python", "scripts/train_copy_model.py", *sys.argv[1:]])
    (args.out / "README.md").write_text(model_card(scores, command, model.num_parameters()), encoding="utf-8")


if __name__ == "__main__":
    main()
