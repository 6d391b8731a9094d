"""Minimisation by L-BFGS until the gradient is small."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def minimise(loss: Callable[[], Tensor], weights: Iterable[Tensor], steps: int, **more: Any) -> float:
    """Move the weights to a minimum of the loss, in at most ``steps`` L-BFGS iterations; return the gradient's norm."""
    weights = list(weights)
    optimizer = torch.optim.LBFGS(weights, max_iter=steps, line_search_fn="strong_wolfe", **more)

    def closure() -> float:
        optimizer.zero_grad()
        value = loss()
        torch.autograd.backward(value, inputs=weights)
        return value.item()

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return float(flat_gradient(loss(), weights).norm())


def flat_gradient(value: Tensor, at: Iterable[Tensor], **more: Any) -> Tensor:
    """The gradient of a scalar as one vector, with zeros for tensors that it does not depend on."""
    parts = torch.autograd.grad(value, list(at), allow_unused=True, materialize_grads=True, **more)
    return torch.cat([part.flatten() for part in parts])
