"""The first hypergradient, which verifies second derivatives; and the gradient of each loss against differences."""

import warnings

from .. import _tree
from .._tree import Tree
from ..curvatures import Curvature, FiniteDifference, Hessian
from ..errors import BestResponseWarning, EvaluationError, SecondDerivativeError, named
from ..methods import Implicit
from ..methods.base import unchecked_hypergradient
from ..methods.hypergradient import Hypergradient, require_finite
from ..solvers import ConjugateGradient, Status
from ..verification.base import unfit
from ..verification.causes import tuned, wrong_slopes
from ..verification.suspects import constants
from ..verification.twin import judged_by_its_arithmetic, trials
from .findings import Bench, Finding, Level

_TENSORS = 40


def reference(bench: Bench) -> Tree:
    """The hypergradient by conjugate gradient of fifty steps; where second derivatives are lost, by differences.

    It is the first one of the problem. What it raises and warns of, and what it verifies, become findings.
    """
    bench.topic = "hypergradient"
    try:
        found = _fifty_steps(bench, Hessian())
        text = "one product and one mixed term agree with differences of the training gradient."
        said: tuple[Level, str] = (
            ("ok", text) if found.verification == "verified" else ("note", f"{found.verification}.")
        )
    except SecondDerivativeError as error:
        found = _fifty_steps(bench, FiniteDifference())
        said = "error", str(error)
    bench.findings.append(Finding(said[0], "second derivatives", said[1]))
    through = _tree.norm(found.indirect)
    bench.direct_only = through == 0.0
    bench.say(
        "note" if found.norm else "warning",
        f"its norm is {found.norm:.3g}; {_tree.norm(found.direct):.3g} of the direct part, {through:.3g} of the part "
        f"that comes through the weights{'. Direct() gives all of it' if bench.direct_only else ''}.",
    )
    return found.total


def _fifty_steps(bench: Bench, curvature: Curvature) -> Hypergradient:
    method = Implicit(ConjugateGradient(50, tolerance=1e-4, damping=None), curvature)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = unchecked_hypergradient(bench.problem, bench.train, bench.val, method, bench.seed, None)
    for warning in said:
        if issubclass(warning.category, BestResponseWarning):
            bench.say("warning", str(warning.message))
    require_finite(found)
    if found.solve is not None and found.solve.status is Status.NOT_FINITE:
        raise EvaluationError(f"the solve must stay finite; got NaN or infinity: {found.solve.detail}.")
    return found


def slopes(bench: Bench) -> None:
    """Compare gradients with differences of the losses along hyperparameters, and along weights of all depths.

    Raises:
        EvaluationError: a gradient is not the slope of its loss.
    """
    bench.topic = "first derivatives"
    problem = bench.problem
    if why := unfit(problem):
        bench.say("note", f"not verified: {why}.")
        return
    hyper, weights = [tuned(n) for n in problem.hyperparameters], list(problem.weights)
    names = hyper[:_TENSORS] + weights[:: max(1, len(weights) // _TENSORS)]
    for loss in ("train_loss", "val_loss"):
        for trial in trials(problem, bench.train, bench.val, None, bench.seed, precise_first=True):
            try:
                trial = judged_by_its_arithmetic(trial)
                wrong = wrong_slopes(trial, loss, names, 1)
                wrong = wrong_slopes(trial, loss, wrong, 2) if wrong else []
            except Exception:  # a loss that cannot be computed beside the weights, or on a part of a batch
                continue
            if wrong:
                raise _not_a_slope(loss, wrong, constants(trial))
            text = f"no difference of {loss} contradicts its gradient, along {len(names)} tensors."
            bench.say("ok", text)
            break
        else:
            bench.say("note", f"not verified: {loss} fails beside the weights.")


def _not_a_slope(loss: str, wrong: list[str], places: list[str]) -> EvaluationError:
    there = f" (there is {named(places)})" if places else ""
    return EvaluationError(
        f"the gradient of {loss} must be its slope; differences of the loss say otherwise for {named(wrong)}. Look "
        f"there for detach(), no_grad(), edits through .data, or a straight-through estimator{there}."
    )
