"""An operator's logits processors: names and loading, their place in sampling, and their faults."""

from __future__ import annotations

import json
import math
import queue
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pd_cluster import wire
from pd_cluster.engine.worker import processor_watch
from pd_cluster.engine.worker.processor_watch import watch_processors
from pd_cluster.errors import ConfigError
from pd_cluster.logits_processors import BatchFacts, ModelFacts, ProcessorConfig
from pd_cluster.model.sampling.grammar_masks import TokenMask
from pd_cluster.model.sampling.load_processors import load_processors
from pd_cluster.model.sampling.request_processors import RequestProcessors, calling
from pd_cluster.model.sampling.sampler import NO_TOKEN, Sampled, Sampler, SamplingRow
from pd_cluster.numerics import Numerics
from pd_cluster.offline.llm_arguments import config_of
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.serve_options import ServeOptions
from pd_cluster.settings.speculation import Speculation
from pd_cluster.types import LegEnd, Request, RequestSpec, Sampling
from tests.support import processors as own
from tests.support.processors import HERE

VOCAB_SIZE = 60
EOS = frozenset({7})
CONFIG = ProcessorConfig(
    model_config=ModelFacts(model="m", tokenizer="t", dtype="float32", max_model_len=64, vocab_size=VOCAB_SIZE)
)
CPU = torch.device("cpu")


def sampler_with(*names: str) -> Sampler:
    loaded = load_processors([f"{HERE}:{name}" for name in names], CONFIG, CPU)
    return Sampler(VOCAB_SIZE, EOS, RequestProcessors(loaded, EOS))


def row_of(output: list[int] | None = None, mask: TokenMask | None = None, **params: Any) -> SamplingRow:
    extra = json.dumps(params.pop("extra")) if "extra" in params else ""
    sampling = Sampling(**{"temperature": 0.0, "max_tokens": 50, **params}, extra_args=extra)
    request = Request("r", RequestSpec([3, 9, 4], sampling), output_token_ids=output or [])
    return SamplingRow(request, 0, len(request.output_token_ids), mask)


def logits_of(seed: int, num_rows: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


# ---- settings and loading


def test_the_setting_takes_names_lists_and_classes() -> None:
    given = {"logits_processors": ["a.b:C, d:E.F", "g:H"]}
    assert ServeOptions.typed({"model": "m", **given}).engine().logits_processors == ("a.b:C", "d:E.F", "g:H")
    assert config_of({"model": "m", "logits_processors": [own.Rolling, "d:E"]}).engine.logits_processors == (
        f"{HERE}:Rolling",
        "d:E",
    )
    assert config_of({"model": "m", "logits_processors": []}).engine.logits_processors == ()
    for wrong in ("a", "a:", "a/b:C", "a:b c", "a:B,", ":C"):
        with pytest.raises(ConfigError, match="expected MODULE:CLASS"):
            ServeOptions.typed({"model": "m", "logits_processors": [wrong]}).engine()


def test_a_class_that_no_engine_can_import_is_refused() -> None:
    class Local(own.OnlyOne):
        pass

    with pytest.raises(ConfigError, match="define the class in a module's body"):
        config_of({"model": "m", "logits_processors": [Local]})


def test_there_are_no_drafts_beside_them() -> None:
    with pytest.raises(ConfigError, match="ngram: there are no drafts with"):
        EngineConfig(model="m", logits_processors=("a:B",), speculation=Speculation(methods=("ngram",)))


def test_instances_with_other_processors_share_no_request() -> None:
    one = Numerics(logits_processors="a:B")
    assert one.difference(Numerics()) == ("\0logits_processors\0", "a:B", "none")
    assert one.digest != Numerics().digest


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("no.such.module:C", "cannot be imported: ModuleNotFoundError: No module named 'no'; install it"),
        (f"{HERE}:Missing", f"the module {HERE} has no Missing"),
        (f"{HERE}:a_function", "must be a class, not function; wrap it in an AdapterLogitsProcessor"),
        (f"{HERE}:Bare", "needs the methods is_argmax_invariant, and new_req_logits_processor or"),
        (f"{HERE}:CannotBegin", "AttributeError: 'ProcessorConfig' object has no attribute 'parallel_config'"),
    ],
)
def test_a_class_that_cannot_serve_ends_the_start(name: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_processors([name], CONFIG, CPU)
    assert f"{name}: " in str(caught.value)
    assert fault in str(caught.value)


def test_what_a_processor_reads_has_vllms_names() -> None:
    """Every attribute available to a processor has its name in vLLM 0.33."""
    assert CONFIG.scheduler_config == BatchFacts(1)
    assert CONFIG.speculative_config is None
    row = row_of(min_tokens=2, stop_token_ids=(5,), logit_bias=((3, 1.0),), extra={"a": 1}, top_k=-1)
    seen: list[Any] = []

    class Sees(own.OnlyOne):
        def new_req_logits_processor(self, params: Any) -> Any:
            seen.append(params)

    (loaded,) = load_processors([f"{HERE}:OnlyOne"], CONFIG, CPU)
    processors = RequestProcessors([replace(loaded, adapter=Sees(CONFIG, CPU, False))], EOS)
    assert not processors.concern(row.request)
    (params,) = seen
    assert (params.min_tokens, params.all_stop_token_ids, params.logit_bias) == (2, {5, 7}, {3: 1.0})
    assert (params.top_k, params.extra_args, params.allowed_token_ids) == (0, {"a": 1}, None)


def test_the_pages_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text("utf-8")
    block = next(each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "KeepOne" in each)
    (tmp_path / "my_processors.py").write_text(block, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load_processors(["my_processors:KeepOne"], CONFIG, CPU)
    sampler = Sampler(VOCAB_SIZE, EOS, RequestProcessors(loaded, EOS))
    rows = [row_of(extra={"target_token": 12}), row_of()]
    lines = logits_of(9, 2)
    assert [each.token_id for each in sampler.sample(lines.clone(), rows)] == [12, int(lines[1].argmax())]


# ---- their place in sampling


def test_they_come_after_masks_and_before_penalties() -> None:
    line = logits_of(1)
    row = row_of([5], repetition_penalty=1.8, logit_bias=((11, 4.0),), bad_words=((12,),))
    expected = line[0].clone()
    expected[12] = -math.inf
    expected[11] += 4.0
    state = 0
    for token_id in (3, 9, 4, 5):
        state = own.rolled(state, token_id)
    expected = own.shifted(expected, state)
    for token_id in (3, 9, 4, 5):
        expected[token_id] = expected[token_id] / 1.8 if expected[token_id] > 0 else expected[token_id] * 1.8
    work = line.clone()
    sampler = sampler_with("ByTokens")
    sampler._adjust(work, [row])
    assert torch.equal(work[0], expected)
    assert sampler.sample(line.clone(), [row])[0].token_id == int(expected.argmax())


def test_logprobs_stay_the_models_own() -> None:
    line = logits_of(2)
    row = row_of(logprobs=1, extra={"target": 31})
    (found,) = sampler_with("OnlyOne").sample(line.clone(), [row])
    assert found.token_id == 31
    assert found.logprobs is not None
    assert found.logprobs.logprob == pytest.approx(float(line[0].log_softmax(0)[31]), abs=1e-5)
    assert found.logprobs.top[0][0] == int(line[0].argmax())


def test_a_guide_holds_behind_them() -> None:
    words = np.zeros(2, dtype=np.uint32)
    words[0] = 1 << 5 | 1 << 6
    mask = TokenMask(words)
    (found,) = sampler_with("ByTokens").sample(logits_of(3), [row_of(mask=mask)])
    assert found.token_id in (5, 6)
    stuck = sampler_with("OnlyOne").sample(logits_of(3), [row_of(mask=mask, extra={"target": 30})])
    assert stuck == [Sampled(NO_TOKEN, None)]  # no token is left, as when masks contradict a guide


def test_processors_that_keep_the_best_token_shape_only_draws() -> None:
    """Such processors run after temperature and min_p and before top_k and top_p, and not for greedy requests."""
    sampler, plain = sampler_with("Sharpens"), Sampler(VOCAB_SIZE, EOS)
    for seed in range(40):
        line = logits_of(seed)
        greedy = row_of()
        assert sampler.sample(line.clone(), [greedy]) == plain.sample(line.clone(), [greedy])
        params = {"seed": seed, "top_p": 0.9, "top_k": 20}
        drawn = sampler.sample(line.clone(), [row_of(temperature=2.0, min_p=0.05, **params)])
        scaled = line / 2.0
        scaled[scaled < scaled.max() + math.log(0.05)] = -math.inf
        expected = plain.sample(scaled * 3.0, [row_of(temperature=1.0, **params)])
        assert drawn == expected


def test_without_a_concern_rows_are_as_without_processors() -> None:
    rows = [row_of(temperature=t, seed=s) for s, t in enumerate((0.0, 0.7, 1.0))]
    sampler = sampler_with("OnlyOne", "Fails")
    assert not any(sampler.processors.concern(row.request) for row in rows)
    lines = logits_of(4, 3)
    assert sampler.sample(lines.clone(), rows) == Sampler(VOCAB_SIZE, EOS).sample(lines.clone(), rows)


# ---- state


def test_a_state_follows_the_tokens_however_they_came() -> None:
    """Covers tokens one by one, a state rebuilt midway, and another list with the same tokens."""
    sampler, row = sampler_with("Rolling"), row_of()
    output = row.request.output_token_ids
    for position in range(12):
        line = logits_of(position)
        if position == 5:
            row.request.output_token_ids = output = list(output)
        if position == 8:
            sampler = sampler_with("Rolling")
        state = 0
        for token_id in output:
            state = own.rolled(state, token_id)
        expected = int(own.shifted(line[0], state).argmax())
        for _ in range(2):  # a second call changes nothing
            now = row._replace(position=position)
            assert sampler.sample(line.clone(), [now])[0].token_id == expected
        output.append(expected)
    output[3:] = [1, 2]  # a beam with another parent
    line, state = logits_of(50), 0
    for token_id in output:
        state = own.rolled(state, token_id)
    found = sampler.sample(line.clone(), [row._replace(position=len(output))])
    assert found[0].token_id == int(own.shifted(line[0], state).argmax())


def test_sequences_that_are_not_forked_yet_have_processors_of_their_own() -> None:
    sampler = sampler_with("Rolling")
    first = row_of(temperature=1.0, n=3, seed=5)
    rows = [first._replace(index=index) for index in range(3)]
    line = logits_of(6)
    together = sampler.sample(line.expand(3, -1).clone(), rows)
    assert together == [sampler_with("Rolling").sample(line.clone(), [row])[0] for row in rows]
    assert len(sampler.processors._sequences) == 1


# ---- faults


@pytest.mark.parametrize(("fails_at", "fault"), [(0, "ZeroDivisionError: at 0"), (-1, "KeyError: 'begin'")])
def test_a_fault_ends_its_row_alone(fails_at: int, fault: str) -> None:
    sampler, lines = sampler_with("Fails", "ByTokens"), logits_of(7, 3)
    rows = [row_of(), row_of(extra={"fails_at": fails_at}), row_of(temperature=1.0)]
    found = sampler.sample(lines.clone(), rows)
    assert found[1] == Sampled(NO_TOKEN, None, f"logits processor {HERE}:Fails: {fault}")
    alone = [sampler_with("Fails", "ByTokens").sample(lines[i : i + 1].clone(), [rows[i]])[0] for i in (0, 2)]
    assert [found[0], found[2]] == alone
    beams = [row_of(extra={"fails_at": fails_at}, beam_width=2), row_of(beam_width=2)]
    first, second = sampler.candidates(lines.clone(), beams, [0, 1])
    assert first == found[1]
    assert isinstance(second, list)
    assert len(second) >= 2


def test_a_processor_that_needs_the_whole_batch_is_refused_by_name() -> None:
    (found,) = sampler_with("NeedsBatch").sample(logits_of(8), [row_of()])
    assert found.token_id == NO_TOKEN
    assert found.problem == (
        f"logits processor {HERE}:NeedsBatch: returned [60] of torch.float32 for one row, [1, 60] of torch.float32; a "
        f"processor that needs the whole batch is not supported"
    )


def test_parameters_that_a_processor_refuses() -> None:
    processors = sampler_with("ByTokens", "OnlyOne").processors
    assert processors.problem(row_of(extra={"target": 3}).request) is None
    problem = processors.problem(row_of(extra={"target": "x"}).request)
    assert problem == f"logits processor {HERE}:OnlyOne: ValueError: target 'x' is not a token id"


def test_arguments_travel_as_they_are() -> None:
    extra = {"a": [1, 2.5, "x"], "big": 1 << 70}
    sampling = Sampling(extra_args=json.dumps(extra))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=Sampling) == sampling


def test_a_call_that_does_not_return_ends_the_process_but_first_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: queue.SimpleQueue[float] = queue.SimpleQueue()
    monkeypatch.setattr(processor_watch, "end_within", ended.put)
    (loaded,) = load_processors([f"{HERE}:Fails"], CONFIG, CPU)
    processors, row = RequestProcessors([loaded], EOS), row_of([1], extra={"fails_at": 9})
    row.request.client = "scheduler"
    sent: list[tuple[str, wire.Body]] = []

    class Post:
        def send(self, conn: str, body: wire.Body) -> None:
            sent.append((conn, body))

        def await_confirmed(self, timeout_s: float) -> bool:
            return True

    reasons: list[str] = []
    watch_processors(processors.calls, Post(), reasons.append, limit_s=0.05)
    assert processors.apply(torch.zeros(VOCAB_SIZE), row.request, 0, is_draw=False) == ""
    assert processors.calls.running is None
    stays = threading.Event()
    try:
        threading.Thread(target=calling, args=(loaded, stays.wait), daemon=True).start()
        assert ended.get(timeout=10) == processor_watch.END_S
    finally:
        stays.set()
    why = f"logits processor {HERE}:Fails: has not returned for 0.05 s"
    assert reasons == [why]
    assert sent == [("scheduler", wire.Outputs(ended=[LegEnd("r", 0, why)]))]
