"""Comparisons for the checks: with the earlier state of a problem, and with expected numbers."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem


class NoTrace:
    """Asserts that weights, buffers, .grad, modes, flags and random state are the same at the end."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def _picture(self) -> dict[str, Any]:
        picture: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
        for side, module in (("model", self._problem.model), ("hyper", self._problem.hyper)):
            for name, p in module.named_parameters():
                picture[f"{side}.{name}"] = p.detach().clone()
                picture[f"{side}.{name}.grad"] = None if p.grad is None else p.grad.clone()
                picture[f"{side}.{name}.requires_grad"] = p.requires_grad
            for name, buffer in module.named_buffers():
                picture[f"{side}.{name}"] = buffer.clone()
                picture[f"{side}.{name}.identity"] = id(buffer)
            for name, part in module.named_modules():
                picture[f"{side}.{name}.training"] = part.training
        return picture

    def __enter__(self) -> None:
        self._before = self._picture()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        after = self._picture()
        same: Callable[[Any, Any], bool] = lambda a, b: (  # noqa: E731
            torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
        )
        changed = [name for name, value in self._before.items() if not same(value, after[name])]
        assert not changed, f"nothing may be left behind; changed: {changed}"


def relative_error(measured: Tensor, expected: Tensor) -> float:
    """‖measured − expected‖ / ‖expected‖; absolute if zero is expected."""
    scale = float(expected.norm())
    return float((measured - expected).norm()) / (scale or 1.0)


def places(x: Tensor) -> Iterator[tuple[int, ...]]:
    """The index of each entry, whatever the layout in memory."""
    return itertools.product(*map(range, x.shape))
