"""KV events of a cluster's instances: each at its own port, consistent with its cache, and counted."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from pd_cluster.cluster.processes.port_reservations import free_port_row
from tests.support.cluster import LiveCluster
from tests.support.kv_event_readers import Mirror, Reader

Checkpoints = Callable[..., Path]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_a_router_outside_of_the_cluster_knows_every_cache(checkpoint: Checkpoints, tmp_path: Path) -> None:
    port = free_port_row(4)
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://127.0.0.1:{port}",
        "replay_endpoint": f"tcp://127.0.0.1:{port + 2}",
        "topic": "kv",
    }
    flags = ["--num-blocks=64", f"--kv-events-config={json.dumps(config)}"]
    rng = random.Random(3)
    with zmq.Context() as context, LiveCluster(tmp_path, checkpoint("llama"), arguments=flags) as cluster:
        names = ("prefill-0", "decode-0")
        for _ in range(40):
            cluster.complete([rng.randrange(200) for _ in range(rng.randrange(20, 90))], 12)
        cluster.assert_home()

        def known(at: int) -> set[int | bytes]:
            """Returns the blocks cached after all batches of an instance, all of which are still in its buffer."""
            mirror = Mirror()
            reader = Reader(context, f"tcp://127.0.0.1:{port + at}")
            past = reader.past(f"tcp://127.0.0.1:{port + 2 + at}", 0)
            reader.socket.close(linger=0)
            assert [number for number, _ in past] == list(range(len(past)))
            for _, batch in past:
                mirror.hear(batch)
            return mirror.hashes("GPU")

        for at, name in enumerate(names):
            cluster.wait_until(
                f"the events of {name} are those of its cache",
                lambda at=at, name=name: len(known(at)) == cluster.instance(name)["num_cached_blocks"] > 30,  # type: ignore[misc]
            )
        metrics = cluster.client.get(f"{cluster.url}/metrics").text
        for name in names:
            counted = re.findall(
                rf'pd_cluster:kv_event_batches(_dropped)?_total{{[^}}]*"{name}"[^}}]*}} ([0-9.]+)', metrics
            )
            assert [(which, float(number) > 0) for which, number in counted] == [("", True), ("_dropped", False)]
        assert cluster.order("/reset_prefix_cache") == {"success": True}
        for at in range(2):
            cluster.wait_until("all is cleared", lambda at=at: not known(at))  # type: ignore[misc]
