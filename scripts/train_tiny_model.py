#!/usr/bin/env python3
"""Trains the small chat model that pd-cluster ships, on text that scripts/tiny_model_text.py makes.

    python scripts/train_tiny_model.py --out pd_cluster/models/tiny-chat

Takes minutes on two cores; downloads nothing. The same seed, steps and threads on the same machine give the same
weights. Ends with an evaluation, which it prints and writes into the model card. Knows nothing of pd_cluster.
"""

import argparse
import json
import math
import random
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tiny_model_calls import TOOL_TEMPLATE, system_text
from tiny_model_eval import evaluate, model_card
from tiny_model_text import SELF_ASKED, Conversation, Turn, phrase, raw_text
from tiny_model_tools import ToolConversation, some_call
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ENDOFTEXT, IM_START, IM_END = range(3)
VOCAB_SIZE = 1024
MAX_POSITIONS = 2048
WORDS_DIGITS_MARKS = r"\p{N}|\p{L}+|[^\s\p{L}\p{N}]|\s"  # a word is the same token wherever it occurs
ROW_LENGTHS = {64: 0.40, 128: 0.35, 256: 0.17, 512: 0.06, 1024: 0.02}  # tokens in a row -> share of the steps
CALL = re.compile(r'(<tool_call>\n{"name": ")(.*?")(, "arguments": )(.*)(}\n</tool_call>)')
TOOL_SHARE = 0.65  # of the rows in the second phase of training
TOOL_ROW_LENGTHS = {128: 0.3, 256: 0.6, 512: 0.1}  # in the second phase of training
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- elif message['content'] -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'text' -%}
                {{- part['text'] -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

Weighted = list[tuple[int, float]]
"""Token ids, each with the weight of its prediction in the loss."""


def train_tokenizer(texts: list[str], special_tokens: list[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE in which every byte has a token and every digit is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS_DIGITS_MARKS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def texts_of_tokens(rng: random.Random) -> list[str]:
    """Returns the texts for the tokenizer's training."""
    conversation = Conversation(rng)
    turns = (conversation.next_turn() for _ in range(20_000))
    texts = ["system user assistant\n", *(part for turn in turns for part in (turn.user, turn.assistant))]
    return texts + [raw_text(rng) for _ in range(2_000)]


class Rows:
    """Rows of training tokens. A row is one conversation or one raw text that leads into a conversation."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.rng = rng
        self._tokenizer = tokenizer

    def _encode(self, text: str, weight: float) -> Weighted:
        return [(token_id, weight) for token_id in self._tokenizer.encode(text).ids]

    def _turn(self, turn: Turn, weight: float) -> Weighted:
        """Weighs a turn: the answer and its end token always count; the question counts with `weight`.

        An answer's total weight is about the square root of its length, so that long easy answers don't dominate.
        """
        return [
            (IM_START, weight), *self._encode("user\n" + turn.user, weight), (IM_END, weight),
            *self._encode("\n", weight), (IM_START, weight), *self._encode("assistant\n", weight),
            *self._answer(turn.assistant),
        ]  # fmt: skip

    def drill(self, num_tokens: int, has_tools: bool = False) -> Weighted:
        """Returns a repeated phrase, or calls. This teaches copying fastest, and half of the skills need copying."""
        text = some_call(self.rng) if has_tools else phrase(self.rng, 8)
        phrase_ids = self._tokenizer.encode(text + "\n").ids
        copies = (num_tokens - 1) // len(phrase_ids)
        row = [(token_id, 0.0) for token_id in phrase_ids]
        return (row + [(token_id, 0.3) for token_id in phrase_ids * copies])[:num_tokens]

    def row(self, num_tokens: int, raw_share: float = 0.06) -> Weighted:
        row: Weighted = []
        conversation = Conversation(self.rng)
        newline = self._encode("\n", 0.0)
        if self.rng.random() < raw_share:
            row += [*self._encode(raw_text(self.rng), 0.2), (ENDOFTEXT, 0.2)]
            row += self._turn(Turn(*SELF_ASKED), 0.2)
        elif (system := conversation.system()) is not None:
            row += [(IM_START, 0.0), *self._encode("system\n" + system, 0.0), (IM_END, 0.0), *newline]
        while len(row) < num_tokens:
            self_asked = bool(row) and self.rng.random() < 0.04
            weight = 0.2 if self_asked else 0.0
            if row and row[-1][0] == IM_END:
                row += self._encode("\n", weight)
            row += self._turn(Turn(*SELF_ASKED) if self_asked else conversation.next_turn(), weight)
        return row[:num_tokens]

    def _answer(self, text: str) -> Weighted:
        ids = self._tokenizer.encode(text).ids
        return [*((token_id, (len(ids) + 1) ** -0.5) for token_id in ids), (IM_END, 0.5)]

    def _call(self, begin: str, name: str, middle: str, arguments: str, end: str) -> Weighted:
        """Weighs a call: its first mark, its name and its arguments count; the text between them hardly counts."""
        counted = len(self._tokenizer.encode(name + arguments).ids)
        weight = (counted + 1) ** -0.5
        pieces = ((begin, 0.04), (name, weight), (middle, 0.04), (arguments, weight), (end, 0.04))
        (first, _), *others = [each for text, weight in pieces for each in self._encode(text, weight)]
        return [(first, 0.5), *others, (IM_END, 0.5)]

    def _message(self, role: str, text: str) -> Weighted:
        newline = self._encode("\n", 0.0)
        if role == "assistant":
            answer = self._call(*called.groups()) if (called := CALL.fullmatch(text)) else self._answer(text)
            return [(IM_START, 0.0), *self._encode("assistant\n", 0.0), *answer, *newline]
        return [(IM_START, 0.0), *self._encode(f"{role}\n{text}", 0.0), (IM_END, 0.0), *newline]

    def tool_row(self, num_tokens: int) -> Weighted:
        """Returns a conversation with tools: calls, their results, and answers that use the results."""
        conversation = ToolConversation(self.rng)
        row: Weighted = []
        system = conversation.system
        if conversation.tools or system is not None:
            row = self._message("system", system_text(system, conversation.tools) if conversation.tools else system)
        while len(row) < num_tokens:
            for role, text in conversation.next_turn().messages():
                row += self._message(role, text)
        return row[:num_tokens]

    def batches(
        self, steps: int, tokens_per_step: int, tool_share: float = 0.0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (input_ids, weights), each [num_rows, row_length]."""
        lengths = TOOL_ROW_LENGTHS if tool_share else ROW_LENGTHS
        for step in range(steps):
            drill_share = (
                0.3 if step < steps // 8 and tool_share else 0.5 if step < steps // 8 else 0.03 + tool_share / 5
            )
            length = self.rng.choices(list(lengths), list(lengths.values()))[0]
            rows = []
            for _ in range(max(1, tokens_per_step // length)):
                is_drill, has_tools = self.rng.random() < drill_share, self.rng.random() < tool_share
                if is_drill:
                    rows.append(self.drill(length, has_tools))
                else:
                    rows.append(self.tool_row(length) if has_tools else self.row(length, 0.06 + tool_share / 4))
            yield (
                torch.tensor([[token_id for token_id, _ in row] for row in rows]),
                torch.tensor([[weight for _, weight in row] for row in rows]),
            )


def make_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=192, intermediate_size=576, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None, eos_token_id=IM_END, pad_token_id=ENDOFTEXT, dtype="float32", use_cache=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def weighted_loss(model: Qwen3ForCausalLM, input_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the weighted mean of the next token's cross entropy, over positions with a weight."""
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]  # [rows, length - 1, hidden]
    counted = weights[:, 1:] > 0
    logits = model.lm_head(hidden[counted])  # [num_counted, vocab]
    losses = F.cross_entropy(logits, input_ids[:, 1:][counted], reduction="none")
    return torch.dot(losses, weights[:, 1:][counted]) / weights[:, 1:].sum()


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with AdamW's step size, in float32: bfloat16 is slow on CPUs without instructions for it."""

    def __init__(
        self, weights: list[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(mean, group["momentum"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(update, alpha=group["lr"] * 0.2 * math.sqrt(max(weight.shape)))


def orthogonal(grad: torch.Tensor) -> torch.Tensor:
    """Returns roughly the nearest orthogonal matrix, by Newton-Schulz iterations (github.com/KellerJordan/Muon)."""
    made = grad.T if grad.shape[0] > grad.shape[1] else grad
    made = made / made.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = made @ made.T
        made = torch.addmm(made, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), made, beta=3.4445)
    return made.T if grad.shape[0] > grad.shape[1] else made


def make_optimizers(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Uses Muon for the matrices: it learns copying (repeat, names, JSON) in a third of AdamW's steps."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return [
        Muon(matrices, lr, weight_decay=0.05),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate(step: int, steps: int) -> float:
    """Returns the share of the highest rate: a short warm-up, then a cosine down to zero."""
    return min((step + 1) / max(1, steps // 30), 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))


def train(
    losses: Iterator[torch.Tensor],
    trained: list[torch.nn.Parameter],
    optimizers: list[torch.optim.Optimizer],
    args: argparse.Namespace,
) -> float:
    """Takes an optimizer step for each loss. Returns the seconds taken, including the iterator's."""
    started_s, smooth = time.monotonic(), math.nan
    with progress_bar() as bar:
        task = bar.add_task("training", total=args.steps, loss=smooth)
        for step, loss in enumerate(losses, start=1):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = args.lr * learning_rate(step, args.steps)
                optimizer.step()
                optimizer.zero_grad()
            smooth = loss.item() if step == 1 else smooth + 0.02 * (loss.item() - smooth)
            bar.update(task, advance=1, loss=smooth)
            if not sys.stderr.isatty() and step % 100 == 0:
                print(f"step {step}/{args.steps} loss {smooth:.4f} {time.monotonic() - started_s:.0f} s", flush=True)
    return time.monotonic() - started_s


def losses_of(
    model: Qwen3ForCausalLM, rows: Rows, args: argparse.Namespace, tool_share: float = 0.0
) -> Iterator[torch.Tensor]:
    for input_ids, weights in rows.batches(args.steps, args.tokens_per_step, tool_share):
        yield weighted_loss(model, input_ids, weights)


def learn_to_chat(args: argparse.Namespace) -> tuple[Qwen3ForCausalLM, Tokenizer, float]:
    tokenizer = train_tokenizer(texts_of_tokens(random.Random(args.seed)), SPECIAL_TOKENS, VOCAB_SIZE)
    model = make_model()
    print(f"{model.num_parameters():,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    losses = losses_of(model, Rows(tokenizer, random.Random(args.seed + 1)), args)
    return model, tokenizer, train(losses, list(model.parameters()), make_optimizers(model, args.lr), args)


def learn_to_call(model: Qwen3ForCausalLM, tokenizer: Tokenizer, args: argparse.Namespace) -> float:
    """Trains a chat model on tool calls, and on more chats, so that it forgets none. Returns the seconds taken."""
    args = argparse.Namespace(**{**vars(args), "steps": args.tool_steps, "lr": args.tool_lr})
    losses = losses_of(model, Rows(tokenizer, random.Random(args.seed + 2)), args, TOOL_SHARE)
    return train(losses, list(model.parameters()), make_optimizers(model, args.lr), args)


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(
        *columns, TextColumn("loss {task.fields[loss]:.4f}"), console=console, disable=not console.is_terminal
    )


def save(
    model: PreTrainedModel, tokenizer: Tokenizer, out: Path, chat_template: str = CHAT_TEMPLATE, **more: str
) -> None:
    """`more`: further fields of tokenizer_config.json."""
    model.generation_config = GenerationConfig(
        eos_token_id=[IM_END, ENDOFTEXT], pad_token_id=ENDOFTEXT, do_sample=False, max_length=None
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    description = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[IM_END],
        "pad_token": SPECIAL_TOKENS[ENDOFTEXT],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
        **more,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_out = Path(__file__).resolve().parent.parent / "pd_cluster" / "models" / "tiny-chat"
    parser.add_argument("--out", type=Path, default=default_out, help="folder to write (default: the shipped model)")
    parser.add_argument("--steps", type=int, default=4500, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--tool-steps", type=int, default=1400, help="steps of the second phase, with tools (default: %(default)s)"
    )
    parser.add_argument(
        "--tool-lr", type=float, default=3e-3, help="highest rate of the second phase (default: %(default)s)"
    )
    parser.add_argument("--start", type=Path, help="folder of a model that chats: only teach it tools")
    parser.add_argument("--tokens-per-step", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=5e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="the weights depend on it (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.start is None:
        model, tokenizer, train_s = learn_to_chat(args)
    else:
        model, train_s = Qwen3ForCausalLM.from_pretrained(args.start), 0.0
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
    train_s += learn_to_call(model, tokenizer, args)
    save(model.eval(), tokenizer, args.out, TOOL_TEMPLATE, tool_call_parser="hermes")
    scores = evaluate(args.out)
    command = shlex.join(["python", "scripts/train_tiny_model.py", *sys.argv[1:]])
    (args.out / "README.md").write_text(model_card(args.out, scores, command, train_s), encoding="utf-8")


if __name__ == "__main__":
    main()
