"""Dropout with rates that are tuned: masks that are differentiable in the rates."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, EvaluationError, require, require_integers, require_number
from .shrinkage import Shrinkage, as_shrinkage


class ConcreteDropout(nn.Module):
    """Dropout whose rates p are hyperparameters: x ⊙ mask / (1 − p), in training mode.

        mask = 1 − sigmoid((logit p + logit u) / τ),   u ~ U(0, 1)

    For a small temperature τ a mask's entry is nearly one with probability 1 − p, and nearly zero otherwise. Unlike
    the masks of torch's dropout it is differentiable in p. In eval mode x is returned as it is. The
    rates are stored as logits. In a model, keep the modules with rates in one submodule, and pass that as
    ``hyper``; the validation loss, in eval mode, then depends on the rates only through the weights.

    Args:
        shape: the shape of the rates: () for one rate; n or (n,) for one for each of n units in the last dimension; or
            any shape that broadcasts against x.
        initial: the initial p.
        shared: dimensions of x that share one mask, such as time in a recurrent network.
        temperature: τ > 0.
        minimum: the lower bound of p, which `project_` restores after a step.
        maximum: the upper bound.
        shrinkage: the strength, or a `Shrinkage`, with which `shrink_` pulls the logits towards a common value.

    Raises:
        ArgumentError: an argument is out of its range.

    Reference: Gal, Hron and Kendall (2017); the paper's section 5.5; one mask over time, Gal and Ghahramani
    (2016).
    """

    def __init__(
        self,
        shape: int | Sequence[int] = (),
        initial: float = 0.5,
        shared: Sequence[int] = (),
        temperature: float = 0.1,
        minimum: float = 1e-3,
        maximum: float = 0.95,
        shrinkage: float | Shrinkage | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        for label, value in (
            ("initial", initial),
            ("temperature", temperature),
            ("minimum", minimum),
            ("maximum", maximum),
        ):
            require_number(f"{name}.{label}", value)
        require(0 < temperature < math.inf, f"{name}.temperature", "positive and finite", temperature)
        if not 0 < minimum <= initial <= maximum < 1:
            raise ArgumentError(
                f"{name} needs 0 < minimum ≤ initial ≤ maximum < 1; got minimum={minimum!r}, "
                f"initial={initial!r}, maximum={maximum!r}."
            )
        for label, numbers in (("shared", shared), ("shape", (shape,) if isinstance(shape, int) else shape)):
            require_integers(f"{name}.{label}", numbers, 0 if label == "shape" else -(2**31))
        self.shared, self.temperature = tuple(shared), temperature
        self.minimum, self.maximum = minimum, maximum
        self.shrinkage = as_shrinkage(f"{name}.shrinkage", shrinkage, 0.0, 1.0)
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        self.logit = nn.Parameter(torch.full(sizes, _logit(initial)))

    def forward(self, x: Tensor) -> Tensor:
        """The tensor with its mask.

        Raises:
            EvaluationError: the rates do not broadcast against x, or x lacks a shared dimension.
        """
        if not self.training:
            return x
        logit = self.logit.to(x.dtype)
        u = torch.rand(self._mask_shape(x), dtype=x.dtype, device=x.device)
        # Beyond this the logarithms of u and 1 − u are infinite in the dtype.
        noise = torch.logit(u, eps=torch.finfo(x.dtype).eps)
        kept = torch.sigmoid(-(logit + noise) / self.temperature)
        return x * (kept * (1.0 + logit.exp()))  # 1 / (1 − p) = 1 + exp(logit p)

    def shrink_(self, factor: float = 1.0) -> None:
        """Pull the rates towards a common value; call it after each step of them, before `project_` (`Tuner` does)."""
        if self.shrinkage is not None:
            p = self.shrinkage.towards
            self.shrinkage.apply_({"logit": self.logit}, factor, None if p is None else _logit(p))

    @torch.no_grad()
    def project_(self) -> None:
        """Restore the bounds of the rates; call it after each step of the rates (`Tuner` does)."""
        self.logit.clamp_(_logit(self.minimum), _logit(self.maximum))

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The range to search: between the logits of ``minimum`` and ``maximum``."""
        return {"logit": (_logit(self.minimum), _logit(self.maximum))}

    @torch.no_grad()
    def rates(self) -> Tensor:
        """The rates p, of the given shape."""
        return self.logit.sigmoid()

    def values(self) -> Tensor:
        """The rates, as `rates` has them."""
        return self.rates()

    def readable(self, name: str) -> tuple[str, Callable[[Tensor], Tensor]] | None:
        """The rates p in the history."""
        return name.replace("logit", "rate"), torch.sigmoid

    def extra_repr(self) -> str:
        return f"{list(self.logit.shape)}, shared={self.shared}, temperature={self.temperature}"

    def _mask_shape(self, x: Tensor) -> list[int]:
        shape = list(x.shape)
        padded = (1,) * (x.ndim - self.logit.ndim) + tuple(self.logit.shape)
        fits = len(padded) == x.ndim and all(n in (1, m) for n, m in zip(padded, shape, strict=True))
        dimensions = [d + x.ndim if d < 0 else d for d in self.shared]
        if not fits or not all(0 <= d < x.ndim for d in dimensions):
            raise EvaluationError(
                f"{type(self).__name__} has rates of shape {list(self.logit.shape)} and shares masks along "
                f"{list(self.shared)}; got a tensor of shape {shape}. Make it with shape=() or that of the last "
                "dimensions."
            )
        for d in dimensions:
            shape[d] = 1
        return shape


class DropConnect(ConcreteDropout):
    """`ConcreteDropout` of a weight's entries, w ⊙ mask / (1 − p): one rate for all, or one for each.

    A call with a weight returns the masked weight, so you can register it as a parametrization:
    ``torch.nn.utils.parametrize.register_parametrization(layer, "weight", drop)``. Or call it in the model's own
    forward. One call draws one mask, which covers the whole sequence if the weight is used over time.

    Args:
        shape: () for one rate for all entries; the shape of the weight for one rate for each entry.
        initial: as for `ConcreteDropout`.
        temperature: as for `ConcreteDropout`.
        minimum: as for `ConcreteDropout`.
        maximum: as for `ConcreteDropout`.
        shrinkage: as for `ConcreteDropout`.

    Reference: Wan et al. (2013); on hidden-to-hidden weights, Merity, Keskar and Socher (2018).
    """

    def __init__(
        self,
        shape: int | Sequence[int] = (),
        initial: float = 0.5,
        temperature: float = 0.1,
        minimum: float = 1e-3,
        maximum: float = 0.95,
        shrinkage: float | Shrinkage | None = None,
    ) -> None:
        super().__init__(shape, initial, (), temperature, minimum, maximum, shrinkage)


def _logit(p: float) -> float:
    return math.log(p) - math.log1p(-p)
