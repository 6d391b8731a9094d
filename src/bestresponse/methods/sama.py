"""T₁ − T₂ for weights that an adaptive optimiser trains."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch.optim import Optimizer

from ..curvatures import Curvature, FiniteDifference
from ..curvatures.base import require_curvature
from ..curvatures.several_batches import linear_system
from ..errors import ArgumentTypeError, EvaluationError
from ..passes.running_statistics import Reading
from ..problem import Passes
from ..verification.base import Claim
from ..verification.claims import SecondDerivatives
from .base import CurvatureMethod, combine
from .hypergradient import Hypergradient
from .reach import refuse_unreached
from .rules import Rule, like
from .sharding import needing_whole
from .trajectory import Trajectory
from .validation import validation_gradient


@dataclass(frozen=True, eq=False)
class SAMA(CurvatureMethod):
    """T₁ − T₂ through an adaptive optimiser: the diagonal D of its step's derivative replaces A⁻¹.

        D = ∂u/∂g at g = ∂L_T/∂w,   dL_V/dλ ≈ ∂L_V/∂λ − (D ∂L_V/∂w) · ∂²L_T/∂w∂λ

    u(g) is the next step of the optimiser, per unit of its learning rate. For SGD the method is
    ``Implicit(Identity())``; for Adam D scales each weight by about 1/√v, as its steps do. The result has the scale
    of the optimiser, not that of the hypergradient: only its direction is meaningful.

    It costs the two gradients and the mixed term. The mixed term is a difference of two gradients unless
    ``curvature=Hessian()`` is given, so it needs no second derivative. The first one is verified; see
    `FiniteDifference`.

    Args:
        rule: the optimiser's step; None takes the rule of the weight optimiser (the tuner's, or
            ``hypergradient(..., weight_optimizer=...)``). Its moments are used in either case.
        curvature: how the mixed term is computed.

    Raises:
        ArgumentTypeError: ``rule`` is not a rule, or ``curvature`` not a curvature.
        EvaluationError: the optimiser is unknown, or has made no step yet.

    Reference: Choe et al. (2023), without their change of the weights' own step.
    """

    rule: Rule | None = None
    curvature: Curvature = FiniteDifference()

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule | None):
            raise ArgumentTypeError(
                f"SAMA.rule must be an update rule, such as rules.Adam(); got {self.rule!r}."
            )
        require_curvature("SAMA", self.curvature)

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        problem, read = passes.problem, Reading(passes, train_batch)
        rule = self._rule(passes.weight_optimizer)
        val_loss, val_gradient, direct = validation_gradient(passes, val_batch, read)
        system = linear_system(self.curvature, passes, train_batch)
        refuse_unreached(problem, direct, system.reached)
        self._refuse_without_moments(rule, passes, system.names)
        path = Trajectory(rule, 1.0, 1, passes, train_batch, False)
        gradient = system.gradient()
        if gradient is None:
            weights = [problem.weights[n] for n in system.names]
            found = problem.group.mean(
                lambda: torch.autograd.grad(passes.train_loss(train_batch), weights, allow_unused=True),
                weights,
                train_batch,
            )
            gradient = {n: g for n, g in zip(system.names, found, strict=True) if g is not None}
        v = {}
        for name in list(gradient):  # one at a time, since the graph of a step is larger than the weight
            g = gradient.pop(name).detach().requires_grad_()
            after = path.start([name]).moved(rule, {name: g}, path.settings).tensors[name]
            (through,) = torch.autograd.grad(after[0], g, val_gradient.pop(name))
            v[name] = -through
            if rule.moments:
                # Where there was no gradient yet, as in rows of an embedding, the derivative is 1/ε, and all other
                # entries would be rounding compared with it. The mixed term is zero there.
                zero = [x.detach() == 0 for x in (g, *after[1:])]
                v[name].masked_fill_(reduce(torch.logical_and, zero), 0.0)
        indirect = {n: None if x is None else -x for n, x in system.mixed(v).items()}
        return replace(combine(problem, val_loss, direct, indirect), norms=read.norms)

    def needing_whole(self) -> object:
        return needing_whole(None, self.curvature)

    def claim(self) -> Claim:
        return SecondDerivatives(self.curvature, product=False)

    def _rule(self, optimizer: Optimizer | None) -> Rule:
        if self.rule is None and optimizer is None:
            raise EvaluationError(
                "SAMA needs the optimiser that trains the weights; got none. Pass weight_optimizer=... to backward or "
                "hypergradient (Tuner does), or SAMA(rule=...)."
            )
        rule = like(optimizer) if self.rule is None and optimizer is not None else self.rule
        assert rule is not None
        return rule

    def _refuse_without_moments(self, rule: Rule, passes: Passes, names: Sequence[str]) -> None:
        known, optimizer = rule.state_of(passes.weight_optimizer), passes.weight_optimizer
        weights = passes.problem.weights
        without = [n for n in names if any(known.get(weights[n], {}).get(m) is None for m in rule.moments)]
        if without:
            wanted = rule.optimizer.__name__ if rule.optimizer else type(rule).__name__
            raise EvaluationError(
                f"SAMA needs the moments of {wanted} for each weight, after a step or more; got "
                f"{'none' if optimizer is None else type(optimizer).__name__}, without those of {without[:5]}. Train "
                "these weights first, and pass their optimiser."
            )
