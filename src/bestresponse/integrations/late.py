"""A `Tuning` that begins when a trainer has made its optimiser of the weights."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import ArgumentTypeError
from ..methods import Method
from ..problem import Problem
from ..runs.requirements import check_hyper_optimizer, check_weight_optimizer
from ..runs.summary import flat_numbers
from ..runs.weight_steps import WeightSteps
from ..tuner import Tuner
from .tuning import Context, Tuning


class LateTuning:
    """What the callbacks of all trainers share: a `Tuning` that is made when training begins.

    Args:
        problem: the two losses.
        hyper_optimizer: a torch optimiser of the hyperparameters, which the trainer does not know.
        val_batches: a loader or a list of validation batches, taken in turn.
        method: the hypergradient; None means ``Implicit()``.
        settings: other arguments of `Tuner`: weight_steps, warmup_steps, hyper_scheduler, policy, seed, callbacks,
            watch.
    """

    tuning: Tuning | None = None

    def __init__(
        self,
        problem: Problem,
        hyper_optimizer: Optimizer,
        val_batches: Iterable[Any],
        method: Method | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if not isinstance(problem, Problem):
            raise ArgumentTypeError(f"{type(self).__name__} needs a Problem; got {type(problem).__name__}.")
        check_hyper_optimizer(problem, hyper_optimizer)
        self.problem, self.hyper_optimizer, self.val_batches = problem, hyper_optimizer, val_batches
        self.method, self.settings = method, settings
        self._saved: Mapping[str, Any] | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """The row of each hyper-step."""
        return [] if self.tuning is None else self.tuning.tuner.history

    def begin(
        self, weight_optimizer: Optimizer, steps: int | None, context: Context, place: Callable[[Any], Any]
    ) -> Tuning:
        """Begin, or go on after an earlier training, with the optimiser that the trainer has made."""
        _follow_the_weights(self.problem)
        if self.tuning is None:
            tuner = Tuner(self.problem, weight_optimizer, self.hyper_optimizer, self.method, **self.settings)
            self.tuning = Tuning(tuner, self.val_batches)
        tuning = self.tuning
        check_weight_optimizer(self.problem, weight_optimizer)
        tuning.tuner.weight_optimizer = weight_optimizer
        tuning.context, tuning.place = context, place
        self.weight_steps = WeightSteps(self.problem, weight_optimizer)
        tuning.expect(steps)
        if self._saved is not None:
            tuning.load_state_dict(self._saved)
            self._saved = None
        return tuning.__enter__()

    def end(self) -> None:
        """End, also after an error."""
        if self.tuning is not None:
            self.tuning.__exit__()

    def steps_in_orthants(self) -> AbstractContextManager[None]:
        """A context for the optimiser's step, in which weights stop at zero under an ℓ1 penalty."""
        return self.weight_steps.in_orthants()

    def state_dict(self) -> dict[str, Any]:
        """The state of the tuning, for the trainer's checkpoint."""
        if self.tuning is None:
            return dict(self._saved or {})
        return self.tuning.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a `state_dict` until training begins."""
        self._saved = state or None


@torch.no_grad()
def _follow_the_weights(problem: Problem) -> None:
    """Move hyperparameters that are still on the CPU to the device of the weights, in place."""
    device = next(iter(problem.weights.values())).device
    here = {p.device.type for p in problem.hyperparameters.values()}
    if here == {"cpu"} and device.type != "cpu":
        problem.hyper.to(device)


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of the history, under ``hyper/`` names, for a trainer's loggers."""
    return {f"hyper/{name}": x for name, x in flat_numbers(row).items() if not name.endswith("_step")}
