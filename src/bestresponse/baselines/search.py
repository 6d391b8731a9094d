"""Search by trials through Optuna."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    Error,
    EvaluationError,
    require,
    require_integer,
    require_number,
)
from ..problem import Problem
from .samplers import grid_of, make
from .space import Fresh, check_names, declared, distribution, write_
from .storage import joined, opened, quiet
from .study import Trials, made, random_state_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

    from .space import Distribution


class MissingPackageError(Error, ImportError):
    """A package of an extra is not installed."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best trial of a search, and all of them.

    Attributes:
        values: the best values by name, in the units of the space.
        loss: their validation loss.
        trials: a row for each trial in the order in which they began: its number ``trial``, its ``values``, its
            ``loss`` (inf where it failed, the reason being ``failure``, else None), and the ``seconds`` of search
            until it was done, without the pauses between runs.
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
        write_(problem, self.values)


def search(
    objective: Callable[[Any], Any],
    space: "Mapping[str, tuple[float, float] | Distribution] | None" = None,
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

    λ* = argmin of L_V(w*(λ), λ) over the λ that are tried. The objective finds w*(λ) as it likes; `Tuner` can run
    inside it, from the λ that it is given. All trials begin with the same random state, that of ``seed``, and
    differ in their values alone; the caller's random state is put back.

    Args:
        objective: a function of the values by name, or of the trial's problem where ``problem`` is given, that
            returns a validation loss. A trial whose loss is not finite, or that ends in an `EvaluationError`, has
            failed: there is a warning, and the sampler takes its loss as inf. Any other exception ends the
            search; its trial is the first to run when the search goes on.
        space: (lowest, highest) by name in the parameter's own units, or a distribution of Optuna's for a
            logarithmic or integer scale. A name is that of a hyperparameter, all entries of which take one
            value, or of an entry: "weights[2]", "rates[0,1]". None is what the modules in ``hyper`` declare in a
            method ``ranges()``, each entry for itself, up to 32.
        problem: a function that makes the problem anew for each trial: modules, losses and initial weights.
        sampler: "grid", "random", "tpe" or "gp", or a sampler of Optuna's, whose seed is its own.
        trials: how many the study has in the end, with those of earlier calls and other processes and those that
            failed. A grid has as many as it has points.
        points: of a grid in each dimension; None is as many as ``trials`` allow.
        seconds: no trial begins after this time in this call; None is no limit.
        storage: where the study is kept: None in memory; a file (SQLite) or a database's URL, from which the same
            call goes on after a kill, with the trial that was killed. Processes that make the same call share
            the trials, and each returns when all are made.
        name: the study's in the storage.
        seed: of each trial's random state; and, with the trial's number, of the sampler.

    Raises:
        ArgumentError: an argument is out of its range, a hyperparameter has no range, there are too many of them,
            or the study of this name is one over another space or grid.
        EvaluationError: every trial failed.
        MissingPackageError: Optuna is not installed, or SciPy for "gp".

    Reference: "random", Bergstra and Bengio (2012); "tpe", tree-structured Parzen estimators, Bergstra et al.
    (2011); "gp", Gaussian processes and expected improvement, Snoek et al. (2012); Optuna, Akiba et al. (2019).
    """
    _require_package("optuna")
    from optuna.distributions import distribution_to_json

    _check(objective, space, problem, sampler, trials, points, seconds)
    measure, ranges = objective, space or {}
    if problem is not None:
        measure, ranges = _with_problem(objective, Fresh(problem), space, seed)
    limits = {key: distribution(key, given) for key, given in ranges.items()}
    grid = grid_of(limits, trials, points) if sampler == "grid" else None
    wanted = trials if grid is None else math.prod(map(len, grid.values()))
    record = {
        "space": {key: distribution_to_json(one) for key, one in limits.items()},
        # The order of the points is drawn by the seed.
        "grid": None if grid is None else {"values": grid, "seed": seed},
    }
    with quiet(), opened(storage) as place:
        study = joined(place, name, make(sampler, seed, grid), record)
        Trials(study, place, limits, measure, wanted, seconds, seed).run()
        return _result(study)


def _with_problem(
    objective: Callable[[Any], Any], fresh: Fresh, space: Mapping[str, Any] | None, seed: int
) -> tuple[Callable[[Any], Any], Mapping[str, Any]]:
    """An objective of values instead of one of problems, and the ranges, which a first problem tells."""

    def measure(values: dict[str, float]) -> Any:
        problem = fresh()
        write_(problem, values)
        return objective(problem)

    with random_state_of(seed):
        first = fresh()
    ranges = declared(first) if space is None else space
    check_names(first, ranges)
    return measure, ranges


def _result(study: "Study") -> SearchResult:
    rows = [
        {
            "trial": trial.number,
            "values": dict(trial.params),
            "loss": trial.value,
            "failure": trial.user_attrs.get("failure") if trial.value == math.inf else None,
            "seconds": trial.user_attrs["seconds"],
        }
        for trial in made(study.get_trials(deepcopy=False))
    ]
    if not rows:
        raise EvaluationError("search needs a trial; got none in its time. Raise search.seconds.")
    best = min(rows, key=lambda row: row["loss"])
    if best["loss"] == math.inf:
        raise EvaluationError(
            f"search needs a trial with a finite loss; all {len(rows)} failed, the first at {best['values']}: "
            f"{best['failure']}. Narrow the space, or lower the learning rate."
        )
    return SearchResult(best["values"], best["loss"], rows, study)


def _check(
    objective: object,
    space: object,
    problem: object,
    sampler: object,
    trials: object,
    points: object,
    seconds: float | None,
) -> None:
    from optuna.samplers import BaseSampler

    if not callable(objective):
        raise ArgumentTypeError(f"search.objective must be a function; got {type(objective).__name__}.")
    if problem is not None and not callable(problem):
        raise ArgumentTypeError(
            "search.problem must be a function that makes a new br.Problem for each trial; got "
            f"{type(problem).__name__}. Pass the function that builds it, modules and all."
        )
    if space is not None and not isinstance(space, Mapping):
        raise ArgumentTypeError(f"search.space must be a dict of ranges; got {type(space).__name__}.")
    if not space and (space is not None or problem is None):
        raise ArgumentError(
            "search.space must have a range by name; got none. Only a problem's modules declare ranges."
        )
    if not isinstance(sampler, BaseSampler) and sampler not in ("grid", "random", "tpe", "gp"):
        raise ArgumentError(
            f'search.sampler must be "grid", "random", "tpe", "gp" or a sampler of Optuna\'s; got {sampler!r}.'
        )
    if sampler == "gp":
        _require_package("scipy")
    require_integer("search.trials", trials, 1)
    if points is not None:
        require_integer("search.points", points, 2)
        require(sampler == "grid", "search.points", 'None but for sampler="grid"', points)
    if seconds is not None:
        require_number("search.seconds", seconds)
        require(seconds > 0, "search.seconds", "positive, or None", seconds)


def _require_package(package: str) -> None:
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"search needs the package {error.name!r}, which is not installed. "
            "Run: pip install 'bestresponse[search]'"
        ) from error
