"""Checks of the optimisers and settings of `Tuner`."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    require,
    require_function,
    require_integer,
    require_number,
    require_parameters,
)
from ..hyperparameters import Kinked, Weights
from ..hyperparameters.orthant import fitting
from ..problem import Problem


def check_settings(
    weight_steps: int,
    warmup_steps: int,
    clips: Mapping[str, float | None],
    max_rise: float | None,
    policy: str,
    schedulers: Mapping[str, object],
) -> None:
    """Raise if an argument of `Tuner` is out of its range."""
    require_integer("Tuner.weight_steps", weight_steps, 1)
    require_integer("Tuner.warmup_steps", warmup_steps, 0)
    for name, clip in clips.items():
        if clip is not None:
            require_number(f"Tuner.{name}", clip)
            require(clip > 0, f"Tuner.{name}", "positive, or None", clip)
    if max_rise is not None:
        require_number("Tuner.max_rise", max_rise)
        require(max_rise > 1, "Tuner.max_rise", "above 1, or None", max_rise)
    for name, scheduler in schedulers.items():
        if scheduler is not None and not callable(getattr(scheduler, "step", None)):
            raise ArgumentTypeError(f"Tuner.{name} must be a learning-rate scheduler; got {scheduler!r}.")
    if not isinstance(policy, str) or policy not in ("warn", "raise", "skip", "return"):
        raise ArgumentError(f'Tuner.policy must be "warn", "raise", "skip" or "return"; got {policy!r}.')


def as_callbacks(callbacks: object) -> list[Any]:
    """A list of functions of the tuner.

    Raises:
        ArgumentTypeError: it is something else, for example a single function.
    """
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, str | bytes | Tensor | Mapping):
        raise ArgumentTypeError(
            f"Tuner.callbacks must be a list of functions; got {callbacks!r}. Pass [callback] for a single one."
        )
    functions = list(callbacks)
    for function in functions:
        require_function("a callback", function, "tuner")
    return functions


def check_weight_optimizer(problem: Problem, optimizer: object) -> None:
    """Raise unless the optimiser can train the weights: it holds all weights, no hyperparameter, and has no decay."""
    if not isinstance(problem, Problem):
        raise ArgumentTypeError(f"Tuner.problem must be a Problem; got {type(problem).__name__}.")
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer) or isinstance(optimizer, type):
            raise ArgumentTypeError(
                "the weight optimiser must be a torch optimiser or a function (problem, batch) -> None; "
                f"got {optimizer!r}."
            )
        require_parameters("the weight optimiser", optimizer, "problem, batch")
        return
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentTypeError(
            "the weight optimiser must step without a closure; got LBFGS. Pass a function (problem, batch) -> None "
            "that calls its step(closure)."
        )
    decayed = {g["weight_decay"] for g in optimizer.param_groups if g.get("weight_decay", 0) != 0}
    if decayed:
        raise ArgumentError(
            "the weight optimiser must have weight_decay=0, since its own decay moves the weights but is not in "
            f"train_loss, which is differentiated; got {sorted(decayed)}. Add the decay to train_loss, where it "
            "can also be tuned: hyperparameters.WeightDecay."
        )
    if any(g.get("maximize") for g in optimizer.param_groups):
        raise ArgumentError(
            "the weight optimiser must minimise train_loss; got maximize=True. Leave it out, or change the "
            "sign of the loss."
        )
    held = _held(optimizer)
    tuned = [n for n, p in problem.hyperparameters.items() if id(p) in held]
    missing = [n for n, w in problem.weights.items() if id(w) not in held]
    if tuned:
        raise ArgumentError(
            f"the weight optimiser must hold weights only; got the hyperparameters {tuned[:5]} too. "
            "Make it with problem.weights.values()."
        )
    if missing:
        raise ArgumentError(
            f"the weight optimiser must hold every weight; it lacks {missing[:5]}. Make it with "
            "problem.weights.values(), or freeze those with requires_grad_(False) before you make the Problem."
        )


def check_hyper_optimizer(problem: Problem, optimizer: object) -> None:
    """Raise unless the optimiser can tune the hyperparameters: it holds all of them and nothing else."""
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"the hyper-optimiser must be a torch optimiser; got {type(optimizer).__name__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentTypeError(
            "the hyper-optimiser must step without a closure; got LBFGS. Use Adam, or cross_validation.BFGS, which "
            "needs gradients alone."
        )
    held = _held(optimizer)
    weights = [n for n, w in problem.weights.items() if id(w) in held]
    missing = [n for n, p in problem.hyperparameters.items() if id(p) not in held]
    if weights or missing:
        what = f"the weights {weights[:5]} too" if weights else f"none of {missing[:5]}"
        raise ArgumentError(
            f"the hyper-optimiser must hold every hyperparameter and nothing else; got {what}. "
            "Make it with problem.hyperparameters.values()."
        )
    _refuse_dense_steps(problem, optimizer)


def _refuse_dense_steps(problem: Problem, optimizer: Optimizer) -> None:
    """Raise if an optimiser of torch cannot step along sparse gradients, or would move rows outside the batch."""
    tables = [m for m in problem.hyper.modules() if isinstance(m, Weights) and m.sparse]
    kind = type(optimizer)
    if not tables or not kind.__module__.startswith("torch.optim"):
        return
    dense = [
        key for g in optimizer.param_groups for key in ("momentum", "weight_decay") if g.get(key, 0) != 0
    ]
    if kind not in (torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad) or dense:
        got = f"{kind.__name__} with {' and '.join(sorted(set(dense)))}" if dense else kind.__name__
        raise ArgumentError(
            "the hyper-optimiser must step on the rows of a batch alone, since hyperparameters.Weights has sparse "
            f"gradients; got {got}. Use SparseAdam, or SGD or Adagrad without momentum and weight_decay; or give the "
            "table dense gradients with Weights(n, sparse=False)."
        )


def _held(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def penalties_at_zero(problem: Problem) -> list[Kinked]:
    """The penalties with a kink at zero; warns of penalties whose weights are unknown."""
    fit, others = fitting(problem.hyper, problem.model)
    if others:
        problem.warn_once(
            "kinked penalties",
            f"{[type(module).__name__ for module in others]} have kinks at zero and were made for a part of the model: "
            "Tuner can't hold weights at zero for them, and hypergradients assume that the weights respond. Make them "
            "with the model of the problem, as in WeightDecay(model, power=1, exclude=[...]).",
        )
    return fit
