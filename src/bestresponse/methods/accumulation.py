"""Hypergradients in the ``.grad`` of the hyperparameters, which must hold no other gradients."""

from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import _tree
from ..errors import named
from ..problem import Problem
from .hypergradient import Hypergradient

# The version of each ``.grad`` when `accumulate` last wrote it. Any other write in place makes a new version.
_written: MutableMapping[Tensor, int] = WeakIdKeyDictionary()


@torch.inference_mode(False)
def accumulate(problem: Problem, result: Hypergradient) -> None:
    """Add a hypergradient into ``.grad``; warn once if that holds anything but earlier hypergradients."""
    if foreign := [n for n, p in problem.hyperparameters.items() if _is_foreign(p.grad)]:
        problem.warn_once(
            "foreign gradients",
            "the .grad of the hyperparameters must be empty or hold earlier hypergradients, since br.backward adds to "
            f"it; got other values for {named(foreign)}. They often come from loss.backward() on the training loss, "
            "which fills every .grad with ∂L_T/∂λ. Call hyper_optimizer.zero_grad() just before br.backward, or "
            "loss.backward(inputs=list(problem.weights.values())).",
        )
    for name, parameter in problem.hyperparameters.items():
        if parameter.grad is None:
            parameter.grad = result.total[name].clone()
        else:
            parameter.grad.add_(result.total[name])
        _written[parameter.grad] = parameter.grad._version


def _is_foreign(gradient: Tensor | None) -> bool:
    """Whether a gradient has values that no hypergradient left there."""
    if gradient is None:
        return False
    version = _written.get(gradient)
    unchanged = version is not None and version == gradient._version
    return not unchanged and bool(_tree.entries(gradient).any())
