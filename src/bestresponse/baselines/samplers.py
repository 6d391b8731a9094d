"""Optuna's samplers, made so that processes and runs that share a study draw different values."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from .storage import no_warnings_of_our_choices

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from .space import Distribution, Space

Grid = dict[str, list[float]]


def make(chosen: "str | BaseSampler", seed: int, grid: Grid | None) -> "BaseSampler":
    """The sampler of a name, or the one that was given."""
    from optuna import samplers

    if isinstance(chosen, samplers.BaseSampler):
        return chosen
    if grid is not None:
        return samplers.GridSampler(grid, seed=seed)
    kinds: dict[str, Callable[..., BaseSampler]] = {
        "random": samplers.RandomSampler,
        "tpe": samplers.TPESampler,
        "gp": samplers.GPSampler,
    }
    return _reseeded(kinds[chosen], seed)


def grid_of(space: "Space", trials: int, points: int | None) -> Grid:
    """The values in each dimension: ``points``, or as many as ``trials`` allow."""
    if points is None:
        points = 1
        while (points + 1) ** len(space) <= trials:
            points += 1
        if points < 2:
            raise ArgumentError(
                f"a grid over {len(space)} hyperparameters needs {2 ** len(space):,} trials or more; got "
                f'trials={trials}. Allow more, search fewer hyperparameters, or use sampler="random".'
            )
    return {name: _levels(distribution, points) for name, distribution in space.items()}


def _levels(distribution: "Distribution", points: int) -> list[float]:
    """Values from end to end, evenly spaced on the distribution's scale and snapped to its steps."""
    low, high, step = distribution.low, distribution.high, distribution.step
    shares = [i / (points - 1) for i in range(points)]
    levels = [low * (high / low) ** s if distribution.log else low + s * (high - low) for s in shares]
    if step is not None:
        levels = [low + step * round((x - low) / step) for x in levels]
    return list(dict.fromkeys(min(max(x, low), high) for x in levels))


def _reseeded(kind: "Callable[..., BaseSampler]", seed: int) -> "BaseSampler":
    """A sampler that is made anew for each trial, with a seed of the trial's place among all.

    With one seed for all, each process at a storage would draw the same values, and a run that goes on after
    a kill would draw again what has been tried. A trial that is made again after a kill has the place of the first.
    """
    from optuna.samplers import BaseSampler

    class Reseeded(BaseSampler):
        def before_trial(self, study: Any, trial: Any) -> None:
            with no_warnings_of_our_choices():
                place = _place(study, trial)
                self.present = kind(seed=random.Random(f"{seed}/{place}").getrandbits(32))
            self.present.before_trial(study, trial)

        def infer_relative_search_space(self, *where: Any) -> Any:
            return self.present.infer_relative_search_space(*where)

        def sample_relative(self, *where: Any) -> Any:
            return self.present.sample_relative(*where)

        def sample_independent(self, *where: Any) -> Any:
            return self.present.sample_independent(*where)

    return Reseeded()


def _place(study: Any, trial: Any) -> int:
    """A trial's number, without those that repeat a trial of a process that was stopped."""
    origin = trial.system_attrs.get("failed_trial", trial.number)
    return sum(
        other.number < origin and "failed_trial" not in other.system_attrs
        for other in study.get_trials(deepcopy=False)
    )
