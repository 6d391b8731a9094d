"""Time and peak memory of pieces of work."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler logs every start
import torch


def seconds(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each piece of work; every round runs all of them."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    for number in range(repeats + 1):
        for name, function in work.items():
            _synchronize()
            start = time.perf_counter()
            function()
            _synchronize()
            if number:  # the first round warms up
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def _synchronize() -> None:
    """Wait until a GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(function: Callable[[], object]) -> int:
    """The peak tensor memory of a function, above the memory in use before it, from every single allocation."""
    enabled = gc.isenabled()
    gc.disable()  # it would free garbage of earlier work meanwhile
    kept = _alive()
    try:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            function()
    finally:
        del kept
        if enabled:
            gc.enable()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def _alive() -> list[torch.Tensor | None]:
    """All present tensors. While they are held, no block is freed whose allocation the profiler has not seen.

    For such a block, the profiler would print a warning from C++.
    """
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    tensors = [x for x in objects if type(x) in kinds]
    return [*tensors, *(x.grad for x in tensors if x.is_leaf)]
