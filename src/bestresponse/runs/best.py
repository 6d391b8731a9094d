"""Callbacks that follow the best value of a number in the history."""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

from ..errors import ArgumentError, require_integer, require_text
from .run import Run
from .schema import count, maybe, of, record


class KeepBest:
    """Keep a copy of weights, buffers and hyperparameters where a number of the history was best.

    `restore` puts it back. The copy is made when the hyper-step is done: a row's ``val_loss`` was measured at
    its weights, just before its hyperparameters moved.

    Args:
        key: the number's name in the rows, such as "val_loss" or one that `Evaluate` adds.
        mode: whether "min" or "max" is best.
    """

    def __init__(self, key: str = "val_loss", mode: Literal["min", "max"] = "min") -> None:
        require_text("KeepBest.key", key)
        _check_mode("KeepBest", mode)
        self.key, self.mode = key, mode
        self.row: dict[str, Any] | None = None
        self._model: dict[str, Any] = {}
        self._hyper: dict[str, Any] = {}

    def __call__(self, tuner: Run) -> None:
        row = tuner.history[-1]
        # After a return the losses of the row are those of the state that was left.
        left = self.key in ("val_loss", "train_loss") and "returned" in row.get("event", "")
        if left or not _improves(row, self.row, self.key, self.mode):
            return
        self.row = row
        self._model = deepcopy(tuner.problem.model.state_dict())
        self._hyper = deepcopy(tuner.problem.hyper.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The best state so far."""
        return {"row": self.row, "model": self._model, "hyper": self._hyper}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`."""
        record(row=maybe(of(dict)), model=of(dict), hyper=of(dict))("the state of KeepBest", state)
        self.row, self._model, self._hyper = state["row"], state["model"], state["hyper"]

    def restore(self, tuner: Run) -> None:
        """Put the best state back into the modules.

        Raises:
            ArgumentError: no row has had the number yet.
        """
        if self.row is None:
            raise ArgumentError(f"KeepBest needs a row with {self.key!r} before it can restore; got none.")
        tuner.problem.model.load_state_dict(self._model)
        tuner.problem.hyper.load_state_dict(self._hyper)


class EarlyStopping:
    """Stop a run when a number of the history has not improved for a while.

    Args:
        key: the number's name in the rows; rows without it do not count.
        patience: rows with it to wait for an improvement.
        mode: whether "min" or "max" is best.
    """

    def __init__(
        self, key: str = "val_loss", patience: int = 20, mode: Literal["min", "max"] = "min"
    ) -> None:
        require_text("EarlyStopping.key", key)
        _check_mode("EarlyStopping", mode)
        require_integer("EarlyStopping.patience", patience, 1)
        self.key, self.patience, self.mode = key, patience, mode
        self._best: dict[str, Any] | None = None
        self._waited = 0

    def __call__(self, tuner: Run) -> None:
        row = tuner.history[-1]
        if self.key not in row:
            return
        if _improves(row, self._best, self.key, self.mode):
            self._best, self._waited = row, 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            best = "nothing" if self._best is None else f"{self._best[self.key]:.4g}"
            tuner.stop(f"{self.key} has not improved on {best} for {self.patience} measurements")

    def state_dict(self) -> dict[str, Any]:
        """The best row, and how long there was none better."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`."""
        record(best=maybe(of(dict)), waited=count)("the state of EarlyStopping", state)
        stopped = state["waited"] >= self.patience  # a run that goes on after it was stopped waits anew
        self._best, self._waited = state["best"], 0 if stopped else state["waited"]

    def close(self) -> None:
        """Wait anew when another run begins."""
        self._waited = 0


def _check_mode(name: str, mode: str) -> None:
    if not isinstance(mode, str) or mode not in ("min", "max"):
        raise ArgumentError(f'{name}.mode must be "min" or "max"; got {mode!r}.')


def _improves(row: Mapping[str, Any], best: Mapping[str, Any] | None, key: str, mode: str) -> bool:
    if row.get(key) is None or math.isnan(row[key]):
        return False
    if best is None:
        return True
    return bool(row[key] < best[key] if mode == "min" else row[key] > best[key])
