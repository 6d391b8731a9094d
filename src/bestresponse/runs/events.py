"""What went wrong in a run, as texts in the rows of its history."""

from collections.abc import Iterable, Mapping
from typing import Any


def add_event(row: dict[str, Any], text: str) -> None:
    """Add an event to a row of the history."""
    row["event"] = f"{row['event']}; {text}" if row.get("event") else text


def events(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The events of a run as the rows of a table, with the numbers of their hyper-steps."""
    return [
        {"hyper_step": row.get("hyper_step"), "event": row["event"]} for row in history if row.get("event")
    ]
