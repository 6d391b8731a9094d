"""A callback that writes the report of a run into one HTML file."""

import base64
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._files import replace_text
from ..errors import ArgumentError, require_number, require_package
from ..memory import settings_of
from ..reports import Recorded, write_report
from ..reports.recorded import TENSORS
from .run import SavedRun
from .summary import plain_values

_SETTINGS = ("weight_steps", "warmup_steps", "clip_weights", "policy", "seed")
_BINS = 40
_MOST_VALUES = 100_000  # of a tensor, in its histogram
_MOST_TENSORS = 100
_MOST_PICTURES = 40
_LEAST_SIDE, _LARGEST_SIDE = 8, 256  # of a picture, in pixels


class Report:
    """Write a report of the run into one HTML file, which any browser shows without a network.

    The report has the losses, the hypergradient with its accuracy and cost, the hyperparameters over time and by layer,
    those that are images as images, and the hyper-steps that failed. The callback writes it once in ``seconds`` and
    when the run ends, also by an error or an interrupt. The file ``hyperparameters.json`` beside it has the histograms
    and images, for ``bestresponse report``.

    Args:
        path: the HTML file. Its folder gives the report its title.
        seconds: the least time between two reports of a running run; drawing takes a second or two.
        config: further settings to list, by name.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ArgumentError: at the first hyper-step, if the folder cannot be written. Later a warning comes instead.
    """

    def __init__(
        self, path: str | Path, seconds: float = 60.0, config: Mapping[str, Any] | None = None
    ) -> None:
        require_number("Report.seconds", seconds)
        require_package("matplotlib", "callbacks.Report", "report")
        self.path, self.seconds, self.config = Path(path), seconds, dict(config or {})
        self._first: dict[str, Any] | None = None
        self._tuner: SavedRun | None = None
        self._written: float | None = None

    def __call__(self, tuner: SavedRun) -> None:
        if tuner.problem.group.rank:  # of several processes rank 0 writes
            return
        if self._first is None:
            self._first = _histograms(plain_values(tuner.problem))
        if self._written is None:
            self._write_tensors(tuner)  # fails at the first hyper-step if the place is wrong
        self._tuner = tuner
        if time.monotonic() - (self._written or 0.0) >= self.seconds:
            self._renew(tuner)

    def _renew(self, tuner: SavedRun) -> None:
        """Write the report; a full disk does not end the run."""
        try:
            self._write(tuner)
        except ArgumentError as error:
            self._written = time.monotonic()
            tuner.problem.warn_once(
                f"report {self.path}", f"{error} The run continues. (This warning comes once.)"
            )

    def _write_tensors(self, tuner: SavedRun) -> dict[str, Any]:
        values = plain_values(tuner.problem)
        tensors = {
            name: {"shape": list(values[name].shape), "first": (self._first or {}).get(name), "last": found}
            for name, found in _histograms(values).items()
        }
        data = {"hyper_step": tuner.hyper_step, "tensors": tensors, "pictures": _pictures(values)}
        replace_text(self.path.with_name(TENSORS), json.dumps(data), "a report")
        self._written = time.monotonic()
        return data

    def _write(self, tuner: SavedRun) -> None:
        ended = tuner.hyper_step >= tuner.last_hyper_step or tuner.stopped is not None
        steps = {"steps": tuner.last_hyper_step} if tuner.last_hyper_step else {}  # else they are unknown
        run = Recorded(
            self.path.resolve().parent.name,
            steps | self.config | settings(tuner) | {"versions": versions()},
            tuner.history,
            {"stopped": tuner.stopped} if ended else None,
            self._write_tensors(tuner),
        )
        write_report(run, self.path)
        self._written = time.monotonic()

    def close(self) -> None:
        """Write the report once more, at the end of the run."""
        tuner, self._tuner = self._tuner, None
        if tuner is not None:
            self._renew(tuner)

    def state_dict(self) -> dict[str, Any]:
        """The first histograms."""
        return {"first": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`."""
        self._first = state["first"]


def settings(tuner: SavedRun) -> dict[str, Any]:
    """The settings of a run as numbers and text."""
    problem = tuner.problem
    parts = {name: vars(tuner)[name] for name in ("weight_optimizer", "hyper_optimizer")}
    return {
        "method": settings_of(tuner.method),
        **{name: _of_optimizer(part) for name, part in parts.items()},
        **{name: vars(tuner)[name] for name in _SETTINGS},
        "number of weights": sum(w.numel() for w in problem.weights.values()),
        "number of hyperparameters": sum(x.numel() for x in problem.hyperparameters.values()),
    }


def versions() -> dict[str, str]:
    """The versions and the number of threads behind the numbers."""
    return {
        "bestresponse": importlib.metadata.version("bestresponse"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }


def _of_optimizer(optimizer: object) -> str:
    if not isinstance(optimizer, Optimizer):
        return settings_of(optimizer)
    rates = dict.fromkeys(str(group["lr"]) for group in optimizer.param_groups if "lr" in group)
    return f"{type(optimizer).__name__}(lr={', '.join(rates)})"


def _histograms(values: Mapping[str, Tensor]) -> dict[str, Any]:
    """A histogram of each tensor with several finite values."""
    found = {}
    for name, tensor in list(values.items())[:_MOST_TENSORS]:
        numbers = tensor.detach().flatten()
        numbers = numbers[:: math.ceil(max(1, len(numbers)) / _MOST_VALUES)].double().cpu()
        numbers = numbers[numbers.isfinite()]
        if len(numbers) < 2:
            continue
        low, high = float(numbers.min()), float(numbers.max())
        logarithmic = low > 0.0 and high >= 30.0 * low  # as the axis of the chart
        if logarithmic:
            numbers, low, high = numbers.log10(), math.log10(low), math.log10(high)
        # Equal values get bins around them that are wider than rounding.
        size = max(abs(low), abs(high))
        margin = 5e-4 * (size or 1.0) if high - low <= 1e-9 * size else 0.0
        low, high = low - margin, high + margin
        counts = torch.histc(numbers, _BINS, low, high)
        edges = torch.linspace(low, high, _BINS + 1, dtype=torch.float64)
        found[name] = {"edges": (10.0**edges if logarithmic else edges).tolist(), "counts": counts.tolist()}
    return found


def _pictures(values: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tensors that are images, [N, 1 or 3, height, width], as bytes."""
    found: dict[str, Any] = {}
    for name, tensor in values.items():
        if tensor.ndim != 4 or tensor.shape[1] not in (1, 3):
            continue
        height, width = tensor.shape[2:]
        if min(height, width) < _LEAST_SIDE or max(height, width) > _LARGEST_SIDE:
            continue
        images = tensor.detach()[:_MOST_PICTURES].float().cpu().nan_to_num()
        low, high = images.min(), images.max()
        pixels = ((images - low) / (high - low).clamp_min(1e-12) * 255).round().byte()
        rows = [bytes(image.permute(1, 2, 0).flatten().tolist()) for image in pixels]
        size = [height, width, tensor.shape[1]]
        found[name] = {"size": size, "pixels": [base64.b64encode(row).decode() for row in rows]}
    return found
