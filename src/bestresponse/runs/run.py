"""The parts of a run that callbacks and checkpoints use."""

from pathlib import Path
from typing import Any, Protocol

from torch.optim import Optimizer

from ..memory import Remembering
from ..problem import Problem
from .streams import Stream


class Run(Protocol):
    """A run of `Tuner`, as its callbacks see it.

    Attributes:
        history: a dict for each hyper-step.
        hyper_step, last_hyper_step: the number of hyper-steps made, and the number at which `Tuner.fit` ends.
        stopped: the reason given to `stop`; None while the run continues.
        policy: what to do when something fails, as for `Tuner`.
    """

    history: list[dict[str, Any]]
    hyper_step: int
    last_hyper_step: int
    stopped: str | None

    @property
    def policy(self) -> str:
        """What to do when something fails."""

    @property
    def problem(self) -> Problem:
        """The two losses."""

    def stop(self, reason: str) -> None:
        """End the run after the present hyper-step."""

    def save(self, path: str | Path) -> None:
        """Write the run into one file."""


class SavedRun(Run, Protocol):
    """A run with everything that a checkpoint writes and reads.

    Attributes:
        streams: the collections of batches by name.
        resumed: positions and random state of a loaded run that has not continued yet; else None.
        weight_step: the number of weight steps made.
        hyper_optimizer, hyper_scheduler: what moves the hyperparameters.
    """

    streams: dict[str, Stream]
    resumed: dict[str, Any] | None
    weight_step: int
    hyper_optimizer: Optimizer
    hyper_scheduler: Any

    @property
    def method(self) -> Remembering:
        """How the hypergradient is computed."""

    @property
    def callbacks(self) -> list[Any]:
        """The functions to call after each hyper-step."""
