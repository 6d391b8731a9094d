"""Time and peak memory of pieces of work."""

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

# Files of torch whose lines on standard error say that a profiler starts, or frees memory that it did not see before.
_SOURCES = (b"ProfilerHandler.cpp:", b"CPUAllocator.cpp:")


def seconds(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each piece of work, all of them in turn in every round."""
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
    """Wait for what a GPU has still to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(function: Callable[[], object]) -> int:
    """The most tensor memory alive at once above what was alive before, counted from every allocation."""
    enabled = gc.isenabled()
    gc.disable()  # what earlier work left in cycles would be freed in between
    kept = _alive()
    try:
        with (
            _without_lines_of_the_profiler(),
            torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            ) as profile,
        ):
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


@contextmanager
def _without_lines_of_the_profiler() -> Iterator[None]:
    """Leave out what the profiler writes to standard error from C++, and pass on all other lines."""
    try:
        terminal = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    with tempfile.TemporaryFile() as written:
        _flush()
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            _flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            written.seek(0)
            others = [line for line in written if not any(source in line for source in _SOURCES)]
            os.write(2, b"".join(others))


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


def _alive() -> list[torch.Tensor | None]:
    """All tensors of now. While they are held, the profiler sees no block freed whose allocation it did not see."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return [*tensors, *(x.grad for x in tensors if x.is_leaf)]
