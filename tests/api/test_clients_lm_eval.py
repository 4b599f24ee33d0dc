"""Unmodified lm-evaluation-harness gives the numbers of the cluster's model.

Multiple-choice tasks request logprobs of given continuations: token id prompts, several per request, with `echo` and
`logprobs`. generate_until requests text. Both must equal transformers' results for the same checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.text.tokenizer import Tokenizer
from tests.api.conftest import MAX_MODEL_LEN
from tests.support.checkpoints import reference_greedy, reference_model
from tests.support.cluster import LiveCluster
from tests.support.only_local import child_environment

CHOICES = ["a brown dog", "two cats", "rain"]
QUESTIONS = ["What barks?", "And now something longer, to be cut in pieces?"]
MAX_NEW_TOKENS = 12
BATCH_SIZE = "4"
TIMEOUT_S = 110
ROOT = Path(__file__).parents[2]

SHARED = """
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
num_fewshot: 0
doc_to_text: "Q: {{{{question}}}} A:"
"""
CHOICE_TASK = """
task: local_choice
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
TEXT_TASK = f"""
task: local_text
output_type: generate_until
doc_to_target: "x"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: {MAX_NEW_TOKENS}, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""

Samples = dict[str, dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def samples(cluster: LiveCluster, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Returns batch size -> task -> the harness's records of each question."""
    folder = tmp_path_factory.mktemp("lm_eval")
    data = folder / "questions.json"
    data.write_text("\n".join(json.dumps({"question": each, "choices": CHOICES}) for each in QUESTIONS))
    for name, task in (("local_choice", CHOICE_TASK), ("local_text", TEXT_TASK)):
        (folder / f"{name}.yaml").write_text(SHARED.format(data=data) + task)
    arguments = {
        "model": "tiny",
        "tokenizer": str(model),
        "tokenizer_backend": "huggingface",
        "base_url": f"{cluster.url}/v1/completions",
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": MAX_MODEL_LEN,
    }
    command = [sys.executable, "-m", "tests.support.run_lm_eval", str(folder), json.dumps(arguments)]
    chat = {"base_url": f"{cluster.url}/v1/chat/completions", "tokenizer_backend": None, "tokenizer": None}
    command += [json.dumps(chat), BATCH_SIZE]
    environment = {**child_environment(), "HF_DATASETS_CACHE": str(folder / "cache"), "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: Samples = json.loads(done.stdout.splitlines()[-1])
    for task in (task for tasks in found.values() for task in tasks.values()):
        task.sort(key=lambda sample: int(sample["doc_id"]))
    return found


def test_loglikelihoods_are_those_of_transformers(samples: Samples, model: Path, tokenizer: Tokenizer) -> None:
    for question, sample in zip(QUESTIONS, samples[BATCH_SIZE]["local_choice"], strict=True):
        assert sample["doc"]["question"] == question
        expected = [loglikelihood(model, tokenizer, question, choice) for choice in CHOICES]
        told = [(total, greedy) for ((total, greedy),) in sample["resps"]]
        assert [total for total, _ in told] == pytest.approx([total for total, _ in expected], abs=1e-3)
        assert [greedy for _, greedy in told] == [greedy for _, greedy in expected]


def test_texts_and_chats_are_those_of_transformers(
    samples: Samples, model: Path, tokenizer: Tokenizer, cluster: LiveCluster
) -> None:
    """Texts and chats equal transformers'; for chats the harness sends messages, which the server renders."""
    for question, sample in zip(QUESTIONS, samples[BATCH_SIZE]["local_text"], strict=True):
        tokens = reference_greedy(model, tokenizer.encode(prompt_of(question)), MAX_NEW_TOKENS)
        assert sample["resps"] == [[tokenizer.decode(tokens).partition("\n\n")[0]]]
    for question, sample in zip(QUESTIONS, samples["chat"]["local_text"], strict=True):
        messages = [{"role": "user", "content": prompt_of(question)}]
        prompt = cluster.client.post(f"{cluster.url}/tokenize", json={"messages": messages}).json()["tokens"]
        tokens = reference_greedy(model, prompt, MAX_NEW_TOKENS)
        assert sample["resps"] == [[tokenizer.decode(tokens).partition("\n\n")[0]]]


def prompt_of(question: str) -> str:
    return f"Q: {question} A:"


def loglikelihood(model: Path, tokenizer: Tokenizer, question: str, choice: str) -> tuple[float, bool]:
    """Returns the log-likelihood of the choice's tokens after the question, and whether each token is the likeliest."""
    context = tokenizer.encode(prompt_of(question))
    answer = tokenizer.encode(f" {choice}")
    with torch.inference_mode():
        logits = reference_model(model)(torch.tensor([context + answer])).logits[0]
    rows = logits[len(context) - 1 : -1].log_softmax(-1)  # [len(answer), vocab_size]
    wanted = torch.tensor(answer)
    total = rows.gather(1, wanted[:, None]).sum()
    return float(total), bool((rows.argmax(-1) == wanted).all())
