"""The linearised training gradient of the batches of all ranks of a group."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._tree import Tree
from ..distributed import Group
from ..problem import Passes
from .base import Linearisation, reached_weights
from .kinks import Group as KinkedGroup
from .kinks import Kinks


def over_ranks(linearise: Callable[[], Linearisation], passes: Passes, batch: Any) -> Linearisation:
    """The linearisation of one process, or the mean over those of the ranks of the problem's group."""
    if not passes.problem.group.averages:
        return linearise()
    return OverRanks(linearise, passes, batch)


class OverRanks(Linearisation):
    """The mean over the ranks of their linearisations; each product and mixed term is one reduction."""

    def __init__(self, linearise: Callable[[], Linearisation], passes: Passes, batch: Any) -> None:
        problem = passes.problem
        self._group, self._batch, self._hyperparameters = problem.group, batch, problem.hyperparameters
        self._own = self._group.together(linearise)
        self.reached = self._group.reached(problem.live(), self._own.reached)
        self.names = reached_weights(problem, self.reached)
        self._weights = [problem.weights[n] for n in self.names]
        self._own.average(self._group, batch)
        self.kinks = _mean_kinks(self._own.kinks, self._group, batch)

    @property
    def detail(self) -> str:  # type: ignore[override]
        """The note of the system of this rank."""
        return self._own.detail

    def __call__(self, v: Tree) -> Tree:
        return self._mean(self._own, v)

    def in_turn(self, first: int) -> Callable[[Tree], Tree]:
        product = self._own.in_turn(first)
        return lambda v: self._mean(product, v)

    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        def own() -> list[Tensor | None]:
            products = self._own.mixed(self._own.covered(v), last)
            return [products[n] for n in self._hyperparameters]

        found = self._group.mean(own, list(self._hyperparameters.values()), self._batch)
        return dict(zip(self._hyperparameters, found, strict=True))

    def _mean(self, product: Callable[[Tree], Tree], v: Tree) -> Tree:
        def own() -> list[Tensor | None]:
            products = product(self._own.covered(v))
            return [products.get(n) for n in self.names]

        found = self._group.mean(own, self._weights, self._batch)
        return {
            n: torch.zeros_like(w) if x is None else x
            for n, w, x in zip(self.names, self._weights, found, strict=True)
        }


def _filled(tensors: list[Tensor | None]) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _mean_kinks(own: Kinks, group: Group, batch: Any) -> Kinks:
    """The kinks of the mean of the losses; all ranks must have the same ones, since weights are the same."""
    parts = [own.gradient, own.rates, *(g.rates for g in own.groups)]
    if not any(group.gather(bool(own.rates))):
        return own
    group.require_same(
        [sorted(part) for part in parts], "kinks of train_loss where weights lie, such as |w| at zero"
    )
    tensors = [part[n] for part in parts for n in sorted(part)]
    means = iter(_filled(group.mean(lambda: tensors, tensors, batch)))
    gradient, rates, *groups = [{n: next(means) for n in sorted(part)} for part in parts]
    return Kinks(
        gradient, rates, [KinkedGroup(g.members, r) for g, r in zip(own.groups, groups, strict=True)]
    )
