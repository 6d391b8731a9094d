"""Products with the Hessian by forward-mode differentiation of the backward pass."""

import functools
import warnings
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from . import _graph, kinks
from ._tree import Tree
from .linearisation import Linearisation, reached_weights, warn_of_power_iterations
from .passes import Passes


class ForwardOverReverse(Linearisation):
    """A v = d/dε ∂L_T/∂w (w + εv), on dual numbers w + εv; the mixed term is d/dε ∂L_T/∂λ (w + εv)."""

    def __init__(self, passes: Passes, batch: Any) -> None:
        self._passes, self._batch = passes, batch
        _load_formulas()
        loss = passes.train_loss(batch)
        self.reached = _graph.leaves(loss)
        self.names = reached_weights(passes.problem, self.reached)
        _graph.inspect_loss(loss)
        self.kinks = kinks.find(passes.problem, loss)
        warn_of_power_iterations(passes.problem)

    def __call__(self, v: Tree) -> Tree:
        with forward_ad.dual_level(), _graph.missing_derivatives_told():
            loss, duals = self._at_duals(v)
            gradient = torch.autograd.grad(loss, list(duals.values()))
            tangents = [_tangent(g) for g in gradient]
        return {
            name: torch.zeros_like(v[name]) if t is None else t
            for name, t in zip(duals, tangents, strict=True)
        }

    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        # Along v as well, and not in reverse through dual numbers, which fails in torch's softmax.
        hyperparameters = self._passes.problem.hyperparameters
        with forward_ad.dual_level(), _graph.missing_derivatives_told():
            loss, _ = self._at_duals(v)
            slopes = torch.autograd.grad(loss, list(hyperparameters.values()), allow_unused=True)
            tangents = [None if g is None else _tangent(g) for g in slopes]
        return dict(zip(hyperparameters, tangents, strict=True))

    def _at_duals(self, v: Tree) -> tuple[Tensor, Tree]:
        """The training loss at w + εv, and those dual weights."""
        weights = self._passes.problem.weights
        live = {n: weights[n].detach().requires_grad_() for n in self.names}
        duals: Tree = {
            n: forward_ad.make_dual(w, v[n])  # type: ignore[no-untyped-call]
            for n, w in live.items()
        }
        return self._passes.train_loss(self._batch, {**weights, **duals}), duals


@functools.cache  # each time would make Python forget which warnings it has given
def _load_formulas() -> None:
    """Let torch load the derivatives that it has in Python; some versions warn of themselves as they do."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", FutureWarning)
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))  # type: ignore[no-untyped-call]


def _tangent(x: Tensor) -> Tensor | None:
    """The derivative along v, None where there is none."""
    tangent: Tensor | None = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]
    return tangent
