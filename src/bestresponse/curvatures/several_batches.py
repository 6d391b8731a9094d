"""The linearised training gradient of one batch or of several."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
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

T = TypeVar("T")


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
    """The weighted mean of the linearisations of several batches: all kept, or one at a time, made again for each use.

    One at a time, the last one of a product is the first of the next product.
    """

    def __init__(self, curvature: Curvature, passes: Passes, batches: Batches) -> None:
        self._curvature, self._passes, self._batches = curvature, passes, batches
        self._held: dict[int, Linearisation] = {}
        self._details: dict[str, None] = {}
        found = self._of_each(lambda part: [(part.reached, part.kinks)])
        self.reached = set().union(*(reached for reached, _ in found))
        self.kinks = self._mean_kinks([own for _, own in found])
        self.names = reached_weights(passes.problem, self.reached)

    @property
    def detail(self) -> str:  # type: ignore[override]
        """The notes of all batches, each once."""
        return "; ".join(filter(None, self._details))

    def __call__(self, v: Tree) -> Tree:
        total = _tree.zeros_like(v)
        for number in self._order():
            self._add_product(total, number, self._batches.weights[number], v)
        return total

    def with_mixed(self, v: Tree) -> tuple[Tree, Derivatives | None]:
        total = _tree.zeros_like(v)
        mixed: Derivatives | None = dict.fromkeys(self._passes.problem.hyperparameters)

        def add(part: Linearisation) -> Derivatives | None:
            own = part.covered(v)
            product, found = (None if mixed is None else part.with_mixed(own)) or (part(own), None)
            _add(total, product, weight)
            return found

        for number in self._order():
            weight = self._batches.weights[number]
            found = self._of(number, add)
            if mixed is not None:
                mixed = (
                    None if found is None else {n: graph.plus(x, found[n], weight) for n, x in mixed.items()}
                )
        return total, mixed

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
        total: Derivatives = dict.fromkeys(self._passes.problem.hyperparameters)
        for number in self._order():
            products = self._of(number, lambda part: part.mixed(part.covered(v), last))
            weight = self._batches.weights[number]
            total = {n: graph.plus(sofar, products[n], weight) for n, sofar in total.items()}
        if last:
            self._held = {}
        return total

    def average(self, group: Group, batch: Any) -> None:
        if len(self._batches) == 1:  # of several, the mean of their curvatures is meant
            self._held[0].average(group, batch)

    def outputs(self) -> list[Tensor]:
        return self._of_each(lambda part: part.outputs())

    def pushed(self, v: Tree) -> list[Tensor]:
        return self._of_each(lambda part: part.pushed(part.covered(v)))

    def bends(self, v: Tree) -> Tree:
        # `mixed` drops the parts.
        self._bent = [] if self._batches.recompute else [self._held[i] for i in range(len(self._batches))]
        return self._by_name(lambda part: part.bends(part.covered(v)))

    def slopes(self, t: float) -> Tree:
        return self._by_name(lambda part: part.slopes(t))

    def _mean_kinks(self, found: list[kinks.Kinks]) -> kinks.Kinks:
        """The kinks of the mean loss, whose gradient also has parts of batches without these kinks."""
        weights = self._passes.problem.weights
        names = {n for own in found for n in own.gradient}
        for number, own in enumerate(found):
            if not (missing := sorted(names - own.gradient.keys())):
                continue
            with self._passes.numbered(number):
                loss = self._passes.train_loss(self._batches.batches[number])
            slopes = torch.autograd.grad(loss, [weights[n] for n in missing], allow_unused=True)
            for name, slope in zip(missing, slopes, strict=True):
                own.gradient[name] = torch.zeros_like(weights[name]) if slope is None else _tree.dense(slope)
                own.rates[name] = torch.zeros_like(weights[name])
        return kinks.mean(zip(found, self._batches.weights, strict=True))

    def _by_name(self, tensors: Callable[[Linearisation], Tree]) -> Tree:
        found: Tree = {}
        for number, part in enumerate(self._bent):
            with self._passes.numbered(number):
                found |= {f"{name} of batch {number}": x for name, x in tensors(part).items()}
        return found

    def _of_each(self, run: Callable[[Linearisation], list[T]]) -> list[T]:
        return [x for number in range(len(self._batches)) for x in self._of(number, run)]

    def _add_product(self, total: Tree, number: int, weight: float, v: Tree) -> Tree:
        return _add(total, self._of(number, lambda part: part(part.covered(v))), weight)

    def _order(self) -> list[int]:
        """The numbers of the batches, beginning with one that is held."""
        numbers = list(range(len(self._batches)))
        return numbers[::-1] if self._batches.recompute and numbers[-1] in self._held else numbers

    def _of(self, number: int, run: Callable[[Linearisation], T]) -> T:
        """The result of a function of the linearisation of the batch with this number."""
        with self._passes.numbered(number):
            if number not in self._held:
                if self._batches.recompute:
                    self._held = {}  # before the next one is made
                part = self._curvature.linearise(self._passes, self._batches.batches[number])
                self._details[part.detail] = None
                self._held[number] = part
            return run(self._held[number])


def _add(total: Tree, product: Tree, weight: float) -> Tree:
    """Add a product, which may lack some names, in place."""
    for name, x in product.items():
        total[name].add_(x, alpha=weight)
    return total
