"""How memory grows with steps, weights and hyperparameters: the paper's table 2, measured."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..diagnostics import measuring
from ..hypernetworks import Hypernetwork, LinearHypernetwork, SelfTuning
from ..methods import Direct, Forward, Implicit, Method, Unrolled, hypergradient
from ..problem import Problem
from ..solvers import ConjugateGradient, Neumann

Work = Callable[[Problem, int], object]

_OUTPUTS = 8
_RATE = 1e-3


class Groups(nn.Module):
    """A decay for each of H groups of weights: the weight with number i is in group i mod H."""

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


def problem_of(weights: int, hyperparameters: int) -> Problem:
    """Least squares on four examples, with as many weights and hyperparameters as wanted."""
    torch.manual_seed(0)
    x, y = torch.randn(4, weights // _OUTPUTS) / math.sqrt(weights), torch.randn(4, _OUTPUTS)
    model = nn.Linear(weights // _OUTPUTS, _OUTPUTS, bias=False)

    def fit(model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
        error: Tensor = model(x) - y
        return error.square().mean()

    def train(model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
        penalty: Tensor = hyper(model)
        return fit(model, hyper, batch) + penalty

    return Problem(model, Groups(model.weight.numel(), hyperparameters), train, fit)


def _once(make: Callable[[int], Method]) -> Work:
    return lambda problem, steps: hypergradient(problem, None, None, make(steps))


def _hypernetwork(make: Callable[[Problem], Hypernetwork], problem: Problem, steps: int) -> None:
    """The network itself, a step of its parameters and a hypergradient."""
    network = make(problem)
    inside = network.problem
    parameters: list[Tensor] = list(inside.weights.values())
    gradients = torch.autograd.grad(inside.train_loss(network, inside.hyper, None), parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, gradients, alpha=-_RATE)
    del gradients
    hypergradient(inside, None, None, Direct())


# The paper's name, what it says of the memory, and the work, in the order of the paper's table.
METHODS: dict[str, tuple[str, Work]] = {
    "unrolled": ("P I + H", _once(lambda steps: Unrolled(steps, _RATE))),
    "unrolled, a checkpoint every √I steps": (
        "",
        _once(lambda steps: Unrolled(steps, _RATE, checkpoint_every=math.isqrt(steps))),
    ),
    "truncated, the last two": ("", _once(lambda steps: Unrolled(steps, _RATE, last=2))),
    "DrMAD": ("", _once(lambda steps: Unrolled(steps, _RATE, trajectory="interpolated"))),
    "forward": ("P H", _once(lambda steps: Forward(steps, _RATE))),
    "linear hypernetwork": ("P H", partial(_hypernetwork, LinearHypernetwork)),
    "self-tuning network": ("(P + H) K", partial(_hypernetwork, SelfTuning)),
    "Neumann, I terms": ("P + H", _once(lambda steps: Implicit(Neumann(steps, _RATE)))),
    "conjugate gradient, I steps": (
        "P + H",
        _once(lambda steps: Implicit(ConjugateGradient(steps, tolerance=0.0))),
    ),
}
QUANTITIES = {"steps I": "I", "weights P": "P", "hyperparameters H": "H"}


def ranges(longest: int) -> dict[str, list[dict[str, int]]]:
    """The sizes to measure at: one of the three grows, and the two others stay."""
    middle = {"steps I": 4, "weights P": 2**14, "hyperparameters H": 4}
    factors = [2**power for power in range(longest)]
    return {
        quantity: [middle | {quantity: middle[quantity] * factor} for factor in factors]
        for quantity in middle
    }


def rows(longest: int) -> Iterator[dict[str, Any]]:
    """The peak memory of each method at each size, in MiB."""
    for quantity, sizes in ranges(longest).items():
        for size in sizes:
            for name, (_, work) in METHODS.items():
                problem = problem_of(size["weights P"], size["hyperparameters H"])
                used = measuring.peak_bytes(partial(work, problem, size["steps I"]))
                yield {"table": 2, "method": name, "grows": quantity, **size, "MiB": used / 2**20}


def slopes(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """D log memory / d log size over the larger half of the sizes: 1 where memory is proportional to it."""
    table = []
    for name, (order, _) in METHODS.items():
        row: dict[str, Any] = {"method": name, "the paper's order": order or "–"}
        for quantity in QUANTITIES:
            of = [r for r in measured if (r["method"], r["grows"]) == (name, quantity)]
            if len(of) > 1:
                row[quantity] = round(_slope([(r[quantity], r["MiB"]) for r in of[len(of) // 2 - 1 :]]), 3)
        table.append(row)
    return table


def _slope(points: Sequence[tuple[float, float]]) -> float:
    x, y = (torch.tensor([math.log(value) for value in values]) for values in zip(*points, strict=True))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())
