"""Callbacks of `Tuner`: plain callables that it calls with itself after each hyper-step.

One with a method ``close()`` has it called when a run ends, also by an error or an interrupt.
Any function of the tuner will do; it reads ``tuner.history`` and may call ``tuner.stop(reason)``.
"""

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch

from .._files import as_path, file_errors, previous_of, replacing, write_all
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    BestResponseWarning,
    require,
    require_function,
    require_integer,
    require_number,
)
from .best import EarlyStopping as EarlyStopping
from .best import KeepBest as KeepBest
from .checkpoint import save
from .loggers import CSV as CSV
from .loggers import MLflow as MLflow
from .loggers import TensorBoard as TensorBoard
from .loggers import Trackio as Trackio
from .loggers import WandB as WandB
from .missing_files import tolerated
from .progress import Progress as Progress
from .recovery import Recovering
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
        require_function("Evaluate.function", function, "model, hyper")
        require_integer("Evaluate.every", every, 1)
        self.function, self.every = function, every

    def __call__(self, tuner: Run) -> None:
        if tuner.hyper_step % self.every and tuner.hyper_step != tuner.last_hyper_step:
            return
        problem = tuner.problem
        reading = problem.group.reading((*problem.model.modules(), *problem.hyper.modules()))
        with problem.undisturbed(twice=False) as passes, passes.eval_mode(), torch.no_grad(), reading:
            values = problem.group.together(lambda: _numbers(self.function(problem.model, problem.hyper)))
        tuner.history[-1].update(problem.group.mean_of(values))


def _numbers(values: object) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in values.items()}  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(
            f'Evaluate.function must return a dict of numbers, as in {{"test_loss": 0.1}}; got {values!r}.'
        ) from error


class StopAtNoise:
    """Stop a run when the steps of the hyperparameters are mostly noise of the validation examples.

    It needs the method `bestresponse.Halves`, whose ``agreement`` it averages over the last hyper-steps. The agreement
    falls as tuning approaches what the validation data can tell, and may rise again later, when the hyperparameters
    overfit both halves alike: stop at the first time.

    Args:
        least: the mean agreement below which the run stops.
        window: hyper-steps in the mean, without those that the policy skipped; the run makes at least as many.

    Raises:
        ArgumentError: at the first hyper-step of a method without an agreement.
    """

    def __init__(self, least: float = 0.05, window: int = 25) -> None:
        require_number("StopAtNoise.least", least)
        require_integer("StopAtNoise.window", window, 1)
        self.least, self.window = least, window

    def __call__(self, tuner: Run) -> None:
        row = tuner.history[-1]
        if "agreement" not in row and row["stepped"]:  # a hyper-step that the policy skips has none either
            raise ArgumentError(
                "StopAtNoise needs hypergradients with an agreement; the history has none. Use the method "
                "Halves(method)."
            )
        known = (row.get("agreement", math.nan) for row in reversed(tuner.history))
        recent = list(islice(filter(math.isfinite, known), self.window))
        if len(recent) == self.window and (mean := sum(recent) / len(recent)) < self.least:
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

    def __call__(self, tuner: Recovering) -> None:
        if has_ended(tuner) or tuner.hyper_step % self.every == 0:
            with tolerated(tuner, "checkpoint", self.path):
                save(tuner, self.path, previous=self.keep == 2)


class JSONLines:
    """Write each row of the history to a file as it comes, a JSON object a line.

    The last line has its end only when the run has come to its end: a file without it is that of a run that was killed
    or interrupted. If a row cannot be written, the run continues with a warning, unless the tuner's policy is "raise";
    the missing rows are written when it is possible again. Of several processes rank 0 writes.

    Args:
        path: the file; rows are appended. A run that goes on from a saved state first removes the rows that
            were written after it was saved. A run that starts anew first removes the rows of a run that was killed or
            interrupted at the end of the file, keeps the old file as ``path.previous``, and warns.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path("JSONLines.path", path)
        self._file: IO[bytes] | None = None
        self._tuner: Run | None = None
        self._resumed = False
        self._next: int | None = None  # the first hyper-step whose row is not written

    def __call__(self, tuner: Run) -> None:
        if tuner.problem.group.rank:
            return
        number = tuner.hyper_step
        own = self._resumed or (self._next is not None and self._next <= number)
        first = number if self._next is None or self._next > number else self._next
        self._tuner = tuner
        with tolerated(tuner, "row", self.path), file_errors(self.path, "JSONLines"):
            self._next = first
            try:
                self._write(tuner, first, own)
            except BaseException:
                self._close()
                raise
            self._next, self._resumed = number + 1, False

    def _write(self, tuner: Run, first: int, own: bool) -> None:
        """Write the rows from ``first`` on; the file may have some of this run, or of another one."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            begun = self._cut(first, own)
            self._file = self.path.open("ab", buffering=0)
        else:
            begun = True
        rows = tuner.history[-1:]
        if first < tuner.hyper_step:
            rows = [row for row in tuner.history if row.get("hyper_step", 0) >= first]
        write_all(self._file, (b"\n" if begun else b"") + "\n".join(map(to_json, rows)).encode())

    def _cut(self, first: int, own: bool) -> bool:
        """Remove rows that this run writes again, and a last one that is damaged; whether the last line has no end."""
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else []
        numbers = list(map(_number_of, lines))
        begin = 0 if own else _last_run(lines, numbers)
        rows = list(zip(lines, numbers, strict=True))
        kept = lines[:begin] + [line for line, n in rows[begin:] if n is not None and n < first]
        if len(kept) < len(lines):
            with replacing(self.path, "JSONLines", previous=not own) as file:
                file.write(b"".join(kept))
            if not own:
                warnings.warn(
                    f"{self.path} ended with {len(lines) - len(kept)} rows of a run that did not come to its end; they "
                    f"are removed. The old file is kept as {previous_of(self.path)}.",
                    BestResponseWarning,
                    stacklevel=5,
                )
        return bool(kept) and not kept[-1].endswith(b"\n")

    def state_dict(self) -> dict[str, Any]:
        """Which file it is."""
        return {"path": str(self.path.resolve())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remove the rows from the next one on, when that is written; those of another file stay."""
        self._close()
        self._resumed, self._next = state["path"] == str(self.path.resolve()), None

    def close(self) -> None:
        """Close the file; the next row opens it again."""
        tuner, self._tuner = self._tuner, None
        with contextlib.suppress(OSError):
            if tuner is not None and self._file is not None and has_ended(tuner):
                write_all(self._file, b"\n")
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def has_ended(tuner: Run) -> bool:
    """Whether the run made all hyper-steps that were asked for, or a callback stopped it."""
    return tuner.hyper_step == tuner.last_hyper_step or tuner.stopped is not None


def _number_of(line: bytes) -> int | None:
    """The hyper-step of a line, zero for other objects; None for a line that is not whole."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    number = row.get("hyper_step", 0) if isinstance(row, dict) else 0
    return number if isinstance(number, int) else 0


def _last_run(lines: list[bytes], numbers: list[int | None]) -> int:
    """Where the rows of a run begin that did not come to its end; the number of lines if there are none."""
    begin = len(lines)
    if not lines or lines[-1].endswith(b"\n"):
        return begin
    following = math.inf
    for number in reversed(numbers):
        if number is None and begin < len(lines):
            break
        if number is not None and not 0 < number < following:
            break
        begin, following = begin - 1, following if number is None else number
    return begin


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
