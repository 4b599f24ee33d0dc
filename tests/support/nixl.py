"""Marks tests that need NIXL; `.venv/bin/pip install --no-deps nixl-cu13==1.5.1` (58 MB) enables them."""

from __future__ import annotations

import pytest

from pd_cluster.devices.device import CPU
from pd_cluster.transport.transport_table import BY_NAME

needs_nixl = pytest.mark.skipif(bool(BY_NAME["nixl"].why_not(CPU)), reason=BY_NAME["nixl"].why_not(CPU) or "it is here")
