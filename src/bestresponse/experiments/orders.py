"""The growth of memory with steps, weights and hyperparameters: the paper's table 2, measured."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bestresponse as br

from ..diagnostics import measuring
from . import plots
from .runs import Row

Work = Callable[[br.Problem, int], object]

_OUTPUTS = 8
_RATE = 1e-3


class Groups(nn.Module):
    """A decay for each of H groups of weights; weight number i is in group i mod H."""

    index: Tensor

    def __init__(self, weights: int, groups: int) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.full((groups,), -4.0))
        self.register_buffer("index", torch.arange(weights) % groups)

    def forward(self, model: nn.Module) -> Tensor:
        """Σ exp(λ_group) w² / 2."""
        (w,) = model.parameters()
        penalty: Tensor = (self.log_decay.exp()[self.index] * w.flatten().square()).sum() / 2
        return penalty


def problem_of(weights: int, hyperparameters: int) -> br.Problem:
    """Least squares on four examples, with the given numbers of weights and hyperparameters."""
    torch.manual_seed(0)
    x, y = torch.randn(4, weights // _OUTPUTS) / math.sqrt(weights), torch.randn(4, _OUTPUTS)
    model = nn.Linear(weights // _OUTPUTS, _OUTPUTS, bias=False)

    def fit(model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
        error: Tensor = model(x) - y
        return error.square().mean()

    def train(model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
        penalty: Tensor = hyper(model)
        return fit(model, hyper, batch) + penalty

    return br.Problem(model, Groups(model.weight.numel(), hyperparameters), train, fit)


def _once(make: Callable[[int], br.Method]) -> Work:
    return lambda problem, steps: br.hypergradient(problem, None, None, make(steps))


def _hypernetwork(make: Callable[[br.Problem], br.hypernetworks.Hypernetwork]) -> Work:
    """Make a hypernetwork, train it for a step, and take a hypergradient."""

    def work(problem: br.Problem, steps: int) -> None:
        network = make(problem)
        inside = network.problem
        parameters: list[Tensor] = list(inside.weights.values())
        gradients = torch.autograd.grad(inside.train_loss(network, inside.hyper, None), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-_RATE)
        del gradients
        br.hypergradient(inside, None, None, br.Direct())

    return work


# By the name in the paper: the order of memory that the paper states, and the work to measure.
METHODS: dict[str, tuple[str, Work]] = {
    "unrolled": ("P I + H", _once(lambda n: br.Unrolled(n, _RATE))),
    "unrolled, a checkpoint every √I steps": (
        "",
        _once(lambda n: br.Unrolled(n, _RATE, checkpoint_every=math.isqrt(n))),
    ),
    "truncated, the last two": ("", _once(lambda n: br.Unrolled(n, _RATE, last=2))),
    "DrMAD": ("", _once(lambda n: br.Unrolled(n, _RATE, trajectory="interpolated"))),
    "forward": ("P H", _once(lambda n: br.Forward(n, _RATE))),
    "linear hypernetwork": ("P H", _hypernetwork(br.hypernetworks.LinearHypernetwork)),
    "self-tuning network": ("(P + H) K", _hypernetwork(br.hypernetworks.SelfTuning)),
    "Neumann, I terms": ("P + H", _once(lambda n: br.Implicit(br.Neumann(n, _RATE)))),
    "conjugate gradient, I steps": (
        "P + H",
        _once(lambda n: br.Implicit(br.ConjugateGradient(n, tolerance=0.0))),
    ),
}
_MIDDLE = {"steps I": 4, "weights P": 2**14, "hyperparameters H": 4}


def rows(longest: int) -> Iterator[Row]:
    """The peak memory of each method in MiB, while one of the three sizes grows and the others are fixed."""
    for quantity in _MIDDLE:
        for power in range(longest):
            size = _MIDDLE | {quantity: _MIDDLE[quantity] * 2**power}
            for name, (_, work) in METHODS.items():
                problem = problem_of(size["weights P"], size["hyperparameters H"])
                used = measuring.peak_bytes(partial(work, problem, size["steps I"]))
                yield {"table": 2, "method": name, "grows": quantity, **size, "MiB": used / 2**20}


def slopes(measured: Sequence[Row]) -> list[Row]:
    """The slope of log memory against log size over the larger half of the sizes; 1 means proportional."""
    table = []
    for name, (order, _) in METHODS.items():
        row: Row = {"method": name, "the paper's order": order or "–"}
        for quantity in _MIDDLE:
            of = [r for r in measured if (r["method"], r["grows"]) == (name, quantity)]
            if len(of) > 1:
                row[quantity] = round(_slope([(r[quantity], r["MiB"]) for r in of[len(of) // 2 - 1 :]]), 3)
        table.append(row)
    return table


def _slope(points: Sequence[tuple[float, float]]) -> float:
    x, y = (torch.tensor([math.log(value) for value in values]) for values in zip(*points, strict=True))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())


def draw(path: Path, measured: Sequence[Row]) -> None:
    """Draw memory against steps, weights and hyperparameters."""
    with plots.panels(path, 1, 3, (10.2, 4.2), sharey=True) as ((*axes,),):
        for panel, quantity in zip(axes, _MIDDLE, strict=True):
            for number, name in enumerate(METHODS):
                of = [r for r in measured if (r["method"], r["grows"]) == (name, quantity)]
                look: Row = {"color": f"C{number}", "label": name, "markersize": 3.5, "linewidth": 1.6}
                plots.curve(panel, of, quantity, "MiB", ("o-", "s--", "^:")[number % 3], **look)
            panel.set_yscale("log")
            panel.set_xscale("log", base=2)
            plots.style(panel, quantity, "peak memory [MiB]" if panel is axes[0] else "")
        plots.legend_below(axes[0], 3)
