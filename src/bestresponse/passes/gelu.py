"""GELU, whose second derivative takes few kernels.

The derivative of ⟨v, g f'(x)⟩ is v f'(x) with respect to g, by the kernel of the first derivative, and v g f''(x) with
respect to x.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tensors import Own, plain, unseen, will_run
from .unread import nothing, present

_BLOCK = 2**15  # numbers
_CUBE = 0.044715
_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)


class _Curve(NamedTuple):
    """A function of each number: f and g f'(x) by torch's kernels, and f'' by plain operations."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    second: Callable[[Tensor], Tensor]


def _of_gelu(x: Tensor) -> Tensor:
    """The second derivative φ(x) (2 − x²) for the density φ of a normal distribution."""
    square = x * x
    return torch.exp(square * -0.5) * ((2.0 - square) * _DENSITY)


def _of_tanh_gelu(x: Tensor) -> Tensor:
    """The second derivative of f = x (1 + tanh u) / 2 and u = √(2/π) (x + 0.044715 x³)."""
    factor, square = math.sqrt(2.0 / math.pi), x * x
    t = torch.tanh(x * (1.0 + _CUBE * square) * factor)
    du = factor + (3.0 * _CUBE * factor) * square
    return (1.0 - t * t) * (du + x * (x * (3.0 * _CUBE * factor) - t * du * du))


_GELU = _Curve(torch._C._nn.gelu, torch.ops.aten.gelu_backward, _of_gelu)
_TANH_GELU = _Curve(
    partial(torch._C._nn.gelu, approximate="tanh"),
    partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    _of_tanh_gelu,
)


def gelu(own: Own, input: Tensor, *, approximate: str = "none") -> Any:
    """The form of ``torch.nn.functional.gelu``; torch's own is ``own``."""
    curve = {"none": _GELU, "tanh": _TANH_GELU}.get(approximate)
    x = input
    usual = torch.is_grad_enabled() and plain([x]) and x.requires_grad and x.dtype.itemsize > 2
    if curve is None or not usual:
        return own()
    return _Value.apply(x, curve)  # type: ignore[no-untyped-call]


class _Value(torch.autograd.Function):
    """f(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, curve: _Curve) -> Tensor:
        ctx.save_for_backward(x)
        ctx.curve, ctx.unread = curve, present()
        outputs: Tensor = curve.value(x)
        return outputs

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], g: Tensor) -> tuple[Tensor, None]:
        return _slope(g, saved[0], ctx.curve, ctx.unread.of_all), None


class _Slope(torch.autograd.Function):
    """g f'(x), or zeros in its place."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, curve: _Curve, without: bool) -> Tensor:
        ctx.save_for_backward(g, x)
        ctx.curve = curve
        return nothing(g, g.shape) if without else curve.slope(g, x)

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], v: Tensor) -> tuple[Tensor | None, ...]:
        (g, x), (of_g, of_x) = saved, (will_run(node) for node, _ in ctx.next_functions[:2])
        curve: _Curve = ctx.curve
        return (
            _slope(v, x, curve) if of_g else None,
            _second(v, g, x, curve) if of_x else None,
            None,
            None,
        )


def _slope(g: Tensor, x: Tensor, curve: _Curve, without: bool = False) -> Tensor:
    if not plain([g, x]):
        return curve.slope(g, x)
    slope: Tensor = _Slope.apply(g, x, curve, without)  # type: ignore[no-untyped-call]
    return slope


def _second(v: Tensor, g: Tensor, x: Tensor, curve: _Curve) -> Tensor:
    """The product v g f''(x), on a CPU by blocks, since temporary tensors in a processor's cache cost little."""
    if torch.is_grad_enabled() or not plain([v, g, x]) or x.device.type != "cpu":
        return v * g * curve.second(x)
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    parts = [torch.split(t.reshape(-1), _BLOCK) for t in (found, v, g, x)]
    for into, one, other, at in zip(*parts, strict=True):
        torch.mul(one, other, out=into).mul_(curve.second(at))
    return found
