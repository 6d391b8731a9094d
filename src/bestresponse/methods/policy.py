"""What `Tuner` does when a loss, a gradient or a solve fails: its ``policy``."""

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import DivergedError, EvaluationError, NotFiniteError, SolveError
from ..problem import Problem
from ..runs.recovery import Recovering
from .base import Method, unchecked_hypergradient
from .hypergradient import Hypergradient, failure_message, require_finite, skip_message, warn_of_failure

_COMPARED = 10  # the last validation losses, whose median is what a rise is measured by
_MOST = 10  # hyper-steps in a row that may fail for the same reason


class Judged(Recovering, Protocol):
    """A run whose hyper-steps are judged.

    Attributes:
        max_rise: the largest multiple of the usual validation loss; None for no limit.
        weight_optimizer: the optimiser of the weights, or a function.
    """

    max_rise: float | None
    weight_optimizer: Any

    @property
    def method(self) -> Method:
        """How the hypergradient is computed."""


class Attempt(NamedTuple):
    """A hypergradient, and what the run does with it.

    Attributes:
        result: the hypergradient, with NaN in all parts if there is none.
        outcome: "warned", "skipped" or "returned" if something is wrong; else empty.
        reason: what is wrong.
    """

    result: Hypergradient
    outcome: str = ""
    reason: str = ""

    @property
    def stepped(self) -> bool:
        """Whether the hyperparameters move along it."""
        return self.outcome in ("", "warned")


def attempt(tuner: Judged, train_loss: float, train_batch: Any, val_batch: Any, seed: int) -> Attempt:
    """Compute a hypergradient, and judge it and the losses by the policy.

    Of several processes all do the same: if one of them skips or returns, all do.

    Raises:
        NotFiniteError: a loss or the hypergradient is not finite, under "warn" and "raise", or too often under "skip".
        SolveError: the solve failed, under "raise".
        EvaluationError: the validation loss rose too far, under "raise"; or "return" has no good state to return to.
    """
    own = _own_attempt(tuner, train_loss, train_batch, val_batch, seed)
    outcomes = tuner.problem.group.gather(own.outcome)
    for outcome in ("returned", "skipped"):
        if outcome in outcomes and own.outcome != outcome:
            return own._replace(outcome=outcome, reason=own.reason or "another process failed")
    return own


def _own_attempt(tuner: Judged, train_loss: float, train_batch: Any, val_batch: Any, seed: int) -> Attempt:
    """The attempt of this process."""
    goes_on = tuner.policy in ("skip", "return")
    where = f" at hyper-step {tuner.hyper_step + 1}"
    result: Hypergradient | None = None
    try:
        _require_finite_loss(tuner, train_loss)
        result = unchecked_hypergradient(
            tuner.problem, train_batch, val_batch, tuner.method, seed, tuner.weight_optimizer
        )
        require_finite(result, where)
    except (DivergedError, NotFiniteError) as error:
        if not goes_on:
            raise
        return _gone_on(tuner, result or _nothing(tuner.problem), error)
    if rise := _rise(tuner, result.val_loss):
        too_high = EvaluationError(
            f"the validation loss must not rise beyond max_rise; got {rise}{where}. Lower the learning rates, or set "
            "clip_hypergradient."
        )
        if goes_on:
            return _gone_on(tuner, result, too_high)
        if tuner.policy == "raise":
            raise too_high
        tuner.problem.warn_once("rise", f"{too_high} (This warning comes once; the history has each event.)")
        return Attempt(result, "warned", rise)
    return _with_its_solve(tuner, result, where)


def _with_its_solve(tuner: Judged, result: Hypergradient, where: str) -> Attempt:
    """Judge the solve; one that fails leaves the state of the run good, so that "return" skips the step as well."""
    if result.solve is None or not result.solve.status.failed:
        return Attempt(result)
    reason = f"the solve ended with {result.solve.status}"
    if tuner.policy == "warn":
        warn_of_failure(tuner.problem, tuner.method, result)
        return Attempt(result, "warned", reason)
    if tuner.policy == "raise":
        raise SolveError(f"{where[1:]}, {failure_message(result.solve, result.indirect)}")
    tuner.problem.warn_once("skipped", skip_message(tuner.hyper_step + 1, reason))
    return Attempt(result, "skipped", reason)


def _gone_on(tuner: Judged, result: Hypergradient, error: EvaluationError) -> Attempt:
    """What a policy that goes on does after an error."""
    number, reason = tuner.hyper_step + 1, str(error).split(". ")[0].rstrip(".")
    if tuner.policy == "skip":
        tuner.problem.warn_once("skipped", skip_message(number, reason))
        return Attempt(result, "skipped", reason)
    if not tuner.last_good.states:
        raise EvaluationError(
            f"hyper-step {number} has no good state to return to, since all before it failed: {error}"
        ) from error
    if _in_a_row(tuner.history, lambda row: str(row.get("event", "")).startswith("returned")) >= _MOST:
        raise EvaluationError(
            f"the run returned {_MOST} times in a row to its last good state: {error}"
        ) from error
    tuner.problem.warn_once(
        "returned",
        f"hyper-step {number} returns to the last good state, with half the learning rate of the hyperparameters: "
        f"{reason}. (This warning comes once; `event` in the history shows each return.)",
    )
    return Attempt(result, "returned", reason)


def _require_finite_loss(tuner: Judged, train_loss: float) -> None:
    if math.isfinite(train_loss):
        return
    error = NotFiniteError(
        f"train_loss must stay finite; got {train_loss} at weight step {tuner.weight_step}. "
        "Lower the learning rate, or clip with clip_weights."
    )
    failed = _in_a_row(tuner.history, lambda row: not math.isfinite(row.get("train_loss", 0.0)))
    if tuner.policy == "skip" and failed >= _MOST:
        raise EvaluationError(f"no weight step was possible in {_MOST} hyper-steps: {error}")
    raise error


def _rise(tuner: Judged, val_loss: float) -> str:
    """How far the validation loss is above the usual one; empty if that is not too far."""
    if tuner.max_rise is None:
        return ""
    good = (row["val_loss"] for row in reversed(tuner.history) if row.get("stepped", True))
    recent = [loss for loss, _ in zip(good, range(_COMPARED), strict=False) if math.isfinite(loss)]
    usual = statistics.median(recent) if recent else math.inf
    if not usual > 0 or val_loss <= tuner.max_rise * usual:
        return ""
    return f"{val_loss:.4g}, more than {tuner.max_rise:g} times the usual {usual:.4g}"


def _in_a_row(history: list[dict[str, Any]], failed: Callable[[dict[str, Any]], bool]) -> int:
    """How many of the last rows failed."""
    return next((n for n, row in enumerate(reversed(history)) if not failed(row)), len(history))


def _nothing(problem: Problem) -> Hypergradient:
    parts = {n: torch.full_like(p, torch.nan) for n, p in problem.hyperparameters.items()}
    return Hypergradient(parts, parts, parts, math.nan)
