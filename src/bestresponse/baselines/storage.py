"""Where a study is kept, and what is asked of one that is there already."""

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

# Seconds. A false alarm costs the trial of a process that still runs, so the grace is long; a death on the same
# machine is seen at once, without it.
BEAT, GRACE, POLL = 10, 60, 0.2
_RECORD = "bestresponse.search"


@contextmanager
def quiet() -> Iterator[None]:
    """Errors only in Optuna's log, and then what the caller had."""
    from optuna import logging

    kept = logging.get_verbosity()
    logging.set_verbosity(max(kept, logging.ERROR))
    try:
        yield
    finally:
        logging.set_verbosity(kept)


@contextmanager
def opened(storage: "str | os.PathLike[str] | BaseStorage | None") -> "Iterator[BaseStorage]":
    """The storage of an argument; the connections of one that is made here are closed in the end."""
    from optuna.storages import BaseStorage, InMemoryStorage

    if storage is None:
        yield InMemoryStorage()
    elif isinstance(storage, BaseStorage):
        yield storage
    elif isinstance(storage, str | os.PathLike):
        database = _database(os.fspath(storage))
        try:
            yield database
        finally:
            database.remove_session()
            database.engine.dispose()
    else:
        raise ArgumentTypeError(
            "search.storage must be a file, a database's URL, a storage of Optuna's or None; got "
            f"{type(storage).__name__}."
        )


def _database(place: str) -> Any:
    from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
    from sqlalchemy.exc import DBAPIError

    if "://" not in place:
        path = Path(place).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        place = f"sqlite:///{path}"
    # By default a thread that beats gives up after five seconds at a locked file, and its trial is taken for dead.
    options = {"connect_args": {"timeout": GRACE}} if place.startswith("sqlite") else {}
    for last in (False, False, False, False, True):
        try:
            with no_warnings_of_our_choices():
                return RDBStorage(
                    place,
                    options,
                    heartbeat_interval=BEAT,
                    grace_period=GRACE,
                    heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
                )
        except DBAPIError:  # two processes that begin at once both make the tables
            if last:
                raise
            time.sleep(POLL)


def joined(storage: "BaseStorage", name: str, sampler: "BaseSampler", record: dict[str, Any]) -> "Study":
    """The study of a name, new or old; raises where an old one searched something else."""
    import optuna

    study = optuna.create_study(storage=storage, sampler=sampler, study_name=name, load_if_exists=True)
    # In this order, since another process that begins the study writes its record before its first trial.
    empty = not study.get_trials(deepcopy=False)
    kept = study.user_attrs.get(_RECORD)
    if kept is None and empty:
        study.set_user_attr(_RECORD, record)
        kept = record
    if study.directions != [optuna.study.StudyDirection.MINIMIZE]:
        raise ArgumentError(
            f"search minimises; the study {name!r} in this storage does not. Use another name."
        )
    if kept is None:
        raise ArgumentError(
            f"search goes on with its own studies; {name!r} in this storage is another's. Use another name."
        )
    for part, given in record.items():
        if kept[part] != given:
            raise ArgumentError(
                f"to go on with the study {name!r}, search needs the {part} that it began with, {kept[part]}; got "
                f"{given}. Repeat the first call, or use another name."
            )
    return study


@contextmanager
def no_warnings_of_our_choices() -> Iterator[None]:
    """Without what Optuna warns of where the choice is ours: experimental features, and losses of inf."""
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.filterwarnings("ignore", "Clip non-finite values")
        yield
