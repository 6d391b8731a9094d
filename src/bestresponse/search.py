"""Search by trials, a thin layer over Optuna: no gradient, few hyperparameters."""

import math
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import _optuna
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BestResponseWarning,
    EvaluationError,
    SecondDerivativeError,
    require,
    require_integer,
    require_number,
    require_package,
)
from .hyperparameters import entries
from .passes import random_state
from .problem import Problem

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import FloatDistribution, IntDistribution
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best trial of a search, and all of them.

    Attributes:
        values: the best values by name, in the units of the space.
        loss: their validation loss.
        trials: a row for each trial in the order in which they began: its number ``trial``, its ``values``, its
            ``loss`` (inf where it failed, and ``failure`` has the reason, else None), and the ``seconds`` of search
            until it ended, without the pauses between calls.
        study: the Optuna study, for its plots and importances. There a failed trial's loss is inf too.
    """

    values: dict[str, float]
    loss: float
    trials: list[dict[str, Any]] = field(repr=False)
    study: "Study" = field(repr=False)

    def write_(self, problem: Problem) -> None:
        """Set the hyperparameters of a problem to the best values; those that were not searched stay.

        Raises:
            ArgumentError: the problem has no hyperparameter of one of the names.
        """
        entries.write_(problem.hyperparameters, self.values)


def search(
    objective: Callable[[Any], Any],
    space: "Mapping[str, tuple[float, float] | FloatDistribution | IntDistribution] | None" = None,
    *,
    problem: Callable[[], Problem] | None = None,
    sampler: "str | BaseSampler" = "tpe",
    trials: int = 30,
    points: int | None = None,
    seconds: float | None = None,
    storage: "str | os.PathLike[str] | BaseStorage | None" = None,
    name: str = "search",
    seed: int = 0,
) -> SearchResult:
    """Minimise a validation loss over few hyperparameters by trials, with one of Optuna's samplers.

        λ* = argmin of L_V(w*(λ), λ) over the λ that are tried

    The objective finds w*(λ); it may run a `Tuner` that starts at the trial's λ. Every trial starts from the random
    state of ``seed``, so trials differ in their values alone. The caller's random state is restored.

    Args:
        objective: a function of the values by name, or of the trial's problem where ``problem`` is given, that
            returns a validation loss. A trial fails if its loss is not finite or it raises an `EvaluationError`:
            the search warns, and the sampler gets the loss inf. Any other exception ends the search; the next call
            on the same storage first tries the same values again.
        space: (lowest, highest) by name in the parameter's own units, or one of Optuna's distributions for a
            logarithmic or integer scale. A name is that of a hyperparameter or of a part, "weights[2]" or
            "rates[0,1]"; its entries share one value. None takes the ranges that the modules in ``hyper`` declare
            in a method ``ranges()``, each entry for itself, up to 32 entries.
        problem: a function that makes a new problem for each trial: modules, losses and initial weights.
        sampler: "grid", "random", "tpe" or "gp", or a sampler of Optuna's, which keeps its own seed.
        trials: the search ends when the study has this many finished trials. Failed ones count, and so do those of
            earlier calls and other processes. A grid has as many trials as points.
        points: the points of a grid in each dimension; None takes as many as ``trials`` allow.
        seconds: this call starts no trial after this time; None sets no limit.
        storage: where the study is kept. None keeps it in memory. With a file (SQLite) or a database's URL, the
            same call later continues the study, and several processes may make the call at once; all but one may
            make a trial too many. A running trial gives a sign of life every 10 s. After 60 s without one it counts
            as killed, and the next trial that any process starts repeats its values. If the search ends earlier, a
            new trial replaces it; a grid repeats the point. A storage of Optuna's has its own rules for this.
        name: the name of the study in the storage.
        seed: of each trial's random state and, with the trial's number, of the sampler.

    Raises:
        ArgumentError: an argument is out of its range, a hyperparameter has no range, there are too many of them,
            or the study of this name searches another space or grid.
        EvaluationError: every trial failed.
        MissingPackageError: Optuna is not installed, or SciPy for "gp".

    Reference: "random", Bergstra and Bengio (2012); "tpe", tree-structured Parzen estimators, Bergstra et al.
    (2011); "gp", Gaussian processes and expected improvement, Snoek et al. (2012); Optuna, Akiba et al. (2019).
    """
    for package in ("optuna", "scipy") if sampler == "gp" else ("optuna",):
        require_package(package, "search", "search")
    from optuna.distributions import distribution_to_json

    _check(objective, space, problem, trials, points, seconds)
    require(points is None or sampler == "grid", "search.points", 'None except with sampler="grid"', points)
    if problem is not None:
        objective, space = _of_values(objective, problem, space, seed)
    limits = {key: _optuna.distribution(key, given) for key, given in (space or {}).items()}
    grid = _optuna.make_grid(limits, trials, points) if sampler == "grid" else None
    wanted = trials if grid is None else math.prod(map(len, grid.values()))
    searched = {
        "space": {key: distribution_to_json(one) for key, one in limits.items()},
        "grid": None if grid is None else {"values": grid, "seed": seed},  # the seed orders the points
    }

    def attempt(trial: "Trial") -> float:
        return _attempt(trial, limits, objective, seed)

    with _optuna.quiet():
        chosen = _optuna.make_sampler(sampler, seed, grid)
        with _optuna.opened(storage) as place:
            study = _optuna.join(place, name, chosen, searched)
            _optuna.run(study, attempt, wanted, seconds or math.inf)
            return _result(study)


def _check(
    objective: object,
    space: object,
    problem: object,
    trials: object,
    points: object,
    seconds: float | None,
) -> None:
    require(callable(objective), "search.objective", "a function", objective)
    makes = problem is None or callable(problem)
    require(makes, "search.problem", "a function that makes a br.Problem", problem)
    ranges = isinstance(space, Mapping) and len(space) > 0
    declared = space is None and problem is not None
    require(ranges or declared, "search.space", "a dict with a range by name, unless problem is given", space)
    require_integer("search.trials", trials, 1)
    if points is not None:
        require_integer("search.points", points, 2)
    if seconds is not None:
        require_number("search.seconds", seconds)
        require(seconds > 0, "search.seconds", "positive, or None", seconds)


def _of_values(
    objective: Callable[[Any], Any], make: Callable[[], Problem], space: Mapping[str, Any] | None, seed: int
) -> tuple[Callable[[Any], Any], Mapping[str, Any]]:
    """The objective as a function of values, and the ranges. A first problem, which no trial uses, has the names."""
    with random_state.seeded(seed):
        first = make()
    if not isinstance(first, Problem):
        raise ArgumentTypeError(f"search.problem must return a br.Problem; got {type(first).__name__}.")
    ranges = entries.declared_ranges(first.hyper, first.hyperparameters) if space is None else space
    entries.refuse_repeated(first.hyperparameters, ranges)
    used = {weakref.ref(first.model), weakref.ref(first.hyper)}

    def measure(values: dict[str, float]) -> Any:
        problem = make()
        own = {weakref.ref(problem.model), weakref.ref(problem.hyper)}
        if used & own:
            raise ArgumentError(
                "search.problem must make a new model and hyper for each trial; got those of an earlier one. Build "
                "them inside the function, or copy them there (copy.deepcopy)."
            )
        used.update(own)
        entries.write_(problem.hyperparameters, values)
        return objective(problem)

    return measure, ranges


def _attempt(trial: "Trial", space: Mapping[str, Any], measure: Callable[[Any], Any], seed: int) -> float:
    """The loss at a trial's values; inf, with a warning, where it fails."""
    values = {name: _optuna.suggested(trial, name, limits) for name, limits in space.items()}
    try:
        with random_state.seeded(seed):
            found = measure(values)
        require(isinstance(found, Real | Tensor), "the loss that search.objective returns", "a number", found)
        loss = float(found.detach() if isinstance(found, Tensor) else found)
        failure = f"the loss is {loss}"
    except SecondDerivativeError:  # the model, not the values, is the cause
        raise
    except EvaluationError as error:
        loss, failure = math.inf, str(error)
    if math.isfinite(loss):
        return loss
    trial.set_user_attr("failure", failure)
    text = f"trial {trial.number} of search failed at {values}: {failure}"
    warnings.warn(text, BestResponseWarning, stacklevel=2)
    # A trial that Optuna counts as failed tells the sampler nothing: a Gaussian process would try its place again.
    return math.inf


def _result(study: "Study") -> SearchResult:
    rows = [
        {
            "trial": trial.number,
            "values": dict(trial.params),
            "loss": trial.value,
            "failure": trial.user_attrs.get("failure") if trial.value == math.inf else None,
            "seconds": trial.user_attrs["seconds"],
        }
        for trial in _optuna.finished(study)
    ]
    if not rows:
        raise EvaluationError(
            "search needs a finished trial; the time was over before. Raise search.seconds."
        )
    best = min(rows, key=lambda row: row["loss"])
    if best["loss"] == math.inf:
        raise EvaluationError(
            f"search needs a trial with a finite loss; all {len(rows)} failed, the first at {best['values']}: "
            f"{best['failure']}. Narrow the space, or lower the learning rate."
        )
    return SearchResult(best["values"], best["loss"], rows, study)
