"""The findings of a check."""

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from ..errors import Error
from ..problem import Problem

Level = Literal["ok", "note", "warning", "error"]


class Obstacle(StrEnum):
    """What keeps the weights from having a best response."""

    INTERPOLATED = "the model fits the batch exactly, and its Hessian is singular"
    UNBOUNDED = "the training loss has no minimum near the weights"
    AT_SADDLE = "the weights lie at a saddle"
    FAR = "the weights are far from a minimum"


@dataclass(frozen=True)
class Finding:
    """One finding of a check.

    Attributes:
        level: "ok", "note", "warning" if it may spoil a run, "error" if it makes hypergradients wrong.
        topic: the topic of the test.
        text: the finding; warnings and errors also say what to do.
        obstacle: for the recommendation, what a warning means for the best response; None for any other finding.
    """

    level: Level
    topic: str
    text: str
    obstacle: Obstacle | None = None


@dataclass
class Bench:
    """A problem with its batches during a check.

    Attributes:
        problem: first the caller's; then a new one with the same modules and losses, but a separate memory of methods.
        train, val: the batches.
        seed: seed of the random state of each pass.
        findings: the findings so far.
        topic: the present topic.
        val_loss: its value on the batch, once it is known.
        direct_only: whether the hypergradient has no part through the weights.
        progress: a function that gets the name of each part of the check when it starts.
    """

    problem: Problem
    train: Any
    val: Any
    seed: int
    findings: list[Finding] = field(default_factory=list)
    topic: str = "parameters"
    val_loss: float = math.inf
    direct_only: bool = False
    progress: Callable[[str], None] = lambda part: None

    def copy_problem(self) -> None:
        """Continue with a new problem; raises if parameters were replaced or frozen."""
        given = self.problem
        given.check_intact()
        self.problem = Problem(given.model, given.hyper, given.train_loss, given.val_loss, given.val_mode)

    def add(self, level: Level, text: str, obstacle: Obstacle | None = None) -> None:
        """Add a finding on the present topic."""
        self.findings.append(Finding(level, self.topic, text, obstacle))

    @contextmanager
    def errors_as_findings(self) -> Iterator[None]:
        """Turn an error into a finding on the present topic, and skip the rest of the block."""
        try:
            yield
        except Error as error:
            self.add("error", str(error))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            cause = f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
            self.add("error", f"this test failed with {cause}. Run the loss by itself to see where.")

    def failed(self, topic: str) -> bool:
        """Whether there is an error on this topic."""
        return any(f.topic == topic and f.level == "error" for f in self.findings)
