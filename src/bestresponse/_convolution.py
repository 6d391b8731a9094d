"""A convolution whose gradient is cheap to differentiate: by kernels of first derivatives, and only what is asked for.

The gradient has two parts, each bilinear. That of the input is a transposed convolution of grad and weights, which
torch differentiates well. That of the weights is a pair of nodes, each of which sees one of its two arguments and takes
the other from a box that hides it from autograd, which so leaves out the one that is not asked for. (Torch's own second
derivative computes all of them, always, and that of the weights by a convolution with kernels as large as images.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch


def convolve(self: Any, torchs: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``_conv_forward`` of torch's convolutions, which are ``torchs``."""
    given = _as_autocast([input, weight] if bias is None else [input, weight, bias])
    dimensions = weight.ndim - 2
    padding = _padding(self, weight.shape[2:])
    if padding is None or input.ndim != weight.ndim or not plain(given):
        outputs: Tensor = torchs(self, input, weight, bias)
        return outputs
    x, w, *rest = given
    if self.padding_mode != "zeros":
        x = F.pad(x, self._reversed_padding_repeated_twice, self.padding_mode)
    stride, padding, dilation = (_each(n, dimensions) for n in (self.stride, padding, self.dilation))
    shape = _Shape(stride, padding, dilation, self.groups)
    outputs = _Convolution.apply(x, w, rest[0] if rest else None, shape)  # type: ignore[no-untyped-call]
    return outputs


def _each(setting: Any, dimensions: int) -> tuple[int, ...]:
    """A setting for each dimension, from one for all of them or from what it is already."""
    each = (setting,) if isinstance(setting, int) else tuple(setting)
    return each * dimensions if len(each) == 1 else each


def _padding(module: Any, kernel: Sequence[int]) -> Any:
    """The zeros on either side; None where torch has more to say."""
    if module.padding_mode != "zeros" or module.padding == "valid":
        return 0
    if module.padding != "same":
        return module.padding
    if set(_each(module.stride, 1)) != {1}:
        return None
    whole = [d * (k - 1) for d, k in zip(_each(module.dilation, len(kernel)), kernel, strict=True)]
    return None if any(p % 2 for p in whole) else tuple(p // 2 for p in whole)


def _as_autocast(given: list[Tensor]) -> list[Tensor]:
    """The tensors in the dtype that autocast gives a convolution's arguments."""
    kind, wide = given[0].device.type, any(t.dtype == torch.float64 for t in given)
    if wide or not torch.is_autocast_enabled(kind) or not all(t.is_floating_point() for t in given):
        return given
    return [t.to(torch.get_autocast_dtype(kind)) for t in given]


def plain(given: Sequence[Tensor]) -> bool:
    """Whether these are real tensors of one dtype and place, not empty, and no transform or compiler is at work.

    Transforms of torch.func, batched gradients, dual numbers and compilers know torch's own operations only.
    """
    x = given[0]
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch._C._are_functorch_transforms_active()
        and all(
            type(t) in (Tensor, nn.Parameter) and t.dtype == x.dtype and t.device == x.device for t in given
        )
        and x.is_floating_point()
        and (x.dtype != torch.float16 or x.device.type != "cpu")  # whose kernels of gradients are slow
        and x.numel() > 0
        and not any(_functorch.is_legacy_batchedtensor(t) for t in given)
        and all(forward_ad.unpack_dual(t).tangent is None for t in given)  # type: ignore[no-untyped-call]
    )


class _Shape(NamedTuple):
    """What a convolution is beside its input and weights."""

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
        """Those with respect to input, weights and bias, by torch's kernel (whose own derivative is the costly one)."""
        zero, sizes = (0,) * len(self.stride), [len(w)]
        found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
            grad, x, w, sizes, self.stride, self.padding, self.dilation, False, zero, self.groups, wanted
        )
        return found


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, shape: _Shape) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.shape = shape
        return shape.of(x, w, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if not torch.is_grad_enabled() or not plain([grad, x, w]):
            return *ctx.shape.gradients(grad, x, w, wanted), None
        of_input = ctx.shape.transposed(grad, w, x.shape) if wanted[0] else None
        of_weights = _of_weights(grad, x, w.detach(), ctx.shape) if wanted[1] else None
        of_bias = grad.sum([0, *range(2, grad.ndim)]) if wanted[2] else None
        return of_input, of_weights, of_bias, None


def _of_weights(grad: Tensor, x: Tensor, like: Tensor, shape: _Shape) -> Tensor:
    """The gradient with respect to weights ``like`` these."""
    value: Tensor = _FromGrad.apply(grad, (x, like), shape)  # type: ignore[no-untyped-call]
    nothing: Tensor = _FromInput.apply(x, (grad, like), shape)  # type: ignore[no-untyped-call]
    return value + nothing


class _FromGrad(torch.autograd.Function):
    """The value, and its derivative with respect to grad."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, box: tuple[Tensor, Tensor], shape: _Shape) -> Tensor:
        ctx.save_for_backward(box[0])
        ctx.shape = shape
        of_weights = shape.gradients(grad, *box, (False, True, False))[1]
        assert of_weights is not None
        return of_weights

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return ctx.shape.of(x, v), None, None


class _FromInput(torch.autograd.Function):
    """Zero, and the derivative with respect to the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: tuple[Tensor, Tensor], shape: _Shape) -> Tensor:
        ctx.save_for_backward(box[0])
        ctx.shape, ctx.sizes = shape, x.shape
        return torch.zeros_like(box[1])

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return ctx.shape.transposed(grad, v, ctx.sizes), None, None
