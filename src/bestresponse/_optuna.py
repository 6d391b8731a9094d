"""What `search` takes from Optuna: ranges, samplers, storages and studies. Optuna is imported where it is used."""

import math
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError, require

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import FloatDistribution, IntDistribution
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

BEAT, GRACE = 10, 60  # seconds between signs of life, and without one until a trial counts as killed
_SEARCHED = "bestresponse.search"


def distribution(name: str, given: Any) -> "FloatDistribution | IntDistribution":
    """A range as Optuna takes it."""
    from optuna.distributions import FloatDistribution, IntDistribution

    if isinstance(given, FloatDistribution | IntDistribution):
        return given
    try:
        low, high = map(float, given)
        right = -math.inf < low < high < math.inf
    except (TypeError, ValueError):
        right = False
    required = "(lowest, highest), finite and in this order, or optuna's FloatDistribution or IntDistribution"
    require(right, f"search.space[{name!r}]", required, given)
    return FloatDistribution(low, high)


def suggested(trial: "Trial", name: str, limits: "FloatDistribution | IntDistribution") -> float:
    """The sampler's value for a trial."""
    from optuna.distributions import IntDistribution

    suggest: Any = trial.suggest_int if isinstance(limits, IntDistribution) else trial.suggest_float
    value: float = suggest(name, limits.low, limits.high, step=limits.step, log=limits.log)
    return value


def make_grid(space: Mapping[str, Any], trials: int, points: int | None) -> dict[str, list[float]]:
    """The values in each dimension, evenly spaced from end to end on its scale and snapped to its steps."""
    count = points or max(n for n in range(1, trials + 1) if n ** len(space) <= trials)
    least = f"≥ {2 ** len(space):,} for a grid over {len(space)} hyperparameters"
    require(count >= 2, "search.trials", least, trials)

    def level(one: Any, share: float) -> Any:
        low, high, step = one.low, one.high, one.step
        x = low * (high / low) ** share if one.log else low + share * (high - low)
        return min(max(x if step is None else low + step * round((x - low) / step), low), high)

    shares = [i / (count - 1) for i in range(count)]
    return {name: list(dict.fromkeys(level(one, s) for s in shares)) for name, one in space.items()}


def make_sampler(
    chosen: "str | BaseSampler", seed: int, grid: dict[str, list[float]] | None
) -> "BaseSampler":
    """The sampler of a name, or the one that was given."""
    from optuna import samplers

    if isinstance(chosen, samplers.BaseSampler):
        return chosen
    if grid is not None:
        return samplers.GridSampler(grid, seed=seed)
    kinds = {"random": samplers.RandomSampler, "tpe": samplers.TPESampler, "gp": samplers.GPSampler}
    require(chosen in kinds, "search.sampler", '"grid", "random", "tpe", "gp" or one of Optuna\'s', chosen)
    kind: Any = kinds[chosen]

    class Reseeded(kind):  # type: ignore[misc]
        """Takes a new seed for each trial; with one, other processes and later calls would draw the same values."""

        def before_trial(self, study: "Study", trial: "FrozenTrial") -> None:
            origin = trial.system_attrs.get("failed_trial", trial.number)
            earlier = study.get_trials(deepcopy=False)[:origin]
            # Without repetitions, so that a search with an interruption draws what it would draw without.
            place = sum("failed_trial" not in other.system_attrs for other in earlier)
            super().__init__(seed=random.Random(f"{seed}/{place}").getrandbits(32))
            super().before_trial(study, trial)

    return Reseeded()


@contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's log of trials, and its warnings of experimental features and of losses of inf."""
    from optuna import exceptions, logging

    kept = logging.get_verbosity()
    logging.set_verbosity(max(kept, logging.ERROR))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", exceptions.ExperimentalWarning)
            warnings.filterwarnings("ignore", "Clip non-finite values")
            yield
    finally:
        logging.set_verbosity(kept)


@contextmanager
def opened(storage: "str | os.PathLike[str] | BaseStorage | None") -> "Iterator[BaseStorage | None]":
    """The storage of an argument. The connections of one that is made here are closed in the end."""
    from optuna.storages import BaseStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
    from sqlalchemy.exc import DBAPIError

    if storage is None or isinstance(storage, BaseStorage):
        yield storage
        return
    place = "None, a file, a database's URL or a storage of Optuna's"
    require(isinstance(storage, str | os.PathLike), "search.storage", place, storage)
    url = os.fspath(storage)
    if "://" not in url:
        path = Path(url).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{path}"
    options: dict[str, Any] = {
        # A beat gives up at a locked file after five seconds by default, and its trial would count as killed.
        "engine_kwargs": {"connect_args": {"timeout": GRACE}} if url.startswith("sqlite") else {},
        "heartbeat_interval": BEAT,
        "grace_period": GRACE,
        "heartbeat_stale_trial_callback": RetryHeartbeatStaleTrialCallback(),
    }
    for last in (False, False, False, False, True):
        try:
            database = RDBStorage(url, **options)
            break
        except DBAPIError:  # another process is making the same tables
            if last:
                raise
            time.sleep(0.5)
    try:
        yield database
    finally:
        database.remove_session()
        database.engine.dispose()


def join(
    storage: "BaseStorage | None", name: str, sampler: "BaseSampler", searched: dict[str, Any]
) -> "Study":
    """The study of a name, new or old; raises where an old one searches something else."""
    import optuna

    study = optuna.create_study(storage=storage, sampler=sampler, study_name=name, load_if_exists=True)
    # In this order, since another process that begins the study writes what it searches before its first trial.
    empty = not study.get_trials(deepcopy=False)
    kept = study.user_attrs.get(_SEARCHED)
    if kept is None and empty and study.directions == [optuna.study.StudyDirection.MINIMIZE]:
        study.set_user_attr(_SEARCHED, searched)
    elif kept != searched:
        raise ArgumentError(
            f"the study {name!r} in this storage must have begun with the same space and grid; it has {kept}, got "
            f"{searched}. Repeat the first call, or use another name."
        )
    return study


def run(study: "Study", attempt: Callable[["Trial"], float], wanted: int, seconds: float) -> None:
    """Run trials until the study has the requested number, or the time is over."""
    from optuna.storages import RetryHeartbeatStaleTrialCallback
    from optuna.trial import TrialState

    began = time.perf_counter()
    before = max((trial.user_attrs["seconds"] for trial in finished(study)), default=0.0)

    def objective(trial: "Trial") -> float:
        try:
            loss = attempt(trial)
        except (Exception, KeyboardInterrupt):  # Optuna fails this trial; one with the same values waits
            RetryHeartbeatStaleTrialCallback()(study, study.trials[trial.number])
            raise
        trial.set_user_attr("seconds", before + time.perf_counter() - began)
        return loss

    def stop_when_enough(study: "Study", trial: "FrozenTrial") -> None:
        if len(finished(study)) >= wanted:
            study.stop()

    while len(finished(study)) < wanted and (left := began + seconds - time.perf_counter()) > 0:
        study.optimize(objective, timeout=None if left == math.inf else left, callbacks=[stop_when_enough])
        # A grid stops early where another process failed at a point, which waits now.
        if not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return


def finished(study: "Study") -> "list[FrozenTrial]":
    """The finished trials in their order; the first where two processes made the same point of a grid."""
    from optuna.trial import TrialState

    first: dict[Any, FrozenTrial] = {}
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        first.setdefault(trial.system_attrs.get("grid_id", f"trial {trial.number}"), trial)
    return list(first.values())
