"""Hypergradients that ask for no second derivative: from the value function, and an identity that knows Adam."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import _graph, _tree
from ._tree import Tree
from .curvature import Curvature, FiniteDifference, linearise
from .errors import ArgumentTypeError, EvaluationError
from .implicit import Method, combine, refuse_unreached, validation_gradient
from .passes import Passes
from .problem import MethodState, Problem
from .result import Hypergradient
from .rules import SGD, Rule, Setting, like
from .solvers.base import require, require_integer, require_number
from .trajectory import Settings, Trajectory


@dataclass(frozen=True, eq=False)
class SAMA(Method):
    """T₁ − T₂ through an adaptive optimiser: the diagonal D of its step's derivative stands for A⁻¹.

        D = ∂u/∂g at g = ∂L_T/∂w,   dL_V/dλ ≈ ∂L_V/∂λ − (D ∂L_V/∂w) · ∂²L_T/∂w∂λ

    u(g) is the step that the optimiser would make next, per unit of its learning rate. For SGD it is
    ``Implicit(Identity())``; for Adam D scales each weight by about 1/√v, as its steps do. The scale of the
    whole is the optimiser's, not that of the hypergradient: only the direction means something.

    It costs the two gradients and the mixed term. That is a difference of two gradients unless
    ``curvature=Hessian()`` is given, so that no second derivative is asked for.

    Args:
        rule: the optimiser's step; None is that of the weight optimiser (the tuner's, or
            ``hypergradient(..., weight_optimizer=...)``), whose moments are used in either case.
        curvature: how the mixed term is computed.

    Raises:
        ArgumentTypeError: ``rule`` is not a rule, or ``curvature`` not a curvature.
        EvaluationError: the optimiser is not known, or has made no step yet.

    Reference: Choe et al. (2023), without their change of the weights' own step.
    """

    rule: Rule | None = None
    curvature: Curvature = FiniteDifference()

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule | None):
            raise ArgumentTypeError(
                f"SAMA.rule must be an update rule, such as rules.Adam(); got {self.rule!r}."
            )
        if not isinstance(self.curvature, Curvature):
            raise ArgumentTypeError(
                f"SAMA.curvature must be a curvature, such as Hessian(); got {self.curvature!r}."
            )

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        problem = passes.problem
        rule = self._rule(passes.weight_optimizer)
        val_loss, val_gradient, direct = validation_gradient(passes, val_batch)
        system = linearise(self.curvature, passes, train_batch)
        refuse_unreached(problem, direct, system.reached)
        path = Trajectory(rule, 1.0, 1, passes, train_batch, False)
        point = path.start()
        weights = [problem.weights[n] for n in system.names]
        gradient = torch.autograd.grad(passes.train_loss(train_batch), weights)
        v = {}
        for name, g in zip(system.names, gradient, strict=True):
            along = g.detach().requires_grad_()
            after = path.update(name, point[name], along, 0)[0]
            (through,) = torch.autograd.grad(after, along, val_gradient[name])
            v[name] = -through
        indirect = {n: None if x is None else -x for n, x in system.mixed(v).items()}
        return combine(problem, val_loss, direct, indirect)

    def _rule(self, optimizer: Optimizer | None) -> Rule:
        if self.rule is None and optimizer is None:
            raise EvaluationError(
                "SAMA needs the optimiser that trains the weights; got none. Pass weight_optimizer=... to backward or "
                "hypergradient (Tuner does), or SAMA(rule=...)."
            )
        rule = like(optimizer) if self.rule is None and optimizer is not None else self.rule
        assert rule is not None
        kept = [] if optimizer is None else list(optimizer.state.values())
        begun = type(optimizer) is rule.optimizer and any(m in s for s in kept for m in rule.moments)
        if rule.moments and not begun:
            raise EvaluationError(
                f"SAMA needs the moments of a {rule.optimizer.__name__} that has made a step; got "
                f"{'none' if optimizer is None else type(optimizer).__name__} with {len(kept)} states. Train the "
                "weights first, and pass their optimiser."
            )
        return rule


@dataclass(frozen=True, eq=False)
class Penalty(Method):
    """The derivative of the value function's penalty: gradients alone, at two sets of weights.

        y ≈ argmin_w L_V(w, λ) + γ L_T(w, λ),   z ≈ argmin_w L_T(w, λ) the present weights,
        dL_V/dλ ≈ ∂L_V/∂λ(y, λ) + γ (∂L_T/∂λ(y, λ) − ∂L_T/∂λ(z, λ))

    At exact y and z the error falls as 1/γ. Errors of y and z are multiplied by γ, so that a large γ needs
    well-trained weights. y is kept for the next call of the same method object, which makes
    ``steps`` more steps from it; make the method once, before the loop.

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
        problem.meet(self)
        state = problem.state(self)
        calls = state.memory.get("calls", 0)
        gamma = self.multiplier(calls) if callable(self.multiplier) else self.multiplier
        self._check_multiplier(gamma)
        moments, made = state.memory.get("moments"), state.memory.get("steps", 0)
        settings: dict[str, Setting] = {"step_size": self.step_size, **self.rule.settings()}
        read = Settings(settings, problem.hyper, problem.weights, 1)
        y = _tree.copy(problem.weights) if state.solution is None else state.solution
        if moments is None:
            moments = {n: tuple(torch.zeros_like(x) for _ in self.rule.moments) for n, x in y.items()}
        for _ in range(self.steps):
            gradient = _sum_at(passes, y, train_batch, val_batch, gamma)
            with torch.no_grad():
                moved = {
                    n: self.rule.update(y[n], g, moments[n], made, read.at(0, n)) for n, g in gradient.items()
                }
            y = y | {n: xs[0] for n, xs in moved.items()}
            moments = moments | {n: xs[1:] for n, xs in moved.items()}
            made += 1
        result = self._at(passes, y, train_batch, val_batch, gamma)
        memory = {"calls": calls + 1, "moments": moments, "steps": made}
        problem.remember(self, MethodState(y, memory))
        return result

    def _at(self, passes: Passes, y: Tree, train_batch: Any, val_batch: Any, gamma: float) -> Hypergradient:
        """The two parts at y and at the present weights."""
        problem = passes.problem
        inputs = problem.hyperparameters
        with _weights_at(problem, y):
            direct = _gradients(passes.val_loss(val_batch), inputs, problem)
            ahead = _gradients(passes.train_loss(train_batch), inputs, problem)
        val_loss, train_loss = passes.val_loss(val_batch), passes.train_loss(train_batch)
        refuse_unreached(problem, direct, _graph.leaves(train_loss))
        behind = _gradients(train_loss, inputs, problem)
        indirect = {n: _graph.plus(_scaled(x, gamma), behind[n], -gamma) for n, x in ahead.items()}
        return combine(problem, float(val_loss.detach()), direct, indirect)

    def _check_multiplier(self, value: object) -> None:
        require_number("Penalty.multiplier", value)
        assert isinstance(value, int | float)
        require(0 < value < math.inf, "Penalty.multiplier", "positive and finite", value)


def _scaled(x: Tensor | None, factor: float) -> Tensor | None:
    return None if x is None else factor * x


def _sum_at(passes: Passes, y: Tree, train_batch: Any, val_batch: Any, gamma: float) -> Tree:
    """∂(L_T + L_V/γ)/∂w at y, for the weights that they reach."""
    problem = passes.problem
    with _weights_at(problem, y):
        of_train = _gradients(passes.train_loss(train_batch), problem.weights, problem)
        of_val = _gradients(passes.val_loss(val_batch), problem.weights, problem)
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


def _gradients(loss: Tensor, inputs: Mapping[str, Tensor], problem: Problem) -> dict[str, Tensor | None]:
    """The gradient of a loss by input, None where it is not reached.

    The gradients of sharded weights exist only in their ``.grad``, where a plain backward pass puts them.
    """
    _graph.refuse_reentrant(loss)
    if not _sharded(problem):
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            loss, list(inputs.values()), allow_unused=True
        )
        return dict(zip(inputs, gradients, strict=True))
    live = [*problem.weights.values(), *problem.hyperparameters.values()]
    kept = [p.grad for p in live]
    try:
        for p in live:
            p.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        return {n: p.grad for n, p in inputs.items()}
    finally:
        for p, grad in zip(live, kept, strict=True):
            p.grad = grad
