"""`benchmarks router --profile`: which layers the scheduler's CPU time goes to, with requests alone or with tokens.

The profiled scheduler is another process than the measured ones: sampling slows it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.router.spec import Profile, Workload

NUM_LAYERS = 30
NUM_FUNCTIONS = 50


def read(path: Path) -> Profile:
    return msgspec.json.decode(path.read_bytes(), type=Profile)


def lines(profile: Profile, workload: Workload) -> list[str]:
    """Returns the tables of the layers and functions with most CPU time, per request of the workload."""
    all_us = sum(profile.layers.values())
    found = [f"{workload.name}: {all_us / 1e6:.2f} s of CPU in {profile.num_samples} samples"]
    for title, booked, most in (
        ("layer", profile.layers, NUM_LAYERS),
        ("function", profile.functions, NUM_FUNCTIONS),
    ):
        found.append(f"{'share':>7} {'us/request':>11}  {title}")
        ranked = sorted(booked.items(), key=lambda each: -each[1])[:most]
        found += [f"{us / all_us:7.1%} {us / workload.num_requests:11.1f}  {name}" for name, us in ranked]
    return found
