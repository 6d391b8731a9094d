"""The Gauss-Newton curvature of a training loss that calls loss functions of torch, which are found at work.

L(z, w, λ) is the training loss as a function of z, the arguments of these functions, and of what it reads past them;
z = z(w, λ). With s = ∂L/∂z and r = ∂L/∂w, both at fixed z, and J = ∂z/∂w, the training gradient is Jᵀ s + r. A
product leaves out only the curvature of z:

    u = J v;   φ = ⟨s, u⟩ + ⟨r, v⟩;   A v = Jᵀ ∂φ/∂z + ∂φ/∂w,

where φ is differentiated with u constant. The mixed term is exact: ∂φ/∂λ, what ∂φ/∂z has through z(λ), and the part of
⟨Jᵀ s, v⟩ that changes with λ at constant s.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._tree import Tree
from ..errors import EvaluationError
from ..passes import graph
from ..passes.checkpoint import recomputed
from ..passes.cut_losses import Cuts, cut_losses
from ..problem import Passes
from . import kinks
from .base import Linearisation, reached_weights
from .by_products import Derivatives, few
from .outputs import filled
from .power_iteration import warn_of_power_iterations


class AtLosses(Linearisation):
    """A = [J; I]ᵀ ∂²L/∂(z, w)² [J; I] at the loss functions of torch that the training loss calls."""

    def __init__(self, passes: Passes, batch: Any, first: bool) -> None:
        problem = passes.problem
        if problem.group.sharded:
            raise EvaluationError(
                "with sharded weights GaussNewton must be given the outputs; got GaussNewton(). Write "
                "GaussNewton(predict, loss, rest)."
            )
        self._passes, self._batch = passes, batch
        plain = passes.train_loss(batch) if first else None
        loss, cuts = self._run()
        self._refuse(cuts, loss, plain)
        self._outputs, self._leaves = cuts.outputs, cuts.leaves
        self.detail = f"outputs found at {', '.join(dict.fromkeys(cuts.names))}"
        weights = list(problem.weights.values())
        found = torch.autograd.grad(loss, [*self._leaves, *weights], create_graph=True, allow_unused=True)
        slopes, past = found[: len(self._leaves)], found[len(self._leaves) :]
        graph.inspect_gradient(g for g in found if g is not None)
        at = [x.detach() for x in filled(slopes, self._leaves)]
        # The value of the loss, with the derivatives and the whole graph of the training loss.
        whole = loss + torch.stack(
            [((z - z.detach()) * s).sum() for z, s in zip(self._outputs, at, strict=True)]
        ).sum().to(loss)
        self.reached = graph.leaves(whole) - {id(x) for x in self._leaves}
        self.names = reached_weights(problem, self.reached)
        graph.inspect_loss(whole)
        self.kinks = kinks.of_loss(problem, whole)
        warn_of_power_iterations(problem)
        self._weights = [problem.weights[n] for n in self.names]
        self._hyperparameters = problem.hyperparameters
        direct = dict(zip(problem.weights, past, strict=True))
        self._gradient = graph.edges(
            {
                **{_place(i): s for i, s in enumerate(slopes) if s is not None},
                **{n: r for n in self.names if (r := direct[n]) is not None},
            }
        )
        self._dummies = [s.requires_grad_() for s in at]
        pulled = torch.autograd.grad(
            self._outputs, self._weights, self._dummies, create_graph=True, allow_unused=True
        )
        graph.inspect_gradient(g for g in pulled if g is not None)
        self._pulled = graph.edges({n: g for n, g in zip(self.names, pulled, strict=True) if g is not None})
        own = {id(p) for p in self._hyperparameters.values()}
        self._outputs_depend = any(graph.leaves(z) & own for z in self._outputs)

    def __call__(self, v: Tree) -> Tree:
        of_outputs, of_weights, _ = self._second(v, self._weights, [])
        return self._sum(self._pulled_back(of_outputs, self._weights), of_weights)

    def with_mixed(self, v: Tree) -> tuple[Tree, Derivatives] | None:
        others = list(self._hyperparameters.values())
        if self._outputs_depend or not few(others, self._weights):
            return None
        of_outputs, of_weights, mixed = self._second(v, self._weights, others)
        product = self._sum(self._pulled_back(of_outputs, self._weights), of_weights)
        return product, dict(zip(self._hyperparameters, mixed, strict=True))

    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        others = list(self._hyperparameters.values())
        of_outputs, _, total = self._second(v, [], others)
        if self._outputs_depend:
            total = list(map(graph.plus, total, self._pulled_back(of_outputs, others)))
            total = list(map(graph.plus, total, graph.vector_product(self._pulled, others, v, True)))
        if last:
            self._gradient, self._pulled, self._outputs, self._leaves, self._dummies = {}, {}, [], [], []
        return dict(zip(self._hyperparameters, total, strict=True))

    def outputs(self) -> list[Tensor]:
        return self._run()[1].outputs

    def pushed(self, v: Tree) -> list[Tensor]:
        return filled(graph.vector_product(self._pulled, self._dummies, v, True), self._dummies)

    def _run(self) -> tuple[Tensor, Cuts]:
        alone = not self._passes.problem.group.averages
        with recomputed(alone=alone), cut_losses() as cuts:
            return self._passes.train_loss(self._batch), cuts

    def _refuse(self, cuts: Cuts, loss: Tensor, plain: Tensor | None) -> None:
        """Raise if no loss function was found, or the passes differ."""
        if not cuts.outputs:
            raise EvaluationError(
                "GaussNewton() looks for the loss functions of torch that train_loss calls with the outputs of the "
                "model, such as F.cross_entropy or F.mse_loss; got a train_loss that calls none. Call one, or give "
                "GaussNewton(predict, loss, rest)."
            )
        if plain is not None and not torch.allclose(plain, loss, rtol=1e-3, atol=1e-6):
            raise EvaluationError(
                "train_loss must have one value in all passes of a hypergradient; got "
                f"{float(plain.detach()):.6g} and {float(loss.detach()):.6g}. Look for state that it changes outside "
                "the model."
            )

    def _second(
        self, v: Tree, weights: Sequence[Tensor], others: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor | None], Sequence[Tensor | None]]:
        """∂φ/∂z, ∂φ/∂w and ∂φ/∂λ."""
        pushed = {_place(i): u for i, u in enumerate(self.pushed(v))}
        inputs = [*self._leaves, *weights, *others]
        given = {n: pushed[n] if n in pushed else v[n] for n in self._gradient}
        found = graph.vector_product(self._gradient, inputs, given, True)
        a, b = len(self._leaves), len(self._leaves) + len(weights)
        return filled(found[:a], self._leaves), found[a:b], found[b:]

    def _pulled_back(self, slopes: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """(∂z/∂inputs)ᵀ slopes."""
        return torch.autograd.grad(self._outputs, inputs, slopes, retain_graph=True, allow_unused=True)

    def _sum(self, one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> Tree:
        total = filled(list(map(graph.plus, one, other)), self._weights)
        return dict(zip(self.names, total, strict=True))


def _place(number: int) -> str:
    """The name of an output among the names of weights, which have no space."""
    return f"output {number}"
