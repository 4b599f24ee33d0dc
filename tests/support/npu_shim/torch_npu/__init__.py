"""Precedes the real torch-npu on child processes' path: imports the real one, then simulates its devices."""

import os
import sys
from importlib import import_module
from pathlib import Path

_here = str(Path(__file__).parents[1])
sys.path[:] = [os.environ["PD_CLUSTER_TEST_TORCH_NPU"], *(path for path in sys.path if path != _here)]
del sys.modules[__name__]
import_module("torch_npu")  # the real module, which replaces this one
import_module("tests.support.npu_simulated").install()
