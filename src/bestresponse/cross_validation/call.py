"""Cross-validation in one call."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _tree
from ..errors import ArgumentError, ArgumentTypeError, require, require_integer, require_number
from ..methods import Implicit, Method
from ..passes.substitution import Loss
from ..solvers import ConjugateGradient, Exact
from ..tuner import Callback, Tuner
from .bfgs import BFGS
from .data import FoldBatches, fold_batches, whole_batches
from .folds import Folds
from .minimise import Minimise

# The number of weights of a fold up to which the default method solves its system exactly.
_FEW = 300
# The run ends if the loss has not fallen by this share for so many hyper-steps.
_IMPROVED, _PATIENCE = 1e-6, 5

_NO_RESPONSE = (
    "the hypergradient is exactly zero, so cross_validate can't tell where to go. Under an ℓ1 penalty this happens "
    "where the penalty holds all weights at zero: start from a smaller penalty, WeightDecay(power=1, initial=...)."
)

_SHORT_STEPS = (
    "the first step of hyper_optimizer moved no hyperparameter by more than tolerance={0:g}, so cross_validate stops "
    "where it began. Raise the optimiser's learning rate, or pass a lower tolerance."
)

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


@dataclass(frozen=True)
class CrossValidation:
    """What `cross_validate` found.

    Attributes:
        hyper: the tuned hyperparameters.
        model: the given model, trained on all data under them.
        loss: the mean of ``losses``.
        losses: the validation loss of each fold, on all its validation examples.
        history: a dict for each hyper-step.
        stopped: the reason why the run ended before ``hyper_steps``; None if it did not.
        tuner: the tuner, whose problem holds the folds.
    """

    hyper: nn.Module
    model: nn.Module
    loss: float
    losses: tuple[float, ...]
    history: list[dict[str, Any]]
    stopped: str | None
    tuner: Tuner

    def __str__(self) -> str:
        end = self.stopped or "all hyper-steps were made"
        return f"cross-validated loss {self.loss:.6g} after {len(self.history)} hyper-steps: {end}"


def cross_validate(
    model: nn.Module,
    hyper: nn.Module,
    train_loss: Loss,
    val_loss: Loss,
    data: Any,
    folds: Any = 5,
    *,
    targets: Any = None,
    groups: Any = None,
    batch_size: int | None = None,
    weight_optimizer: MakeOptimizer | Minimise = Minimise(),
    hyper_optimizer: MakeOptimizer | None = None,
    method: Method | None = None,
    hyper_steps: int = 50,
    weight_steps: int = 1,
    warmup_steps: int = 0,
    retrain_steps: int | None = None,
    tolerance: float = 0.01,
    val_mode: Literal["eval", "as_is"] = "eval",
    verify: bool = True,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
) -> CrossValidation:
    """Tune hyperparameters on the cross-validated loss, then train the model once on all data.

        λ* = argmin_λ (1/K) Σ_k L_V(w_k*(λ), λ; fold k)

    The defaults suit small models with smooth losses or ℓ1 penalties. `Minimise` trains each fold to the minimum before
    each hyper-step, so hypergradients are exact. `BFGS` moves the hyperparameters, and the best ones are kept. Networks
    need a ``weight_optimizer`` from torch. Weights and hyperparameters then move together, and the last
    hyperparameters are kept.

    Args:
        model: the model. Copies of it train on the folds; it is trained itself on all data in the end.
        hyper: the module whose parameters to tune; they change in place.
        train_loss: L_T of one fold: (model, hyper, batch) -> scalar, regulariser included.
        val_loss: L_V of one fold.
        data: a tensor, a tuple of tensors with one length, or a data set; see `fold_batches`.
        folds: K, a splitter of scikit-learn, or pairs of training and validation rows; see `fold_batches`.
        targets: what a splitter stratifies by.
        groups: the group of each example, for splitters that keep groups together.
        batch_size: the examples in a batch of a fold; None means all.
        weight_optimizer: `Minimise`, or a function that makes a torch optimiser, as in
            ``lambda weights: torch.optim.Adam(weights, 1e-3)``.
        hyper_optimizer: a function that makes the optimiser of the hyperparameters; None means `BFGS` with `Minimise`,
            and else Adam at a rate of 0.05.
        method: how to compute the hypergradient. None means ``Implicit()`` with a torch optimiser. With `Minimise` it
            means ``Implicit(Exact())`` for up to 300 weights, and up to 200 steps of conjugate gradient for more.
        hyper_steps: the largest number of hyper-steps. With `Minimise` the hyperparameters with the lowest measured
            loss are kept; those after the last step are not measured.
        weight_steps: weight steps before each hyper-step.
        warmup_steps: weight steps before the first hyper-step.
        retrain_steps: the weight steps of the final training; None means as many as each fold made, or one call of
            `Minimise`.
        tolerance: the run stops after a hyper-step that moves no hyperparameter further than this. With `Minimise` it
            also stops after five hyper-steps that do not lower the loss.
        val_mode: as that of `Problem`.
        verify: as that of `Problem`.
        seed: the seed of mini-batches and hypergradients.
        callbacks: functions that take the tuner, called after each hyper-step.

    Returns:
        A `CrossValidation`.

    Raises:
        ArgumentTypeError: an optimiser in place of a function that makes one.
        ArgumentError: ``batch_size`` with `Minimise`; or those of `Folds`, `fold_batches` and `Tuner`.
    """
    require_integer("hyper_steps", hyper_steps, 1)
    require_number("tolerance", tolerance)
    require(tolerance >= 0, "tolerance", "≥ 0", tolerance)
    exact = isinstance(weight_optimizer, Minimise)
    if exact and batch_size is not None:
        raise ArgumentError(
            f"Minimise needs all rows in each step; got batch_size={batch_size}. Pass a weight_optimizer, such as "
            "lambda weights: torch.optim.Adam(weights, 1e-3)."
        )
    train, val = fold_batches(data, folds, targets=targets, groups=groups, batch_size=batch_size, seed=seed)
    _require_maker("weight_optimizer", weight_optimizer)
    _require_maker("hyper_optimizer", hyper_optimizer)
    problem = Folds(model, hyper, train_loss, val_loss, len(train.rows), val_mode, verify)
    kept = _Kept(problem, tolerance, _PATIENCE if exact else math.inf, hyper_optimizer is not None)
    weights = problem.weights.values()
    tuner = Tuner(
        problem,
        weight_optimizer if isinstance(weight_optimizer, Minimise) else weight_optimizer(weights),
        (hyper_optimizer or (BFGS if exact else _adam))(problem.hyperparameters.values()),
        method or _method(problem, exact),
        weight_steps=weight_steps,
        warmup_steps=warmup_steps,
        seed=seed,
        callbacks=[kept, *callbacks],
    )
    tuner.fit(train, val, hyper_steps)
    if isinstance(weight_optimizer, Minimise):
        hyper.load_state_dict(kept.best)
        weight_optimizer(problem, next(iter(train)))
    losses = _losses(problem, val)
    steps = (1 if exact else tuner.weight_step) if retrain_steps is None else retrain_steps
    tuner.retrain(whole_batches(data, batch_size, seed), steps, lambda model: None)
    return CrossValidation(
        hyper, model, math.fsum(losses) / len(losses), losses, tuner.history, tuner.stopped, tuner
    )


class _Kept:
    """The best hyperparameters so far; stops the run when they hardly move, or the loss hardly falls.

    Args:
        problem: the folds.
        tolerance: the largest change of a hyperparameter that counts as none.
        patience: hyper-steps to wait for a lower loss; infinite for losses of mini-batches.
        own_optimizer: whether the hyperparameters have an optimiser of the caller's, whose steps may be short.
    """

    def __init__(self, problem: Folds, tolerance: float, patience: float, own_optimizer: bool) -> None:
        self._problem, self._tolerance, self._patience = problem, tolerance, patience
        self._own_optimizer = own_optimizer
        self._least, self._waited = math.inf, 0
        self.best = self._before = self._now()

    def __call__(self, tuner: Tuner) -> None:
        row, now = tuner.history[-1], self._now()
        improved = self._least - row["val_loss"] > _IMPROVED * abs(row["val_loss"])
        self._waited = 0 if improved else self._waited + 1
        if row["val_loss"] < self._least:  # which belongs to the hyperparameters before the step
            self._least, self.best = row["val_loss"], self._before
        names = [n for n in self._problem.hyperparameters if now[n].numel()]
        moved = max(float((now[n] - self._before[n]).abs().max()) for n in names)
        self._before = now
        row["moved"] = moved
        if row["hypergradient_norm"] == 0.0:
            tuner.problem.warn_once("no response", _NO_RESPONSE)
        if row["stepped"] and moved <= self._tolerance:
            if self._own_optimizer and len(tuner.history) == 1 and moved > 0.0:
                tuner.problem.warn_once("short steps", _SHORT_STEPS.format(self._tolerance))
            tuner.stop(f"the hyperparameters moved by at most {self._tolerance:g}")
        elif self._waited >= self._patience:
            tuner.stop(f"the loss has not fallen in {self._waited} hyper-steps")

    def _now(self) -> dict[str, Any]:
        return copy.deepcopy(self._problem.hyper.state_dict())


def _require_maker(name: str, value: object) -> None:
    """Raise for an optimiser in place of a function that makes one."""
    if value is not None and (not callable(value) or value is Minimise):
        got = (
            "the class Minimise; create an instance, Minimise()"
            if value is Minimise
            else type(value).__name__
        )
        raise ArgumentTypeError(
            f"{name} must be a function that makes a torch optimiser of given parameters, as in "
            f"lambda parameters: torch.optim.Adam(parameters, 1e-3); got {got}."
        )


def _adam(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.Adam(parameters, 0.05)


def _method(problem: Folds, exact: bool) -> Method:
    """The default method: a solve that is exact, or nearly, where the weights are at the minimum."""
    if not exact:
        return Implicit()
    if _tree.size(problem.whole.weights) <= _FEW:
        return Implicit(Exact())
    return Implicit(ConjugateGradient(max_steps=200, tolerance=1e-3), warm_start=True)


def _losses(problem: Folds, val: FoldBatches) -> tuple[float, ...]:
    """The validation loss of each fold on all its validation examples."""
    losses = []
    for number, fold in enumerate(problem.folds):
        with fold.undisturbed(twice=False) as passes:
            losses.append(len(problem.folds) * float(passes.val_loss(val.of_fold(number)).detach()))
    return tuple(losses)
