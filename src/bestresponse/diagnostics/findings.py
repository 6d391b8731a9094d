"""What a check found, one sentence at a time."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..batches import Batches
from ..errors import Error
from ..problem import Problem
from ..verification.twin import mapped

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
    """A problem on the bench: a twin of its own, so that nothing of a check stays with the caller's.

    Attributes:
        problem: the twin, with the caller's modules and losses.
        train, val: the batches.
        seed: of the random state of each pass.
        findings: what was found so far.
        direct_only: whether train_loss reads no hyperparameter, so that nothing comes through the weights.
    """

    problem: Problem
    train: Any
    val: Any
    seed: int
    findings: list[Finding]
    direct_only: bool = False

    def say(self, level: Level, topic: str, text: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(level, topic, text))

    @contextmanager
    def errors_told(self, topic: str) -> Iterator[None]:
        """Turn an error into a finding, and leave the rest of the block."""
        try:
            yield
        except Error as error:
            self.say("error", topic, str(error))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
            self.say("error", topic, f"this ended in {said}. Run the loss by itself to see where.")

    def failed(self, topic: str) -> bool:
        """Whether there is an error on this topic."""
        return any(f.topic == topic and f.level == "error" for f in self.findings)


def repeated(batch: Any, times: int) -> Any | None:
    """A batch of tensors of one length, so many times after itself; None where it is something else."""
    lengths = set()

    def again(x: Tensor) -> Tensor:
        if not x.ndim:
            return x
        lengths.add(len(x))
        return torch.cat([x] * times)

    if isinstance(batch, Batches):
        return None
    longer = mapped(batch, again)
    return longer if len(lengths) == 1 else None
