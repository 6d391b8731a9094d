"""The recommendation that follows from the findings of a check."""

import math
from dataclasses import dataclass

from .. import _tree
from . import methods
from .findings import Bench, Obstacle
from .methods import Row
from .retraining import Retraining
from .spectrum import Spectrum

# A slope with at most this relative difference from that of retraining is right.
_CLOSE = 0.2
# Cosines with the reference count as equal up to this difference.
_NEAR = 0.02


@dataclass(frozen=True)
class Recommendation:
    """What to do next, in three parts.

    Attributes:
        call: the method to call, or what to do before any method is worth calling.
        cost: the cost of a hypergradient by that method.
        watch: what to look at.
    """

    call: str
    cost: str
    watch: str


def recommended(
    bench: Bench, known: Spectrum | None, retraining: Retraining | None, rows: list[Row]
) -> Recommendation:
    """What to do next: fix errors, train further, or start with a method."""
    wrong = [f.topic for f in bench.findings if f.level == "error" and f.topic != "second derivatives"]
    if wrong or known is None:
        topics = ", ".join(dict.fromkeys(wrong)) or "curvature"
        return Recommendation(
            f"no method yet: fix what the check says about {topics}, and check again.",
            "not measured.",
            f"the line {topics} above.",
        )
    if bench.direct_only:
        watch = "hyperparameters that reach val_loss only; check again if some should reach train_loss."
        return Recommendation(
            "Direct(), since the hypergradient has no part through the weights.",
            _cost("Direct()", rows),
            watch,
        )
    if bench.failed("second derivatives"):
        name = "Implicit(curvature=FiniteDifference())"
        call = (
            f"{name}, if the networks are smooth; otherwise Penalty(steps, step_size). Other methods need the remedy "
            "in the error about second derivatives."
        )
    else:
        name, call = _start_with(bench, known, rows)
    if before := _first(bench, retraining, rows):
        return Recommendation(
            f"no method yet: {before}, and check again.",
            _cost("Implicit()", rows, " by Implicit()"),
            "the lines about curvature and stationarity above.",
        )
    return Recommendation(call, _cost(name, rows), _watch(name, retraining, rows))


def _start_with(bench: Bench, known: Spectrum, rows: list[Row]) -> tuple[str, str]:
    """The method for this number of hyperparameters, or another one if it fails in the table; and how to call it."""
    first = methods.FOR_FEW if _tree.size(bench.problem.hyperparameters) <= methods.FEW else "Implicit()"
    failed = {r.method: r.said for r in rows if r.failed}
    name, reason = first, ""
    if first in failed:
        others = {
            r.method: r for r in rows if not r.failed and r.cosine is not None and r.seconds is not None
        }
        if not others:
            text = "no method of the table, since all of them fail: train longer, or add a regulariser to train_loss."
            return "", text
        best = max(r.cosine or -1.0 for r in others.values())
        near = [n for n, r in others.items() if (r.cosine or -1.0) >= best - _NEAR]
        name = (
            "Implicit()" if "Implicit()" in near else min(near, key=lambda n: others[n].seconds or math.inf)
        )
        reason = f", since {first} fails here: its solve ends with {failed[first]}"
    call = f"{name}{reason}. Make it once, before the loop."
    if known.indefinite and name != "Implicit()":
        call += " If the loss is convex in the model's outputs, add curvature=GaussNewton()."
    return name, call


def _first(bench: Bench, retraining: Retraining | None, rows: list[Row]) -> str:
    """What must happen before a hypergradient means anything; empty if nothing."""
    met = {f.obstacle for f in bench.findings}
    if Obstacle.INTERPOLATED in met:
        return "add a regulariser to train_loss, train further until its gradient is small"
    if Obstacle.UNBOUNDED in met or Obstacle.AT_SADDLE in met:
        return "train_loss needs a minimum near the weights; add a regulariser, or train from other weights"
    if not any(r.slope for r in rows):
        return "find out why no hyperparameter moves val_loss; train the weights first"
    nearest = _nearest(retraining, rows)
    if Obstacle.FAR in met and (nearest is None or not 0.5 <= nearest[1] <= 2.0):
        return "train the weights longer before the first hyper-step (warmup_steps)"
    return ""


def _cost(name: str, rows: list[Row], said: str = "") -> str:
    """The time and memory of one call."""
    row = next((r for r in rows if r.method == name and r.seconds is not None), None)
    if row is None:
        return "not measured."
    memory = "" if row.memory is None else f", and {row.memory:.1f} times the memory of one"
    return f"{row.seconds:.1f} training gradients for a hypergradient{said}{memory}."


def _watch(name: str, retraining: Retraining | None, rows: list[Row]) -> str:
    """How near the method is to retraining, and what shows that it stays near."""
    nearest = _nearest(retraining, rows)
    if nearest is None or retraining is None:
        return _later(name)
    row = next((r for r in rows if r.method == name and r.slope is not None), None)
    own = None if row is None else (row.slope or 0.0) / retraining.slope
    text = "" if own is None else f"{name} gives {own:.2f} times the slope of retraining in one call here."
    if own is None or not 0.5 <= own <= 2.0:
        text += f" {nearest[0]} is nearest, with {nearest[1]:.2f} times."
        if name in ("Implicit()", methods.FOR_FEW):
            text += " Along a run it comes nearer, since each call starts from the last solution."
    return f"{text} Look at {_later(name)}".strip()


def _later(name: str) -> str:
    """What shows along a run that the answers are good."""
    solves = name.startswith("Implicit")
    report = "h.solve.residual and h.solve.hypergradient_error along the run, and " if solves else ""
    return f"{report}a loss on data that no hypergradient sees (Tuner(watch=...))."


def _nearest(retraining: Retraining | None, rows: list[Row]) -> tuple[str, float] | None:
    """The cheapest method close to retraining, or else the closest, with its share of the slope of retraining."""
    ran = {r.method: r for r in rows if r.slope is not None and r.seconds is not None and not r.failed}
    if retraining is None or not ran or not retraining.certain:
        return None
    ratio = {n: (r.slope or 0.0) / retraining.slope for n, r in ran.items()}
    near = [n for n in ran if abs(ratio[n] - 1.0) <= _CLOSE]
    closest = min(ran, key=lambda n: abs(ratio[n] - 1.0))
    name = min(near, key=lambda n: ran[n].seconds or math.inf, default=closest)
    return name, ratio[name]
