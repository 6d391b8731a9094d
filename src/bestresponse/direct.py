"""The direct part of a hypergradient, by itself."""

from dataclasses import dataclass
from typing import Any

from . import _graph
from .claims import Value
from .implicit import Method, combine, refuse_unreached, validation_gradient
from .passes import Passes
from .result import Hypergradient
from .verification import Claim


@dataclass(frozen=True, eq=False)
class Direct(Method):
    """∂L_V/∂λ alone: for validation losses that read the hyperparameters themselves.

    It is what remains where the weights do not respond, or are computed from λ inside the loss, as
    by a hypernetwork.
    """

    twice = False

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        problem = passes.problem
        val_loss, _, direct = validation_gradient(passes, val_batch)
        if any(x is None for x in direct.values()):
            refuse_unreached(problem, direct, _graph.leaves(passes.train_loss(train_batch)))
        return combine(problem, val_loss, direct, {})

    def claim(self) -> Claim:
        return Value(
            type(self),
            "",
            lambda passes, train, val: validation_gradient(passes, val)[2],
            (lambda passes, train, val: float(passes.val_loss(val).detach()),),
            False,
        )
