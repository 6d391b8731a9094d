"""The recommendation that follows from the findings of a check."""

import math

from .. import _tree
from . import methods
from .findings import Bench
from .methods import Row
from .retraining import Retraining
from .spectrum import Spectrum

# A slope with at most this relative difference from that of retraining is right.
_CLOSE = 0.2
# Cosines with the reference count as equal up to this difference.
_NEAR = 0.02


def recommended(bench: Bench, known: Spectrum | None, retraining: Retraining | None, rows: list[Row]) -> str:
    """What to do first: fix errors, or start with a method, with its slope relative to that of retraining."""
    wrong = [f.topic for f in bench.findings if f.level == "error" and f.topic != "second derivatives"]
    if wrong or known is None:
        topics = ", ".join(dict.fromkeys(wrong)) or "curvature"
        return f"fix what the check says about {topics}, and check again."
    if bench.direct_only:
        return "Direct(), since the hypergradient has no part through the weights."
    if bench.failed("second derivatives"):
        text = (
            "the remedy in the error message, for exact hypergradients; otherwise "
            "Implicit(curvature=FiniteDifference()) for smooth networks, or Penalty(steps, step_size)"
        )
    else:
        text = _start_with(bench, rows)
        if known.lowest < 0.0:
            text += "; with curvature=GaussNewton(predict, loss, rest) if the loss can be split"
        if any(type(m).__name__.startswith("Dropout") and m.training for m in bench.problem.model.modules()):
            text += "; with dropout and small batches, ConjugateGradient(2, damping=0.1)"
        if any(f.topic == "stationarity" and f.level == "warning" for f in bench.findings):
            text += "; train longer before the first hyper-step"
    return f"{text}.{_closest(retraining, rows)}"


def _start_with(bench: Bench, rows: list[Row]) -> str:
    """The recommended method for this number of hyperparameters, or another one if it fails in the table."""
    first = methods.FOR_FEW if _tree.size(bench.problem.hyperparameters) <= methods.FEW else "Implicit()"
    failed = {r.method: r.said for r in rows if r.failed}
    if first not in failed:
        return f"{first}, constructed once before the loop"
    others = {r.method: r for r in rows if not r.failed and r.cosine is not None and r.seconds is not None}
    if not others:
        return (
            "no method of the table, since all of them fail: train longer, or add a regulariser to train_loss"
        )
    best = max(r.cosine or -1.0 for r in others.values())
    near = [n for n, r in others.items() if (r.cosine or -1.0) >= best - _NEAR]
    chosen = "Implicit()" if "Implicit()" in near else min(near, key=lambda n: others[n].seconds or math.inf)
    return f"{chosen}, since {first} fails here: its solve ends with {failed[first]}"


def _closest(retraining: Retraining | None, rows: list[Row]) -> str:
    """The cheapest of the compared methods that are close to retraining, or else the closest."""
    ran = {r.method: r for r in rows if r.slope is not None and r.seconds is not None and not r.failed}
    if retraining is None or not ran or abs(retraining.slope) <= 5.0 * retraining.error:
        return ""
    ratio = {n: (r.slope or 0.0) / retraining.slope for n, r in ran.items()}
    near = [n for n in ran if abs(ratio[n] - 1.0) <= _CLOSE]
    nearest = min(ran, key=lambda n: abs(ratio[n] - 1.0))
    if not 0.5 <= ratio[nearest] <= 2.0:
        return (
            " In a single call on this batch, no method predicts the slope of retraining for "
            f"{retraining.steps} steps: train longer (warmup_steps), and check again."
        )
    name = min(near, key=lambda n: ran[n].seconds or math.inf, default=nearest)
    return (
        f" In a single call on this batch, {name} gives {ratio[name]:.2f} times the slope of retraining, at a cost of "
        f"{ran[name].seconds:.1f} training gradients. During a run, warm-started methods become more accurate."
    )
