"""Callbacks of `Tuner`: plain callables that it calls with itself after each hyper-step.

One with a method ``close()`` has it called when a run ends, also by an error or an interrupt.
Any function of the tuner will do; it reads ``tuner.history`` and may call ``tuner.stop(reason)``.
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import ArgumentError, BestResponseWarning, require, require_integer, require_number
from .best import EarlyStopping as EarlyStopping
from .best import KeepBest as KeepBest
from .checkpoint import save
from .files import as_path, file_errors, previous_of, replacing, tolerated
from .progress import Progress as Progress
from .run import Run, SavedRun
from .watch import Watch as Watch


class Evaluate:
    """Measure held-out data: what is tuned on validation data fits it better than anything else.

    Args:
        function: (model, hyper) -> dict of numbers, which are added to the row in the history. It runs in
            eval mode without gradients, and leaves random state and buffers as they were.
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
        with problem.undisturbed(twice=False) as passes, passes.eval_mode(), torch.no_grad():
            values = self.function(problem.model, problem.hyper)
        tuner.history[-1].update({name: float(value) for name, value in values.items()})


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

    If a file cannot be written, the run continues with a warning and an event in the history, unless the tuner's policy
    is "raise".

    Args:
        path: the file; it is replaced, whole at any time.
        every: hyper-steps between two saves; the last one that `Tuner.fit` was asked for, and one that stops
            the run, are saved in any case.
        keep: 1, or 2 to keep the file before the last one too, as ``path.previous``. `Tuner.load` takes that one if
            ``path`` is damaged.
    """

    def __init__(self, path: str | Path, every: int = 1, keep: int = 1) -> None:
        require_integer("Checkpoint.every", every, 1)
        require_integer("Checkpoint.keep", keep, 1)
        require(keep <= 2, "Checkpoint.keep", "1 or 2", keep)
        self.path, self.every, self.keep = as_path("Checkpoint.path", path), every, keep

    def __call__(self, tuner: SavedRun) -> None:
        last = tuner.hyper_step == tuner.last_hyper_step or tuner.stopped is not None
        if last or tuner.hyper_step % self.every == 0:
            with tolerated(tuner, f"the run is not saved in {self.path}"):
                save(tuner, self.path, previous=self.keep == 2)


class JSONLines:
    """Write each row of the history to a file as it comes, a JSON object a line.

    If a row cannot be written, the run continues with a warning, unless the tuner's policy is "raise"; the missing rows
    are written when it is possible again.

    Args:
        path: the file; rows are appended. A run that goes on from a saved state first removes the rows that
            were written after it was saved. A run that starts anew removes the rows that an earlier run wrote from its
            hyper-step on, such as a run that was killed before its first save; the old file stays as
            ``path.previous``, with a warning.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path("JSONLines.path", path)
        self._file: IO[bytes] | None = None
        self._resumed = False
        self._next: int | None = None  # the first hyper-step whose row is not written

    def __call__(self, tuner: Run) -> None:
        number = tuner.hyper_step
        if self._next is None or self._next > number:  # another run than before
            self.close()
            self._next, own = number, self._resumed
        else:
            own = True
        with tolerated(tuner, f"rows are missing in {self.path}"), file_errors(self.path, "JSONLines"):
            try:
                self._write(tuner, self._next, own)
            except BaseException:
                self.close()
                raise
            self._next, self._resumed = number + 1, False

    def _write(self, tuner: Run, first: int, own: bool) -> None:
        """Write the rows from ``first`` on; the rows that the file already has from there on are its own or not."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._cut(first, own)
            self._file = self.path.open("ab", buffering=0)
        rows = tuner.history[-1:]
        if first < tuner.hyper_step:
            rows = [row for row in tuner.history if row.get("hyper_step", 0) >= first]
        left = memoryview("".join(to_json(row) + "\n" for row in rows).encode())
        while left:
            left = left[self._file.write(left) or 0 :]

    def state_dict(self) -> dict[str, Any]:
        """Which file it is."""
        return {"path": str(self.path.resolve())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remove the rows from the next one on, when that is written; those of another file stay."""
        self.close()
        self._resumed, self._next = state["path"] == str(self.path.resolve()), None

    def _cut(self, first: int, own: bool) -> None:
        """Remove the rows from ``first`` on, and a last one that was not written to its end."""
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else []
        numbers = [_number_of(line) for line in lines]
        kept = [line for line, n in zip(lines, numbers, strict=True) if n is not None and n < first]
        later = sum(n is not None and n >= first for n in numbers)
        if len(kept) == len(lines):
            return
        previous = later > 0 and not own
        with replacing(self.path, "JSONLines", previous) as file:
            file.write(b"".join(kept))
        if previous:
            warnings.warn(
                f"{self.path} had {later} rows of an earlier run, from hyper-step {first} on, which are removed. The "
                f"old file is kept as {previous_of(self.path)}.",
                BestResponseWarning,
                stacklevel=6,
            )

    def close(self) -> None:
        """Close the file; the next row opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _number_of(line: bytes) -> int | None:
    """The hyper-step of a line, zero for other objects; None for a line that is damaged or not at its end."""
    try:
        row = json.loads(line)
        number = row.get("hyper_step", 0) if isinstance(row, dict) else 0
    except ValueError:
        return None
    return int(number) if line.endswith(b"\n") and isinstance(number, int) else None


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
