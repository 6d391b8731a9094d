"""A convolution whose gradient is cheap to differentiate: by kernels of first derivatives, and only where needed.

The gradient has two parts, each bilinear. The part of the input is a transposed convolution of grad and weights, which
torch differentiates well. The part of the weights is a pair of nodes. Each sees one of its two arguments and takes
the other from a box that hides it from autograd, so autograd can skip the gradient that is not needed. (Torch's own
second derivative always computes all of them, and that of the weights by a convolution with kernels as large as
images.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tensors import Own, as_autocast, eager, plain, unseen
from .unread import ends_at, nothing, present

Each = int | Sequence[int]


def convolve(
    own: Own,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Each = 1,
    padding: Each | str = 0,
    dilation: Each = 1,
    groups: int = 1,
) -> Any:
    """The form of ``torch.conv1d``, ``conv2d`` and ``conv3d``; torch's own is ``own``."""
    given = [input, weight] if bias is None else [input, weight, bias]
    if not torch.is_grad_enabled() or not eager(given) or input.ndim != weight.ndim:
        return own()
    given = as_autocast(given)
    zeros = _padding(padding, stride, dilation, weight.shape[2:])
    if zeros is None or not plain(given) or not any(t.requires_grad for t in given):
        return own()
    steps, zeros, spread = (_each(n, weight.ndim - 2) for n in (stride, zeros, dilation))
    shape = _Shape(steps, zeros, spread, groups)
    if any(len(n) != weight.ndim - 2 for n in shape[:3]):
        return own()
    x, w, *rest = given
    return _Convolution.apply(x, w, rest[0] if rest else None, shape)  # type: ignore[no-untyped-call]


def convolution(
    own: Own,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Each,
    padding: Each,
    dilation: Each,
    transposed: bool,
    output_padding: Each,
    groups: int,
) -> Any:
    """The form of ``torch.convolution``."""
    return own() if transposed else convolve(own, input, weight, bias, stride, padding, dilation, groups)


def _each(setting: Each, dimensions: int) -> tuple[int, ...]:
    """A setting for each dimension, from one value for all or from one for each."""
    each = (setting,) if isinstance(setting, int) else tuple(setting)
    return each * dimensions if len(each) == 1 else each


def _padding(padding: Each | str, stride: Each, dilation: Each, kernel: Sequence[int]) -> Each | None:
    """The zeros on either side; None for other paddings."""
    if padding == "valid":
        return 0
    if not isinstance(padding, str):
        return padding
    if padding != "same" or set(_each(stride, 1)) != {1}:
        return None
    whole = [d * (k - 1) for d, k in zip(_each(dilation, len(kernel)), kernel, strict=True)]
    return None if any(p % 2 for p in whole) else tuple(p // 2 for p in whole)


class _Shape(NamedTuple):
    """The settings of a convolution besides its input and weights."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def of(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """The convolution."""
        zero = (0,) * len(self.stride)
        return torch.convolution(
            x, w, bias, self.stride, self.padding, self.dilation, False, zero, self.groups
        )

    def transposed(self, grad: Tensor, w: Tensor, sizes: torch.Size) -> Tensor:
        """The gradient with respect to an input of these sizes."""
        dimensions = zip(grad.shape[2:], w.shape[2:], sizes[2:], *self[:3], strict=True)
        rest = [n - ((g - 1) * s - 2 * p + d * (k - 1) + 1) for g, k, n, s, p, d in dimensions]
        return torch.convolution(
            grad, w, None, self.stride, self.padding, self.dilation, True, rest, self.groups
        )

    def gradients(
        self, grad: Tensor, x: Tensor, w: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of input, weights and bias, by torch's kernel (whose own derivative is the costly one)."""
        zero, sizes = (0,) * len(self.stride), [len(w)]
        found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
            grad, x, w, sizes, self.stride, self.padding, self.dilation, False, zero, self.groups, wanted
        )
        return found


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, shape: _Shape) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.shape, ctx.ends, ctx.unread = shape, ends_at(w), present()
        return shape.of(x, w, bias)

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = saved
        wanted = ctx.needs_input_grad[:3]
        if not torch.is_grad_enabled() or not plain([grad, x, w]):
            return *ctx.shape.gradients(grad, x, w, wanted), None
        all, without = ctx.unread.of_all, ctx.unread.of_weights and ctx.ends
        of_input = _of_input(grad, w, x.shape, ctx.shape, all) if wanted[0] else None
        of_weights = _of_weights(grad, x, w.detach(), ctx.shape, all or without) if wanted[1] else None
        of_bias = grad.sum([0, *range(2, grad.ndim)]) if wanted[2] else None
        return of_input, of_weights, of_bias, None


def _of_input(grad: Tensor, w: Tensor, sizes: torch.Size, shape: _Shape, without: bool) -> Tensor:
    """The gradient with respect to the input, or zeros in its place."""
    if not without:
        return shape.transposed(grad, w, sizes)
    value: Tensor = _OfInput.apply(grad, (w,), sizes, shape)  # type: ignore[no-untyped-call]
    return value


class _OfInput(torch.autograd.Function):
    """Zeros in the place of the gradient, and its derivative with respect to grad."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, box: tuple[Tensor], sizes: torch.Size, shape: _Shape) -> Tensor:
        ctx.save_for_backward(*box)
        ctx.shape = shape
        return nothing(grad, sizes)

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], v: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.shape.of(v, saved[0]), None, None, None


def _of_weights(grad: Tensor, x: Tensor, like: Tensor, shape: _Shape, without: bool) -> Tensor:
    """The gradient with respect to weights ``like`` these, or zeros in its place."""
    value: Tensor = _FromGrad.apply(grad, (x, like), shape, without)  # type: ignore[no-untyped-call]
    zeros: Tensor = _FromInput.apply(x, (grad, like), shape)  # type: ignore[no-untyped-call]
    return value + zeros


class _FromGrad(torch.autograd.Function):
    """The value, or zeros in its place, and its derivative with respect to grad."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, box: tuple[Tensor, Tensor], shape: _Shape, without: bool) -> Tensor:
        ctx.save_for_backward(box[0])
        ctx.shape = shape
        if without:
            return nothing(grad, box[1].shape)
        of_weights = shape.gradients(grad, *box, (False, True, False))[1]
        assert of_weights is not None
        return of_weights

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], v: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = saved
        return ctx.shape.of(x, v), None, None, None


class _FromInput(torch.autograd.Function):
    """Zero, and the derivative with respect to the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: tuple[Tensor, Tensor], shape: _Shape) -> Tensor:
        ctx.save_for_backward(box[0])
        ctx.shape, ctx.sizes = shape, x.shape
        return nothing(x, box[1].shape)

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], v: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = saved
        return ctx.shape.transposed(grad, v, ctx.sizes), None, None
