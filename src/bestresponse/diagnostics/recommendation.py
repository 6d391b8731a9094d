"""Which method to begin with, from what a check found."""

import math

from .. import _tree
from . import methods
from .findings import Bench
from .methods import Row
from .retraining import Retraining
from .spectrum import Spectrum

# A slope that is this near to that of training again is right.
_CLOSE = 0.2
# Cosines with the reference that are no further apart are alike.
_NEAR = 0.02


def recommended(bench: Bench, known: Spectrum | None, retraining: Retraining | None, rows: list[Row]) -> str:
    """What to do first: fix errors, or begin with a method, of which the re-training says how good it is."""
    wrong = [f.topic for f in bench.findings if f.level == "error" and f.topic != "second derivatives"]
    if wrong or known is None:
        topics = ", ".join(dict.fromkeys(wrong)) or "curvature"
        return f"fix what the check says about {topics}, and check again."
    if bench.direct_only:
        return "Direct(), since nothing comes through the weights."
    if bench.failed("second derivatives"):
        text = (
            "the way out that the error names, for exact hypergradients; else Implicit(curvature=FiniteDifference()) "
            "on smooth networks, or Penalty(steps, step_size)"
        )
    else:
        text = _start_with(bench, rows)
        if known.lowest < 0.0:
            text += "; where the loss splits, with curvature=GaussNewton(predict, loss, rest)"
        if any(type(m).__name__.startswith("Dropout") and m.training for m in bench.problem.model.modules()):
            text += "; with dropout and small batches, ConjugateGradient(2, damping=0.1)"
        if any(f.topic == "stationarity" and f.level == "warning" for f in bench.findings):
            text += "; and more training before the first hyper-step"
    return f"{text}.{_closest(retraining, rows)}"


def _start_with(bench: Bench, rows: list[Row]) -> str:
    """The method that we recommend for so many hyperparameters, or another where the table shows that it fails."""
    first = methods.FOR_FEW if _tree.size(bench.problem.hyperparameters) <= methods.FEW else "Implicit()"
    failed = {r.method: r.said for r in rows if r.failed}
    if first not in failed:
        return f"{first}, made once before the loop"
    others = {r.method: r for r in rows if not r.failed and r.cosine is not None and r.seconds is not None}
    if not others:
        return "no method of the table, since each fails: train further, or add a regulariser to train_loss"
    best = max(r.cosine or -1.0 for r in others.values())
    near = [n for n, r in others.items() if (r.cosine or -1.0) >= best - _NEAR]
    chosen = "Implicit()" if "Implicit()" in near else min(near, key=lambda n: others[n].seconds or math.inf)
    return f"{chosen}, since {first} fails here: its solve ends with {failed[first]}"


def _closest(retraining: Retraining | None, rows: list[Row]) -> str:
    """The cheapest of the compared methods that is near the re-training, or else the nearest."""
    ran = {r.method: r for r in rows if r.slope is not None and r.seconds is not None and not r.failed}
    if retraining is None or not ran or abs(retraining.slope) <= 5.0 * retraining.error:
        return ""
    ratio = {n: (r.slope or 0.0) / retraining.slope for n, r in ran.items()}
    near = [n for n in ran if abs(ratio[n] - 1.0) <= _CLOSE]
    nearest = min(ran, key=lambda n: abs(ratio[n] - 1.0))
    if not 0.5 <= ratio[nearest] <= 2.0:
        return (
            f" In a single call on this batch no method predicts what {retraining.steps} steps of training again give: "
            "train further (warmup_steps), and check again."
        )
    name = min(near, key=lambda n: ran[n].seconds or math.inf, default=nearest)
    return (
        f" In a single call on this batch {name} gives {ratio[name]:.2f} times the slope of training again, at "
        f"{ran[name].seconds:.1f} training gradients. Methods that start warm come nearer along a run."
    )
