"""A third part of the data, which no gradient sees: its loss, and the state where that is lowest."""

import math
import statistics
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..batches import length_of, weighted
from ..errors import ArgumentError, BestResponseWarning, require_integer
from ..problem import Problem
from .best import KeepBest
from .run import Run
from .schema import each, of, record
from .streams import Stream

# A smaller relative fall of the validation loss is noise.
_FALL = 0.02


class Watch(KeepBest):
    """Measure the validation loss on a third part of the data, and keep the state that is best on it.

    Many hyperparameters overfit the validation data: the validation loss falls, while the loss on new data rises. The
    mean loss over the watch's batches is added to the rows of the history as ``watch_loss``, and
    ``watch_gap`` is its difference from the mean validation loss of the hyper-steps since the last measurement.
    `restore` puts the best state back. A warning comes once a run, if the watch's loss has had no new minimum for
    ``patience`` measurements while the validation loss fell by more than two per cent.

    The watch chooses the state, so its best loss is a little too good; measure a result on a fourth part. To end a run,
    add ``callbacks.EarlyStopping("watch_loss", patience=...)``.

    Args:
        batches: a loader or a list, all of which is measured each time. Batches whose tensors have one length count by
            it, others equally.
        every: hyper-steps between two measurements. The last hyper-step of a `fit` is measured too, unless a callback
            stopped the run.
        patience: measurements without a new minimum before the warning.

    Raises:
        ArgumentError: ``batches`` is not a collection that can be iterated repeatedly, or a number is too small.
    """

    def __init__(self, batches: Iterable[Any], every: int = 10, patience: int = 5) -> None:
        super().__init__("watch_loss")
        Stream("watch", batches)
        require_integer("Watch.every", every, 1)
        require_integer("Watch.patience", patience, 1)
        self.batches, self.every, self.patience = batches, every, patience
        # The validation losses since the last measurement, and their means at all measurements since the best one.
        self._recent: list[float] = []
        self._means: list[float] = []
        self._warned = False

    def __call__(self, tuner: Run) -> None:
        row = tuner.history[-1]
        if math.isfinite(row["val_loss"]):
            self._recent.append(row["val_loss"])
        if tuner.hyper_step % self.every and tuner.hyper_step != tuner.last_hyper_step:
            return
        row["watch_loss"] = self.measure(tuner)
        mean = statistics.fmean(self._recent) if self._recent else math.nan
        row["watch_gap"] = row["watch_loss"] - mean
        super().__call__(tuner)
        self._means = [mean] if self.row is row else [*self._means, mean]
        self._recent = []
        fell = self._means[0] - self._means[-1] > _FALL * abs(self._means[0])
        overfits = len(self._means) > self.patience and fell
        # There is no best row if the loss was never a number.
        if overfits and self.row is not None and not self._warned:
            self._warned = True
            warnings.warn(self._message(self.row, row), BestResponseWarning, stacklevel=3)

    def measure(self, tuner: Run) -> float:
        """The mean loss over the batches at the present state, without side effects.

        Raises:
            ArgumentError: there is no batch.
        """
        problem = tuner.problem
        total, count = problem.group.together(lambda: self._own(problem))
        if not count:
            raise ArgumentError(
                "watch must hold at least one batch; got none. Is drop_last dropping all of it?"
            )
        sums = problem.group.mean_of({"total": total, "count": count})
        return sums["total"] / sums["count"]

    def _own(self, problem: Problem) -> tuple[float, float]:
        """The sum of the losses over the examples of this process, and their number."""
        total, count = 0.0, 0.0
        reading = problem.group.reading((*problem.model.modules(), *problem.hyper.modules()))
        with problem.undisturbed(twice=False) as passes, passes.validating(), torch.no_grad(), reading:
            for batch in self.batches:
                size = sum(length_of(piece) or 1 for piece, _ in weighted(batch))
                for piece, weight in weighted(batch):
                    total += size * weight * float(problem.val_loss(problem.model, problem.hyper, piece))
                count += size
        return total, count

    def _message(self, best: Mapping[str, Any], row: Mapping[str, Any]) -> str:
        fell = f"{self._means[0]:.4g} to {self._means[-1]:.4g}"
        return (
            f"the loss on the watch's data was lowest at hyper-step {best['hyper_step']}, "
            f"{best['watch_loss']:.4g}, and is {row['watch_loss']:.4g} at hyper-step {row['hyper_step']}, while the "
            f"mean validation loss of {self.every} hyper-steps fell from {fell}: the hyperparameters overfit the "
            "validation data. The best state is kept; tuner.watch.restore(tuner) puts it back. Stop there "
            '(callbacks.EarlyStopping("watch_loss")), use more validation data, or give the hyperparameters less '
            "freedom (shrinkage, or fewer of them)."
        )

    def state_dict(self) -> dict[str, Any]:
        """The best state, and the validation losses since then."""
        own = {"recent": self._recent, "means": self._means, "warned": self._warned}
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        numbers = each(of(int, float))
        record(recent=numbers, means=numbers, warned=of(bool))("the state of Watch", state)
        self._recent, self._means = list(state["recent"]), list(state["means"])
        self._warned = state["warned"]


def as_watch(watch: Iterable[Any] | Watch | None) -> Watch | None:
    """A collection of batches as a `Watch` with its usual settings."""
    return watch if watch is None or isinstance(watch, Watch) else Watch(watch)
