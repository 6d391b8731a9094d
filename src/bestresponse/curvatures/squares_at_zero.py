"""Second derivatives that autograd loses in |x|² and ‖x‖² where x is exactly zero.

Torch takes the derivatives of |x| and ‖x‖ at zero as zero. So the gradient of |x|², 2 |x| sign(x), is right, but its
derivative becomes 2 sign(x)², which is 0 at zero instead of 2.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..errors import SecondDerivativeError
from ..passes import graph


def refuse_squares_at_zero(loss: Tensor) -> None:
    """Raise if a loss is a smooth function of an absolute value or a norm at zero, and has curvature there.

    A kink, such as that of a lasso, has a slope at zero, and is left alone. If an argument of these functions is
    exactly zero, this costs a gradient; if the slope is zero too, two more.
    """
    found = [(node, zero) for node in graph.nodes([loss]) if (zero := _at_zero(node)) is not None]
    edges = [GradientEdge(node, 0) for node, _ in found]
    if not edges:
        return
    slopes = torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
    flat = [None if s is None else zero & (s == 0) for s, (_, zero) in zip(slopes, found, strict=True)]
    suspects = [i for i, x in enumerate(flat) if x is not None and bool(x.any())]
    if not suspects:
        return
    again = torch.autograd.grad(loss, [edges[i] for i in suspects], create_graph=True)
    for i, slope in zip(suspects, again, strict=True):
        if not slope.requires_grad:
            continue
        (bend,) = torch.autograd.grad(
            slope, [edges[i]], torch.ones_like(slope), retain_graph=True, allow_unused=True
        )
        if bend is not None and bool((flat[i] & bend.isfinite() & (bend != 0)).any()):
            what = "abs" if found[i][0].name().startswith("Abs") else "a norm"
            raise SecondDerivativeError(
                f"train_loss must have right second derivatives; got the square, or another smooth function, of {what} "
                "at exactly zero, where that of torch is 0 instead of 2. Write x.square() for x.abs()**2, and "
                "x.square().sum() for x.norm()**2; or use Implicit(curvature=FiniteDifference())."
            )


def _at_zero(node: Any) -> Tensor | None:
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
