"""Settings of an optimiser that are functions of the hyperparameters."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import EvaluationError
from ..passes import graph
from .rules import Setting, Value


class Settings:
    """The step size and a rule's settings at the present hyperparameters, detached from them.

    Each function of ``hyper`` is evaluated once, and the steps use its result as a leaf. `pull` and
    `push` carry derivatives from the leaves to the hyperparameters and back.

    Attributes:
        leaves: the tensors that depend on hyperparameters.
        reached: the identities of the hyperparameters that they depend on.
    """

    def __init__(
        self,
        settings: Mapping[str, Setting],
        hyper: nn.Module,
        weights: Mapping[str, Tensor],
        steps: int,
        bounds: Mapping[str, tuple[float, float]],
    ) -> None:
        self._steps, self._weights, self._bounds = steps, weights, bounds
        self._outputs: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self._values = {
            name: self._read(name, setting(hyper)) if callable(setting) else setting
            for name, setting in settings.items()
        }
        self.reached = {leaf for x in self._outputs for leaf in graph.leaves(x)}

    def at(self, step: int, weight: str) -> dict[str, Value]:
        """The settings of one weight at one step."""
        device = self._weights[weight].device
        found = {name: self._at(value, step, weight) for name, value in self._values.items()}
        return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in found.items()}

    def _at(self, value: Any, step: int, weight: str) -> Value:
        if isinstance(value, list):
            return self._at(value[step], step, weight)
        if isinstance(value, dict):
            return self._at(value[weight], step, weight)
        if isinstance(value, tuple):  # a tensor with a value for each step
            return value[0][step]  # type: ignore[no-any-return]
        return value  # type: ignore[no-any-return]

    def _read(self, name: str, value: Any, inside: bool = False) -> Any:
        if isinstance(value, Mapping) and value.keys() == self._weights.keys():
            return {weight: self._read_for(name, x, weight) for weight, x in value.items()}
        if isinstance(value, Sequence) and len(value) == self._steps and not inside:
            return [self._read(name, x, inside=True) for x in value]
        allowed = (1,) if inside else (1, self._steps)
        if not isinstance(value, Tensor) or value.ndim > 1 or value.numel() not in allowed:
            raise EvaluationError(
                f"{name} must return a scalar tensor, one of shape [{self._steps}] with a value for each step, a dict "
                f"with a tensor for each weight, or a sequence of those; got {_described(value)}."
            )
        if value.numel() == 1:
            return self._leaf(name, value.reshape(()))
        return (self._leaf(name, value),)

    def _read_for(self, name: str, value: Any, weight: str) -> Tensor:
        shape = self._weights[weight].shape
        if not isinstance(value, Tensor) or not _broadcasts(value.shape, shape):
            raise EvaluationError(
                f"{name} must return tensors that broadcast against the weights; got {_described(value)} for "
                f"{weight!r} of shape {list(shape)}."
            )
        return self._leaf(name, value)

    def _leaf(self, name: str, value: Tensor) -> Tensor:
        inner = value.detach()
        if name in self._bounds:
            low, high = self._bounds[name]
            inside, allowed = (inner >= low) & (inner < high), f"values from {low:g} to below {high:g}"
        else:  # a step size
            inside, allowed = (inner > 0) & (inner < math.inf), "positive and finite values"
        if not bool(inside.all()):
            raise EvaluationError(
                f"{name} must return {allowed}; got {_described(value)}. Tune its logarithm, or the logit of a "
                "momentum: exp() and sigmoid() stay within the bounds, except for rounding at extreme values."
            )
        if not value.requires_grad:
            return inner
        self._outputs.append(value)
        self.leaves.append(inner.clone().requires_grad_())
        return self.leaves[-1]

    def pull(self, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Turn derivatives with respect to the leaves into derivatives with respect to ``inputs``."""
        pairs = [(x, g) for x, g in zip(self._outputs, gradients, strict=True) if g is not None]
        if not pairs:
            return [None] * len(inputs)
        outputs, given = zip(*pairs, strict=True)
        return list(torch.autograd.grad(outputs, inputs, given, retain_graph=True, allow_unused=True))

    def push(self, inputs: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The change of the leaves if ``inputs`` change by ``tangents``."""
        return graph.Pushforward(self._outputs, inputs)(tangents)


def _broadcasts(shape: torch.Size, against: torch.Size) -> bool:
    padded = (1,) * (len(against) - len(shape)) + tuple(shape)
    return all(n in (1, m) for n, m in zip(padded, against, strict=False)) and len(padded) == len(against)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, int | float | str) else f"a {type(value).__name__}"
    return f"{value.detach().tolist()}" if value.numel() <= 4 else f"a tensor of shape {list(value.shape)}"
