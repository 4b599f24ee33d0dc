"""All faults of `bench faults`, by the names of its `--faults`."""

from __future__ import annotations

from pd_cluster.lab.faults.clients import CLIENT_FAULTS
from pd_cluster.lab.faults.clock import CLOCK_FAULTS
from pd_cluster.lab.faults.disk import DISK_FAULTS
from pd_cluster.lab.faults.end import END_FAULTS
from pd_cluster.lab.faults.means import MEANS_FAULTS
from pd_cluster.lab.faults.scripts import FAULTS
from pd_cluster.lab.faults.terms import Fault

ALL_FAULTS: dict[str, Fault] = {
    **FAULTS,
    **MEANS_FAULTS,
    **CLIENT_FAULTS,
    **DISK_FAULTS,
    **CLOCK_FAULTS,
    **END_FAULTS,
}
