"""The hyperparameters in a report: over time, by tensor as histograms, and as images."""

import base64
import math
from typing import Any

from . import charts, page
from .charts import Line
from .recorded import Recorded, is_number

_MOST_LINES = 8  # in one chart
_MOST_CHARTS = 24


def section(run: Recorded) -> str:
    """Charts of the hyperparameters over time, and histograms by tensor."""
    figures = [*_over_time(run)]
    tensors = run.tensors.get("tensors", {})
    for name, found in list(tensors.items())[: max(0, _MOST_CHARTS - len(figures))]:
        title = f"{name}, all values"
        figures.append(
            charts.histogram(
                title,
                found.get("first"),
                found.get("last"),
                f"Density of the values, shape {found.get('shape')}. Grey: at the first hyper-step.",
            )
        )
    names = dict.fromkeys([*_names(run), *tensors])
    left = len(names) - _MOST_CHARTS
    more = f"{len(names)} hyperparameters; the charts show the first ones." if left > 0 else ""
    about = (
        "Values are those of the parameters themselves, for example logarithms of weight decays."
        if names
        else ""
    )
    return page.section(
        "Hyperparameters", page.paragraph(f"{about} {more}".strip(), "soft"), page.grid(figures)
    )


def _names(run: Recorded) -> list[str]:
    return list(dict.fromkeys(name for row in run.history for name in row.get("hyperparameters") or {}))


def _over_time(run: Recorded) -> list[str]:
    """A chart for each hyperparameter: lines for a few values, bands for many."""
    figures = []
    for name in _names(run)[: _MOST_CHARTS // 2]:
        x, summaries = [], []
        for row in run.history:
            summary = (row.get("hyperparameters") or {}).get(name)
            if isinstance(summary, dict):
                x.append(row["hyper_step"])
                summaries.append(summary)
        many = [(at, s["quantiles"]) for at, s in zip(x, summaries, strict=True) if s.get("quantiles")]
        if many:
            caption = "Line: the median. Bands: 25 to 75, 5 to 95, and 0 to 100 per cent of the values."
            at, quantiles = zip(*many, strict=True)
            figures.append(charts.fan(f"{name} over time", at, [_numeric(q) for q in quantiles], caption))
            continue
        values = [_numeric(summary.get("value") or []) for summary in summaries]
        columns = [list(column) for column in zip(*values, strict=False)][:_MOST_LINES]
        several = len(columns) > 1
        entries = [Line(f"[{i}]" if several else name, x, y, i) for i, y in enumerate(columns)]
        figures.append(charts.lines(f"{name} over time", entries))
    return figures


def _numeric(values: Any) -> list[float]:
    return [float(value) if is_number(value) else math.nan for value in values]


def pictures(run: Recorded) -> str:
    """Hyperparameters that are images, and the figures in the folder."""
    figures = []
    for name, found in run.tensors.get("pictures", {}).items():
        (height, width, channels), images = found["size"], []
        for number, text in enumerate(found["pixels"]):
            values = [byte / 255.0 for byte in base64.b64decode(text)]
            pixels = [values[i : i + channels] for i in range(0, len(values), channels)]
            flat: list[Any] = [pixel[0] for pixel in pixels] if channels == 1 else pixels
            array = [flat[row * width : (row + 1) * width] for row in range(height)]
            images.append(charts.image(array, f"{name}[{number}]"))
        figures.append(page.figure(name, page.mosaic(images), wide=True))
    drawn = [page.figure(p.stem, charts.embedded(p.read_bytes(), p.stem), wide=True) for p in run.pictures]
    return page.section("Pictures", page.grid([*figures, *drawn]))
