"""Two halves of the validation batch: whether they ask for the same step of the hyperparameters."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .. import _tree
from ..batches import halves_of
from ..curvatures import Curvature
from ..errors import ArgumentTypeError
from ..memory import MethodState
from ..problem import Passes, Problem
from ..solvers import Report
from ..solvers.blockwise import worst_of
from ..verification.base import Claim
from .base import Method, require_method
from .hypergradient import Hypergradient
from .implicit import Implicit


@dataclass(frozen=True, eq=False)
class Halves(Method):
    """Any method on two halves of the validation batch: the mean of both hypergradients, and their agreement.

        h = c₁ h₁ + c₂ h₂,   agreement = ⟨h₁, h₂⟩ / (‖h₁‖ ‖h₂‖)

    The halves are every second example (or every second one of several `Batches`), with the shares c. Each half has its
    own warm start, and both use the same training batch and dropout masks. An agreement near zero shows that a step of
    the hyperparameters is mostly noise of the validation examples. It does not show whether the hyperparameters
    overfit the validation data, since they were tuned on both halves. The cost is that of two hypergradients.

    Args:
        method: the method for each half.

    Raises:
        ArgumentTypeError: ``method`` is not a method, or is itself a `Halves`.
    """

    method: Method = field(default_factory=Implicit)
    # A problem keeps the state of a method under its object, so each half has an object.
    _second: Method = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_method(self.method)
        if isinstance(self.method, Halves):
            raise ArgumentTypeError(
                f"Halves.method must be a method for each half; got {self.method!r}. Use it alone."
            )
        object.__setattr__(self, "_second", copy.copy(self.method))

    @property
    def twice(self) -> bool:
        return self.method.twice

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        (half, c), (other_half, _) = passes.problem.group.together(lambda: halves_of(val_batch))
        first = passes.problem.group.share(half, other_half, c)
        second = 1.0 - first
        one = self.method.differentiate(passes, train_batch, half)
        chosen, spent = self._chosen(passes.problem), one.solve.products if one.solve else 0
        other = self._second.differentiate(passes, train_batch, other_half)
        if self._chosen(passes.problem) != chosen:  # the second half's solve chose another curvature
            passes.problem.remember(self.method, MethodState())
            one = self.method.differentiate(passes, train_batch, half)
            assert one.solve is not None
            one = replace(one, solve=replace(one.solve, products=one.solve.products + spent))
        size = one.norm * other.norm
        total, direct, indirect = (
            _tree.add(_tree.scale(a, first), b, second)
            for a, b in ((one.total, other.total), (one.direct, other.direct), (one.indirect, other.indirect))
        )
        return replace(
            one,
            total=total,
            direct=direct,
            indirect=indirect,
            val_loss=first * one.val_loss + second * other.val_loss,
            solve=_both(one.solve, other.solve),
            agreement=_tree.dot(one.total, other.total) / size if size > 0.0 else math.nan,
        )

    def _chosen(self, problem: Problem) -> list[Curvature]:
        """The curvatures in use."""
        parts = self.method.parts_that_remember().values()
        return [part.now(problem) for part in parts if isinstance(part, Curvature)]

    def parts_that_remember(self) -> Mapping[str, object]:
        shared = self.method.parts_that_remember()
        return {"first half": self.method, "second half": self._second, **shared}

    def needing_whole(self) -> object:
        return self.method.needing_whole()

    def claim(self) -> Claim | None:
        return self.method.claim()


def _both(one: Report | None, other: Report | None) -> Report | None:
    """The worst of each number of two reports, with the products and steps of both."""
    if one is None or other is None:
        return one or other
    return replace(
        worst_of([one, other]), products=one.products + other.products, steps=one.steps + other.steps
    )
