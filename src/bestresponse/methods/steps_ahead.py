"""The common part of differentiation through steps ahead in reverse and in forward mode."""

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .._tree import Tree
from ..errors import (
    ArgumentTypeError,
    DivergedError,
    NotFiniteError,
    require,
    require_integer,
    require_number,
)
from ..memory import settings_of
from ..passes.passes import Buffers
from ..passes.running_statistics import Reading
from ..problem import Passes
from ..verification.base import Claim
from ..verification.claims import Value
from .base import Method
from .rules import Rule, Setting
from .trajectory import Point, Trajectory
from .validation import validation_gradient

# The steps that a verification repeats.
_VERIFIED = 2


@dataclass(frozen=True, eq=False)
class ThroughSteps(Method):
    """The common part of reverse and forward mode: the steps ahead."""

    steps: int
    step_size: Setting

    def _check(self, rule: object, fresh_batches: object) -> None:
        name = type(self).__name__
        require_integer(f"{name}.steps", self.steps, 1)
        if not isinstance(fresh_batches, bool):
            raise ArgumentTypeError(f"{name}.fresh_batches must be True or False; got {fresh_batches!r}.")
        if isinstance(self.step_size, Tensor):
            raise ArgumentTypeError(
                f"{name}.step_size must be a number, or a function of hyper that returns a tensor, as in lambda hyper: "
                "hyper.log_rate.exp(); got a tensor."
            )
        if not callable(self.step_size):
            require_number(f"{name}.step_size", self.step_size)
            require(0 < self.step_size < math.inf, f"{name}.step_size", "positive and finite", self.step_size)
        if not isinstance(rule, Rule):
            raise ArgumentTypeError(
                f"{name}.rule must be an update rule, such as rules.Adam(); got {rule!r}. rules.like(optimizer) "
                "makes the rule of a torch optimiser."
            )


def at_the_end(
    passes: Passes, val_batch: Any, end: Point, read: Reading
) -> tuple[float, Tree, dict[str, Tensor | None]]:
    """The validation loss and its gradients at the last point, with the buffers that the steps left."""
    passes.carry(end.buffers)
    try:
        return validation_gradient(passes, val_batch, read, end.as_leaves().weights)
    except NotFiniteError as error:
        raise DivergedError(
            f"the steps ahead must stay finite; got, at their end: {error} Use a smaller step_size, or fewer steps."
        ) from error


def claim_of(method: ThroughSteps, rule: Rule, short: ThroughSteps) -> Claim:
    """L_V(w_K(λ), λ), after only few steps if their settings are numbers."""
    settings = (method.step_size, *rule.settings().values())
    if not any(map(callable, settings)):
        short = replace(short, steps=min(method.steps, _VERIFIED))

    kept: Buffers = {}

    def end(passes: Passes, train: Any) -> Point:
        path = Trajectory(rule, short.step_size, short.steps, passes, train, False)
        return path.run(path.start(), 0, short.steps)

    def loss(passes: Passes, val: Any, point: Point, buffers: Buffers) -> float:
        passes.carry(buffers)
        try:
            return float(passes.val_loss(val, point.as_leaves().weights).detach())
        finally:
            passes.carry({})

    def total(passes: Passes, train: Any, val: Any) -> dict[str, Tensor]:
        kept.clear()
        kept.update(end(passes, train).buffers)
        try:
            return short.differentiate(passes, train, val).total
        finally:
            passes.carry({})

    def again(passes: Passes, train: Any, val: Any) -> float:
        return loss(passes, val, end(passes, train), kept)

    return Value(type(method), settings_of(method), total, again, True)
