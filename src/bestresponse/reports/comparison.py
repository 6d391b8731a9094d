"""Several runs side by side."""

from collections.abc import Sequence
from pathlib import Path

from .._files import replace_text
from ..errors import ArgumentError
from . import charts, page
from .charts import Line
from .recorded import Recorded, Row, is_number
from .report import duration

_MOST_RUNS = 8  # the number of colours
_CHARTS = {
    "val_loss": "Validation loss",
    "watch_loss": "Watch loss",
    "train_loss": "Training loss",
    "hypergradient_norm": "Norm of the hypergradient",
    "agreement": "Agreement of two halves of the validation batch",
    "residual": "Residual of the solves",
    "hypergradient_error": "Estimated error of the hypergradient",
    "damping_effect": "Estimated effect of the damping",
    "products": "Curvature products in a hyper-step",
    "damping": "Damping that the solver chose",
    "scale": "Step of the Neumann series",
    "watch_gap": "Watch loss minus validation loss",
}
_OWN = ("out", "resume", "resumed_after")  # settings that say nothing about a difference


def write_comparison(runs: Sequence[Recorded], path: Path) -> None:
    """Write one HTML file with the runs' results, the settings in which they differ, and their lines in common charts.

    Raises:
        ArgumentError: there are fewer than two runs or more than eight, or the file cannot be written.
        MissingPackageError: matplotlib is not installed.
    """
    if not 2 <= len(runs) <= _MOST_RUNS:
        raise ArgumentError(
            f"a comparison needs 2 to {_MOST_RUNS} runs; got {len(runs)}. Choose other folders."
        )
    names = _distinct([run.name for run in runs])
    shared = list(dict.fromkeys(key for run in runs for key in run.numbers))
    keys = _CHARTS | {
        key: key for key in shared if key not in (*_CHARTS, "hyper_step", "weight_step", "seconds")
    }
    against = [_chart(title, key, runs, names, "hyper_step") for key, title in keys.items()]
    timed = [
        _chart(f"{_CHARTS[key]} over time", key, runs, names, "seconds") for key in ("val_loss", "watch_loss")
    ]
    parts = [
        page.section("Results", page.table([_result(n, run) for n, run in zip(names, runs, strict=True)])),
        page.section("Settings that differ", _differences(runs, names)),
        page.section("By hyper-step", page.grid(against)),
        page.section("By time", page.grid(timed)),
    ]
    replace_text(path, page.page("Comparison of " + ", ".join(names), *parts), "a report")


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, with numbers where several are equal."""
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _chart(title: str, key: str, runs: Sequence[Recorded], names: Sequence[str], along: str) -> str:
    lines = []
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        rows = [row for row in run.history if key in row and is_number(row.get(along))]
        values = [float(row[key]) if is_number(row[key]) else float("nan") for row in rows]
        lines.append(Line(name, [row[along] for row in rows], values, number))
    return charts.lines(title, lines, x="hyper-step" if along == "hyper_step" else "time [s]")


def _result(name: str, run: Recorded) -> Row:
    """A run's row in the table of results."""
    result = run.result or {}
    row: Row = {"run": name, "ended": run.result is not None}
    if run.history:
        row["hyper-steps"] = run.history[-1]["hyper_step"]
        for key, title in (("val_loss", "validation loss"), ("watch_loss", "watch loss")):
            finite = [value for value in run.series(key)[1] if is_number(value)]
            if finite:
                row |= {f"{title}, last": finite[-1], f"{title}, lowest": min(finite)}
        row["products"] = sum(r["products"] for r in run.history if is_number(r.get("products"))) or None
    headline = result.get("headline")
    row |= headline if isinstance(headline, dict) else {}
    seconds = result.get("seconds", run.history[-1].get("seconds") if run.history else None)
    row["time"] = duration(float(seconds)) if seconds is not None and is_number(seconds) else None
    return row


def _differences(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    """A table of the settings that are not equal in all runs, a column for each run."""
    flat = [dict(page.flattened(run.config)) for run in runs]
    keys = [key for key in dict.fromkeys(key for settings in flat for key in settings) if key not in _OWN]
    differing = [key for key in keys if len({page.shown(settings.get(key)) for settings in flat}) > 1]
    rows: list[Row] = [
        {"setting": key} | {n: page.shown(s.get(key)) for n, s in zip(names, flat, strict=True)}
        for key in differing
    ]
    return page.table(rows) or page.paragraph("There is none.")
