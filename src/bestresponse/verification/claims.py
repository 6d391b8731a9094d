"""The quantities that methods claim to differentiate, and their differences."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..batches import Batches
from ..curvatures import Curvature, Hessian, Linearisation
from ..curvatures.several_batches import linearised
from ..passes.checkpoint import recomputed
from ..passes.graph import has_kinks
from ..problem import Passes, Problem
from . import causes
from .base import Claim, wrong_of
from .causes import NEAR, Finding, together, tuned
from .probe import (
    COARSE,
    FINE,
    FINE_VALUES,
    FINEST_VALUES,
    Differences,
    Line,
    Step,
    Values,
    Verdict,
    direction,
    gradient,
    or_zero,
    scales,
)
from .twin import Trial

_SYMMETRIC = 1e-2


@dataclass(frozen=True)
class SecondDerivatives(Claim):
    """A product with the curvature and the mixed term, as `Implicit` uses them.

    For an exact curvature, A v is the difference of the training gradient; this also shows its symmetry, since autograd
    gives vᵀA. For any other curvature, A is symmetric, and J v is the difference of the model's outputs, if it has
    them; and the second derivatives of the loss in these outputs and past them, if it uses any, are differences of its
    slopes. The mixed term is exact in both cases.
    """

    curvature: Curvature
    product: bool = True

    def key(self) -> tuple[Any, str]:
        part = "products and mixed term" if self.product else "mixed term"
        if isinstance(self.curvature, Hessian):  # all of them are the same
            return Hessian, part
        return self.curvature, part

    def now(self, problem: Problem) -> Claim:
        return replace(self, curvature=self.curvature.now(problem))

    def skipped(self) -> str:
        return "" if self.curvature.twice else "differences replace second derivatives"

    def pairs(self, train: Any, val: Any) -> list[tuple[Any, Any]]:
        """Each of `Batches` alone if memory is for one of them."""
        recompute = isinstance(train, Batches) and train.recompute
        return [(batch, val) for batch in (train if recompute else [train])]

    def judge(self, trial: Trial, number: int) -> Verdict:
        problem, weights = trial.problem, trial.problem.weights
        v = direction(weights, problem.model, number)
        with problem.undisturbed(trial.seed) as passes, Line(weights, v) as line:
            line.to(NEAR)
            if isinstance(self.curvature, Hessian):
                return self._of_double_backward(trial, passes, line, v)
            return self._of_system(trial, passes, line, v, number)

    def _of_double_backward(self, trial: Trial, passes: Passes, line: Line, v: Tree) -> Verdict:
        """∂(vᵀg)/∂w and ∂(vᵀg)/∂λ, as `Hessian` computes them."""
        problem = trial.problem
        with recomputed(alone=not problem.group.averages):
            loss = passes.train_loss(trial.train)
        if not trial.exact and has_kinks(loss):
            return Verdict("unclear")
        of_weights = problem.weights if self.product else {}
        inputs = together(of_weights, problem.hyperparameters)
        slopes = together(problem.weights, problem.hyperparameters if self.product else {})
        found = torch.autograd.grad(loss, list(slopes.values()), create_graph=True, allow_unused=True)
        del loss
        g = dict(zip(slopes, found, strict=True))
        live = {n: g[n] for n in v if g[n] is not None and g[n].requires_grad}
        products = torch.autograd.grad(
            list(live.values()), list(inputs.values()), [v[n] for n in live], allow_unused=True
        )
        claimed = {n: or_zero(x, inputs[n]) for n, x in zip(inputs, products, strict=True)}
        here = {n: or_zero(g[n], x) for n, x in inputs.items()} if self.product else None
        del found, g, live, products

        def values() -> Tree:
            return gradient(passes.train_loss(trial.train), inputs)

        groups = [list(of_weights), [n for n in inputs if n not in of_weights]]
        differences = Differences(values, line, here, scales(of_weights))
        return differences.judge(claimed, groups, FINE if trial.exact else COARSE)

    def _of_system(self, trial: Trial, passes: Passes, line: Line, v: Tree, number: int) -> Verdict:
        """The products of the curvature itself."""
        problem = trial.problem
        if not trial.exact and has_kinks(passes.train_loss(trial.train)):
            return Verdict("unclear")
        system = linearised(self.curvature, passes, trial.train)
        v = system.covered(v)
        claimed: Tree = {}
        outputs: Tree = {}
        bends: Tree = {}
        symmetric = True
        if self.product:
            u = direction({n: problem.weights[n] for n in v}, problem.model, number + 100)
            product = system(v)
            symmetric = _is_symmetric(u, system(u), v, product)
            if self.curvature.exact:
                claimed = product
            else:
                outputs = {f"output {i}": x.detach() for i, x in enumerate(system.pushed(v))}
                bends = system.bends(v)
        mixed = system.mixed(v)
        hyper = {tuned(n): or_zero(mixed[n], p) for n, p in problem.hyperparameters.items()}
        groups = [list(claimed), list(outputs), list(hyper)]
        inputs = together({n: problem.weights[n] for n in claimed}, problem.hyperparameters)
        values = _values(trial, passes, system, inputs, bool(outputs))
        differences = Differences(values, line, sizes=scales({n: problem.weights[n] for n in claimed}))
        steps, here = FINE if trial.exact else COARSE, line.t
        verdict = differences.judge({**claimed, **outputs, **hyper}, groups, steps)
        if bends:  # after the outputs, since both are large
            del outputs, differences
            slopes = Differences(lambda: system.slopes(line.t - here), line)
            verdict = verdict.and_also(slopes.judge(bends, [list(bends)], steps))
        return verdict if symmetric else Verdict("wrong", [*verdict.names, "A"])

    def explain(self, trial: Trial, names: list[str]) -> Finding:
        products = self.product and self.curvature.exact
        of_gradient = products or not self.product or all(map(causes.is_tuned, names))
        return causes.cause(trial, self.curvature if of_gradient else None, names, products)


def _values(
    trial: Trial, passes: Passes, system: Linearisation, inputs: dict[str, Tensor], outputs: bool
) -> Values:
    def values() -> Tree:
        found = gradient(passes.train_loss(trial.train), inputs)
        pushed = system.outputs() if outputs else []
        # Copies, since an output may be a view of a weight, which moves.
        return found | {f"output {i}": x.detach().clone() for i, x in enumerate(pushed)}

    return values


@dataclass(frozen=True)
class Value(Claim):
    """A value whose derivative along λ is the hypergradient; it can be computed again at λ ± εη.

    Attributes:
        method: the class of the method.
        settings: the settings of the method.
        total: (passes, train, val) -> the claimed derivative, by hyperparameter.
        again: (passes, train, val) -> the value, with running statistics as constants.
        twice: whether the method differentiates the training loss twice.
    """

    method: type
    settings: str
    total: Callable[[Passes, Any, Any], Mapping[str, Tensor | None]]
    again: Callable[[Passes, Any, Any], float]
    twice: bool

    def key(self) -> tuple[Any, str]:
        return self.method, self.settings

    def delicate(self) -> bool:
        return self.twice

    def judge(self, trial: Trial, number: int) -> Verdict:
        fine = FINEST_VALUES if self.twice else FINE_VALUES
        return self._compared(trial, number, fine if trial.exact else COARSE)

    def _compared(self, trial: Trial, number: int, steps: Sequence[Step]) -> Verdict:
        problem, hyper = trial.problem, trial.problem.hyperparameters
        aside = direction(problem.weights, problem.model, number)
        eta = direction(hyper, problem.hyper, number)
        batches = trial.train, trial.val
        with ExitStack() as stack:
            passes = stack.enter_context(problem.undisturbed(trial.seed, None, self.twice))
            stack.enter_context(Line(problem.weights, aside)).to(NEAR)
            line = stack.enter_context(Line(hyper, eta))
            passes.statistics_follow = False  # settled statistics do, which no difference of the value shows
            total = self.total(passes, *batches)
            slope = sum(float((x * eta[n]).sum()) for n, x in total.items() if x is not None)

            def values() -> Tree:
                return {"slope": _scalar(self.again(passes, *batches), trial.exact)}

            claimed = {"slope": _scalar(slope, trial.exact)}
            return Differences(values, line).judge(claimed, [["slope"]], steps)

    def explain(self, trial: Trial, names: list[str]) -> Finding:
        if self.twice:
            second = SecondDerivatives(Hessian())
            wrong = wrong_of(second, trial)
            if wrong:
                return second.explain(trial, wrong)
        if self._compared(trial, 2, FINE_VALUES if trial.exact else COARSE).kind != "wrong":
            return Finding("verified")
        return causes.field(trial, [tuned(n) for n in trial.problem.hyperparameters], solvable=False)


def _scalar(x: float, exact: bool) -> Tensor:
    """A value and the precision in which it was computed."""
    return torch.tensor([x], dtype=torch.float64 if exact else torch.float32)


def _is_symmetric(u: Tree, of_u: Tree, v: Tree, of_v: Tree) -> bool:
    """Whether uᵀA v = vᵀA u, relative to the usual size of such products."""
    size = _tree.norm(u) * _tree.norm(of_v) + _tree.norm(v) * _tree.norm(of_u)
    general = size / max(1, _tree.size(u)) ** 0.5
    return bool(abs(_tree.dot(u, of_v) - _tree.dot(v, of_u)) <= _SYMMETRIC * general)
