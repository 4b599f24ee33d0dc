"""Optional speed-ups not yet measured on GPUs: where they are available, and that they are part of the numerics."""

from __future__ import annotations

import pytest

from pd_cluster.devices.device import CPU, Device
from pd_cluster.errors import ConfigError
from pd_cluster.model.kernels import cuda_speedups
from pd_cluster.model.kernels.attention_backend import Attention
from pd_cluster.model.kernels.cuda_speedups import numerics_name, sped_up, speedups_for
from pd_cluster.settings.engine_config import CUDA_SPEEDUPS

CUDA = Device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_speedups, "compute_capability", lambda device: (9, 0))


def test_a_gpu_has_them_in_their_order_and_a_cpu_none(hopper: None) -> None:
    given = tuple(reversed(CUDA_SPEEDUPS))
    assert speedups_for(given, CUDA, is_deterministic=False, enforce_eager=False) == CUDA_SPEEDUPS
    assert speedups_for(given, CPU, is_deterministic=False, enforce_eager=False) == ()


@pytest.mark.parametrize(
    ("wanted", "device", "is_deterministic", "enforce_eager", "says"),
    [
        ("pdl", Device("npu"), False, False, "it is for NVIDIA GPUs; remove it on NPUs"),
        ("skinny-gate", CUDA, True, False, "not with --deterministic, which fixes the order of sums"),
        ("symmetric-sums", CUDA, True, False, "not with --deterministic, which fixes the order of sums"),
        ("prompt-graphs", CUDA, False, True, "not with --enforce-eager, which captures no graphs"),
    ],
)
def test_pairs_that_contradict_each_other(
    hopper: None, wanted: str, device: Device, is_deterministic: bool, enforce_eager: bool, says: str
) -> None:
    with pytest.raises(ConfigError, match=f"--cuda-speedups {wanted}: {says}"):
        speedups_for((wanted,), device, is_deterministic, enforce_eager)


def test_dependent_launches_need_hopper_and_those_that_change_numbers_are_part_of_their_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_speedups, "compute_capability", lambda device: (8, 9))
    with pytest.raises(ConfigError, match=r"pdl: it needs compute capability 9\.0, but this GPU has 8\.9"):
        speedups_for(("pdl",), CUDA, is_deterministic=False, enforce_eager=False)
    assert numerics_name("Triton", ()) == numerics_name("Triton", ("pdl", "prompt-graphs")) == "Triton"
    assert numerics_name("Triton", CUDA_SPEEDUPS) == "Triton + skinny-gate + symmetric-sums"
    assert numerics_name("Triton", ("pdl", "skinny-gate"), "fla 0.6.0") == "Triton + skinny-gate + fla 0.6.0"


def test_only_triton_attention_is_launched_early() -> None:
    def attend(*given: object, pdl: bool = False) -> bool:
        return pdl

    for name, is_early in (("Triton", True), ("deterministic Triton", True), ("FlashInfer 1 (sm_90)", False)):
        found = sped_up(Attention(name, attend_batch=attend), ("pdl",)).attend_batch  # type: ignore[arg-type]
        assert found is not None
        assert found() is is_early
        plain = sped_up(Attention(name, attend_batch=attend), ("skinny-gate",))  # type: ignore[arg-type]
        assert plain.attend_batch is attend
        assert plain.speedups == ("skinny-gate",)
