"""The linear system without the weights that a kink holds."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from .._tree import Tree
from ..problem import Problem
from .base import Linearisation


def without_held(system: Linearisation, problem: Problem) -> Linearisation:
    """The same system without the weights that its kinks hold, if they hold any."""
    masks = system.kinks.held()
    return WithoutHeld(system, masks, problem) if masks else system


class WithoutHeld(Linearisation):
    """F A F and the mixed term of F v, where F sets the held weights to zero.

    With a right-hand side F b the solution is F (F A F)⁺ F b, the solution of the system of the other weights. The
    layout of vectors stays the same, so a warm start fits even if other weights are held.
    """

    def __init__(self, system: Linearisation, masks: Mapping[str, Tensor], problem: Problem) -> None:
        self._system, self._masks = system, masks
        self.names, self.reached, self.kinks = system.names, system.reached, system.kinks
        number = sum(int(mask.sum()) for mask in masks.values())
        zero = all(bool((problem.weights[n].detach()[mask] == 0).all()) for n, mask in masks.items())
        self._said = (
            f"{number:,} {'weight' if number == 1 else 'weights'} held at {'zero' if zero else 'a kink'}"
        )

    @property
    def detail(self) -> str:  # type: ignore[override]
        """The note of the inner system, and the number of held weights."""
        return "; ".join(filter(None, (self._system.detail, self._said)))

    def responding(self, v: Tree) -> Tree:
        return {n: x.masked_fill(self._masks[n], 0.0) if n in self._masks else x for n, x in v.items()}

    def __call__(self, v: Tree) -> Tree:
        return self._within(self._system, v)

    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        return self._system.mixed(self.responding(v), last)

    def with_mixed(self, v: Tree) -> tuple[Tree, dict[str, Tensor | None] | None] | None:
        both = self._system.with_mixed(self.responding(v))
        return None if both is None else (self.responding(both[0]), both[1])

    def in_turn(self, first: int) -> Callable[[Tree], Tree]:
        return partial(self._within, self._system.in_turn(first))

    def _within(self, product: Callable[[Tree], Tree], v: Tree) -> Tree:
        """F applied to the product with F v."""
        return self.responding(product(self.responding(v)))
