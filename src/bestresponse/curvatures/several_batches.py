"""The linearised training gradient of one batch or of several."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..batches import Batches
from ..distributed import Group
from ..passes import graph
from ..problem import Passes
from . import kinks
from .base import Curvature, Linearisation, reached_weights, warn_of_unreached
from .by_products import Derivatives
from .held import without_held
from .over_ranks import over_ranks


def linear_system(curvature: Curvature, passes: Passes, batch: Any) -> Linearisation:
    """The linearised training gradient of one batch, or of the mean over `Batches`.

    With several processes it is the mean over their batches. A warning names the weights that it does not reach, once.
    Weights that a kink holds are left out of its products.
    """
    system = over_ranks(lambda: linearised(curvature, passes, batch), passes, batch)
    warn_of_unreached(passes.problem, system.names)
    return without_held(system, passes.problem)


def linearised(curvature: Curvature, passes: Passes, batch: Any) -> Linearisation:
    """The linearisation of one batch, or the mean over `Batches`."""
    if isinstance(batch, Batches):
        return MeanLinearisation(curvature, passes, batch)
    return curvature.linearise(passes, batch)


class MeanLinearisation(Linearisation):
    """The weighted mean of the linearisations of several batches: all kept, or one at a time, rebuilt for each use."""

    def __init__(self, curvature: Curvature, passes: Passes, batches: Batches) -> None:
        self._curvature, self._passes, self._batches = curvature, passes, batches
        self._parts: list[Linearisation] = []
        self.reached = set()
        found = []
        for number, batch in enumerate(batches):
            with passes.numbered(number):
                if batches.recompute:
                    loss = passes.train_loss(batch)
                    self.reached |= graph.leaves(loss)
                    found.append(kinks.of_loss(passes.problem, loss))
                else:
                    self._parts.append(curvature.linearise(passes, batch))
                    self.reached |= self._parts[-1].reached
                    found.append(self._parts[-1].kinks)
        self.kinks = kinks.mean(zip(found, batches.weights, strict=True))
        self.names = reached_weights(passes.problem, self.reached)
        self._details = dict.fromkeys(part.detail for part in self._parts)

    @property
    def detail(self) -> str:  # type: ignore[override]
        """The notes of all batches, each once."""
        return "; ".join(filter(None, self._details))

    def __call__(self, v: Tree) -> Tree:
        total = _tree.zeros_like(v)
        for number, weight in enumerate(self._batches.weights):
            self._add_product(total, number, weight, v)
        return total

    def with_mixed(self, v: Tree) -> tuple[Tree, Derivatives | None]:
        total, shared = _tree.zeros_like(v), True
        mixed: Derivatives = dict.fromkeys(self._passes.problem.hyperparameters)
        for number, weight in enumerate(self._batches.weights):
            with self._part(number) as part:
                own = {name: v[name] for name in part.names}
                both = part.with_mixed(own) if shared else None
                product, found = (part(own), None) if both is None else both
            _add(total, product, weight)
            shared = found is not None
            mixed = {n: graph.plus(x, found[n], weight) for n, x in mixed.items()} if found else {}
        return total, mixed if shared else None

    def in_turn(self, first: int) -> Callable[[Tree], Tree]:
        count = first

        def product(v: Tree) -> Tree:
            nonlocal count
            number = count % len(self._batches)
            count += 1
            # Over a round the mean of n c_i A_i is Σ c_i A_i.
            weight = len(self._batches) * self._batches.weights[number]
            return self._add_product(_tree.zeros_like(v), number, weight, v)

        return product

    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        total: dict[str, Tensor | None] = dict.fromkeys(self._passes.problem.hyperparameters)
        for number, weight in enumerate(self._batches.weights):
            with self._part(number) as part:
                products = part.mixed({name: v[name] for name in part.names}, last or self._batches.recompute)
            total = {n: graph.plus(sofar, products[n], weight) for n, sofar in total.items()}
        if last:
            self._parts = []
        return total

    def average(self, group: Group, batch: Any) -> None:
        if len(self._parts) == 1:  # of several, the mean of their curvatures is meant
            self._parts[0].average(group, batch)

    def outputs(self) -> list[Tensor]:
        return self._of_each(lambda part: part.outputs())

    def pushed(self, v: Tree) -> list[Tensor]:
        return self._of_each(lambda part: part.pushed({name: v[name] for name in part.names}))

    def bends(self, v: Tree) -> Tree:
        self._bent = list(self._parts)  # `mixed` drops the parts
        return self._named(lambda part: part.bends({name: v[name] for name in part.names}))

    def slopes(self, t: float) -> Tree:
        return self._named(lambda part: part.slopes(t))

    def _named(self, tensors: Callable[[Linearisation], Tree]) -> Tree:
        found: Tree = {}
        for number, part in enumerate(self._bent):
            with self._passes.numbered(number):
                found |= {f"{name} of batch {number}": x for name, x in tensors(part).items()}
        return found

    def _of_each(self, tensors: Callable[[Linearisation], list[Tensor]]) -> list[Tensor]:
        found: list[Tensor] = []
        for number in range(len(self._batches)):
            with self._part(number) as part:
                found += tensors(part)
        return found

    def _add_product(self, total: Tree, number: int, weight: float, v: Tree) -> Tree:
        with self._part(number) as part:
            product = part({name: v[name] for name in part.names})
        return _add(total, product, weight)

    @contextmanager
    def _part(self, number: int) -> Iterator[Linearisation]:
        with self._passes.numbered(number):
            if self._parts:
                yield self._parts[number]
            else:
                part = self._curvature.linearise(self._passes, self._batches.batches[number])
                self._details[part.detail] = None
                yield part


def _add(total: Tree, product: Tree, weight: float) -> Tree:
    """Add a product, which may lack some names, in place."""
    for name, x in product.items():
        total[name].add_(x, alpha=weight)
    return total
