"""A `Tuning` that begins when a trainer has made its optimiser of the weights."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import ArgumentTypeError, BestResponseWarning, named
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
        known = inspect.signature(Tuner).parameters.keys()
        if unknown := sorted(settings.keys() - known):
            raise ArgumentTypeError(
                f"settings of {type(self).__name__} must be arguments of Tuner, such as weight_steps; got {unknown}."
            )
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
        """Begin, or go on after an earlier training, with the optimiser of the trainer and the steps that are left."""
        _follow_the_weights(self.problem)
        _warn_of_half_precision(self.problem)
        if self.tuning is None:
            tuner = Tuner(self.problem, weight_optimizer, self.hyper_optimizer, self.method, **self.settings)
            self.tuning = Tuning(tuner, self.val_batches)
        tuning = self.tuning
        check_weight_optimizer(self.problem, weight_optimizer)
        tuning.tuner.weight_optimizer = weight_optimizer
        tuning.context, tuning.place = context, place
        self.weight_steps = WeightSteps(self.problem, weight_optimizer)
        if self._saved is not None:
            tuning.load_state_dict(self._saved)
            self._saved = None
        tuning.expect(steps)
        return tuning.__enter__()

    def warn_without_state(self, place: str) -> None:
        """Warn if a checkpoint that training resumes from has no state of the tuning."""
        if self.tuning is None and self._saved is None:
            warnings.warn(
                f"the checkpoint {place!r} was written without {type(self).__name__}: tuning begins anew, with the "
                "present hyperparameters.",
                BestResponseWarning,
                stacklevel=3,
            )

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


def _warn_of_half_precision(problem: Problem) -> None:
    half = [n for n, p in problem.hyperparameters.items() if p.dtype in (torch.float16, torch.bfloat16)]
    if half:
        problem.warn_once(
            "half precision",
            f"hyperparameters should be in float32, since small steps are lost in half precision; got {named(half)} in "
            f"{problem.hyperparameters[half[0]].dtype}. Keep their module outside the module that the trainer "
            'converts, or use mixed precision ("bf16-mixed").',
        )


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of the history, under ``hyper/`` names, for a trainer's loggers."""
    return {f"hyper/{name}": x for name, x in flat_numbers(row).items() if not name.endswith("_step")}
