"""Precedes the real torch-npu on the path of child processes: imports it, then simulates the machine under it."""

import os
import sys
from importlib import import_module
from pathlib import Path

_here = str(Path(__file__).parents[1])
sys.path[:] = [os.environ["PD_CLUSTER_TEST_TORCH_NPU"], *(path for path in sys.path if path != _here)]
del sys.modules[__name__]
import_module("torch_npu")  # the real one, which replaces this module
import_module("tests.support.npu_simulated").install()
