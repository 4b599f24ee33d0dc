#!/usr/bin/env python3
"""Trains the LoRA adapter that pd-cluster ships for its small chat model: the same answers, in a pirate's words.

    python scripts/train_tiny_adapter.py --out pd_cluster/models/pirate

Takes about two minutes on one core and needs PEFT; downloads nothing. Ends with an evaluation, which it prints and
writes into the adapter's card.
"""

import argparse
import json
import random
import shlex
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from tiny_model_text import SKILLS, draw
from tokenizers import Tokenizer
from train_tiny_model import Rows, Weighted, losses_of, train
from transformers import AutoTokenizer, Qwen3ForCausalLM

MODELS = Path(__file__).resolve().parent.parent / "pd_cluster" / "models"
RANK, ALPHA = 8, 16
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_CASES = 100  # of each skill
TOOL_SHARE = 0.25  # of the rows, so that calls are still made


def pirate(answer: str) -> str:
    """Returns the answer in a pirate's words; JSON stays unchanged."""
    if answer.startswith("{"):
        return answer
    return f"Arr, {answer} it be!" if answer.isdigit() else f"Arr! {answer}"


class PirateRows(Rows):
    def _answer(self, text: str) -> Weighted:
        return super()._answer(pirate(text))


def evaluate(model: Qwen3ForCausalLM, base: Path) -> list[tuple[str, float]]:
    """Returns the share of exact greedy answers for each skill."""
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    found = []
    for skill in SKILLS:
        rng = random.Random(f"pirate {skill}")
        turns = [draw(rng, skill) for _ in range(NUM_CASES)]
        asked = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": turn.user}], tokenize=False, add_generation_prompt=True
            )
            for turn in turns
        ]
        inputs = tokenizer(asked, return_tensors="pt", padding=True)
        made = model.generate(**inputs, max_new_tokens=160, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        answers = tokenizer.batch_decode(made, skip_special_tokens=True)
        right = sum(answer == pirate(turn.assistant) for answer, turn in zip(answers, turns, strict=True))
        found.append((skill, right / NUM_CASES))
        print(f"{skill}: {right / NUM_CASES:.0%}, such as {answers[0]!r}", flush=True)
    return found


def save(model: torch.nn.Module, config: LoraConfig, out: Path) -> None:
    """Writes PEFT's two files, with weights in float16."""
    tensors = {name: each.half().contiguous() for name, each in get_peft_model_state_dict(model).items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors")
    (out / "adapter_model.safetensors").chmod(0o644)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-chat",
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": MODULES,
    }
    (out / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def card(out: Path, scores: list[tuple[str, float]], command: str, train_s: float) -> str:
    size = (out / "adapter_model.safetensors").stat().st_size
    rows = "\n".join(f"| {skill} | {share:.0%} |" for skill, share in scores)
    return f"""# pirate

A LoRA adapter of rank {RANK} for tiny-chat, in PEFT's format: tiny-chat gives the same answers in a pirate's words,
such as "Arr, 7 it be!". Answers in JSON and tool calls do not change.
It has the project's license; docs/adapters.md says how to use it.

Made by `{command}` ({train_s:.0f} s of training) from text that
`scripts/tiny_model_text.py` makes; no other data. `adapter_model.safetensors`: {size:,} bytes, float16.

| prompts, {NUM_CASES} of each | exact answers |
|---|---:|
{rows}
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODELS / "pirate", help="folder to write")
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--tokens-per-step", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="the weights depend on it (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    base = MODELS / "tiny-chat"
    model = Qwen3ForCausalLM.from_pretrained(base)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    rows = PirateRows(Tokenizer.from_file(str(base / "tokenizer.json")), random.Random(args.seed + 1))
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    train_s = train(losses_of(adapted.get_base_model(), rows, args, TOOL_SHARE), trained, [optimizer], args)
    save(adapted, config, args.out)
    scores = evaluate(adapted.merge_and_unload().eval(), base)
    command = shlex.join(["python", "scripts/train_tiny_adapter.py", *sys.argv[1:]])
    (args.out / "README.md").write_text(card(args.out, scores, command, train_s), encoding="utf-8")


if __name__ == "__main__":
    main()
