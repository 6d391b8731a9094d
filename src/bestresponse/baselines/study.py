"""The trials of a study that several processes share, of which none is lost when a process is killed."""

import functools
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import ArgumentTypeError, BestResponseWarning, EvaluationError, SecondDerivativeError
from ..passes import random_state
from .storage import POLL, no_warnings_of_our_choices

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from .space import Distribution, Space

_FRESH = 10  # seconds from a trial's beginning until it is on record which process runs it, at most


class _Surplus(Exception):
    """Several processes began the last trial at once, and this one withdraws."""


@dataclass
class Trials:
    """The trials of one call: begun until the study has as many as are wanted, or the time is over."""

    study: "Study"
    storage: "BaseStorage"
    space: "Space"
    measure: Callable[[dict[str, float]], Any]
    wanted: int
    seconds: float | None
    seed: int
    began: float = field(default_factory=time.perf_counter, init=False)
    before: float = field(default=0.0, init=False)  # seconds of search in earlier calls
    number: int = field(default=-1, init=False)
    raised: BaseException | None = field(default=None, init=False)
    enough: bool = field(default=False, init=False)

    def run(self) -> None:
        """Make the trials that are wanted, or wait for other processes to make them."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        self.before = max(
            (t.user_attrs.get("seconds", 0.0) for t in made(self.study.get_trials(deepcopy=False))),
            default=0.0,
        )
        while self._room():
            self.enough = False
            try:
                self.study.optimize(self._trial, catch=(_Surplus,), callbacks=[self._stop_when_enough])
            except BaseException as error:
                if error is self.raised:
                    told = isinstance(error, Exception | KeyboardInterrupt)  # Optuna has failed the trial
                    self._queue_again(self.number) if told else self._fail(self.number)
                elif isinstance(error, ValueError | UpdateFinishedTrialError) and self._was_taken_for_dead():
                    continue
                raise
            waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if not self.enough and not waiting:  # the sampler has nothing left to try
                return

    def _trial(self, trial: "Trial") -> float:
        from optuna.exceptions import UpdateFinishedTrialError

        self.number, self.raised = trial.number, None
        try:
            return self._attempt(trial)
        except (_Surplus, UpdateFinishedTrialError):
            raise
        except BaseException as error:
            self.raised = error
            raise

    def _attempt(self, trial: "Trial") -> float:
        trial.set_user_attr("process", {"trial": trial.number, "machine": _machine(), "number": os.getpid()})
        if self._count(below=trial.number)[1] >= self.wanted:
            raise _Surplus
        with no_warnings_of_our_choices():
            values = {name: _suggested(trial, name, limits) for name, limits in self.space.items()}
        try:
            loss = self._loss(values)
            failure = f"the loss is {loss}"
        except SecondDerivativeError:
            raise
        except EvaluationError as error:
            loss, failure = math.inf, str(error)
        if not math.isfinite(loss):
            # As a failed trial of Optuna's it would tell the sampler nothing, and a Gaussian process would try the
            # same place again and again.
            loss = math.inf
            trial.set_user_attr("failure", failure)
            text = f"trial {trial.number} of search failed at {values}: {failure}"
            warnings.warn(text, BestResponseWarning, stacklevel=2)
        trial.set_user_attr("seconds", self.before + time.perf_counter() - self.began)
        return loss

    def _loss(self, values: dict[str, float]) -> float:
        with random_state_of(self.seed):
            loss = self.measure(values)
        try:
            return float(loss.detach() if isinstance(loss, Tensor) else loss)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentTypeError(
                f"search.objective must return a number; got {type(loss).__name__}. Return the validation loss."
            ) from error

    def _room(self) -> bool:
        """Whether to begin a trial. While others make all that are wanted it waits, lest one of them be killed."""
        while not self._late():
            done, begun = self._count()
            if begun < self.wanted:
                return True
            if done >= self.wanted:
                return False
            time.sleep(POLL)
        return False

    def _stop_when_enough(self, study: "Study", trial: "FrozenTrial") -> None:
        from optuna.trial import TrialState

        if trial.state == TrialState.FAIL and "grid_id" in trial.system_attrs:
            self._queue_again(trial.number)  # it withdrew, and another may not have its point
        self.enough = self._late() or self._count()[1] >= self.wanted
        if self.enough:
            study.stop()

    def _late(self) -> bool:
        return self.seconds is not None and time.perf_counter() - self.began >= self.seconds

    def _count(self, below: float = math.inf) -> tuple[int, int]:
        """How many trials are done; and how many are done, or under way with a number below the one given."""
        from optuna.storages import fail_stale_trials
        from optuna.trial import TrialState

        with no_warnings_of_our_choices():
            fail_stale_trials(self.study)
        beats = getattr(self.storage, "get_heartbeat_interval", lambda: None)() is not None
        under_way = 0
        trials = self.study.get_trials(deepcopy=False)  # all at once, so that none is counted in both states
        for trial in trials:
            if trial.state != TrialState.RUNNING:
                continue
            lives = _lives(trial, beats)
            if lives is False:
                self._fail(trial.number)
            elif lives and trial.number < below:
                under_way += 1
        done = len(made(trials))
        return done, done + under_way

    def _fail(self, number: int) -> None:
        """Fail the trial of a process that is dead, and queue it again; one process does it if several want to."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        study_id = self.storage.get_study_id_from_name(self.study.study_name)
        trial_id = self.storage.get_trial_id_from_study_id_trial_number(study_id, number)
        try:
            if self.storage.set_trial_state_values(trial_id, TrialState.FAIL):
                self._queue_again(number)
        except UpdateFinishedTrialError:
            pass

    def _queue_again(self, number: int) -> None:
        from optuna.storages import RetryHeartbeatStaleTrialCallback

        with no_warnings_of_our_choices():
            RetryHeartbeatStaleTrialCallback()(self.study, self.study.trials[number])

    def _was_taken_for_dead(self) -> bool:
        """Whether another process failed this one's trial, which can't be told then; it has queued it again."""
        from optuna.trial import TrialState

        if self.number < 0 or self.study.trials[self.number].state != TrialState.FAIL:
            return False
        warnings.warn(
            f"trial {self.number} of search was taken for dead by another process, for want of a sign of life (was "
            "this machine asleep?); it is run again.",
            BestResponseWarning,
            3,
        )
        return True


def made(trials: "Iterable[FrozenTrial]") -> "list[FrozenTrial]":
    """Those that are done, in their order; of several at one point of a grid, or again at one trial, the first."""
    from optuna.trial import TrialState

    first: dict[int, FrozenTrial] = {}
    for trial in trials:
        if trial.state == TrialState.COMPLETE:
            attributes = trial.system_attrs
            origin = attributes.get("grid_id", attributes.get("failed_trial", trial.number))
            first.setdefault(origin, trial)
    return list(first.values())


@contextmanager
def random_state_of(seed: int) -> Iterator[None]:
    """The global generators under a seed, and then as they were."""
    kept = random_state.snapshot()
    try:
        random_state.seed_all(seed)
        yield
    finally:
        random_state.restore(kept)


def _suggested(trial: "Trial", name: str, limits: "Distribution") -> float:
    from optuna.distributions import IntDistribution

    if isinstance(limits, IntDistribution):
        return trial.suggest_int(name, limits.low, limits.high, step=limits.step, log=limits.log)
    return trial.suggest_float(name, limits.low, limits.high, step=limits.step, log=limits.log)


def _lives(trial: "FrozenTrial", beats: bool) -> bool | None:
    """Whether the process that runs a trial lives; None where nothing would tell of its death."""
    process = trial.user_attrs.get("process")
    # A trial that was queued again has the record of the process that was killed, until it is begun.
    if process is None or process["trial"] != trial.number:
        return trial.datetime_start is not None and (
            abs((datetime.now() - trial.datetime_start).total_seconds()) < _FRESH
        )
    if process["machine"] != _machine() or os.name != "posix":  # elsewhere the signal 0 ends a process
        return beats or None
    try:
        os.kill(process["number"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@functools.cache
def _machine() -> str:
    """Where a process's number means the same process: a machine since it was started, and a container in it."""
    try:
        start = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {start} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()
