"""Callbacks of `Tuner`: plain callables that it calls with itself after each hyper-step.

One with a method ``close()`` has it called when a run ends, also by an error or an interrupt.
Any function of the tuner will do; it reads ``tuner.history`` and may call ``tuner.stop(reason)``.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import ArgumentError, require_integer, require_number
from .best import EarlyStopping as EarlyStopping
from .best import KeepBest as KeepBest
from .loggers import CSV as CSV
from .loggers import MLflow as MLflow
from .loggers import TensorBoard as TensorBoard
from .loggers import Trackio as Trackio
from .loggers import WandB as WandB
from .progress import Progress as Progress
from .report import Report as Report
from .run import Run
from .watch import Watch as Watch


class Evaluate:
    """Measure held-out data: what is tuned on validation data fits it better than anything else.

    Args:
        function: (model, hyper) -> dict of numbers, which are added to the row in the history. It runs in
            eval mode without gradients, and leaves random state and buffers as they were. Of several processes the
            means are taken, each counting equally.
        every: hyper-steps between two measurements; the last one that `Tuner.fit` was asked for is measured
            in any case.
    """

    def __init__(self, function: Callable[[Any, Any], Mapping[str, float]], every: int = 1) -> None:
        require_integer("Evaluate.every", every, 1)
        self.function, self.every = function, every

    def __call__(self, tuner: Run) -> None:
        if tuner.hyper_step % self.every and tuner.hyper_step != tuner.last_hyper_step:
            return
        problem = tuner.problem
        reading = problem.group.reading((*problem.model.modules(), *problem.hyper.modules()))
        with problem.undisturbed(twice=False) as passes, passes.eval_mode(), torch.no_grad(), reading:
            values = problem.group.together(lambda: self.function(problem.model, problem.hyper))
        values = problem.group.mean_of({name: float(value) for name, value in values.items()})
        tuner.history[-1].update(values)


class StopAtNoise:
    """Stop a run when the steps of the hyperparameters are mostly noise of the validation examples.

    It needs the method `bestresponse.Halves`, whose ``agreement`` it averages over the last hyper-steps. The agreement
    falls as tuning approaches what the validation data can tell, and may rise again later, when the hyperparameters
    overfit both halves alike: stop at the first time.

    Args:
        least: the mean agreement below which the run stops.
        window: hyper-steps in the mean; the run makes at least as many.

    Raises:
        ArgumentError: at the first hyper-step of a method without an agreement.
    """

    def __init__(self, least: float = 0.05, window: int = 25) -> None:
        require_number("StopAtNoise.least", least)
        require_integer("StopAtNoise.window", window, 1)
        self.least, self.window = least, window

    def __call__(self, tuner: Run) -> None:
        if "agreement" not in tuner.history[-1]:
            raise ArgumentError(
                "StopAtNoise needs hypergradients with an agreement; the history has none. Use the method "
                "Halves(method)."
            )
        recent = [row.get("agreement", math.nan) for row in tuner.history[-self.window :]]
        mean = sum(recent) / len(recent)
        if len(recent) == self.window and mean < self.least:
            tuner.stop(f"the mean agreement of two halves fell to {mean:.2g} over {self.window} hyper-steps")


class Checkpoint:
    """Save the run every few hyper-steps, after all other callbacks; `Tuner.load` goes on from there.

    Args:
        path: the file; it is replaced, whole at any time.
        every: hyper-steps between two saves; the last one that `Tuner.fit` was asked for, and one that stops
            the run, are saved in any case.
    """

    def __init__(self, path: str | Path, every: int = 1) -> None:
        require_integer("Checkpoint.every", every, 1)
        self.path, self.every = Path(path), every

    def __call__(self, tuner: Run) -> None:
        last = tuner.hyper_step == tuner.last_hyper_step or tuner.stopped is not None
        if last or tuner.hyper_step % self.every == 0:
            tuner.save(self.path)


class JSONLines:
    """Write each row of the history to a file as it comes, a JSON object a line.

    Of several processes rank 0 writes.

    Args:
        path: the file; rows are appended. A run that goes on from a saved state first removes the rows that
            were written after it was saved.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = None
        self._resumed = False

    def __call__(self, tuner: Run) -> None:
        if tuner.problem.group.rank:
            return
        if self._resumed and self.path.exists():
            self._cut(tuner.hyper_step)
        self._resumed = False
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(to_json(tuner.history[-1]) + "\n")
        self._file.flush()

    def state_dict(self) -> dict[str, Any]:
        """Which file it is."""
        return {"path": str(self.path.resolve())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remove the rows from the next one on, when that is written; those of another file stay."""
        self.close()
        self._resumed = state["path"] == str(self.path.resolve())

    def _cut(self, hyper_step: int) -> None:
        """Remove the rows from ``hyper_step`` on, and a last one that was not written to its end."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        kept = []
        for line in lines:
            try:
                kept += [line] if json.loads(line)["hyper_step"] < hyper_step else []
            except (ValueError, KeyError, TypeError):
                continue
        replace_text(self.path, "".join(f"{line}\n" for line in kept))

    def close(self) -> None:
        """Close the file; the next row opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it is either the old one or the new one, and never a part."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def to_json(value: Any, indent: int | None = None) -> str:
    """A JSON text that every reader accepts: numbers that are not finite become null, other objects text."""
    return json.dumps(_plain(value), ensure_ascii=False, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
