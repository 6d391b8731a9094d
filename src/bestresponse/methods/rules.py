"""Pure update rules: the steps of torch's optimisers on one weight, as differentiable functions.

torch's own ``differentiable=True`` changes weights in place, which breaks the graphs of the losses of earlier
steps. The root in its Adam has no derivative where a gradient is zero, as for a unit that never fires,
and then everything is NaN from the second step on. These rules avoid both problems.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ArgumentError, ArgumentTypeError, EvaluationError, require, require_number

Value = float | Tensor
# A number, or a function of the module hyper; `Unrolled` lists what the function may return.
Setting = float | Callable[[Any], Tensor | Mapping[str, Tensor] | Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Rule(ABC):
    """One step of one weight: (w, g, moments) ↦ (w', moments'), without changing its arguments.

    Each numeric field may be a function of the module ``hyper`` instead; then it can be tuned.
    """

    optimizer: ClassVar[type[Optimizer] | None] = None
    # The range of each setting that is a number or a function of hyper: from the first to below the second.
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}

    def __post_init__(self) -> None:
        for f in fields(self):
            value, place = getattr(self, f.name), f"{type(self).__name__}.{f.name}"
            if f.name in self.bounds and not callable(value):
                require_number(place, value)
                low, high = self.bounds[f.name]
                require(low <= value < high, place, f"from {low:g} to below {high:g}, or a function", value)
            elif f.name not in self.bounds and not isinstance(value, bool):
                raise ArgumentTypeError(f"{place} must be True or False; got {value!r}.")

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]:
        """The names that torch's optimiser gives to the tensors that the rule keeps for each weight."""

    @abstractmethod
    def update(
        self, w: Tensor, g: Tensor, moments: tuple[Tensor, ...], step: int, s: Mapping[str, Value]
    ) -> tuple[Tensor, ...]:
        """The weight after one step, and the moments.

        Args:
            w: the weight.
            g: its gradient.
            moments: the moments after earlier steps, in the order of `moments`; zeros before the first.
            step: the number of earlier steps.
            s: ``step_size`` and the rule's own settings by name.
        """

    def step(
        self, point: tuple[Tensor, ...], g: Tensor, step: int, s: Mapping[str, Value]
    ) -> tuple[Tensor, ...]:
        """`update` of a weight with its moments, in their dtypes; raises if the rule returns something else."""
        after = self.update(point[0], g, point[1:], step, s)
        shapes = [x.shape for x in after] if isinstance(after, tuple) else None
        if shapes != [x.shape for x in point]:
            raise EvaluationError(
                f"{type(self).__name__}.update must return a tuple of the weight and its moments, of the shapes "
                f"{[list(x.shape) for x in point]}; got {type(after).__name__ if shapes is None else shapes}."
            )
        return tuple(x.to(before.dtype) for x, before in zip(after, point, strict=True))

    def settings(self) -> dict[str, Setting]:
        """The tunable fields, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in self.bounds}

    def state_of(self, optimizer: Optimizer | None) -> Mapping[Any, Mapping[str, Any]]:
        """What a torch optimiser keeps for each weight if it matches this rule's class; else an empty dict."""
        if optimizer is None or type(optimizer) is not self.optimizer:
            return {}
        _refuse_variants(optimizer)
        return optimizer.state


@dataclass(frozen=True, eq=False)
class SGD(Rule):
    """Gradient descent, optionally with momentum: torch.optim.SGD.

        b' = μ b + (1 − τ) g  (b' = g at the first step),   w' = w − α b'   (Nesterov: w − α (g + μ b'))

    Args:
        momentum: μ, from 0 to below 1.
        dampening: τ.
        nesterov: whether to use Nesterov's variant.
        weight_decay: adds ``weight_decay`` · w to g.
    """

    momentum: Setting = 0.0
    dampening: Setting = 0.0
    nesterov: bool = False
    weight_decay: Setting = 0.0

    optimizer: ClassVar[type[Optimizer] | None] = torch.optim.SGD
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "momentum": (0.0, 1.0),
        "dampening": (0.0, math.inf),
        "weight_decay": (0.0, math.inf),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (not self.moments or callable(self.dampening) or self.dampening):
            raise ArgumentError(
                "SGD.nesterov needs momentum and no dampening; got "
                f"momentum={self.momentum!r}, dampening={self.dampening!r}."
            )

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if callable(self.momentum) or self.momentum else ()

    def update(
        self, w: Tensor, g: Tensor, moments: tuple[Tensor, ...], step: int, s: Mapping[str, Value]
    ) -> tuple[Tensor, ...]:
        g = _decayed(g, w, s["weight_decay"])
        if not moments:
            return (w - s["step_size"] * g,)
        velocity = g if step == 0 else s["momentum"] * moments[0] + (1.0 - s["dampening"]) * g
        along = g + s["momentum"] * velocity if self.nesterov else velocity
        return w - s["step_size"] * along, velocity


@dataclass(frozen=True, eq=False)
class Adam(Rule):
    """Adam: torch.optim.Adam.

        m' = β₁ m + (1 − β₁) g,   v' = β₂ v + (1 − β₂) g²,
        w' = w − α m' / (1 − β₁ᵗ) / (√(v' / (1 − β₂ᵗ)) + ε)

    Args:
        beta1: β₁, from 0 to below 1.
        beta2: β₂, likewise.
                eps: ε ≥ 0.
        weight_decay: adds ``weight_decay`` · w to g.

    Reference: Kingma and Ba (2015).
    """

    beta1: Setting = 0.9
    beta2: Setting = 0.999
    eps: Setting = 1e-8
    weight_decay: Setting = 0.0

    optimizer: ClassVar[type[Optimizer] | None] = torch.optim.Adam
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "beta1": (0.0, 1.0),
        "beta2": (0.0, 1.0),
        "eps": (0.0, math.inf),
        "weight_decay": (0.0, math.inf),
    }

    @property
    def moments(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update(
        self, w: Tensor, g: Tensor, moments: tuple[Tensor, ...], step: int, s: Mapping[str, Value]
    ) -> tuple[Tensor, ...]:
        return _adam(w, _decayed(g, w, s["weight_decay"]), moments, step, s)


@dataclass(frozen=True, eq=False)
class AdamW(Adam):
    """Adam with decoupled weight decay, which shrinks w by α times ``weight_decay``: torch.optim.AdamW.

    Reference: Loshchilov and Hutter (2019).
    """

    weight_decay: Setting = 1e-2

    optimizer: ClassVar[type[Optimizer] | None] = torch.optim.AdamW

    def update(
        self, w: Tensor, g: Tensor, moments: tuple[Tensor, ...], step: int, s: Mapping[str, Value]
    ) -> tuple[Tensor, ...]:
        return _adam(w * (1.0 - s["step_size"] * s["weight_decay"]), g, moments, step, s)


def _decayed(g: Tensor, w: Tensor, decay: Value) -> Tensor:
    return g if isinstance(decay, float | int) and decay == 0 else g + decay * w


def _adam(
    w: Tensor, g: Tensor, moments: tuple[Tensor, ...], step: int, s: Mapping[str, Value]
) -> tuple[Tensor, ...]:
    beta1, beta2 = s["beta1"], s["beta2"]
    mean = beta1 * moments[0] + (1.0 - beta1) * g
    square = beta2 * moments[1] + (1.0 - beta2) * g.square()
    unbias1, unbias2 = 1.0 - beta1 ** (step + 1), 1.0 - beta2 ** (step + 1)
    root = _root(square) / unbias2**0.5
    return w - (s["step_size"] / unbias1) * mean / (root + s["eps"]), mean, square


def _root(x: Tensor) -> Tensor:
    """√x with a derivative of zero at zero; torch's is infinite there, and zero times it is NaN."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def like(optimizer: Optimizer) -> Rule:
    """The rule of a torch optimiser, with its settings.

    Raises:
        ArgumentTypeError: there is no rule for its class.
        ArgumentError: the rule lacks a setting, or a setting differs between parameter groups.
    """
    kinds: tuple[type[Rule], ...] = (SGD, Adam, AdamW)
    kind = next((rule for rule in kinds if rule.optimizer is type(optimizer)), None)
    if kind is None:
        raise ArgumentTypeError(
            f"a rule must be like torch's SGD, Adam or AdamW; got {type(optimizer).__name__}. Write a subclass of "
            "rules.Rule for it."
        )
    groups = [dict(g) for g in optimizer.param_groups]
    for group in groups:
        if "betas" in group:
            group["beta1"], group["beta2"] = group["betas"]
    _refuse_variants(optimizer)
    names = [f.name for f in fields(kind)]
    differing = [n for n in names if any(g[n] != groups[0][n] for g in groups)]
    if differing:
        raise ArgumentError(
            f"a rule has one value of each setting for all weights; got groups with different {differing}. Write the "
            f"rule in full, with functions that return a dict by weight: rules.{kind.__name__}(...)."
        )
    return kind(**{n: groups[0][n] for n in names})


def _refuse_variants(optimizer: Optimizer) -> None:
    """Raise for options of torch's optimisers that the rules lack."""
    variants = ["amsgrad", "maximize"]
    variants += ["decoupled_weight_decay"] if type(optimizer) is torch.optim.Adam else []
    if used := [n for n in variants if any(g.get(n) for g in optimizer.param_groups)]:
        raise ArgumentError(
            f"the rules have no amsgrad or maximize, and decoupled decay only in AdamW; got {used} of "
            f"{type(optimizer).__name__}. Train without it, or write a subclass of rules.Rule."
        )
