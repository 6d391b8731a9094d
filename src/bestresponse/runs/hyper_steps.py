"""Steps of the hyperparameters along the hypergradient in their ``.grad``."""

from typing import Any

from torch.optim import Optimizer

from ..hyperparameters import Bounded, Shrinking
from ..passes.embedding import clip_gradients
from ..problem import Problem
from .events import add_event
from .summary import Summary
from .weight_steps import FirstSettings


class HyperSteps:
    """A step of the optimiser, then shrinkage, then the bounds of the modules that have them.

    Args:
        problem: the two losses.
        optimizer: the optimiser of the hyperparameters, whose first learning rates are recorded: a scheduler that
            lowers a rate lowers the shrinkage too.
    """

    def __init__(self, problem: Problem, optimizer: Optimizer) -> None:
        self.problem, self._first = problem, FirstSettings(optimizer)
        self.summary = Summary(problem)

    def step(self, optimizer: Optimizer, clip: float | None, row: dict[str, Any]) -> None:
        """Make a step along the hypergradient of a row of the history; ``.grad`` is empty afterwards."""
        if clip is not None and row["hypergradient_norm"] > clip:
            clip_gradients(list(self.problem.hyperparameters.values()), clip)
            add_event(row, "hypergradient clipped", f"its norm was {row['hypergradient_norm']:.4g}")
        optimizer.step()
        modules = list(self.problem.hyper.modules())
        factors = self._factors(optimizer)
        for module in modules:
            if isinstance(module, Shrinking):
                own = [factors[id(p)] for p in module.parameters() if id(p) in factors]
                module.shrink_(max(own, default=1.0))
        for module in modules:
            if isinstance(module, Bounded):
                module.project_()
        optimizer.zero_grad(set_to_none=True)

    def _factors(self, optimizer: Optimizer) -> dict[int, float]:
        """The current learning rate of each hyperparameter, divided by its first one."""
        factors = {}
        for group, first in zip(optimizer.param_groups, self._first.of(optimizer), strict=True):
            # An optimiser without a learning rate, such as one with a line search, has the factor one.
            factor = float(group["lr"]) / float(first["lr"]) if first.get("lr") else 1.0
            factors.update({id(p): factor for p in group["params"]})
        return factors
