"""The last good states of a run, to which it returns with smaller steps of the hyperparameters."""

from copy import deepcopy
from typing import Any, Protocol

from torch.optim import Optimizer

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
        """Restore a state, and halve the present learning rates of the hyperparameters."""
        if self.failed and len(self.states) > 1:
            self.states.pop()
        smaller = [_smaller(group.get("lr")) for group in tuner.hyper_optimizer.param_groups]
        first = [_smaller(getattr(s, "base_lrs", None)) for s in _with_parts(tuner.hyper_scheduler)]
        state = self.states.pop()
        # Optimisers and methods may use the tensors that they are given.
        restore_state(tuner, deepcopy(state))
        _set_rates(tuner.hyper_optimizer, smaller)
        for scheduler, rates in zip(_with_parts(tuner.hyper_scheduler), first, strict=True):
            if rates is not None:
                scheduler.base_lrs = rates  # from which some schedulers compute each rate
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


def _smaller(rate: Any) -> Any:
    if isinstance(rate, list):
        return [_SMALLER * one for one in rate]
    return None if rate is None else _SMALLER * rate


def _set_rates(optimizer: Optimizer, rates: list[Any]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate


def _with_parts(scheduler: Any) -> list[Any]:
    """A scheduler and those that it is made of."""
    return [scheduler, *getattr(scheduler, "_schedulers", ())]
