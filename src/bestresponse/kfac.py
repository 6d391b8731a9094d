"""Kronecker factors of the Gauss-Newton matrix, layer by layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from . import _graph, _tree
from ._tree import Tree
from .batches import weighted
from .kronecker import Layer, supported
from .linearisation import Curvature, Linearisation
from .outputs import depends, listed, output_root
from .passes import Passes
from .problem import Problem
from .solvers.base import require_integer
from .split_loss import OutputLoss, Predict, Rest, Split, SplitLinearisation, check_parts

# The share of the largest eigenvalue that steadies a preconditioner.
_STEADY = 0.1

Calls = dict[nn.Module, list[tuple[Tensor, GradientEdge]]]


@dataclass(frozen=True, eq=False)
class KFAC(Curvature):
    """A = blockdiag_l(A_l ⊗ G_l) + R: the Gauss-Newton matrix by Kronecker factors, one block for a layer.

        A_l = (1/R) Σ_r a_r a_rᵀ,   G_l = Σ_r g_r g_rᵀ,   g = (∂outputs/∂s_l)ᵀ S,   S Sᵀ = ∂²loss/∂outputs²

    a_r are the inputs of the layer with a one for its bias, s_r = W a_r its outputs, and R counts the rows: examples,
    and the places in a sequence or image that share the layer; G_l sums over the columns of S as well. For linear,
    convolutional and embedding layers; other weights (norms, recurrent cells, weights of more than one layer, or
    that functions use) get an unbiased estimate of the Gauss-Newton diagonal, and the report names them. R is the
    exact Hessian of ``rest``, as in `GaussNewton`; the mixed term is that of the whole training loss.

    It equals `GaussNewton` for one linear layer under squared error, and for one example. Elsewhere it is an
    approximation, and its use is as a preconditioner: ``ConjugateGradient(preconditioner=KFAC(...))`` with any
    curvature.

    Args:
        predict, loss, rest: as in `GaussNewton`; the loss is a sum over the examples, which the first dimension of
            the outputs counts, and convex in them.
        samples: the number of random columns of S, each a backward pass; None takes all of them, as many as
            an example has outputs.

    Raises:
        EvaluationError: loss(predict) + rest differs from train_loss; or the loss couples examples, or is not convex.

    Reference: Martens and Grosse (2015); Grosse and Martens (2016); Eschenhagen et al. (2023), "expand".
    """

    predict: Predict
    loss: OutputLoss
    rest: Rest | nn.Module | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        check_parts(self)
        if self.samples is not None:
            require_integer("KFAC.samples", self.samples, 1)

    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        return _Kronecker(self, passes, batch)

    def inverse(self, passes: Passes, batch: Any) -> Callable[[float], Callable[[Tree], Tree]]:
        """Maps a damping δ to the preconditioner r ↦ (A + (δ + 0.1 λ_max) I)⁻¹ r, by the eigenvalues of the factors.

        A layer's diagonal of ``rest`` is its mean there. The tenth of the largest eigenvalue of all blocks is for
        directions whose curvature the factors miss, which slow conjugate gradient down without it. Of several
        `Batches` the factors are the means.
        """
        problem = passes.problem
        total: Factors | None = None
        for number, (piece, weight) in enumerate(weighted(batch)):
            with passes.numbered(number), _captured(problem) as calls:
                passes.replay()
                outputs = self.predict(problem.model, problem.hyper, piece)
            moving = [x for x in listed(outputs, "KFAC") if depends(x)]
            factors = Factors(problem, calls, self, outputs, moving, piece)
            total = factors.scaled(weight) if total is None else total.plus(factors, weight)
        assert total is not None
        known = getattr(self.rest, "curvature_diagonal", None)
        with torch.no_grad():
            return total.inverse(dict(known(problem.model)) if known is not None else {})


@contextmanager
def _captured(problem: Problem) -> Iterator[Calls]:
    """Record inputs and the places of the outputs of the layers that have factors, while predict runs."""
    weights = {id(w) for w in problem.weights.values()}
    calls: Calls = {}

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return output
        x = args[0] if args else kwargs["input"]
        # An activation may write over the output in place, and that of a linear layer may be a view, whose place in
        # the graph is then another: the copy keeps its own.
        output = output.clone()
        calls.setdefault(module, []).append((x.detach(), get_gradient_edge(output)))
        return output

    with ExitStack() as stack:
        for module in problem.model.modules():
            if supported(module) and id(module.weight) in weights:
                stack.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        yield calls


class Factors:
    """The Kronecker factors of each layer, and the diagonal for the weights without any."""

    def __init__(
        self,
        problem: Problem,
        calls: Calls,
        curvature: KFAC,
        outputs: Any,
        moving: Sequence[Tensor],
        batch: Any,
    ) -> None:
        names = {id(w): n for n, w in problem.weights.items()}
        # Others are hyperparameters that predict hands on to the loss.
        wanted = [bool(_graph.leaves(x) & names.keys()) for x in moving]
        columns = _columns(curvature, outputs, moving, wanted, batch)
        moving = list(compress(moving, wanted))
        uses = _graph.uses(moving)
        modules = [m for m, made in calls.items() if uses[id(m.weight)] <= len(made)]
        self.layers = [Layer(m, names, uses) for m in modules]
        covered = {name for layer in self.layers for name in layer.names}
        self._others = {n: w for n, w in problem.weights.items() if n not in covered and id(w) in uses}
        self.diagonal: Tree = _tree.zeros_like(self._others)
        made = [calls[m] for m in modules]
        for layer, of_layer in zip(self.layers, made, strict=True):
            layer.set_inputs([x for x, _ in of_layer])
        edges = [edge for of_layer in made for _, edge in of_layer]
        inputs: list[Any] = [*edges, *self._others.values()]
        for u in columns if inputs else ():
            slopes = torch.autograd.grad(moving, inputs, u, retain_graph=True, allow_unused=True)
            self._add(slopes, made)

    def _add(self, slopes: Sequence[Tensor | None], made: Sequence[Sequence[Any]]) -> None:
        """Add the outer products of one column."""
        following = iter(slopes)
        for layer, of_layer in zip(self.layers, made, strict=True):
            layer.add_slopes([next(following) for _ in of_layer])
        for name, slope in zip(self._others, following, strict=True):
            if slope is not None:
                self.diagonal[name] += slope.square()

    def scaled(self, weight: float) -> "Factors":
        """These factors, with a weight."""
        for layer in self.layers:
            layer.scale_(weight)
        self.diagonal = {n: weight * d for n, d in self.diagonal.items()}
        return self

    def plus(self, other: "Factors", weight: float) -> "Factors":
        """These factors and those of another batch."""
        for layer, one in zip(self.layers, other.layers, strict=True):
            layer.add_(one, weight)
        self.diagonal = {n: d + weight * other.diagonal[n] for n, d in self.diagonal.items()}
        return self

    def product(self, v: Tree) -> Tree:
        """C v."""
        total = {n: self.diagonal[n] * x if n in self.diagonal else torch.zeros_like(x) for n, x in v.items()}
        for layer in self.layers:
            total.update(layer.product(v))
        return total

    def inverse(self, rest: Tree) -> Callable[[float], Callable[[Tree], Tree]]:
        """Maps a damping to the inverse of C, the diagonal of the rest and that damping."""
        spectra = [layer.spectrum(rest) for layer in self.layers]
        tops = [top for top, _ in spectra] or [float(d.max()) for d in self.diagonal.values() if d.numel()]
        steady = _STEADY * max(tops, default=0.0) or 1.0

        def damped(damping: float) -> Callable[[Tree], Tree]:
            damping += steady

            def apply(r: Tree) -> Tree:
                z = {}
                for name, x in r.items():
                    known = [tree[name] for tree in (self.diagonal, rest) if name in tree]
                    z[name] = x / (sum(known) + damping)
                for _, spectrum in spectra:
                    z.update(spectrum(r, damping))
                return z

            return apply

        return damped


def _columns(
    curvature: KFAC, outputs: Any, moving: Sequence[Tensor], wanted: Sequence[bool], batch: Any
) -> Iterator[list[Tensor]]:
    """Columns of S: one for each output with a random sign for each example, or sums of all with random signs.

    The signs make the square of the sum over the examples an unbiased estimate of the sum of squares.
    """
    size, root = output_root(curvature.loss, outputs, moving, wanted, batch)
    like = next(compress(moving, wanted))
    examples = len(like) if like.ndim else 1
    generator = torch.Generator().manual_seed(0)
    for number in range(curvature.samples or size):
        width = size if curvature.samples else 1
        signs = 2.0 * torch.randint(2, (examples, width), generator=generator) - 1.0
        xi = torch.zeros(examples, size)
        xi[:, slice(None) if curvature.samples else slice(number, number + 1)] = signs
        yield root(xi.to(like.device, like.dtype) / (curvature.samples or 1) ** 0.5)


class _Kronecker(SplitLinearisation):
    """Products with the factors of one batch."""

    def predict(self, curvature: Split, passes: Passes, batch: Any) -> Any:
        assert isinstance(curvature, KFAC)
        self._curvature, self._problem = curvature, passes.problem
        with _captured(passes.problem) as self._calls:
            return super().predict(curvature, passes, batch)

    def prepare(self, loss: OutputLoss, outputs: Any, moving: list[Tensor], batch: Any) -> None:
        self._factors = Factors(self._problem, self._calls, self._curvature, outputs, moving, batch)
        self._calls = {}
        if self._factors.diagonal:
            named = ", ".join(list(self._factors.diagonal)[:5])
            more = len(self._factors.diagonal) - 5
            said = f"by its diagonal: {named}" + (f" and {more} more" if more > 0 else "")
            self.detail = "; ".join(filter(None, (self.detail, said)))

    def outer(self, v: Tree) -> Tree:
        return self._factors.product(v)
