"""All faults of `benchmarks faults`, by the names of its `--faults`."""

from __future__ import annotations

from benchmarks.faults.clients import CLIENT_FAULTS
from benchmarks.faults.means import MEANS_FAULTS
from benchmarks.faults.scripts import FAULTS
from benchmarks.faults.terms import Fault

ALL_FAULTS: dict[str, Fault] = {**FAULTS, **MEANS_FAULTS, **CLIENT_FAULTS}
