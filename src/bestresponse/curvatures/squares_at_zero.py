"""Second derivatives that autograd loses in |x|² and ‖x‖² where x is exactly zero.

Torch takes the derivatives of |x| and ‖x‖ at zero as zero. So the gradient of |x|², 2 |x| sign(x), is right, but its
derivative becomes 2 sign(x)², which is 0 at zero instead of 2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..errors import SecondDerivativeError


def refuse_squares(
    loss: Tensor, zeros: Sequence[tuple[Any, Tensor]], slopes: Sequence[Tensor | None]
) -> None:
    """Raise if a loss is a smooth function of an absolute value or a norm at zero, and has curvature there.

    A kink, such as that of a lasso, has a slope at zero, and is left alone. If a slope is zero, this costs two
    gradients.

    Args:
        loss: the loss, whose graph is kept.
        zeros: the nodes of absolute values and norms, with where they are zero.
        slopes: the gradients of the loss with respect to their values.
    """
    flat = [(n, z & (s == 0)) for (n, z), s in zip(zeros, slopes, strict=True) if s is not None]
    suspects = [(node, where) for node, where in flat if bool(where.any())]
    edges = [GradientEdge(node, 0) for node, _ in suspects]
    again = torch.autograd.grad(loss, edges, create_graph=True) if edges else ()
    for (node, where), edge, slope in zip(suspects, edges, again, strict=True):
        if not slope.requires_grad:
            continue
        (bend,) = torch.autograd.grad(
            slope, [edge], torch.ones_like(slope), retain_graph=True, allow_unused=True
        )
        if bend is not None and bool((where & bend.isfinite() & (bend != 0)).any()):
            what = "abs" if node.name().startswith("Abs") else "a norm"
            raise SecondDerivativeError(
                f"train_loss must have right second derivatives; got the square, or another smooth function, of {what} "
                "at exactly zero, where that of torch is 0 instead of 2. Write x.square() for x.abs()**2, and "
                "x.square().sum() for x.norm()**2; or use Implicit(curvature=FiniteDifference())."
            )


def zeros_of(node: Any) -> Tensor | None:
    """Where the value of an absolute value or of a Euclidean norm is zero; None if nowhere, or for another node."""
    name = node.name()
    if name.startswith("AbsBackward"):
        value = node._saved_self.detach()
    elif name.startswith("LinalgVectorNormBackward") and node._saved_ord == 2:
        value = node._saved_result.detach()
    else:
        return None
    zero = value == 0
    return zero if not value.is_complex() and bool(zero.any()) else None
