"""Replacing weights by other tensors: the places to replace, and the models that cannot run with them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, EvaluationError
from . import graph
from .embedding import has_max_norm

Loss = Callable[[Any, Any, Any], Tensor]


class Losses(nn.Module):
    """One module that holds model and hyper, so that one functional_call can put tensors into both."""

    def __init__(self, model: nn.Module, hyper: nn.Module) -> None:
        super().__init__()
        self.model, self.hyper = model, hyper

    def forward(self, loss: Loss, batch: Any) -> Tensor:
        return loss(self.model, self.hyper, batch)


_NO_CHECKPOINTS = (
    "this method replaces the weights by other tensors, and needs a forward pass without "
    "torch.utils.checkpoint and other hooks of saved tensors: a part that is computed again in the backward pass "
    "would use the weights themselves. Turn it off in the model, or use Implicit() with Hessian() or GaussNewton, "
    "which work with use_reentrant=False."
)


@contextmanager
def no_checkpoints() -> Iterator[None]:
    """Refuse checkpointing while other tensors replace the weights: the second run would use the weights."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(_NO_CHECKPOINTS):
            yield
    except RuntimeError as error:
        if str(error) != _NO_CHECKPOINTS:
            raise
        raise EvaluationError(_NO_CHECKPOINTS) from error


def places(root: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Every place of these tensors below ``root``, with the tensor's name; each place once.

    functional_call does not restore a tensor that it replaced twice, as in a module registered under two names.
    """
    names = {id(x): name for name, x in tensors.items()}
    return {
        f"{path}.{leaf}": names[id(p)]
        for path, module in root.named_modules()
        for leaf, p in module._parameters.items()
        if id(p) in names
    }


def refuse_max_norm(model: nn.Module, who: str) -> None:
    """Raise for embeddings that edit their weights in a forward pass."""
    bounded = [name for name, module in model.named_modules() if has_max_norm(module)]
    if bounded:
        raise ArgumentError(
            f"{who} replaces the weights by other values and needs embeddings without max_norm, which edits "
            f"them outside the graph; got {bounded[:5]} with it. Normalise the looked-up rows in the model's forward."
        )


def refuse_captured(
    name: str, loss: Tensor, originals: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> None:
    """Raise if a loss depends on original weights, whose place others take."""
    reached = graph.leaves(loss, until=weights.values())
    captured = [key for key, w in originals.items() if id(w) in reached]
    if captured:
        raise EvaluationError(
            f"{name} must read the weights through its argument model, since this method puts other "
            f"tensors in their place; it used the original {captured[:5]} as well. Replace the "
            "captured module or parameter in the function by its argument."
        )
