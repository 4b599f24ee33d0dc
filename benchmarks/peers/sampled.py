"""Runs `pd-cluster` and samples where its CPU time goes: `python -m benchmarks.peers.sampled RESULT serve …`.

Counting begins anew at SIGUSR1, and the result is written at the end. A timer of the process's CPU time interrupts the
main thread; each thread's time since then is booked on the stack that it is in. It is booked twice: on the project's
innermost package, with the library that the package called, and on the project's innermost function. Time in C is its
caller's.
"""

from __future__ import annotations

import runpy
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import msgspec

from benchmarks.router.spec import Profile

PERIOD_S = 0.002
PACKAGE = "pd_cluster"


class Sampler:
    def __init__(self) -> None:
        self._by_layer: Counter[str] = Counter()
        self._by_function: Counter[str] = Counter()
        self._seen_ns: dict[int, int] = {}
        self._num_samples = 0

    def start(self) -> None:
        """Samples from now on. The main thread must be the caller."""
        signal.signal(signal.SIGPROF, self._sample)
        signal.signal(signal.SIGUSR1, self._begin_anew)
        signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)

    def stop(self) -> Profile:
        """Returns microseconds by place."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        return Profile(num_samples=self._num_samples, layers=dict(self._by_layer), functions=dict(self._by_function))

    def _begin_anew(self, number: int, interrupted: FrameType | None) -> None:
        self._by_layer.clear()
        self._by_function.clear()
        self._num_samples = 0

    def _sample(self, number: int, interrupted: FrameType | None) -> None:
        frames = {**sys._current_frames(), threading.get_ident(): interrupted}
        self._num_samples += 1
        for ident, frame in frames.items():
            try:
                now_ns = time.clock_gettime_ns(time.pthread_getcpuclockid(ident))
            except (OSError, ProcessLookupError):
                continue  # the thread has ended
            passed_us = (now_ns - self._seen_ns.get(ident, now_ns)) // 1000
            self._seen_ns[ident] = now_ns
            if passed_us and frame is not None:
                layer, function = places_of(frame)
                self._by_layer[layer] += passed_us
                self._by_function[function] += passed_us


def places_of(frame: FrameType) -> tuple[str, str]:
    """Returns the layer and the function that a stack's time is booked on."""
    library, at = "", frame
    function = frame.f_code.co_qualname
    while at.f_back is not None:
        name = at.f_globals.get("__name__", "")
        if name.partition(".")[0] == PACKAGE and name != __name__:
            layer = "/".join(name.split(".")[1:3])
            place = f"{layer}: {at.f_code.co_qualname}"
            return (f"{layer} → {library}", f"{place} → {library} {function}") if library else (layer, place)
        library = library or name.partition(".")[0]
        at = at.f_back
    return (library or "start", f"{library or 'start'}: {function}")


def main() -> None:
    result, *arguments = sys.argv[1:]
    sys.argv = ["pd-cluster", *arguments]
    sampler = Sampler()
    sampler.start()
    try:
        runpy.run_module("pd_cluster", run_name="__main__")
    finally:
        Path(result).write_bytes(msgspec.json.encode(sampler.stop()))


if __name__ == "__main__":
    main()
