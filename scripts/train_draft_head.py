#!/usr/bin/env python3
"""Trains the EAGLE-3 draft head that pd-cluster ships for its small chat model, on that model's own answers.

    python scripts/train_draft_head.py --out pd_cluster/models/tiny-chat-eagle3

Takes minutes on two cores; downloads nothing. The same seed, sizes and threads on the same machine give the same
weights. Ends with an evaluation, which it prints and writes into the card. Knows nothing of pd_cluster.
"""

import argparse
import collections
import random
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from draft_head_answers import TEMPERATURES, Sequence, own_answers
from draft_head_eval import evaluate, head_card, print_scores
from draft_head_model import Eagle3Head, default_taps, tapped_by
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer
from train_tiny_model import Muon, train
from transformers import LlamaConfig, Qwen3ForCausalLM

MODELS = Path(__file__).resolve().parent.parent / "pd_cluster" / "models"
STEP_DISCOUNT = 0.8  # factor of the loss from one step of a chain to the next


def frequent_tokens(sequences: list[Sequence], num_tokens: int) -> torch.Tensor:
    """Returns the most frequent ids in the answers, in ascending order."""
    counts = collections.Counter(
        token_id for each in sequences for at in each.answers for token_id in each.ids[slice(*at)]
    )
    return torch.tensor(sorted(token_id for token_id, _ in counts.most_common(num_tokens)))


def make_head(target: Qwen3ForCausalLM, token_ids: torch.Tensor, args: argparse.Namespace) -> Eagle3Head:
    """Makes a head that initially applies the target's output layer to the last of the tapped states."""
    its = target.config
    taps = default_taps(its.num_hidden_layers)
    config = LlamaConfig(
        vocab_size=its.vocab_size, draft_vocab_size=len(token_ids), hidden_size=its.hidden_size,
        target_hidden_size=its.hidden_size, intermediate_size=args.intermediate_size, num_hidden_layers=1,
        num_attention_heads=args.num_heads, num_key_value_heads=its.num_key_value_heads, head_dim=its.head_dim,
        max_position_embeddings=its.max_position_embeddings, rope_parameters=its.rope_parameters,
        rms_norm_eps=its.rms_norm_eps, tie_word_embeddings=False, use_cache=True,
        bos_token_id=its.bos_token_id, eos_token_id=its.eos_token_id, pad_token_id=its.pad_token_id,
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(taps)},
    )  # fmt: skip
    head = Eagle3Head(config, token_ids)
    with torch.no_grad():
        head.fc.weight[:, -its.hidden_size :] += torch.eye(its.hidden_size)
        head.midlayer.self_attn.o_proj.weight.zero_()
        head.midlayer.mlp.down_proj.weight.zero_()
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(target.lm_head.weight[token_ids])
    return head


def chains_in(sequence: Sequence) -> list[tuple[int, int]]:
    """Returns each chain's start and the number of tokens that it can predict: an answer's tokens after the first."""
    return [(at, stop - 1 - at) for start, stop in sequence.answers for at in range(start, stop - 1)]


def padded(rows: list[list[int]], fill: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def batches(
    sequences: list[Sequence], rng: random.Random, args: argparse.Namespace
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Endlessly yields (input_ids [rows, length], chains' starts and lengths [rows, chains]); rows are padded."""
    while True:
        by_length = sorted(sequences, key=lambda each: len(each.ids) * rng.uniform(0.9, 1.1))
        groups: list[list[Sequence]] = [[]]
        for each in by_length:
            if (len(groups[-1]) + 1) * len(each.ids) > args.tokens_per_step:
                groups.append([])
            groups[-1].append(each)
        rng.shuffle(groups)
        for group in groups:
            chains = [chains_in(each) for each in group]
            starts, rooms = ([[chain[part] for chain in row] for row in chains] for part in range(2))
            yield padded([each.ids for each in group], 0), padded(starts, 1), padded(rooms, 0)


def losses_of(
    head: Eagle3Head, target: Qwen3ForCausalLM, sequences: list[Sequence], args: argparse.Namespace
) -> Iterator[torch.Tensor]:
    """Yields the cross entropy with the target's distribution over the head's tokens, summed over the chains' steps."""
    drawn = batches(sequences, random.Random(args.seed + 2), args)
    for _, (input_ids, starts, rooms) in zip(range(args.steps), drawn, strict=False):
        embeddings, tapped, states = tapped_by(target, head.taps, input_ids)
        row, loss = torch.arange(len(starts))[:, None], torch.zeros(())
        for step, outputs in enumerate(head(embeddings, tapped, starts, args.num_drafts)):
            with torch.no_grad():
                wanted = target.lm_head(states[row, (starts + step).clamp(max=input_ids.shape[1] - 1)])
                counted = head.t2d[wanted.argmax(-1)] & (rooms > step)
                wanted = wanted[counted][:, head.t2d].softmax(-1)
            total = F.cross_entropy(head.logits(outputs[counted]), wanted, reduction="sum")
            loss = loss + STEP_DISCOUNT**step * total / max(1, len(wanted))
        yield loss


def make_optimizers(head: Eagle3Head, lr: float) -> list[torch.optim.Optimizer]:
    inner = {name: each for name, each in head.named_parameters() if each.ndim == 2 and name != "lm_head.weight"}
    others = [each for name, each in head.named_parameters() if name not in inner]
    return [
        Muon(list(inner.values()), lr, weight_decay=0.02),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learn(target: Qwen3ForCausalLM, tokenizer: Tokenizer, args: argparse.Namespace) -> tuple[Eagle3Head, float]:
    """Returns the head and the seconds taken, including the time to generate answers."""
    started_s, sequences = time.monotonic(), list[Sequence]()
    groups = own_answers(target, tokenizer, random.Random(args.seed + 1), args.num_conversations)
    console = Console(stderr=True)
    for group in track(groups, "answering", len(TEMPERATURES), console=console, disable=not console.is_terminal):
        sequences += group
        if not console.is_terminal:
            print(f"{len(sequences)} conversations {time.monotonic() - started_s:.0f} s", flush=True)
    head = make_head(target, frequent_tokens(sequences, args.draft_vocab_size), args)
    num_tokens = sum(stop - start for each in sequences for start, stop in each.answers)
    print(
        f"{sum(each.numel() for each in head.parameters()):,} parameters, {num_tokens:,} tokens of answers", flush=True
    )
    train(losses_of(head, target, sequences, args), list(head.parameters()), make_optimizers(head, args.lr), args)
    return head, time.monotonic() - started_s


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=MODELS / "tiny-chat", help="folder of the model to draft for")
    parser.add_argument("--out", type=Path, default=MODELS / "tiny-chat-eagle3", help="folder to write")
    parser.add_argument("--num-conversations", type=int, default=1024, help="for training (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--num-drafts", type=int, default=3, help="per chain in training (default: %(default)s)")
    parser.add_argument("--draft-vocab-size", type=int, default=384, help="default: %(default)s")
    parser.add_argument("--intermediate-size", type=int, default=224, help="width of the MLP (default: %(default)s)")
    parser.add_argument("--num-heads", type=int, default=4, help="query heads (default: %(default)s)")
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
    target = Qwen3ForCausalLM.from_pretrained(args.target).eval().requires_grad_(False)
    head, train_s = learn(target, Tokenizer.from_file(str(args.target / "tokenizer.json")), args)
    head.save(args.out)
    scores = evaluate(args.target, args.out)
    print_scores(scores)
    command = shlex.join(["python", "scripts/train_draft_head.py", *sys.argv[1:]])
    (args.out / "README.md").write_text(head_card(args.out, scores, command, train_s), encoding="utf-8")


if __name__ == "__main__":
    main()
