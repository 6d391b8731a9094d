"""The direct part of a hypergradient alone."""

from dataclasses import dataclass, replace
from typing import Any

from ..passes import graph
from ..passes.running_statistics import Reading
from ..problem import Passes
from ..verification.base import Claim
from ..verification.claims import Value
from .base import Method, combine
from .hypergradient import Hypergradient
from .reach import refuse_unreached
from .validation import validation_gradient


@dataclass(frozen=True, eq=False)
class Direct(Method):
    """∂L_V/∂λ alone: for validation losses that read the hyperparameters themselves.

    It is the whole hypergradient if the weights do not respond, or if the loss computes them from λ, as with a
    hypernetwork. It includes the effect of λ on running statistics.
    """

    twice = False

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        problem, read = passes.problem, Reading(passes, train_batch)
        val_loss, _, direct = validation_gradient(passes, val_batch, read, through_weights=False)
        if any(x is None for x in direct.values()):
            group, live = problem.group, problem.live()
            own = group.together(lambda: graph.leaves(passes.train_loss(train_batch)))
            refuse_unreached(problem, direct, group.reached(live, own))
        return replace(combine(problem, val_loss, direct, {}), norms=read.norms)

    def needing_whole(self) -> object:
        return None

    def claim(self) -> Claim:
        return Value(
            type(self),
            "",
            lambda passes, train, val: validation_gradient(passes, val, Reading(passes, train), None, False)[
                2
            ],
            lambda passes, train, val: float(passes.val_loss(val).detach()),
            False,
        )
