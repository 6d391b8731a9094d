"""The sums that influence functions take over the training batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed import Group
from ..methods.base import combine
from ..methods.reach import refuse_unreached
from ..problem import Problem
from ..solvers import Solution
from .solves import warn_of_missing


@dataclass(frozen=True)
class Query:
    """The loss of a query, its direct part, and the solution of its linear system."""

    loss: float
    direct: dict[str, Tensor | None]
    solution: Solution


class Sums:
    """The sums over batches of the mixed products, for each query and hyperparameter.

    Attributes:
        whole, examples: the sum of what the batches count by, and of their lengths.
        reached: the identities of the leaves that the training losses depend on.
    """

    def __init__(self, problem: Problem, queries: int) -> None:
        self.whole, self.examples, self.reached = 0.0, 0.0, set[int]()
        self._problem = problem
        self._total = {
            n: torch.zeros(queries, *p.shape, dtype=p.dtype, device=p.device)
            for n, p in problem.hyperparameters.items()
        }
        self._seen: dict[str, Tensor | None] = {}

    def subtract(self, q: int, products: dict[str, Tensor | None], share: float) -> None:
        """Subtract the products of a batch with the solution of query ``q``."""
        for name, product in products.items():
            if product is None:
                continue
            own = self._total[name][q]
            if not product.is_sparse:
                self._seen[name] = None
                own.sub_(product, alpha=share)
                continue
            product = product.coalesce()  # torch adds a sparse tensor to a row of a matrix at wrong places
            rows = product.indices()[0]
            own.index_add_(0, rows, product.values(), alpha=-share)
            seen = self._seen.setdefault(name, torch.zeros(len(own), dtype=torch.bool, device=own.device))
            if seen is not None:
                seen[rows] = True

    def join(self, group: Group) -> None:
        """Add the sums of all ranks of a group."""
        if not group.averages:
            return
        tuned = self._problem.hyperparameters
        names = [n for n in self._total if id(tuned[n]) not in group.own]
        means = group.mean(lambda: [self._total[n] for n in names], [self._total[n] for n in names])
        self._total |= {n: group.size * x for n, x in zip(names, means, strict=True) if x is not None}
        numbers = group.mean_of({"whole": self.whole, "examples": self.examples})
        self.whole, self.examples = (group.size * numbers[n] for n in ("whole", "examples"))
        self.reached = group.reached(self._problem.live(), self.reached)
        found = group.gather(self._seen)
        for name in {n: None for seen in found for n in seen if n in names}:
            masks = [seen[name] for seen in found if name in seen]
            dense = any(mask is None for mask in masks)
            self._seen[name] = None if dense else torch.stack([m for m in masks if m is not None]).any(0)

    def scores(self, queries: Sequence[Query], size: float | None) -> dict[str, Tensor]:
        """The derivatives of the losses of all queries, with their direct parts."""
        whole = self.whole if size is None else size
        refuse_unreached(self._problem, queries[0].direct, self.reached)
        for name, seen in self._seen.items():
            if seen is not None:
                warn_of_missing(name, seen)
        for q, query in enumerate(queries):
            own = {n: x[q] / whole if n in self._seen else None for n, x in self._total.items()}
            for name, x in combine(self._problem, query.loss, query.direct, own).total.items():
                self._total[name][q] = x
        return self._total
