"""Verification at run time: the derivatives behind a hypergradient, against differences, once for each problem.

Autograd prunes a path without a word where a backward pass has no graph, and differentiates what is detached as a
constant. Differences of the training gradient do neither. They are taken near the weights and not at them, since
networks stand on their kinks there (zero biases); and on a part of the batch. In float32 a difference crosses the
kinks of a network, which is then copied in float64 where it bears that.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _causes, _tree
from ._causes import NEAR, Finding
from ._graph import has_kinks
from ._probe import (
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
from ._tree import Tree
from ._twin import Trial, trials
from .curvature import Hessian
from .errors import SecondDerivativeError
from .linearisation import Curvature, Linearisation
from .passes import Passes
from .problem import Problem

# Whether problems are verified at all; tests turn it off where it is not what they are about.
ENABLED = True

_SYMMETRIC = 1e-2


class Claim(ABC):
    """What a method claims to differentiate.

    Attributes:
        thing: what has been verified when the claim has; kept weakly.
        what: which part of it.
        skipped: why there is nothing to verify; empty where there is.
        delicate: whether float32 shows it only where there is no copy in float64.
    """

    thing: Any
    what: str
    skipped: str = ""
    delicate: bool = False

    @abstractmethod
    def judge(self, trial: Trial, number: int) -> Verdict:
        """Compare at the place with this number near the weights."""

    @abstractmethod
    def explain(self, trial: Trial, names: list[str]) -> Finding:
        """The cause of what is wrong."""


def verified(problem: Problem, claim: Claim | None, train: Any, val: Any, seed: int | None) -> str | None:
    """What verification says of a claim on this problem; it is made when the claim comes up for the first time.

    Raises:
        SecondDerivativeError: a derivative is lost.
    """
    if not (ENABLED and problem.verify):
        return None
    if claim is None:
        return "not verified: the method claims nothing that differences can show"
    if claim.skipped:
        return f"not verified: {claim.skipped}"
    known = problem.verified(claim.thing)
    if claim.what not in known:
        finding = _examined(problem, claim, train, val, seed)
        if finding.lost:
            raise SecondDerivativeError(finding.text)
        if finding.text:
            problem.warn_once(("verification", claim.what), finding.text)
        known[claim.what] = finding.outcome
    return known[claim.what]


def _examined(problem: Problem, claim: Claim, train: Any, val: Any, seed: int | None) -> Finding:
    """What differences in float64 say, or those in the problem's own precision where that is all there is."""
    coarse: tuple[Trial, list[str]] | None = None
    for trial in trials(problem, train, val, claim, seed, claim.delicate):
        if coarse is not None and not trial.exact:
            break  # no copy of it serves
        try:
            wrong = wrong_of(trial.thing, trial)
            if wrong is None:
                return Finding("verified")
            if trial.exact:
                return _concluded(trial, wrong)
            coarse = trial, wrong
        except Exception:  # a loss that bears no step aside, or no smaller batch, for whatever reason
            continue
    if coarse is None:
        return Finding("not verified: the losses cannot be computed beside the weights")
    try:
        return _concluded(*coarse)
    except Exception as error:  # whatever a loss may raise, of which the hypergradient did not depend
        return Finding(f"not verified: {type(error).__name__} beside the weights")


def wrong_of(claim: Claim, trial: Trial) -> list[str] | None:
    """What is wrong at two places near the weights, in different directions; None where one of them is right."""
    first = claim.judge(trial, 1)
    if first.kind == "right" or (not trial.exact and first.kind == "unclear"):
        return None if first.kind == "right" else []
    second = claim.judge(trial, 2)
    return None if second.kind == "right" else [n for n in second.names if n in first.names]


def _concluded(trial: Trial, wrong: list[str]) -> Finding:
    return trial.thing.explain(trial, wrong) if wrong else _causes.unclear(trial)


@dataclass(frozen=True)
class SecondDerivatives(Claim):
    """A product with the curvature and the mixed term, as `Implicit` uses them.

    Of an exact curvature A v is the difference of the training gradient, which shows its symmetry too: autograd
    gives vᵀA. Of any other A is symmetric, and J v is the difference of the model's outputs, where it has them.
    The mixed term is exact in either case.
    """

    curvature: Curvature
    product: bool = True

    @property
    def thing(self) -> Any:  # type: ignore[override]
        return self.curvature

    @property
    def what(self) -> str:  # type: ignore[override]
        return "products and mixed term" if self.product else "mixed term"

    @property
    def skipped(self) -> str:  # type: ignore[override]
        return "" if self.curvature.twice else "differences stand for second derivatives"

    def judge(self, trial: Trial, number: int) -> Verdict:
        problem, weights = trial.problem, trial.problem.weights
        v = direction(weights, problem.model, number)
        with problem.undisturbed(trial.seed) as passes, Line(weights, v) as line:
            line.to(NEAR)
            if isinstance(self.curvature, Hessian) and self.curvature.mode == "reverse":
                return self._of_double_backward(trial, passes, line, v)
            return self._of_system(trial, passes, line, v, number)

    def _of_double_backward(self, trial: Trial, passes: Passes, line: Line, v: Tree) -> Verdict:
        """∂(vᵀg)/∂w and ∂(vᵀg)/∂λ, as `Hessian` computes them."""
        problem = trial.problem
        loss = passes.train_loss(trial.train)
        if not trial.exact and has_kinks(loss):
            return Verdict("unclear")
        of_weights = problem.weights if self.product else {}
        inputs = _both(of_weights, problem.hyperparameters)
        slopes = _both(problem.weights, problem.hyperparameters if self.product else {})
        found = torch.autograd.grad(loss, list(slopes.values()), create_graph=True, allow_unused=True)
        del loss
        g = dict(zip(slopes, found, strict=True))
        live = {n: g[n] for n in v if g[n] is not None and g[n].requires_grad}  # type: ignore[union-attr]
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
        """What the curvature itself gives."""
        problem = trial.problem
        if not trial.exact and has_kinks(passes.train_loss(trial.train)):
            return Verdict("unclear")
        system = self.curvature.linearise(passes, trial.train)
        v = {n: v[n] for n in system.names}
        claimed: Tree = {}
        outputs: Tree = {}
        symmetric = True
        if self.product:
            u = direction({n: problem.weights[n] for n in v}, problem.model, number + 100)
            product = system(v)
            symmetric = _is_symmetric(u, system(u), v, product)
            if self.curvature.exact:
                claimed = product
            else:
                outputs = {f"output {i}": x.detach() for i, x in enumerate(system.pushed(v))}
        mixed = system.mixed(v)
        hyper = {_tuned(n): or_zero(mixed[n], p) for n, p in problem.hyperparameters.items()}
        groups = [list(claimed), list(outputs), list(hyper)]
        inputs = _both({n: problem.weights[n] for n in claimed}, problem.hyperparameters)
        values = _values(trial, passes, system, inputs, bool(outputs))
        differences = Differences(values, line, sizes=scales({n: problem.weights[n] for n in claimed}))
        verdict = differences.judge({**claimed, **outputs, **hyper}, groups, FINE if trial.exact else COARSE)
        return verdict if symmetric else Verdict("wrong", [*verdict.names, "A"])

    def explain(self, trial: Trial, names: list[str]) -> Finding:
        exact = self.curvature if self.product and self.curvature.exact else None
        return _causes.cause(trial, exact, names)


def _values(
    trial: Trial, passes: Passes, system: Linearisation, inputs: dict[str, Tensor], outputs: bool
) -> Values:
    def values() -> Tree:
        found = gradient(passes.train_loss(trial.train), inputs)
        pushed = system.outputs() if outputs else []
        return found | {f"output {i}": x.detach() for i, x in enumerate(pushed)}

    return values


@dataclass(frozen=True)
class Value(Claim):
    """A value whose derivative along λ the hypergradient is, as it can be computed again at λ ± εη.

    Attributes:
        thing: the class of the method.
        what: its settings.
        total: (passes, train, val) -> what is claimed, by hyperparameter.
        again: (passes, train, val) -> the value.
        twice: whether the method differentiates the training loss twice.
    """

    thing: Any
    what: str
    total: Callable[[Passes, Any, Any], Mapping[str, Tensor | None]]
    again: Callable[[Passes, Any, Any], float]
    twice: bool

    @property
    def delicate(self) -> bool:  # type: ignore[override]
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
        return _causes.field(trial, [_tuned(n) for n in trial.problem.hyperparameters], solvable=False)


def _scalar(x: float, exact: bool) -> Tensor:
    """A value with the precision that it was computed in."""
    return torch.tensor([x], dtype=torch.float64 if exact else torch.float32)


def _tuned(name: str) -> str:
    return _causes.tuned(name)


def _both(weights: Mapping[str, Tensor], hyperparameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, **{_tuned(n): p for n, p in hyperparameters.items()}}


def _is_symmetric(u: Tree, of_u: Tree, v: Tree, of_v: Tree) -> bool:
    """Whether uᵀA v = vᵀA u, to a share of what such products are in general."""
    size = _tree.norm(u) * _tree.norm(of_v) + _tree.norm(v) * _tree.norm(of_u)
    general = size / max(1, _tree.size(u)) ** 0.5
    return abs(_tree.dot(u, of_v) - _tree.dot(v, of_u)) <= _SYMMETRIC * general
