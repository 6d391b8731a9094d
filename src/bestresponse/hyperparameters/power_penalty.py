"""The penalty (1/p) exp(rate) |w|ᵖ of one tensor, its derivatives and its graph."""

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor


def penalty(w: Tensor, rate: Tensor, power: float) -> Tensor:
    """(1/p) Σ exp(rate) |w|ᵖ for one tensor, with a graph that holds only the two tensors.

    Its two gradients are two nodes. Each sees one of the tensors as its input and takes the other
    from a box, so autograd can skip a gradient that is not needed, which it cannot do inside a node. Dual numbers,
    vmap and compilers cannot see into a box; for them plain operations are used.
    """
    mapped = any(map(torch._C._functorch.is_batchedtensor, (w, rate)))
    dual = any(forward_ad.unpack_dual(x).tangent is not None for x in (w, rate))  # type: ignore[no-untyped-call]
    if mapped or dual or torch.compiler.is_compiling():
        return (rate.exp() * _power(w, power)).sum() / power
    # For p = 1 torch's abs makes the kink, so that the search for kinks finds it.
    base = w.abs() if power == 1 else w
    of_weights: Tensor = _ToWeights.apply(base, (rate,), power)  # type: ignore[no-untyped-call]
    of_rates: Tensor = _ToRates.apply(rate, (w,), power)  # type: ignore[no-untyped-call]
    return of_weights + of_rates


def decays_of(rate: Tensor, w: Tensor) -> Tensor:
    """exp(rate) in a new tensor, in the higher precision of the two."""
    return rate.exp().to(torch.promote_types(rate.dtype, w.dtype))


# Below p = 2 the curvature is infinite at a weight of zero. There √(w² + ε²) replaces |w|, with this ε.
_SMALL = 1e-6


def _power(w: Tensor, p: float) -> Tensor:
    """|w|ᵖ, smoothed at zero for 1 < p < 2."""
    if p in (1, 2):
        return w.abs() if p == 1 else w.square()
    return (w.square() + _SMALL**2).pow(p / 2) if 1 < p < 2 else w.abs().pow(p)


def slope(w: Tensor, p: float) -> Tensor:
    """∂/∂w of |w|ᵖ / p."""
    if p in (1, 2):
        return w.sign() if p == 1 else w
    return w * (w.square() + _SMALL**2).pow(p / 2 - 1) if 1 < p < 2 else w.abs().pow(p - 1) * w.sign()


def _bend(w: Tensor, p: float) -> Tensor:
    """∂²/∂w² of |w|ᵖ / p."""
    if p == 2:
        return torch.ones_like(w)
    if p == 1:
        return torch.zeros_like(w)
    if p > 2:
        return (p - 1) * w.abs().pow(p - 2)
    smooth = w.square() + _SMALL**2
    return smooth.pow(p / 2 - 1) + (p - 2) * w.square() * smooth.pow(p / 2 - 2)


def diagonal(w: Tensor, rate: Tensor, p: float) -> Tensor:
    """∂²/∂w² of the penalty."""
    decays = rate.exp()
    return (decays if p == 2 and decays.shape == w.shape else decays * _bend(w, p)).to(w.dtype)


class _ToWeights(torch.autograd.Function):
    """The value, and ∂/∂w = exp(rate) |w|^(p−1) sign w; with respect to |w| instead of w if p = 1."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, box: tuple[Tensor], power: float) -> Tensor:
        # The slope of |w| as a function of itself is one everywhere, so a single number is enough.
        ctx.save_for_backward(w.new_ones(()).expand_as(w) if power == 1 else w)
        ctx.box, ctx.power = box, power
        decays = decays_of(box[0], w)
        if decays.shape != w.shape:
            return (decays * _power(w, power)).sum() / power
        # In place: with millions of weights, allocating memory costs as much as the arithmetic.
        return (decays.mul_(w).mul_(w) if power == 2 else decays.mul_(_power(w, power))).sum() / power

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (w,) = ctx.saved_tensors
        (rate,) = ctx.box
        decays, steep = decays_of(rate, w), slope(w, ctx.power)
        whole = decays.shape == w.shape and not torch.is_grad_enabled()
        return (decays.mul_(steep) if whole else decays * steep) * grad, None, None


class _ToRates(torch.autograd.Function):
    """Zero, and ∂/∂rate = exp(rate) |w|ᵖ / p, summed over the weights that share a rate."""

    @staticmethod
    def forward(ctx: Any, rate: Tensor, box: tuple[Tensor], power: float) -> Tensor:
        ctx.save_for_backward(rate)
        ctx.box, ctx.power = box, power
        return rate.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rate,) = ctx.saved_tensors
        (w,) = ctx.box
        whole = rate.exp() * _power(w, ctx.power) * (grad / ctx.power)
        return whole.sum_to_size(rate.shape), None, None
