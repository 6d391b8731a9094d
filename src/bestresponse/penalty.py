"""Hypergradients from the value function, which ask for first derivatives alone."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _graph, _tree
from ._tree import Tree
from .curvature import warn_of_unreached
from .errors import ArgumentTypeError, DivergedError, NotFiniteError
from .implicit import Method, combine, refuse_unreached
from .passes import Passes, refuse_max_norm
from .problem import MethodState, Problem
from .result import Hypergradient
from .rules import SGD, Rule, Setting
from .solvers.base import require, require_integer, require_number
from .tuned_settings import Settings

# Second weights that are worse than this share beyond the present ones are given up.
_WORSE = 0.1


@dataclass(frozen=True, eq=False)
class Penalty(Method):
    """The derivative of the value function's penalty: gradients alone, at two sets of weights.

        y ≈ argmin_w L_V(w, λ) + γ L_T(w, λ),   z ≈ argmin_w L_T(w, λ) the present weights,
        dL_V/dλ ≈ ∂L_V/∂λ(y, λ) + γ (∂L_T/∂λ(y, λ) − ∂L_T/∂λ(z, λ))

    At exact y and z the error falls as 1/γ. Errors of y and z are multiplied by γ, so that a large γ needs
    well-trained weights. y is kept for the next call of the same method object, which makes ``steps`` more steps
    from it; make the method once, before the loop. Where y has become worse than z for L_V + γ L_T by more than a
    tenth, it begins again at z.

    Both sets of weights run through the model itself, one after the other, in place: nothing is substituted, so
    that fused attention and sharded models (FSDP2) work. With a sharded model the gradients of hyperparameters
    outside it are those of this rank's batch. ``val_loss`` is at the present weights, and ``direct`` at y.

    Args:
        steps: of y on L_T + L_V/γ, in a call.
        step_size: α of these steps.
        multiplier: γ > 0; or a function of the number of the call, from 0, for a γ that grows.
        rule: the steps.

    Raises:
        ArgumentError: an argument out of its range.
        DivergedError: the steps make y worse than it began.

    Reference: Kwon, Kwon, Wright and Nowak (2023); for large models, Pan et al. (2024).
    """

    steps: int
    step_size: float
    multiplier: float | Callable[[int], float] = 10.0
    rule: Rule = SGD()

    def __post_init__(self) -> None:
        require_integer("Penalty.steps", self.steps, 1)
        require_number("Penalty.step_size", self.step_size)
        require(0 < self.step_size < math.inf, "Penalty.step_size", "positive and finite", self.step_size)
        if not callable(self.multiplier):
            self._check_multiplier(self.multiplier)
        if not isinstance(self.rule, Rule):
            raise ArgumentTypeError(
                f"Penalty.rule must be an update rule, such as rules.Adam(); got {self.rule!r}."
            )

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        problem = passes.problem
        refuse_max_norm(problem.model, "Penalty")
        problem.meet(self)
        state = problem.state(self)
        calls = state.memory.get("calls", 0)
        gamma = self.multiplier(calls) if callable(self.multiplier) else self.multiplier
        self._check_multiplier(gamma)
        batches = train_batch, val_batch
        result = None
        if state.solution is not None:
            result, second = self._from(_Second.of(state), passes, batches, gamma)
        if result is None:  # the first call, or the second weights were left behind
            result, second = self._from(_Second.at(problem, self.rule), passes, batches, gamma)
        if result is None:
            raise DivergedError(
                "Penalty's second weights must become better than the present ones, for L_T + L_V/γ; "
                f"{self.steps} steps from these made them worse. Use a smaller step_size than {self.step_size:g}."
            )
        if not _tree.not_finite(result.total):
            problem.remember(self, second.state(calls + 1))
        return result

    def _from(
        self, second: "_Second", passes: Passes, batches: tuple[Any, Any], gamma: float
    ) -> tuple[Hypergradient | None, "_Second"]:
        """The hypergradient after the steps from there; None where they lead to a place that is worse than here."""
        problem = passes.problem
        settings: dict[str, Setting] = {"step_size": self.step_size, **self.rule.settings()}
        read = Settings(settings, problem.hyper, problem.weights, 1, self.rule.bounds)
        inputs = problem.hyperparameters
        try:
            for _ in range(self.steps):
                gradient = _sum_at(passes, second.weights, batches, gamma)
                with torch.no_grad():
                    second = second.moved(self.rule, gradient, read)
            with _weights_at(problem, second.weights):
                val_there, direct = _gradients(passes.val_loss(batches[1]), inputs, problem)
                train_there, ahead = _gradients(passes.train_loss(batches[0]), inputs, problem)
        except NotFiniteError:
            return None, second
        val_loss, train_loss = passes.val_loss(batches[1]), passes.train_loss(batches[0])
        here, there = (
            float(train_loss.detach()) + float(val_loss.detach()) / gamma,
            train_there + val_there / gamma,
        )
        if not there <= here + _WORSE * abs(here):
            return None, second
        refuse_unreached(problem, direct, _graph.leaves(train_loss))
        _, behind = _gradients(train_loss, inputs, problem)
        indirect = {n: _graph.plus(_scaled(x, gamma), behind[n], -gamma) for n, x in ahead.items()}
        return combine(problem, float(val_loss.detach()), direct, indirect), second

    def _check_multiplier(self, value: object) -> None:
        require_number("Penalty.multiplier", value)
        assert isinstance(value, int | float)
        require(0 < value < math.inf, "Penalty.multiplier", "positive and finite", value)


@dataclass(frozen=True)
class _Second:
    """The second weights.

    Attributes:
        tensors: each of them, and after it the moments that the rule keeps for it.
        counts: how many steps have moved each.
    """

    tensors: dict[str, tuple[Tensor, ...]]
    counts: dict[str, int]

    @classmethod
    def at(cls, problem: Problem, rule: Rule) -> "_Second":
        """The present weights."""
        copies = _tree.copy(problem.weights)
        kept = len(rule.moments)
        tensors = {n: (y, *(torch.zeros_like(y) for _ in range(kept))) for n, y in copies.items()}
        return cls(tensors, dict.fromkeys(tensors, 0))

    @classmethod
    def of(cls, state: MethodState) -> "_Second":
        """Those of the last call."""
        assert state.solution is not None
        moments, counts = state.memory["moments"], state.memory["counts"]
        return cls({n: (y, *moments[n]) for n, y in state.solution.items()}, counts)

    def state(self, calls: int) -> MethodState:
        """What to remember."""
        moments = {n: xs[1:] for n, xs in self.tensors.items()}
        return MethodState(self.weights, {"calls": calls, "moments": moments, "counts": self.counts})

    @property
    def weights(self) -> Tree:
        """The weights alone."""
        return {n: xs[0] for n, xs in self.tensors.items()}

    def moved(self, rule: Rule, gradient: Tree, settings: Settings) -> "_Second":
        """After one step."""
        moved = {
            n: rule.step(self.tensors[n], g, self.counts[n], settings.at(0, n)) for n, g in gradient.items()
        }
        counts = {n: count + (n in gradient) for n, count in self.counts.items()}
        return _Second(self.tensors | moved, counts)


def _scaled(x: Tensor | None, factor: float) -> Tensor | None:
    return None if x is None else factor * x


def _sum_at(passes: Passes, y: Tree, batches: tuple[Any, Any], gamma: float) -> Tree:
    """∂(L_T + L_V/γ)/∂w at y, for the weights that L_T or L_V reaches."""
    problem = passes.problem
    with _weights_at(problem, y):
        _, of_train = _gradients(passes.train_loss(batches[0]), problem.weights, problem)
        _, of_val = _gradients(passes.val_loss(batches[1]), problem.weights, problem)
    warn_of_unreached(problem, [n for n, g in of_train.items() if g is not None])
    total = {n: _graph.plus(x, of_val[n], 1.0 / gamma) for n, x in of_train.items()}
    return {n: g for n, g in total.items() if g is not None}


@contextmanager
def _weights_at(problem: Problem, values: Tree) -> Iterator[None]:
    """The live weights with other values, and then as they were."""
    kept = _tree.copy(problem.weights)
    try:
        _write(problem, values)
        yield
    finally:
        _write(problem, kept)


@torch.no_grad()
def _write(problem: Problem, values: Tree) -> None:
    for name, w in problem.weights.items():
        w.copy_(values[name])


def _sharded(problem: Problem) -> bool:
    """Whether a weight is a DTensor, whose module is imported by whoever shards."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(w, module.DTensor) for w in problem.weights.values())


def _gradients(
    loss: Tensor, inputs: Mapping[str, Tensor], problem: Problem
) -> tuple[float, dict[str, Tensor | None]]:
    """A loss and its gradient by input, None where it is not reached.

    The gradients of sharded weights exist only in their ``.grad``, where a plain backward pass puts them.
    """
    _graph.refuse_reentrant(loss)
    if not _sharded(problem):
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            loss, list(inputs.values()), allow_unused=True
        )
        return float(loss.detach()), dict(zip(inputs, gradients, strict=True))
    live = [*problem.weights.values(), *problem.hyperparameters.values()]
    kept = [p.grad for p in live]
    try:
        for p in live:
            p.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), {n: p.grad for n, p in inputs.items()}
    finally:
        for p, grad in zip(live, kept, strict=True):
            p.grad = grad
