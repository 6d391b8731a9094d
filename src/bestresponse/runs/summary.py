"""Summaries of the hyperparameters for the rows of the history."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..hyperparameters import Readable
from ..problem import Problem

_SMALL = 8  # entries up to which a tensor is stored whole
_SAMPLE = 1024  # entries whose quantiles are computed
_NUMBERS = 32  # on average in a row; more would make long histories and their checkpoints large
_LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

Read = Callable[[Tensor], Tensor]


class Summary:
    """The values of small hyperparameters, and quantiles of large ones, tensor by tensor.

    Modules that are `hyperparameters.Readable` give plain values, such as decays for their logarithms. Quantiles are
    those of about 1,024 evenly spaced entries, so that their cost does not grow with the tensors. Where the summary
    has more than 32 numbers, rows have it less often.
    """

    def __init__(self, problem: Problem) -> None:
        names = {id(p): (n, (lambda x: x)) for n, p in problem.hyperparameters.items()}
        names |= _plain_names(problem)
        self._parts = [(*names[id(p)], p) for p in problem.hyperparameters.values() if p.numel()]
        numbers = sum(p.numel() if p.numel() <= _SMALL else len(_LEVELS) for _, _, p in self._parts)
        self._every = max(1, math.ceil(numbers / _NUMBERS))

    def of(self, hyper_step: int, last_hyper_step: int) -> dict[str, Any]:
        """The entry ``hyperparameters`` of a row; nothing for the rows between two summaries.

        It has {"value": [...]} for a tensor of up to eight entries, and {"quantiles": [...]} for a larger one: the
        minimum, 5, 25, 50, 75 and 95 per cent, and the maximum.
        """
        if (hyper_step - 1) % self._every and hyper_step != last_hyper_step:
            return {}
        return {"hyperparameters": self._now()}

    @torch.no_grad()
    def _now(self) -> dict[str, dict[str, list[float]]]:
        pieces = [_piece(parameter.detach(), read) for _, read, parameter in self._parts]
        if not pieces:
            return {}
        # All numbers at once: on a GPU, each transfer waits for the device.
        place = pieces[0].device
        numbers = iter(torch.cat([piece.to(place) for piece in pieces]).tolist())
        return {
            name: {
                "value" if parameter.numel() <= _SMALL else "quantiles": [
                    next(numbers) for _ in range(len(piece))
                ]
            }
            for (name, _, parameter), piece in zip(self._parts, pieces, strict=True)
        }


def plain_values(problem: Problem) -> dict[str, Tensor]:
    """All values of the hyperparameters, by the names of their summaries."""
    plain = _plain_names(problem)
    found = {}
    for name, parameter in problem.hyperparameters.items():
        shown, read = plain.get(id(parameter), (name, lambda x: x))
        found[shown] = read(parameter.detach())
    return found


def _plain_names(problem: Problem) -> dict[int, tuple[str, Read]]:
    """The name of the plain values of a parameter, and the function that computes them, by the parameter's identity."""
    found: dict[int, tuple[str, Read]] = {}
    for place, module in problem.hyper.named_modules():
        if not isinstance(module, Readable):
            continue
        reader: Any = module
        prefix = f"{place}." if place else ""
        for name, parameter in reader.named_parameters():
            if (plain := reader.readable(name)) is not None:
                found[id(parameter)] = (prefix + plain[0], plain[1])
    return found


def _piece(parameter: Tensor, read: Read) -> Tensor:
    """A few numbers of a tensor: its entries, or quantiles of them."""
    flat = parameter.reshape(-1)
    sample = read(flat[:: max(1, len(flat) // _SAMPLE)])
    sample = sample if sample.dtype == torch.float64 else sample.float()
    if len(flat) <= _SMALL:
        return sample
    return sample.sort().values[[round(level * (len(sample) - 1)) for level in _LEVELS]]


def flat_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of the history, each under one name, for loggers.

    A summary becomes ``hyperparameters/NAME``, with ``/0``, ``/1`` for several values or ``/median`` and so on.
    """
    numbers = {k: float(v) for k, v in row.items() if isinstance(v, bool | int | float)}
    for name, summary in row.get("hyperparameters", {}).items():
        start = f"hyperparameters/{name}"
        if "quantiles" in summary:
            labels = ["min", "q05", "q25", "median", "q75", "q95", "max"]
            numbers |= {f"{start}/{x}": y for x, y in zip(labels, summary["quantiles"], strict=True)}
        elif len(values := summary["value"]) == 1:
            numbers[start] = values[0]
        else:
            numbers |= {f"{start}/{i}": y for i, y in enumerate(values)}
    return numbers
