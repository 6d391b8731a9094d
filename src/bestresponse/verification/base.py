"""Verification at run time: compare the derivatives behind a hypergradient with differences, once for each problem.

Autograd silently prunes a path if a backward pass has no graph, and treats detached tensors as
constants. Differences of the training gradient do neither. They are taken near the weights and not at them, since
networks may lie on kinks there (zero biases), and on a part of the batch. In float32 a difference crosses the
kinks of a network, so a float64 copy of the network is used if possible.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
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

# Whether problems are verified at all; tests of other things turn it off.
ENABLED = True


class Claim(ABC):
    """The quantity that a method claims to differentiate."""

    @abstractmethod
    def key(self) -> tuple[Any, str]:
        """The key of the claim: an object or a class, which is kept weakly, and a part of it."""

    def now(self, problem: Problem) -> "Claim":
        """The claim that a method makes on this problem at present."""
        return self

    def skipped(self) -> str:
        """The reason why there is nothing to verify; empty if there is something."""
        return ""

    def delicate(self) -> bool:
        """Whether float32 is used only if there is no copy in float64."""
        return False

    def pairs(self, train: Any, val: Any) -> list[tuple[Any, Any]]:
        """The training and validation batches to verify on, one pair at a time."""
        return [(train, val)]

    @abstractmethod
    def judge(self, trial: Trial, number: int) -> Verdict:
        """Compare at the place with this number near the weights."""

    @abstractmethod
    def explain(self, trial: Trial, names: list[str]) -> Finding:
        """The cause of a wrong derivative."""


def verified(problem: Problem, claim: Claim | None, train: Any, val: Any, seed: int | None) -> str | None:
    """The result of verification for a claim on this problem; it runs when the claim first appears.

    Raises:
        SecondDerivativeError: a derivative is lost.
    """
    if not (ENABLED and problem.verify):
        return None
    if claim is None:
        return "not verified: differences can check nothing that the method claims"
    claim = claim.now(problem)
    if why := claim.skipped() or unfit(problem):
        return f"not verified: {why}"
    thing, part = claim.key()
    known = problem.verifications(thing)
    if part not in known:
        with torch.inference_mode(False), torch.enable_grad():
            # Each rank compares its own derivatives with its own differences.
            own = problem.alone()
            finding = _worst([_examined(own, claim, *pair, seed) for pair in claim.pairs(train, val)])
            finding = _worst(problem.group.gather(finding))
        if finding.lost:
            raise SecondDerivativeError(finding.text)
        if finding.text:
            problem.warn_once(("verification", finding.outcome), finding.text)
        known[part] = finding.outcome
    return known[part]


def _worst(findings: Sequence[Finding]) -> Finding:
    """The finding for all ranks: a lost derivative, else a doubt, else that of the first."""
    return max(findings, key=lambda f: (f.lost, bool(f.text), f.outcome != "verified"))


def unfit(problem: Problem) -> str:
    """The reason why differences cannot help here; empty if there is none."""
    if problem.group.sharded:
        return "the weights are sharded"
    if power_iteration(problem) is not None:
        return "spectral_norm takes its singular vectors as constants in training mode"
    if any(map(has_max_norm, problem.model.modules())):
        return "embeddings with max_norm edit their weights in each pass"
    return ""


def _examined(problem: Problem, claim: Claim, train: Any, val: Any, seed: int | None) -> Finding:
    """The result of differences in float64, or in the problem's own precision if there is no float64 copy."""
    coarse: tuple[Trial, list[str]] | None = None
    for trial in trials(problem, train, val, claim, seed, claim.delicate()):
        if coarse is not None and not trial.exact:
            break  # no copy works
        try:
            wrong = wrong_of(trial.thing, trial)
            if wrong is not None and trial.exact:
                trial = judged_by_its_arithmetic(trial)
                wrong = wrong if trial.exact else wrong_of(trial.thing, trial)
            if trial.problem.edits.drifted:
                continue  # a copy that restores more follows
            if wrong is None:
                return Finding("verified")
            if trial.exact:
                return _concluded(trial, wrong)
            coarse = trial, wrong
        except Exception:  # a loss that fails at other weights or on a smaller batch, for any reason
            continue
    if coarse is None:
        return Finding("not verified: the losses cannot be computed near the weights")
    try:
        return _concluded(*coarse)
    except Exception as error:  # any error of a loss, since the hypergradient does not depend on it
        return Finding(f"not verified: {type(error).__name__} near the weights")


def wrong_of(claim: Claim, trial: Trial) -> list[str] | None:
    """The mismatch at two places near the weights, in different directions; None if one of them is right."""
    first = claim.judge(trial, 1)
    if first.kind == "right" or (not trial.exact and first.kind == "unclear"):
        return None if first.kind == "right" else []
    second = claim.judge(trial, 2)
    return None if second.kind == "right" else [n for n in second.names if n in first.names]


def _concluded(trial: Trial, wrong: list[str]) -> Finding:
    return trial.thing.explain(trial, wrong) if wrong else causes.unclear(trial)
