"""Time and memory of a tuned run, in units of plain training."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bestresponse as br

NOTE = (
    "time / plain: the CPU time of a weight step with its share of the hyper-steps, divided by that of a step of plain "
    "training. Both kinds of steps alternated during the run. On a GPU it is elapsed time."
)


class Pace:
    """A callback that times hyper-steps, and after each ``every`` of them one plain step on a copy of the problem.

    The hyperparameters of the copy stay constant. This must be the first callback and its `begin` the last one, so that
    the other callbacks are not timed.
    """

    def __init__(self, copy: br.Problem, optimizer: torch.optim.Optimizer, batch: Any, every: int) -> None:
        self._copy, self._optimizer, self._batch, self._every = copy, optimizer, batch, every
        self._weights = list(copy.weights.values())
        self._device = self._weights[0].device
        self._began: float | None = None
        self.tuned: list[float] = []
        self.plain: list[float] = []

    def __call__(self, tuner: br.Tuner) -> None:
        if self._began is not None:
            self.tuned.append((self._clock() - self._began) / tuner.weight_steps)
        if tuner.hyper_step % self._every == 0:
            began = self._clock()
            self.steps(1)
            self.plain.append(self._clock() - began)

    def steps(self, number: int) -> None:
        """Make plain training steps on the copy."""
        for _ in range(number):
            self._optimizer.zero_grad()
            loss = self._copy.train_loss(self._copy.model, self._copy.hyper, self._batch)
            torch.autograd.backward(loss, inputs=self._weights)
            self._optimizer.step()

    def begin(self, _: br.Tuner) -> None:
        """Start timing the next hyper-step."""
        self._began = self._clock()

    def ratio(self) -> float | None:
        """The median time of a weight step divided by that of a plain step; None before both were timed."""
        if not self.tuned or not self.plain:
            return None
        return statistics.median(self.tuned) / statistics.median(self.plain)

    def _clock(self) -> float:
        if self._device.type == "cpu":
            return time.process_time()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int | None:
    """The peak memory of the work, above that at its start; None if the system does not report it.

    On a GPU it counts tensors. On Linux it is the peak resident memory of the process, whose high-water mark is reset.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        base = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - base
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        resident = _resident_bytes("VmRSS")
    except OSError:
        work()
        return None
    work()
    return _resident_bytes("VmHWM") - resident


def _resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
