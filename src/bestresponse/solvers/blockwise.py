"""Block-diagonal systems: each block has its own solve."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _tree
from .._tree import Tree
from .base import Solver
from .lockstep import in_lockstep
from .system import Preconditioner, Product, Report, Solution, Status


@dataclass(frozen=True, eq=False)
class Blockwise:
    """A solve of its own for each block of a block-diagonal A, with its own coefficients, start and memory.

    The names of the weights begin with that of their block: ``fold0.weight``. The solves advance side by side, and
    one product with A answers all of them.

    Args:
        solver: the solver of each block.
    """

    solver: Solver

    def solve(
        self,
        A: Product,
        b: Tree,
        *,
        start: Tree | None = None,
        memory: Mapping[str, Any] | None = None,
        diagonal: Tree | None = None,
        preconditioner: Preconditioner | None = None,
    ) -> Solution:
        """Solve A x = b, as `Solver.solve` does; the report has the worst of each number."""
        blocks, known = _tree.divided(b), memory or {}
        starts = {} if start is None else _tree.divided(start)
        diagonals = {} if diagonal is None else _tree.divided(diagonal)

        def solved(name: str) -> Callable[[Product], Solution]:
            return functools.partial(
                self.solver.solve,
                b=blocks[name],
                start=starts.get(name),
                memory=known.get(name),
                diagonal=diagonals.get(name),
                preconditioner=preconditioner,
            )

        def together(vectors: dict[str, Tree]) -> dict[str, Tree]:
            every = {n: vectors[n] if n in vectors else _tree.zeros_like(x) for n, x in blocks.items()}
            products = _tree.divided(A(_tree.joined(every)))
            return {name: products[name] for name in vectors}

        solutions = in_lockstep({name: solved(name) for name in blocks}, together)
        residuals = {n: s.residual for n, s in solutions.items() if s.residual is not None}
        return Solution(
            _tree.joined({n: s.x for n, s in solutions.items()}),
            worst_of([s.report for s in solutions.values()]),
            {n: s.memory for n, s in solutions.items()},
            _tree.joined(residuals) if len(residuals) == len(solutions) else None,
            _largest(s.stretch for s in solutions.values()),
        )


def worst_of(reports: Sequence[Report]) -> Report:
    """The worst of each number of several reports: the last status, the most products, the largest residual."""
    order = list(Status)
    met = [r.curvature for r in reports if r.curvature is not None]
    return Report(
        status=max((r.status for r in reports), key=order.index),
        products=max(r.products for r in reports),
        steps=max(r.steps for r in reports),
        residual=_largest(r.residual for r in reports),
        warm=all(r.warm for r in reports),
        scale=_largest(r.scale for r in reports),
        damping=_largest(r.damping for r in reports),
        curvature=(min(low for low, _ in met), max(high for _, high in met)) if met else None,
        hypergradient_error=_largest(r.hypergradient_error for r in reports),
        damping_effect=_largest(r.damping_effect for r in reports),
        detail="; ".join(dict.fromkeys(r.detail for r in reports if r.detail)),
    )


def _largest(values: Iterable[float | None]) -> float | None:
    """The largest of the values that are known."""
    return max((x for x in values if x is not None), default=None)
