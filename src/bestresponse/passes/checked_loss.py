"""The requirements on a loss: one real, finite number with a graph."""

import torch
from torch import Tensor

from ..errors import EvaluationError, NotFiniteError


def checked_loss(name: str, loss: object) -> Tensor:
    """A loss as a scalar with a graph; raises for anything else."""
    if isinstance(loss, Tensor) and loss.is_meta:
        raise EvaluationError(
            f"{name} must have a value; got a tensor on the meta device, which has none. Make parameters, buffers and "
            "batches on a device with memory (Module.to_empty, then load or initialise)."
        )
    if isinstance(loss, Tensor) and loss.is_complex():
        raise EvaluationError(
            f"{name} must return a real scalar tensor; got {loss.dtype}. Return its .real, .abs() or a similar value."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a {type(loss).__name__}. Return the tensor itself, without item() or float()"
        if isinstance(loss, Tensor):
            got = f"shape {list(loss.shape)}. Take the mean over the batch"
        raise EvaluationError(f"{name} must return a scalar tensor; got {got}.")
    if not loss.requires_grad:
        raise EvaluationError(
            f"{name} must depend on the weights or hyperparameters by a graph; got a detached value "
            f"{float(loss):.4g}. Look for detach(), item(), no_grad() or .data in it."
        )
    return loss.reshape(())


def refuse_not_finite(name: str, loss: Tensor) -> None:
    """Raise if a loss is NaN or infinite."""
    if not bool(torch.isfinite(loss)):
        raise NotFiniteError(
            f"{name} must be finite; got {float(loss.detach())}. Lower the learning rates, clip the gradients, "
            "or look at the batch."
        )
