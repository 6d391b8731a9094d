"""Hypergradients from the value function, which need only first derivatives."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..curvatures.base import warn_of_unreached
from ..errors import (
    ArgumentTypeError,
    DivergedError,
    NotFiniteError,
    require,
    require_integer,
    require_number,
)
from ..memory import MethodState, settings_of
from ..passes import graph
from ..passes.arithmetic import Arithmetic
from ..passes.resolution import Circumstances, refuse_half_precision, sizes
from ..passes.substitution import refuse_max_norm
from ..problem import Passes, Problem
from ..solvers import Report, Status
from ..verification.base import Claim
from ..verification.claims import Value
from .base import Method, combine
from .hypergradient import Hypergradient
from .other_weights import losses, train_gradients, val_gradients, verify_difference, weights_at
from .reach import refuse_unreached, unreached_by_validation
from .rules import SGD, Rule, Setting
from .trajectory import Point
from .tuned_settings import Settings

# Weights y that are worse than the present ones by more than this share are dropped.
_WORSE = 0.1


@dataclass(frozen=True, eq=False)
class Penalty(Method):
    """The derivative of the value function's penalty, from gradients at two sets of weights.

        y ≈ argmin_w L_V(w, λ) + γ L_T(w, λ),   z ≈ argmin_w L_T(w, λ),
        dL_V/dλ ≈ ∂L_V/∂λ(y, λ) + γ (∂L_T/∂λ(y, λ) − ∂L_T/∂λ(z, λ))

    At exact y and z the error falls as 1/γ. It is large if the training loss is small compared with L_V/γ. Both are
    copies of the present weights and take the same steps in each call, so common changes cancel, such as the training
    that the weights still need. Their difference is kept for the next call of the same method
    object, which starts from it; make the method once, before the loop. It is a Neumann series of ``steps`` terms
    that continues from call to call.

    ``h.solve.residual`` is ‖∂(L_T + L_V/γ)(y) − ∂L_T(z)‖ / ‖∂L_V(y)/γ‖ before the last step: one if y has not moved
    yet, small if y has converged. If y is worse than the present weights for L_V + γ L_T by more
    than a tenth, it begins again.

    Both sets of weights run through the model itself, one after the other, in place. Nothing is substituted, so
    fused attention and compiled modules work. ``val_loss`` is at the present weights, and ``direct`` at y.

    The first call verifies that ∂L_T at y and z differ by more than rounding, at four training gradients and one of
    the validation loss. Later calls verify again if a tensor of weights, or γ, has doubled or halved since.

    Args:
        steps: the number of steps of y and z in a call. A step costs three gradients, or four if the validation loss
            reads running statistics, which follow the weights (those of a sharded model count as constants).
        step_size: α of these steps.
        multiplier: γ > 0; or a function of the number of the call, from 0, for a γ that grows.
        rule: gradient descent, whose momentum is kept between calls. Adam's steps would not cancel between y and z,
            and the remainder can point the wrong way.

    Raises:
        ArgumentError: an argument is out of its range, or the weights have half precision, which rounds small steps
            away.
        EvaluationError: the training loss computes in half precision, which does not resolve the difference at this γ.
            In float32 there is a warning instead.
        DivergedError: the steps make y worse than it began.

    Reference: Kwon, Kwon, Wright and Nowak (2023); for large models, Pan et al. (2024).
    """

    steps: int
    step_size: float
    multiplier: float | Callable[[int], float] = 100.0
    rule: SGD = SGD()

    def __post_init__(self) -> None:
        require_integer("Penalty.steps", self.steps, 1)
        require_number("Penalty.step_size", self.step_size)
        require(0 < self.step_size < math.inf, "Penalty.step_size", "positive and finite", self.step_size)
        if not callable(self.multiplier):
            self._check_multiplier(self.multiplier)
        if not isinstance(self.rule, SGD):
            raise ArgumentTypeError(
                "Penalty.rule must be gradient descent, rules.SGD(...), since the steps of other rules do not cancel "
                f"between the two sets of weights; got {self.rule!r}."
            )

    twice = False

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        problem = passes.problem
        refuse_max_norm(problem.model, "Penalty")
        refuse_half_precision("Penalty", problem.weights)
        problem.meet(self)
        state = problem.state(self)
        calls = state.memory.get("calls", 0)
        gamma = self.multiplier(calls) if callable(self.multiplier) else self.multiplier
        self._check_multiplier(gamma)
        batches = train_batch, val_batch
        found = None
        if state.solution is not None:
            found = self._from(_Pair.of(problem, state), passes, batches, gamma, warm=True)
        if found is None:  # the first call, or the stored difference has become useless
            found = self._from(_Pair.at(problem, self.rule), passes, batches, gamma, warm=False)
        if found is None:
            losses(passes, batches)  # raises if the steps are not the cause
            raise DivergedError(
                "Penalty's weights y must become better than at their start, for L_T + L_V/γ; in this call "
                f"{self.steps} steps made them worse. Use a step_size below {self.step_size:g}, or a Tuner with "
                'policy="skip".'
            )
        if not _tree.not_finite(found.result.total):
            verified = self._verified(passes, found, batches, gamma, state.memory.get("verified"))
            problem.remember(self, found.pair.state(calls + 1, verified))
        return found.result

    def _verified(
        self, passes: Passes, found: "_Found", batches: tuple[Any, Any], gamma: float, known: Any
    ) -> dict[str, Any]:
        """Verify at the first call, and when weights or γ have doubled or halved; return the sizes then."""
        here = Circumstances(found.arithmetic, sizes(passes.problem.weights))
        if here.same(known) and 0.5 * known["multiplier"] <= gamma <= 2.0 * known["multiplier"]:
            return dict(known)
        y, z = found.pair.y.weights, found.pair.z.weights
        verify_difference(passes, y, z, batches, gamma, found.arithmetic)
        return here.data(multiplier=gamma)

    def needing_whole(self) -> object:
        return None

    def claim(self) -> Claim:
        """The gradients with respect to λ at one set of weights; the result combines them."""

        def total(passes: Passes, train: Any, val: Any) -> dict[str, Tensor | None]:
            inputs = passes.problem.hyperparameters
            _, of_train = train_gradients(passes, train, inputs)
            _, of_val, _ = val_gradients(passes, (train, val), inputs)
            return {n: graph.plus(x, of_val[n]) for n, x in of_train.items()}

        def value(passes: Passes, train: Any, val: Any) -> float:
            return float(passes.train_loss(train).detach()) + float(passes.val_loss(val).detach())

        return Value(type(self), settings_of(self), total, value, False)

    def _from(
        self, pair: "_Pair", passes: Passes, batches: tuple[Any, Any], gamma: float, warm: bool
    ) -> "_Found | None":
        """The hypergradient after the steps from there; None if they lead to a point worse than the present weights."""
        problem = passes.problem
        settings: dict[str, Setting] = {"step_size": self.step_size, **self.rule.settings()}
        rates = Settings(settings, problem.hyper, problem.weights, 1, self.rule.bounds)
        inputs, residual = problem.hyperparameters, 0.0
        try:
            for _ in range(self.steps):
                pair, residual = pair.stepped(self.rule, rates, passes, batches, gamma)
            with weights_at(problem, pair.y.weights):
                val_y, direct, read = val_gradients(passes, batches, inputs)
                train_y, ahead = train_gradients(passes, batches[0], inputs)
            with weights_at(problem, pair.z.weights):
                _, behind = train_gradients(passes, batches[0], inputs)
        except NotFiniteError:
            return None
        here = losses(passes, batches)
        if not here.validates:
            raise unreached_by_validation(problem)
        least = here.train + here.val / gamma
        if not train_y + val_y / gamma <= least + _WORSE * abs(least):
            return None
        refuse_unreached(problem, direct, here.reached)
        indirect = {n: graph.plus(_scaled(x, gamma), behind[n], -gamma) for n, x in ahead.items()}
        report = Report(Status.STEPS_USED, 0, self.steps, residual, warm, detail=read.detail)
        result = combine(problem, here.val, direct, indirect)
        return _Found(replace(result, solve=report, norms=read.norms), pair, here.arithmetic)

    def _check_multiplier(self, value: object) -> None:
        require_number("Penalty.multiplier", value)
        assert isinstance(value, int | float)
        require(0 < value < math.inf, "Penalty.multiplier", "positive and finite", value)


@dataclass(frozen=True)
class _Pair:
    """The weights y and z."""

    y: Point
    z: Point

    @classmethod
    def at(cls, problem: Problem, rule: Rule) -> "_Pair":
        """Both at the present weights."""
        weights = _tree.copy(problem.weights)
        tensors = {n: (w, *(torch.zeros_like(w) for _ in rule.moments)) for n, w in weights.items()}
        here = Point(tensors, dict.fromkeys(tensors, 0))
        return cls(here, here)

    @classmethod
    def of(cls, problem: Problem, state: MethodState) -> "_Pair":
        """The pair with z at the present weights, and y as far from them as at the end of the last call."""
        assert state.solution is not None
        z = _tree.copy(problem.weights)
        y = _tree.add(z, state.solution)
        return cls(*(_with(x, state.memory[name]) for x, name in ((y, "y"), (z, "z"))))

    def state(self, calls: int, verified: dict[str, Any]) -> MethodState:
        """The state for the next call."""
        apart = _tree.add(self.y.weights, self.z.weights, -1.0)
        kept = {"y": _without(self.y), "z": _without(self.z)}
        return MethodState(apart, {"calls": calls, "verified": verified, **kept})

    def stepped(
        self, rule: Rule, settings: Settings, passes: Passes, batches: tuple[Any, Any], gamma: float
    ) -> tuple["_Pair", float]:
        """Both after one step, and ‖∂(L_T + L_V/γ)(y) − ∂L_T(z)‖ / ‖∂L_V(y)/γ‖ before it."""
        problem = passes.problem
        with weights_at(problem, self.z.weights):
            _, found = train_gradients(passes, batches[0], problem.weights)
        with weights_at(problem, self.y.weights):
            _, of_train = train_gradients(passes, batches[0], problem.weights)
            _, of_val, _ = val_gradients(passes, batches, problem.weights)
        warn_of_unreached(problem, [n for n, g in of_train.items() if g is not None])
        at_z = {n: g for n, g in found.items() if g is not None}
        pulled = {n: g / gamma for n, g in of_val.items() if g is not None}
        at_y = {n: graph.plus(g, pulled.get(n)) for n, g in of_train.items()}
        along = {n: g for n, g in at_y.items() if g is not None}
        apart = {n: g - at_z[n] if n in at_z else g for n, g in along.items()}
        size = _tree.norm(pulled)
        with torch.no_grad():
            pair = _Pair(self.y.moved(rule, along, settings), self.z.moved(rule, at_z, settings))
        return pair, _tree.norm(apart) / size if size > 0.0 else 0.0


@dataclass(frozen=True)
class _Found:
    """The result of some steps, and the precision in which the training loss computes."""

    result: Hypergradient
    pair: _Pair
    arithmetic: Arithmetic


def _without(point: Point) -> dict[str, Any]:
    """The state of a point to keep, besides its weights."""
    return {"moments": {n: xs[1:] for n, xs in point.tensors.items()}, "counts": point.counts}


def _with(weights: Tree, memory: Mapping[str, Any]) -> Point:
    """The point with these weights and the stored state."""
    return Point({n: (w, *memory["moments"][n]) for n, w in weights.items()}, memory["counts"])


def _scaled(x: Tensor | None, factor: float) -> Tensor | None:
    return None if x is None else factor * x
