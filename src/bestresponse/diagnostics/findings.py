"""What a check found, one sentence at a time."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import Error
from ..problem import Problem

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    Attributes:
        level: "ok", "note", "warning" for what may spoil a run, "error" for what makes its hypergradients wrong.
        topic: what was looked at.
        text: what was found, and for warnings and errors what to do.
    """

    level: Level
    topic: str
    text: str


@dataclass
class Bench:
    """A problem with its batches while it is checked.

    Attributes:
        problem: at first the caller's, then another one with its modules and losses, which has a memory of its own.
        train, val: the batches.
        seed: of the random state of each pass.
        findings: what was found so far.
        topic: what is looked at.
        direct_only: whether nothing comes through the weights.
    """

    problem: Problem
    train: Any
    val: Any
    seed: int
    findings: list[Finding] = field(default_factory=list)
    topic: str = "parameters"
    direct_only: bool = False

    def leave_the_callers(self) -> None:
        """Go on with another problem; raises where parameters were replaced or frozen."""
        given = self.problem
        given.check_intact()
        self.problem = Problem(given.model, given.hyper, given.train_loss, given.val_loss, given.val_mode)

    def say(self, level: Level, text: str) -> None:
        """Add a finding on the present topic."""
        self.findings.append(Finding(level, self.topic, text))

    @contextmanager
    def errors_told(self) -> Iterator[None]:
        """Turn an error into a finding on the present topic, and leave the rest of the block."""
        try:
            yield
        except Error as error:
            self.say("error", str(error))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
            self.say("error", f"this ended in {said}. Run the loss by itself to see where.")

    def failed(self, topic: str) -> bool:
        """Whether there is an error on this topic."""
        return any(f.topic == topic and f.level == "error" for f in self.findings)
