"""The cross-entropy of logits and classes, whose second derivative is the closed product.

With p = softmax(z), the loss of a row is log Σ exp(z) − z_y, and its gradient is g (p − e_y). The inner product of that
with v has the derivatives ⟨v, p − e_y⟩ with respect to g, and g (p ∘ v − p ⟨p, v⟩) with respect to z.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .tensors import Own, plain, unseen, will_run

_BLOCK = 2**16  # numbers of a block of rows, which a processor's cache keeps


def cross_entropy(
    own: Own,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The form of ``torch.nn.functional.cross_entropy`` for rows of logits and their classes."""
    usual = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not (usual and reduction in ("none", "sum", "mean") and _fits(input, target)):
        return own()
    z = input.float() if torch.is_autocast_enabled(input.device.type) and input.dtype.itemsize < 4 else input
    if z.dtype.itemsize < 4:
        return own()
    losses: Tensor = _Losses.apply(z, target, ignore_index)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() / (target != ignore_index).sum() if reduction == "mean" else losses.sum()


def _fits(z: Tensor, classes: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and plain([z])
        and z.requires_grad
        and z.ndim == 2
        and type(classes) is Tensor
        and classes.dtype == torch.int64
        and classes.shape == z.shape[:1]
        and classes.device == z.device
    )


class _Losses(torch.autograd.Function):
    """The loss of each row, zero if its class is the ignored one."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, classes: Tensor, ignored: int) -> Tensor:
        losses = F.nll_loss(z.log_softmax(1), classes, ignore_index=ignored, reduction="none")
        counted = classes != ignored
        ctx.save_for_backward(z, classes.where(counted, 0).unsqueeze(1), counted)
        return losses

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], g: Tensor) -> tuple[Tensor, None, None]:
        z, classes, counted = saved
        g = (g * counted).unsqueeze(1)
        if not plain([g, z]):
            return _plainly(g, z, classes), None, None
        return _Gradient.apply(g, z, classes), None, None  # type: ignore[no-untyped-call]


class _Gradient(torch.autograd.Function):
    """g (p − e_y)."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, z: Tensor, classes: Tensor) -> Tensor:
        ctx.save_for_backward(g, z, classes)
        p = z.softmax(1)
        return p.scatter_add_(1, classes, -torch.ones_like(g)).mul_(g)

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], v: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        g, z, classes = saved
        wanted = [will_run(node) for node, _ in ctx.next_functions[:2]]
        if torch.is_grad_enabled() or not plain([v, z]):
            return *_second(v, g, z, classes, wanted), None
        rows = max(1, _BLOCK // z.shape[1]) if z.device.type == "cpu" else len(z)
        found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (g, z)]
        for first in range(0, len(z), rows):
            at = slice(first, first + rows)
            _second(v[at], g[at], z[at], classes[at], wanted, [x[at] for x in found])
        return found[0] if wanted[0] else None, found[1] if wanted[1] else None, None


def _second(
    v: Tensor,
    g: Tensor,
    z: Tensor,
    classes: Tensor,
    wanted: Sequence[bool],
    into: Sequence[Tensor | None] = (None, None),
) -> tuple[Tensor | None, Tensor | None]:
    """The wanted derivatives of ⟨v, g (p − e_y)⟩ with respect to g and z."""
    p = z.softmax(1)
    of_g = torch.bmm(p.unsqueeze(1), v.unsqueeze(2)).squeeze(2) if wanted[0] else None
    of_z = torch._softmax_backward_data(v, p, 1, p.dtype) if wanted[1] else None
    return (
        None if of_g is None else torch.sub(of_g, v.gather(1, classes), out=into[0]),
        None if of_z is None else torch.mul(of_z, g, out=into[1]),
    )


def _plainly(g: Tensor, z: Tensor, classes: Tensor) -> Tensor:
    """The gradient g (p − e_y) by plain operations."""
    return g * z.softmax(1) - torch.zeros_like(z).scatter(1, classes, 1.0) * g
