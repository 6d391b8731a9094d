"""The first hypergradient, which verifies second derivatives; and the gradients of the losses against differences."""

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
    """The hypergradient by fifty conjugate-gradient steps; by differences if second derivatives are lost.

    It is the first one of the problem. Its errors, warnings and verification become findings.
    """
    bench.topic = "hypergradient"
    level: Level = "ok"
    text = "one product and one mixed term agree with differences of the training gradient."
    try:
        h = _fifty_steps(bench, Hessian())
        if h.verification != "verified":
            level, text = "note", f"{h.verification}."
    except SecondDerivativeError as error:
        h = _fifty_steps(bench, FiniteDifference())
        level, text = "error", str(error)
    bench.findings.append(Finding(level, "second derivatives", text))
    direct, indirect = _tree.norm(h.direct), _tree.norm(h.indirect)
    bench.direct_only = direct > 0.0 and indirect == 0.0
    text = f"its norm is {h.norm:.3g}. The direct part has norm {direct:.3g}, that through the weights {indirect:.3g}"
    if bench.direct_only:
        text += "; Direct() gives all of it"
    elif not h.norm:
        text += ": at these weights, no hyperparameter moves val_loss"
    bench.add("note" if h.norm else "warning", f"{text}.")
    return h.total


def _fifty_steps(bench: Bench, curvature: Curvature) -> Hypergradient:
    method = Implicit(ConjugateGradient(50, tolerance=1e-4, damping=None), curvature)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        h = unchecked_hypergradient(bench.problem, bench.train, bench.val, method, bench.seed, None)
    for warning in caught:
        if issubclass(warning.category, BestResponseWarning):
            bench.add("warning", str(warning.message))
    require_finite(h)
    if h.solve is not None and h.solve.status is Status.NOT_FINITE:
        raise EvaluationError(f"the solve must stay finite; got NaN or infinity: {h.solve.detail}.")
    return h


def slopes(bench: Bench) -> None:
    """Compare gradients with differences of the losses along hyperparameters and along weights of all depths.

    Raises:
        EvaluationError: a gradient is not the slope of its loss.
    """
    bench.topic = "first derivatives"
    problem = bench.problem
    if why := unfit(problem):
        bench.add("note", f"not verified: {why}.")
        return
    hyper, weights = [tuned(n) for n in problem.hyperparameters], list(problem.weights)
    names = hyper[:_TENSORS] + weights[:: max(1, len(weights) // _TENSORS)]
    for loss in ("train_loss", "val_loss"):
        for trial in trials(problem, bench.train, bench.val, None, bench.seed, precise_first=True):
            try:
                trial = judged_by_its_arithmetic(trial)
                wrong = wrong_slopes(trial, loss, names, 1)
                wrong = wrong_slopes(trial, loss, wrong, 2) if wrong else []
            except Exception:  # the loss fails at other weights, or on a part of the batch
                continue
            if wrong:
                raise _wrong_gradient(loss, wrong, constants(trial))
            bench.add("ok", f"the gradient of {loss} agrees with differences along {len(names)} tensors.")
            break
        else:
            bench.add("note", f"not verified: {loss} fails at other weights.")


def _wrong_gradient(loss: str, wrong: list[str], places: list[str]) -> EvaluationError:
    there = f" (there is {named(places)})" if places else ""
    return EvaluationError(
        f"the gradient of {loss} must be its slope; differences of the loss disagree for {named(wrong)}. Look there "
        f"for detach(), no_grad(), edits through .data, or a straight-through estimator{there}."
    )
