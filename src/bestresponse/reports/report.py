"""The report of one run."""

import math
import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path

from .._files import replace_text
from ..errors import ArgumentError
from . import charts, hyperparameters, page
from .charts import Line
from .recorded import Recorded, Row, is_number

_LOSSES = {"train_loss": "training", "val_loss": "validation", "watch_loss": "watch"}
# The keys that have their own chart, number or paragraph; all other numbers have a chart beside the losses.
_KNOWN = {*_LOSSES, "hyper_step", "weight_step", "seconds", "hypergradient_norm", "agreement", "residual"}
_KNOWN |= {"hypergradient_error", "damping_effect", "products", "damping", "scale"}
_TITLES = {"watch_gap": "Watch loss minus validation loss"}
_MOST_LINES = 8  # in one chart
_MOST_MEASURED = 24  # numbers with a chart of their own
_LAST_ROWS = 20
_MOST_EVENTS = 50


def write_report(run: Recorded, path: Path) -> None:
    """Write the report of a run into one HTML file, which needs no other file and no network.

    Raises:
        ArgumentError: the run has no row and no result yet, or the file cannot be written.
        MissingPackageError: matplotlib is not installed.
    """
    if not run.rows and not run.result:
        raise ArgumentError(
            f"a report needs rows in metrics.jsonl or a result; {run.name} has none. Has the run started?"
        )
    parts = [_state(run), _numbers(run), _losses(run), _hypergradients(run), hyperparameters.section(run)]
    parts += [hyperparameters.pictures(run), _troubles(run), _table(run), _settings(run)]
    replace_text(path, page.page(f"Run {run.name}", *parts), "a report")


def _state(run: Recorded) -> str:
    """Whether the run has ended, and what is missing."""
    made = run.history[-1]["hyper_step"] if run.history else None
    wanted, notes = run.config.get("steps"), []
    if run.result is None and run.config:
        of = f" of {wanted:,}" if isinstance(wanted, int) else ""
        steps = f" {made:,}{of} hyper-steps are here." if made else ""
        notes.append(f"This run has not ended, or was interrupted.{steps}")
    elif run.result and run.result.get("stopped"):
        notes.append(f"The run stopped early: {run.result['stopped']}.")
    if run.damaged:
        lines = "line of metrics.jsonl is" if run.damaged == 1 else "lines of metrics.jsonl are"
        notes.append(f"{run.damaged} {lines} damaged and left out.")
    return "".join(page.paragraph(note, "note") for note in notes)


def _numbers(run: Recorded) -> str:
    """The few numbers to read first."""
    values: dict[str, str] = {}
    headline = (run.result or {}).get("headline")
    for name, value in headline.items() if isinstance(headline, dict) else ():
        values[name] = page.shown(value)
    if run.history:
        last = run.history[-1]
        values["hyper-steps"] = page.shown(last["hyper_step"])
        for key, name in _LOSSES.items():
            values |= _last_and_lowest(run, key, name)
        products = [row["products"] for row in run.history if is_number(row.get("products"))]
        if products:
            values["curvature products"] = page.shown(sum(products))
            values["products a hyper-step (mean)"] = f"{statistics.fmean(products):.1f}"
    seconds = (run.result or {}).get("seconds", run.history[-1].get("seconds") if run.history else None)
    if is_number(seconds):
        values["time"] = duration(float(seconds or 0.0))
        if run.history:
            values["a hyper-step with its weight steps"] = duration(_pace(run))
    return page.tiles(values)


def _last_and_lowest(run: Recorded, key: str, name: str) -> dict[str, str]:
    values = [value for value in run.series(key)[1] if is_number(value)]
    if not values:
        return {}
    lowest = {} if key == "train_loss" else {f"{name} loss, lowest": page.shown(min(values))}
    return {f"{name} loss, last": page.shown(values[-1]), **lowest}


def _pace(run: Recorded) -> float:
    """The median seconds between two rows, without warm-up and pauses."""
    _, times = run.series("seconds")
    spans = [b - a for a, b in pairwise(times) if b > a]
    return statistics.median(spans) if spans else (times[0] if times else 0.0)


def duration(seconds: float) -> str:
    """A time as text."""
    if not math.isfinite(seconds) or seconds < 1.0:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60.0:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _line(run: Recorded, key: str, label: str, colour: int, dashed: bool = False) -> Line:
    return Line(label, *run.series(key), colour, dashed)


def _losses(run: Recorded) -> str:
    shown = [_line(run, key, name, i) for i, (key, name) in enumerate(_LOSSES.items())]
    others = [key for key in run.numbers if key.endswith("_loss") and key not in _LOSSES][: _MOST_LINES - 3]
    shown += [_line(run, key, key.removesuffix("_loss"), 3 + i, dashed=True) for i, key in enumerate(others)]
    watched = (
        "No gradient sees the watch's data: if its loss rises while the validation loss falls, the hyperparameters "
        "overfit the validation data. "
    )
    caption = (watched if "watch_loss" in run.numbers else "") + _places_of_lowest(run)
    measured = [key for key in run.numbers if key not in _KNOWN and key not in others][:_MOST_MEASURED]
    figures = [
        charts.lines(_TITLES.get(key, key), [_line(run, key, "last", i)]) for i, key in enumerate(measured)
    ]
    return page.section(
        "Losses and measurements", page.grid([charts.lines("Losses", shown, caption), *figures])
    )


def _places_of_lowest(run: Recorded) -> str:
    places = []
    for key in ("val_loss", "watch_loss"):
        points = [(y, x) for x, y in zip(*run.series(key), strict=True) if is_number(y)]
        if points:
            places.append(f"the {_LOSSES[key]} loss at hyper-step {min(points)[1]:,}")
    return f"Lowest: {', '.join(places)}." if places else ""


def _hypergradients(run: Recorded) -> str:
    norm = [_line(run, "hypergradient_norm", "last", 0)]
    agreement = [_line(run, "agreement", "last", 4)]
    errors = [
        _line(run, "residual", "residual", 0),
        _line(run, "hypergradient_error", "estimated error of the hypergradient", 1),
        _line(run, "damping_effect", "estimated effect of the damping", 3, dashed=True),
    ]
    figures = [
        charts.lines(
            "Norm of the hypergradient", norm, "It falls as the hyperparameters reach their optimum."
        ),
        charts.lines(
            "Agreement of two halves of the validation batch",
            agreement,
            "The cosine of their hypergradients. Near 1, the steps follow the data. Near 0, they follow the noise "
            "of single examples.",
            zero=True,
        ),
        charts.lines(
            "Accuracy of the solves",
            errors,
            "Relative to the right-hand side and to the exact hypergradient.",
        ),
        charts.lines(
            "Curvature products", [_line(run, "products", "last", 2)], "The main cost of a hyper-step."
        ),
        charts.lines("Damping that the solver chose", [_line(run, "damping", "last", 3)]),
        charts.lines("Step of the Neumann series", [_line(run, "scale", "last", 3)]),
    ]
    return page.section("Hypergradients", page.grid(figures))


def _troubles(run: Recorded) -> str:
    """How solves ended, and which hyper-steps were skipped, restarted or not finite."""
    if not run.history:
        return ""
    step = {id(row): row["hyper_step"] for row in run.history}
    ends = Counter(str(row["status"]) for row in run.history if row.get("status"))
    skipped = [step[id(row)] for row in run.history if row.get("stepped") is False]
    warm = [row for row in run.history if row.get("warm") is not None]
    cold = [step[id(row)] for row in warm[1:] if not row["warm"]] if any(row["warm"] for row in warm) else []
    broken = [step[id(row)] for row in run.history if _not_finite(row)]
    rows = {
        "solves that ended with": ", ".join(f"{name}: {count:,}" for name, count in ends.items())
        or "no solves",
        "skipped hyper-steps": _listed(skipped),
        "solves that restarted from zero": _listed(cold),
        "rows with numbers that are not finite": _listed(broken),
        "runs continued after hyper-steps": _listed(run.config.get("resumed_after") or []),
    }
    events = [
        {"hyper-step": row["hyper_step"], "event": row["event"]} for row in run.history if row.get("event")
    ]
    return page.section("Skipped steps and restarts", page.pairs(rows), page.table(events[:_MOST_EVENTS]))


def _not_finite(row: Row) -> bool:
    keys = ("train_loss", "val_loss", "watch_loss", "hypergradient_norm")
    return any(key in row and not is_number(row[key]) for key in keys)


def _listed(steps: list[int]) -> str:
    """How many there are, and the first of them."""
    if not steps:
        return "none"
    more = ", …" if len(steps) > 10 else ""
    return f"{len(steps):,} ({', '.join(f'{step:,}' for step in steps[:10])}{more})"


def _table(run: Recorded) -> str:
    """The result's table, and the last rows."""
    rows = (run.result or {}).get("rows")
    final = page.table([row for row in rows if isinstance(row, dict)]) if isinstance(rows, list) else ""
    last = [{k: x for k, x in row.items() if not isinstance(x, dict)} for row in run.rows[-_LAST_ROWS:]]
    return page.section("Result", final, page.fold_out(f"the last {len(last)} rows", page.table(last)))


def _settings(run: Recorded) -> str:
    result = run.result or {}
    versions = result.get("versions") or run.config.get("versions") or {}
    config = {name: value for name, value in run.config.items() if name != "versions"}
    return page.section("Configuration", page.pairs(config)) + page.section("Versions", page.pairs(versions))
