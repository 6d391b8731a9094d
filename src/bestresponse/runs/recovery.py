"""The last good states of a run, to which it returns with smaller steps of the hyperparameters."""

from copy import deepcopy
from typing import Any, Protocol

from .run import SavedRun
from .state import restore_state, state_of

_SMALLER = 0.5
_APART = 20  # hyper-steps; the older state is up to so many older than the newer one


class LastGood:
    """Copies of the weights, hyperparameters, optimisers and the method's state, under the policy "return".

    A copy is taken when the losses and the hypergradient of a state are known to be good, before the hyperparameters
    move. Its hyperparameters may be bad all the same, if the weights have not followed them yet: a run that fails again
    at once returns to an older copy.

    Attributes:
        states: at most two copies, the older one first.
        failed: whether the run has returned to the newest one and not made a good hyper-step since then.
    """

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.failed = False

    def keep(self, tuner: SavedRun) -> None:
        """Copy the present state."""
        if tuner.policy != "return":
            return
        new = {**deepcopy(state_of(tuner)), "hyper_step": tuner.hyper_step}
        close = len(self.states) == 2 and new["hyper_step"] - self.states[0]["hyper_step"] < _APART
        self.states, self.failed = [*(self.states[:1] if close else self.states[-1:]), new], False

    def put_back(self, tuner: SavedRun) -> None:
        """Restore a state, but the present schedule of the hyperparameters with half of its learning rates."""
        if self.failed and len(self.states) > 1:
            self.states.pop()
        groups, scheduler = tuner.hyper_optimizer.param_groups, tuner.hyper_scheduler
        settings = [{k: deepcopy(x) for k, x in group.items() if k != "params"} for group in groups]
        schedule = deepcopy(scheduler.state_dict()) if hasattr(scheduler, "state_dict") else None
        state = self.states.pop()
        # Optimisers and methods may use the tensors that they are given.
        restore_state(tuner, deepcopy(state))
        for group, present in zip(tuner.hyper_optimizer.param_groups, settings, strict=True):
            group.update(present)
            _halve(group, ("lr", "initial_lr", "max_lr", "min_lr"))
        if scheduler is not None and schedule is not None:
            scheduler.load_state_dict(schedule)
        for part in _with_parts(scheduler):
            _halve(
                getattr(part, "__dict__", {}), ("base_lrs", "max_lrs")
            )  # some compute each rate from these
        self.states.append(state)
        self.failed = True

    def state_dict(self) -> dict[str, Any]:
        """The copies."""
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict`."""
        self.states, self.failed = list(state["states"]), state["failed"]


class Recovering(SavedRun, Protocol):
    """A run with states to return to."""

    @property
    def last_good(self) -> LastGood:
        """The last good states."""


def _halve(settings: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if (rate := settings.get(name)) is not None:
            several = isinstance(rate, list | tuple)
            settings[name] = [_SMALLER * one for one in rate] if several else _SMALLER * rate


def _with_parts(scheduler: Any) -> list[Any]:
    """A scheduler and those that it is made of."""
    return [scheduler, *getattr(scheduler, "_schedulers", ())]
