"""What went wrong in a run, as texts in the rows of its history."""

from collections.abc import Iterable, Mapping
from typing import Any


def add_event(row: dict[str, Any], kind: str, details: str) -> None:
    """Add an event to the others in ``row["event"]``."""
    text = f"{kind}: {details.replace(';', ',')}"
    row["event"] = f"{row['event']}; {text}" if row.get("event") else text


def events(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a table of events: for each kind, how often it came, and its first and last hyper-step."""
    table: dict[str, dict[str, Any]] = {}
    for row in history:
        for text in filter(None, (row.get("event") or "").split("; ")):
            kind, _, details = text.partition(": ")
            number = row.get("hyper_step")
            entry = table.setdefault(kind, {"event": kind, "times": 0, "first": number, "last": number})
            entry["times"] += 1
            entry |= {"last": number, "the last one": details}
    return list(table.values())
