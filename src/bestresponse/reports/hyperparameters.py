"""The hyperparameters in a report: over time, by tensor as histograms, and as images."""

import base64
import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from . import charts, page
from .charts import Line
from .recorded import Recorded, Row, is_number

_MOST_LINES = 8  # in one chart
_MOST_TENSORS = 12  # with charts


def section(run: Recorded) -> str:
    """Charts of the hyperparameters over time, and histograms by tensor."""
    summaries, tensors = run.summaries, run.tensors.get("tensors", {})
    figures = [
        _over_time(name, *zip(*rows, strict=True)) for name, rows in list(summaries.items())[:_MOST_TENSORS]
    ]
    for name, found in list(tensors.items())[:_MOST_TENSORS]:
        caption = f"Density of the values, shape {found.get('shape')}. Grey: at the first hyper-step."
        figures.append(charts.histogram(f"{name}, all values", found["last"], found.get("first"), caption))
    count = max(len(summaries), len(tensors))
    more = f"The first {_MOST_TENSORS} of {count} tensors." if count > _MOST_TENSORS else ""
    return page.section("Hyperparameters", page.paragraph(more, "soft"), page.grid(figures))


def _over_time(name: str, x: Sequence[float], summaries: Sequence[Row]) -> str:
    """Lines for a few values, bands for many."""
    title = f"{name} over time"
    if all("quantiles" in summary for summary in summaries):
        caption = "Line: the median. Bands: 25 to 75, 5 to 95, and 0 to 100 per cent of the values."
        return charts.fan(title, x, [_numeric(summary["quantiles"]) for summary in summaries], caption)
    values = [_numeric(summary.get("value", [])) for summary in summaries]
    columns = [list(column) for column in zip_longest(*values, fillvalue=math.nan)][:_MOST_LINES]
    labels = [f"[{i}]" for i in range(len(columns))] if len(columns) > 1 else ["last"]
    return charts.lines(
        title, [Line(n, x, y, i) for i, (n, y) in enumerate(zip(labels, columns, strict=True))]
    )


def _numeric(values: Sequence[Any]) -> list[float]:
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
