"""The Gauss-Newton curvature of a training loss that calls loss functions of torch, which are found at work.

L(z, w, λ) is the training loss as a function of z, the arguments of these functions, and of what it reads past them;
z = z(w, λ). With s = ∂L/∂z and r = ∂L/∂w, both at fixed z, and J = ∂z/∂w, the training gradient is Jᵀ s + r. A
product leaves out only the curvature of z:

    u = J v;   φ = ⟨s, u⟩ + ⟨r, v⟩;   A v = Jᵀ ∂φ/∂z + ∂φ/∂w,

where φ is differentiated with u constant. The mixed term is exact: ∂φ/∂λ, what ∂φ/∂z has through z(λ), and the part of
⟨Jᵀ s, v⟩ that changes with λ at constant s.

Losses of logarithms z of probabilities p = exp(z) are linear in z. As z is log_softmax(z), a loss is also that of z as
logits, with the Hessian c (diag(p) − p pᵀ) for an example, c = −Σ s; a shift of z, such as that of the logits, does
not matter to it. A product adds this Hessian to ∂φ/∂z.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._tree import Tree
from ..errors import EvaluationError, named
from ..passes import graph
from ..passes.checkpoint import recomputed
from ..passes.cut_losses import Cut, Cuts, cut_losses
from ..passes.unread import Unread
from ..problem import Passes
from . import kinks
from .base import Curvature, Linearisation, by_place, reached_weights
from .by_products import Derivatives, few
from .outputs import filled
from .power_iteration import warn_of_power_iterations


class AtLosses(Linearisation):
    """A = [J; I]ᵀ ∂²L/∂(z, w)² [J; I] at the loss functions of torch that the training loss calls."""

    def __init__(self, curvature: Curvature, passes: Passes, batch: Any) -> None:
        problem = passes.problem
        if problem.group.sharded:
            raise EvaluationError(
                "with sharded weights GaussNewton must be given the outputs; got GaussNewton(). Write "
                "GaussNewton(predict, loss, rest)."
            )
        self._passes, self._batch = passes, batch
        unread = Unread()
        with unread.noticed():
            loss, cuts = _run(passes, batch)
        self._cuts = Cuts(whole=cuts.whole, alone=cuts.alone)
        leaves, weights = [cut.leaf for cut in cuts.made], list(problem.weights.values())
        found = torch.autograd.grad(loss, [*leaves, *weights], create_graph=True, allow_unused=True)
        graph.inspect_gradient(g for g in found if g is not None)
        slopes = {i: s for i, s in enumerate(found[: len(leaves)]) if s is not None}
        _refuse_none(cuts, bool(slopes))
        if not problem.has_checked(curvature):
            _compare(passes.train_loss(batch).detach(), loss)
            problem.checked(curvature)
        self._used = list(slopes)
        used = [cuts.made[i] for i in self._used]
        self.detail = _detail(used, cuts.missed)
        self._outputs, self._leaves = [cut.output for cut in used], [cut.leaf for cut in used]
        self._classes = [cut.classes for cut in used]
        # s, and at the same time the point where Jᵀ s is differentiated.
        self._slopes = [s.detach() for s in slopes.values()]
        below = list(graph.nodes(self._outputs))
        bent = self._bent(list(slopes.values())) if any(map(_may_be_square, below)) else None
        whole = _connected(loss, self._outputs, self._slopes, bent)
        nodes = [*graph.nodes([whole], until=self._outputs), *below]
        self.reached = graph.leaves_among(nodes, whole) - set(map(id, self._leaves))
        self.names = reached_weights(problem, self.reached)
        graph.inspect_nodes(nodes)
        self.kinks = kinks.of_loss(problem, whole, nodes)
        warn_of_power_iterations(problem)
        self._weights = [problem.weights[n] for n in self.names]
        self._hyperparameters = problem.hyperparameters
        past = dict(zip(problem.weights, found[len(leaves) :], strict=True))
        self._gradient = graph.edges(
            {
                **{_place(i): s for i, s in enumerate(slopes.values())},
                **{n: r for n in self.names if (r := past[n]) is not None},
            }
        )
        own = set(map(id, self._hyperparameters.values()))
        read = {id(node.variable) for node in below if hasattr(node, "variable")}
        self._outputs_depend = bool(own & (read | set(map(id, self._outputs))))
        for s in self._slopes:
            s.requires_grad_()
        with unread.left_out(below, all=not self._outputs_depend):
            pulled = torch.autograd.grad(
                self._outputs, self._weights, self._slopes, create_graph=True, allow_unused=True
            )
        graph.inspect_gradient(g for g in pulled if g is not None)
        self._pulled = graph.edges({n: g for n, g in zip(self.names, pulled, strict=True) if g is not None})

    def __call__(self, v: Tree) -> Tree:
        return self._product(v, [])[0]

    def with_mixed(self, v: Tree) -> tuple[Tree, Derivatives] | None:
        others = list(self._hyperparameters.values())
        if self._outputs_depend or not few(others, self._weights):
            return None
        product, mixed = self._product(v, others)
        return product, dict(zip(self._hyperparameters, mixed, strict=True))

    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        others = list(self._hyperparameters.values())
        of_outputs, _, total = self._second(v, self.pushed(v), [], others)
        if self._outputs_depend:
            total = list(map(graph.plus, total, self._pulled_back(of_outputs, others)))
            total = list(map(graph.plus, total, graph.vector_product(self._pulled, others, v, True)))
        if last:
            self._gradient, self._pulled, self._outputs, self._leaves, self._slopes = {}, {}, [], [], []
        return dict(zip(self._hyperparameters, total, strict=True))

    def outputs(self) -> list[Tensor]:
        made = _run(self._passes, self._batch)[1].made
        return [made[i].output for i in self._used]

    def pushed(self, v: Tree) -> list[Tensor]:
        return filled(graph.vector_product(self._pulled, self._slopes, v, True), self._slopes)

    def bends(self, v: Tree) -> Tree:
        pushed = self.pushed(v)
        of_outputs, of_weights, _ = self._second(v, pushed, self._weights, [])
        self._line = [(z.detach().clone(), u) for z, u in zip(self._leaves, pushed, strict=True)]
        return by_place(of_outputs, dict(zip(self.names, filled(of_weights, self._weights), strict=True)))

    def slopes(self, t: float) -> Tree:
        values = dict(zip(self._used, (z + t * u for z, u in self._line), strict=True))
        loss, cuts = _run(self._passes, self._batch, self._cuts, values)
        leaves = [cuts.made[i].leaf for i in self._used]
        found = torch.autograd.grad(loss, [*leaves, *self._weights], allow_unused=True)
        whole = filled(found, [*leaves, *self._weights])
        return by_place(whole[: len(leaves)], dict(zip(self.names, whole[len(leaves) :], strict=True)))

    def _product(self, v: Tree, others: Sequence[Tensor]) -> tuple[Tree, Sequence[Tensor | None]]:
        """A v, and ∂φ/∂λ for these hyperparameters."""
        pushed = self.pushed(v)
        of_outputs, of_weights, mixed = self._second(v, pushed, self._weights, others)
        slopes = self._with_classes(of_outputs, pushed)
        del of_outputs, pushed  # as large as the outputs
        pulled = self._pulled_back(slopes, self._weights)
        total = filled(list(map(graph.plus, pulled, of_weights)), self._weights)
        return dict(zip(self.names, total, strict=True)), mixed

    def _second(
        self, v: Tree, pushed: Sequence[Tensor], weights: Sequence[Tensor], others: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor | None], Sequence[Tensor | None]]:
        """∂φ/∂z, ∂φ/∂w and ∂φ/∂λ."""
        along = {**v, **{_place(i): u for i, u in enumerate(pushed)}}
        inputs = [*self._leaves, *weights, *others]
        found = graph.vector_product(self._gradient, inputs, {n: along[n] for n in self._gradient}, True)
        a, b = len(self._leaves), len(self._leaves) + len(weights)
        return filled(found[:a], self._leaves), found[a:b], found[b:]

    def _with_classes(self, products: Sequence[Tensor], pushed: Sequence[Tensor]) -> list[Tensor]:
        """Products, with those of the Hessian of losses of logarithms."""
        found = []
        for x, z, s, dim, u in zip(products, self._leaves, self._slopes, self._classes, pushed, strict=True):
            if dim is not None:
                p, c = z.detach().exp(), -s.detach().sum(dim, keepdim=True)
                pu = p * u
                x = x + c * (pu - p * pu.sum(dim, keepdim=True))
            found.append(x)
        return found

    def _bent(self, slopes: Sequence[Tensor]) -> list[Tensor]:
        """Where the loss has curvature in the outputs."""
        generator = torch.Generator().manual_seed(0)
        along = [
            torch.randn(z.shape, generator=generator, dtype=torch.float32, device="cpu").to(z)
            for z in self._leaves
        ]
        live = [(s, u) for s, u in zip(slopes, along, strict=True) if s.requires_grad]
        products: Sequence[Tensor | None] = [None] * len(self._leaves)
        if live:
            values, directions = zip(*live, strict=True)
            products = torch.autograd.grad(
                values, self._leaves, directions, retain_graph=True, allow_unused=True
            )
        own = filled(products, self._leaves)
        return [x != 0 for x in self._with_classes(own, along)]

    def _pulled_back(self, slopes: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """(∂z/∂inputs)ᵀ slopes."""
        return torch.autograd.grad(self._outputs, inputs, slopes, retain_graph=True, allow_unused=True)


def finds_outputs(curvature: Curvature, passes: Passes, batch: Any) -> bool:
    """Whether `AtLosses` finds outputs in the training loss of a batch, at two passes without a second derivative."""
    if passes.problem.group.sharded:
        return False
    try:
        plain = passes.train_loss(batch).detach()
        loss, cuts = _run(passes, batch)
        _compare(plain, loss)
    except EvaluationError:
        return False
    passes.problem.checked(curvature)
    reached = graph.leaves(loss)
    return any(id(cut.leaf) in reached for cut in cuts.made)


def _run(
    passes: Passes, batch: Any, like: Cuts | None = None, values: Mapping[int, Tensor] | None = None
) -> tuple[Tensor, Cuts]:
    """The training loss over cut arguments; again if some must stay whole, or are in checkpointed blocks.

    ``values`` replace those of the arguments of an earlier run, which this one is ``like``.
    """
    whole: set[int] = set() if like is None else set(like.whole)
    alone = not passes.problem.group.averages if like is None else like.alone
    while True:
        with recomputed(alone=alone), cut_losses(whole, values) as cuts:
            loss = passes.train_loss(batch)
        cuts.alone = alone
        if any(not cut.output.requires_grad for cut in cuts.made):
            raise EvaluationError(
                "GaussNewton() cannot follow a train_loss that detaches an argument of a loss function in place "
                "(detach_()). Use detach(), or give GaussNewton(predict, loss, rest)."
            )
        if alone and cuts.in_block:
            # Other runs of a block would not see the cuts; torch's own checkpoints keep the graph of the first.
            alone = False
        elif cuts.inner:
            whole |= cuts.inner
        else:
            return loss, cuts


def _refuse_none(cuts: Cuts, used: bool) -> None:
    """Raise if no loss function was found whose value reaches the training loss."""
    if not used:
        missed = (
            f" It calls {named(dict.fromkeys(cuts.missed))} where that cannot be followed."
            if cuts.missed
            else ""
        )
        raise EvaluationError(
            "GaussNewton() looks for the loss functions of torch that train_loss calls with the outputs of the "
            "model, such as F.cross_entropy or F.mse_loss; got a train_loss that is made of none. Call one, or give "
            f"GaussNewton(predict, loss, rest).{missed}"
        )


def _compare(plain: Tensor, loss: Tensor) -> None:
    """Raise if the loss with cuts has another value than without."""
    if not torch.allclose(plain, loss, rtol=1e-3, atol=1e-6):
        raise EvaluationError(
            "train_loss must have one value in all passes of a hypergradient; got "
            f"{float(plain.detach()):.6g} and, with copies of the outputs, {float(loss.detach()):.6g}. Look for state "
            "that it changes outside the model, or give GaussNewton(predict, loss, rest)."
        )


def _detail(used: Sequence[Cut], missed: Sequence[str]) -> str:
    """The note of the report."""
    found = f"outputs found at {', '.join(dict.fromkeys(cut.function for cut in used))}"
    return f"{found}; not followed: {', '.join(dict.fromkeys(missed))}" if missed else found


def _may_be_square(node: Any) -> bool:
    """Whether a node is an absolute value or a norm, whose square has a wrong second derivative at zero."""
    return bool(node.name().startswith(("Abs", "LinalgVectorNorm")))


class _Joined(torch.autograd.Function):
    """The loss, with a path of slope s to each output."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, slopes: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.slopes = slopes
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return g, None, *(g.to(s) * s for s in ctx.slopes)


def _connected(
    loss: Tensor, outputs: Sequence[Tensor], slopes: Sequence[Tensor], bent: Sequence[Tensor] | None
) -> Tensor:
    """The value of the loss with the gradient and the whole graph of the training loss, with a bend in the outputs."""
    whole: Tensor = _Joined.apply(loss, list(slopes), *outputs)  # type: ignore[no-untyped-call]
    for z, where in zip(outputs, bent or [], strict=False):
        change = (z - z.detach()).masked_fill(~z.detach().isfinite(), 0.0)  # masked logits are −∞
        whole = whole + (change.square() * where).sum().to(whole)
    return whole


def _place(number: int) -> str:
    """The name of an output among the names of weights, which have no space."""
    return f"output {number}"
