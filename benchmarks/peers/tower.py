"""The vision tower of a model by itself: CPU time of pictures that one rank computes, and that two ranks share.

Ranks are threads here, in a group of their own over gloo; `spec.model` is the model's folder.
"""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from benchmarks.pictures import SIDE, pixels_of
from benchmarks.spec import PeerResult, Spec, child_main
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.media.pictures import fitted, of_array
from pd_cluster.media.rules import ImageRules
from pd_cluster.model.image_rows import ImagePart
from pd_cluster.model.parallel.group import Rendezvous, join
from pd_cluster.model.vision.load import load_tower

WAIT_S = 120.0
NUM_PICTURES = 4
_loading = threading.Lock()  # transformers patches torch meanwhile


def measure(spec: Spec) -> PeerResult:
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(spec.model)
    num_steps = 1 if spec.quick else 2
    figures = {}
    for size in (1, 2):
        steps = zip(*times_s(checkpoint, size, num_steps), strict=True)
        figures[f"tower_{size}_ms"] = 1e3 * min(max(ranks) for ranks in steps)
    return PeerResult(figures=figures)


def times_s(checkpoint: Checkpoint, size: int, num_steps: int) -> list[list[float]]:
    """Returns the CPU time of each step on each of `size` ranks, [size][num_steps]."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(size) as threads:

        def work(rank: int) -> list[float]:
            group = join(Rendezvous(f"{folder}/ranks", rank, size, WAIT_S, WAIT_S))
            with _loading:
                tower = load_tower(checkpoint, torch.float32, CPU, 0, group)
            found = []
            for step in range(num_steps + 1):
                parts = parts_of(tower.rules, step)
                started_s = time.thread_time()
                tower.rows(parts, sum(part.num_tokens for part in parts))
                found.append(time.thread_time() - started_s)
            return found[1:]  # without the warm-up

        running = [threads.submit(work, rank) for rank in range(size)]
        return [each.result() for each in running]


def parts_of(rules: ImageRules, seed: int) -> list[ImagePart]:
    """Returns NUM_PICTURES pictures, one after the other."""
    parts, row = [], 0
    for at in range(NUM_PICTURES):
        pixels = np.frombuffer(pixels_of(NUM_PICTURES * seed + at), np.uint8).reshape(SIDE, SIDE, 3)
        image, digest = fitted(of_array(pixels), rules)
        parts.append(ImagePart(row, 0, rules.num_tokens(image), digest, image))
        row += parts[-1].num_tokens
    return parts


if __name__ == "__main__":
    child_main(measure)
