"""Layer norm in the form of `_norms`, by kernels of rows."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .norms import Norm, Three, normalised
from .tensors import Own, eager, of_one_kind


def layer_norm(
    own: Own,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """The form of ``torch.layer_norm``; torch's own is ``own``."""
    shape, x = tuple(normalized_shape), input
    if not _fits(x, shape, weight, bias):
        return own()
    if x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type):
        x = x.float()
    return normalised(own, _Rows(shape, x.ndim, eps), x, weight, bias, shape)


def native_layer_norm(
    own: Own,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Any:
    """The form of ``torch.native_layer_norm``, which also returns mean and r."""
    shape = tuple(normalized_shape)
    if not _fits(input, shape, weight, bias):
        return own()
    y = layer_norm(lambda: own()[0], input, shape, weight, bias, eps)
    return y, *_Rows(shape, input.ndim, eps).statistics(input)


def _fits(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether these are arguments for a form."""
    affine = [t for t in (weight, bias) if t is not None]
    return (
        torch.is_grad_enabled()
        and eager([x, *affine])
        and len(shape) > 0
        and x.shape[-len(shape) :] == shape
        and all(t.shape == shape for t in affine)
        and of_one_kind(x, affine)
    )


class _Rows(Norm):
    def __init__(self, shape: tuple[int, ...], ndim: int, eps: float) -> None:
        super().__init__(range(-len(shape), 0), range(-ndim, -len(shape)), eps)
        self.shape, self.count = shape, math.prod(shape)

    def outputs(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y, self.mean, self.scale = torch.native_layer_norm(x, self.shape, w, b, self.eps)
        outputs: Tensor = y
        return outputs

    def gradients(self, g: Tensor, x: Tensor, w: Tensor | None, wanted: Sequence[bool]) -> Any:
        return torch.ops.aten.native_layer_norm_backward(
            g, x, self.shape, self.mean, self.scale, w, w, wanted
        )

    def of_gradients(self, v: Three, x: Tensor, w: Tensor) -> Tensor:
        of_g: Tensor = torch.native_layer_norm(x, self.shape, v[1], v[2], self.eps)[0]
        return of_g.addcmul_(self._projected(v[0], x), w)

    def of_rest(self, v: Sequence[Tensor], gradients: Three, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        g, r = gradients[0], self.scale
        u = g * w
        projected, v_normal = self._along_normal(v[0], x, True)
        u_normal = self._along_normal(u, x, False)[1]
        none, one = torch.zeros_like(r), torch.ones_like(r)
        of_w: Tensor = torch.ops.aten.native_layer_norm_backward(
            g, projected, self.shape, none, one, w, w, (False, True, False)
        )[1]
        by_x = -r * r * self.average(u * projected)
        of_x = self._projected(u.mul_(-r * v_normal).addcmul_(g, v[1]), x)
        of_x.addcmul_(projected, -r * u_normal).addcmul_(x, by_x).sub_(by_x * self.mean)
        return of_x, of_w

    def _projected(self, u: Tensor, x: Tensor) -> Tensor:
        """P(u)."""
        projected: Tensor = self.gradients(u, x, None, (True, False, False))[0]
        return projected

    def _along_normal(self, u: Tensor, x: Tensor, project: bool) -> tuple[Tensor, Tensor]:
        """P(u), if needed, and mean(u x̂), by the kernel of batch norm with rows as channels."""
        rows, mean, r = (1, -1, self.count), self.mean.view(-1), self.scale.view(-1)
        projected, total, _ = torch.ops.aten.native_batch_norm_backward(
            *(u.reshape(rows), x.reshape(rows), torch.ones_like(r), None, None),
            *(mean, r, True, self.eps, (project, True, project)),
        )
        return projected.view(x.shape) if project else u, total.view(self.mean.shape) / self.count
