"""What a check found, one sentence at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

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
    """A problem on the bench: a twin of its own, so that nothing of a check stays with the caller's.

    Attributes:
        problem: the twin, with the caller's modules and losses.
        train, val: the batches.
        seed: of the random state of each pass.
        findings: what was found so far.
    """

    problem: Problem
    train: Any
    val: Any
    seed: int
    findings: list[Finding]

    def say(self, level: Level, topic: str, text: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(level, topic, text))

    @contextmanager
    def errors_told(self, topic: str) -> Iterator[None]:
        """Turn an error of ours into a finding, and leave the rest of the block."""
        try:
            yield
        except Error as error:
            self.say("error", topic, str(error))

    def failed(self, topic: str) -> bool:
        """Whether there is an error on this topic."""
        return any(f.topic == topic and f.level == "error" for f in self.findings)


def named(names: Any, most: int = 5) -> str:
    """A list of names in words."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(map(str, listed[:most])) + more


def halves(batch: Any) -> tuple[Any, Any] | None:
    """The first and the second half of a batch of tensors; None where it is something else."""
    lengths: set[int] = set()

    def cut(value: Any, part: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, Tensor) and value.ndim:
            lengths.add(len(value))
            return part(value)
        if isinstance(value, dict):
            return {k: cut(v, part) for k, v in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(cut(v, part) for v in value))
        if isinstance(value, list | tuple):
            return type(value)(cut(v, part) for v in value)
        return value

    first, second = (cut(batch, part) for part in (lambda x: x[: len(x) // 2], lambda x: x[len(x) // 2 :]))
    size = lengths.pop() if len(lengths) == 1 else 0
    return (first, second) if size >= 2 and size % 2 == 0 else None
