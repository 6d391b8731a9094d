"""Kronecker factors of the Gauss-Newton matrix, layer by layer."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .. import _tree
from .._tree import Tree
from ..batches import weighted
from ..distributed import Group
from ..errors import named, require, require_integer, require_number
from ..hyperparameters.protocol import diagonal_of, knows_its_curvature
from ..passes import graph
from ..problem import Passes, Problem
from ..solvers.system import Preconditioner, Product
from .base import Curvature, Linearisation
from .kronecker import Layer, supported
from .outputs import root_columns, with_graph
from .split_loss import OutputLoss, Predict, Rest, Split, SplitLinearisation, check_parts

Calls = dict[nn.Module, list["Call"]]


@dataclass(frozen=True, eq=False)
class KFAC(Curvature):
    """A = blockdiag_l(A_l ⊗ G_l) + ∂²rest/∂w²: Kronecker factors of the Gauss-Newton matrix, one block for each layer.

        A_l = (1/M) Σ_m a_m a_mᵀ,   G_l = Σ_m g_m g_mᵀ,   g = (∂outputs/∂s_l)ᵀ S,   S Sᵀ = ∂²loss/∂outputs²

    a_m are the inputs of the layer with a one for its bias, s_m = W a_m its outputs, and M counts the examples, and the
    places in a sequence or image that share the layer; G_l also sums over the columns of S. Linear,
    convolutional and embedding layers have factors. Other weights (norms, recurrent cells, weights that several layers
    or functions use, or with more than 4,096 inputs or outputs) get an unbiased estimate of the Gauss-Newton
    diagonal, and the report names them. The Hessian of ``rest`` is exact, as in `GaussNewton`; the mixed term is
    that of the whole training loss.

    It equals `GaussNewton` for one linear layer, under squared error or for one example. Otherwise it is an
    approximation, most useful as a preconditioner of any curvature, ``ConjugateGradient(preconditioner=KFAC(...))``:
    then the answer does not depend on it. It costs a forward pass, a backward pass for each column of S, and
    the eigenvalues of each factor, which `Report.products` does not count.

    Args:
        predict: as in `GaussNewton`. For a preconditioner the split is not compared with train_loss.
        loss: as in `GaussNewton`. It is convex in the outputs and is a mean over the examples, the first dimension of
            the outputs: no term couples examples.
        rest: as in `GaussNewton`. A preconditioner uses only its known diagonal.
        samples: the number of random columns of S; None takes all of them, as many as an example has outputs.
        steady: the damping of a preconditioner, as a share σ ≥ 0 of the largest eigenvalue λ_max. It covers directions
            whose curvature the factors miss. If the curvature of the system is the same KFAC, nothing is missed, and
            ``steady=0`` is best: where the diagonal of ``rest`` is known, the preconditioner is nearly the inverse.

    Raises:
        EvaluationError: the loss couples examples, or is not convex in the outputs; as a curvature, loss(predict)
            + rest differs from train_loss.

    Reference: Martens and Grosse (2015); Grosse and Martens (2016); Eschenhagen et al. (2023), "expand".
    """

    predict: Predict
    loss: OutputLoss
    rest: Rest | nn.Module | None = None
    samples: int | None = None
    steady: float = 0.1

    def __post_init__(self) -> None:
        check_parts(self)
        if self.samples is not None:
            require_integer("KFAC.samples", self.samples, 1)
        require_number("KFAC.steady", self.steady)
        require(0.0 <= self.steady < math.inf, "KFAC.steady", "≥ 0 and finite", self.steady)

    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        return _Kronecker(self, passes, batch)

    def make_preconditioner(self, passes: Passes, batch: Any) -> Preconditioner:
        """The map r ↦ (A + (δ + σ λ_max) I)⁻¹ r at any damping δ, by the eigenvalues of the factors.

        Each layer uses the mean of the diagonal of ``rest``, and λ_max is the largest eigenvalue of all blocks. For
        several `Batches` the factors are the means.
        """
        problem, group = passes.problem, passes.problem.group
        total = group.together(lambda: self._factors(passes, batch))
        if group.averages:
            total.average(group, batch)
        with torch.no_grad():
            rest = diagonal_of(self.rest, problem.model) if knows_its_curvature(self.rest) else {}
            return _Inverse(total, rest, self.steady)

    def _factors(self, passes: Passes, batch: Any) -> "Factors":
        problem = passes.problem
        total: Factors | None = None
        for number, (piece, weight) in enumerate(weighted(batch)):
            with passes.numbered(number), passes.unmoved("KFAC.predict", batch), _captured(problem) as calls:
                passes.replay()
                outputs = self.predict(problem.model, problem.hyper, piece)
            factors = Factors(problem, calls, self, outputs, with_graph(outputs, "KFAC"), piece)
            total = factors.scaled(weight) if total is None else total.plus(factors.scaled(weight))
        assert total is not None
        return total


@dataclass(frozen=True)
class Call:
    """One call of a layer: its input, the input's version then, and the place of its output in the graph."""

    x: Tensor
    version: int
    edge: GradientEdge


@contextmanager
def _captured(problem: Problem) -> Iterator[Calls]:
    """Record the calls of the layers that have factors, while predict runs."""
    names = {id(w): n for n, w in problem.weights.items()}
    calls: Calls = {}

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        # Other tensors may have replaced the weights.
        ours = id(module._parameters["weight"]) in names
        if not ours or not isinstance(output, Tensor) or not output.requires_grad:
            return output
        x = args[0] if args else kwargs["input"]
        # An activation may overwrite the output in place. The output of a linear layer may be a view, whose node
        # in the graph then changes: the copy keeps its own node.
        output = output.clone()
        version = 0 if x.is_inference() else x._version
        calls.setdefault(module, []).append(Call(x.detach(), version, get_gradient_edge(output)))
        return output

    with ExitStack() as stack:
        for module in problem.model.modules():
            if supported(module) and id(module._parameters["weight"]) in names:
                # The first of the module's hooks, so that it sees what the layer itself makes.
                handle = module.register_forward_hook(record, with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
        yield calls


class Factors:
    """The Kronecker factors of each layer, and the diagonal for weights without factors.

    Attributes:
        layers: by the name of the weight.
        diagonal: by weight.
    """

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
        # Other outputs are hyperparameters that predict passes to the loss.
        wanted = [bool(graph.leaves(x) & names.keys()) for x in moving]
        columns = root_columns(curvature.loss, curvature.samples, outputs, moving, wanted, batch)
        moving = list(compress(moving, wanted))
        uses = graph.uses(moving)
        made = _alone(calls, uses, set(graph.nodes(moving)))
        found = {m: Layer(m, names, uses, [call.x for call in of_layer]) for m, of_layer in made.items()}
        self.layers = {layer.weight: layer for layer in found.values()}
        covered = {name for layer in self.layers.values() for name in layer.names}
        others = {n: w for n, w in problem.weights.items() if n not in covered and id(w) in uses}
        self.diagonal: Tree = _tree.zeros_like(others)
        edges = [call.edge for of_layer in made.values() for call in of_layer]
        inputs: list[Any] = [*edges, *others.values()]
        for u in columns if inputs else ():
            slopes = torch.autograd.grad(moving, inputs, u, retain_graph=True, allow_unused=True)
            following = iter(slopes)
            for module, of_layer in made.items():
                found[module].add_slopes([next(following) for _ in of_layer])
            for name, slope in zip(others, following, strict=True):
                if slope is not None:
                    self.diagonal[name] += slope.square()

    def scaled(self, weight: float) -> "Factors":
        """These factors, with a weight."""
        for layer in self.layers.values():
            layer.scale_(weight)
        self.diagonal = {n: weight * d for n, d in self.diagonal.items()}
        return self

    def plus(self, other: "Factors") -> "Factors":
        """These factors and those of another batch, which may have run other layers."""
        for name, one in other.layers.items():
            if name in self.layers:
                self.layers[name].add_(one)
            else:
                self.layers[name] = one
        for name, d in other.diagonal.items():
            self.diagonal[name] = d + self.diagonal[name] if name in self.diagonal else d
        return self

    def average(self, group: Group, batch: Any) -> None:
        """Take the means over the ranks of a group; all of them must have run the same layers."""
        group.require_same([list(self.layers), list(self.diagonal)], "weights with Kronecker factors")
        factors = [x for layer in self.layers.values() for x in (layer.a, layer.g)]
        tensors = [*factors, *self.diagonal.values()]
        means = iter(x for x in group.mean(lambda: tensors, tensors, batch) if x is not None)
        for layer in self.layers.values():
            layer.a, layer.g = next(means), next(means)
        self.diagonal = {n: next(means) for n in self.diagonal}

    def product(self, v: Tree) -> Tree:
        """C v."""
        total = {n: self.diagonal[n] * x if n in self.diagonal else torch.zeros_like(x) for n, x in v.items()}
        for layer in self.layers.values():
            total.update(layer.product(v))
        return total

    @property
    def detail(self) -> str:
        """Which weights have no factors."""
        return f"KFAC by its diagonal: {named(self.diagonal)}" if self.diagonal else ""


class _Inverse(Preconditioner):
    """The inverse of the factors, the diagonal of the rest and the damping."""

    def __init__(self, factors: Factors, rest: Tree, steady: float) -> None:
        self.detail = factors.detail
        self._diagonal, self._rest = factors.diagonal, rest
        self._spectra = [layer.spectrum(rest) for layer in factors.layers.values()]
        tops = [top for top, _ in self._spectra] or [
            float(d.max()) for d in self._diagonal.values() if d.numel()
        ]
        top = max(tops, default=0.0)
        self._steady = max(steady, 1e-12) * top or 1.0  # a null space of the factors must not divide by zero

    def at(self, damping: float) -> Product:
        shift = damping + self._steady

        def apply(r: Tree) -> Tree:
            z = {}
            for name, x in r.items():
                known = [tree[name] for tree in (self._diagonal, self._rest) if name in tree]
                z[name] = x / (sum(known) + shift)
            for _, spectrum in self._spectra:
                z.update(spectrum(r, shift))
            return z

        return apply


def _alone(calls: Calls, uses: Counter[int], nodes: set[Any]) -> Calls:
    """The calls that reach the outputs, of layers whose weight nothing else uses and whose inputs stayed as they were.

    Under autocast several layers may use one copy of a weight, and an input may be changed in place.
    """
    reached = {m: [c for c in made if c.edge.node in nodes] for m, made in calls.items()}
    owners = Counter(id(m.weight) for m, made in reached.items() if made)
    return {
        m: made
        for m, made in reached.items()
        if made
        and owners[id(m.weight)] == 1
        and uses[id(m.weight)] <= len(made)
        and all(c.x.is_inference() or c.x._version == c.version for c in made)
    }


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
        self.detail = "; ".join(filter(None, (self.detail, self._factors.detail)))

    def average(self, group: Group, batch: Any) -> None:
        self._factors.average(group, batch)

    def outer(self, v: Tree) -> Tree:
        return self._factors.product(v)
