"""A linear layer whose gradient may leave out values that nobody reads.

With respect to the weights the gradient is gᵀ x, one of the three matrix products of a layer, and with respect to the
inputs it is g w. Their derivatives with respect to g, x vᵀ and v wᵀ, need neither value.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .tensors import Own, plain, unseen, will_run
from .unread import ends_at, nothing, present

# A smaller product of matrices costs less than the calls of Python around it.
_SMALL = 2**24


def linear(own: Own, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """The form of ``torch.nn.functional.linear``; torch's own is ``own``."""
    given = [t for t in (input, weight, bias) if t is not None]
    usual = torch.is_grad_enabled() and plain(given) and any(t.requires_grad for t in given)
    if not usual or torch.is_autocast_enabled(input.device.type):
        return own()
    fits = weight.ndim == 2 and input.ndim > 1 and input.shape[-1] == weight.shape[1]
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    if not fits or input.numel() * len(weight) < _SMALL:
        return own()
    return _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """x wᵀ + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.ends, ctx.unread = ends_at(w), present()
        y = F.linear(x.flatten(0, -2), w, bias)
        # No view of it, which could not be changed in place.
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], len(w)])  # type: ignore[no-any-return]

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = saved
        of_x, of_w, of_bias = ctx.needs_input_grad[:3]
        all, without = ctx.unread.of_all, ctx.unread.of_weights and ctx.ends
        g = g.reshape(-1, len(w))
        return (
            _of_input(g, w, all).reshape(x.shape) if of_x else None,
            _of_weights(g, x.reshape(-1, w.shape[1]), without or all) if of_w else None,
            g.sum(0) if of_bias else None,
        )


def _of_input(g: Tensor, w: Tensor, without: bool) -> Tensor:
    if not without:
        return g @ w
    value: Tensor = _OfInput.apply(g, (w,))  # type: ignore[no-untyped-call]
    return value


class _OfInput(torch.autograd.Function):
    """Zeros in the place of g w, with its derivative with respect to g."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, box: tuple[Tensor]) -> Tensor:
        ctx.save_for_backward(*box)
        return nothing(g, (len(g), box[0].shape[1]))

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], v: Tensor) -> tuple[Tensor, None]:
        return v @ saved[0].mT, None


class _OfWeights(torch.autograd.Function):
    """gᵀ x, or zeros in its place."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, without: bool) -> Tensor:
        ctx.save_for_backward(g, x)
        return nothing(g, (g.shape[1], x.shape[1])) if without else g.mT @ x

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], v: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (g, x), (of_g, of_x) = saved, (will_run(node) for node, _ in ctx.next_functions[:2])
        return x @ v.mT if of_g else None, g @ v if of_x else None, None


def _of_weights(g: Tensor, x: Tensor, without: bool) -> Tensor:
    if not plain([g, x]):
        return g.mT @ x
    value: Tensor = _OfWeights.apply(g, x, without)  # type: ignore[no-untyped-call]
    return value
