"""Verification at run time: the derivatives behind a hypergradient, against differences, once for each problem.

Autograd prunes a path without a word where a backward pass has no graph, and differentiates what is detached as a
constant. Differences of the training gradient do neither. They are taken near the weights and not at them, since
networks stand on their kinks there (zero biases); and on a part of the batch. In float32 a difference crosses the
kinks of a network, which is then copied in float64 where it bears that.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch

from ..curvatures.power_iteration import power_iteration
from ..errors import SecondDerivativeError
from ..passes.embedding import has_max_norm
from ..problem import Problem
from . import causes
from .causes import Finding
from .probe import Verdict
from .twin import Trial, judged_by_its_arithmetic, trials

# Whether problems are verified at all; tests turn it off where it is not what they are about.
ENABLED = True


class Claim(ABC):
    """What a method claims to differentiate."""

    @abstractmethod
    def key(self) -> tuple[Any, str]:
        """What has been verified when the claim has: an object, or a class, which is kept weakly, and a part of it."""

    def skipped(self) -> str:
        """Why there is nothing to verify; empty where there is."""
        return ""

    def delicate(self) -> bool:
        """Whether float32 shows it only where there is no copy in float64."""
        return False

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
    if why := claim.skipped() or unfit(problem):
        return f"not verified: {why}"
    thing, part = claim.key()
    known = problem.verifications(thing)
    if part not in known:
        with torch.inference_mode(False), torch.enable_grad():
            finding = _examined(problem, claim, train, val, seed)
        if finding.lost:
            raise SecondDerivativeError(finding.text)
        if finding.text:
            problem.warn_once(("verification", finding.outcome), finding.text)
        known[part] = finding.outcome
    return known[part]


def unfit(problem: Problem) -> str:
    """What keeps differences from showing anything that is not known; empty where nothing does."""
    if power_iteration(problem) is not None:
        return "spectral_norm takes its singular vectors as constants in training mode"
    if any(map(has_max_norm, problem.model.modules())):
        return "embeddings with max_norm edit their weights in each pass"
    return ""


def _examined(problem: Problem, claim: Claim, train: Any, val: Any, seed: int | None) -> Finding:
    """What differences in float64 say, or those in the problem's own precision where that is all there is."""
    coarse: tuple[Trial, list[str]] | None = None
    for trial in trials(problem, train, val, claim, seed, claim.delicate()):
        if coarse is not None and not trial.exact:
            break  # no copy of it serves
        try:
            wrong = wrong_of(trial.thing, trial)
            if wrong is not None and trial.exact:
                trial = judged_by_its_arithmetic(trial)
                wrong = wrong if trial.exact else wrong_of(trial.thing, trial)
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
    return trial.thing.explain(trial, wrong) if wrong else causes.unclear(trial)
