"""Charts as SVG that follow the theme of the page: matplotlib draws them, and CSS gives them their colours.

matplotlib writes an SVG of some kilobytes that needs no script. Libraries for interactive charts would add megabytes of
script to each report.
"""

import base64
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..errors import require_package
from . import page
from .recorded import Row, is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 200  # groups of points that remain of a long line; each keeps its smallest and its largest value
_INK, _GRID = "#010203", "#010204"  # stand for colours of the page; no chart has them otherwise
_VARIABLES = {_INK: "--ink", _GRID: "--line"} | {f"#0a0b{i:02x}": f"--s{i}" for i in range(8)}
_NEEDLESS = r"<metadata>.*?</metadata>|font-family: [^;]*; | +(?=<)| transform=\"rotate\(-0 [^\"]*\""
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bestresponse",
    "font.size": 11,
    "axes.edgecolor": _GRID,
    "axes.facecolor": "none",
    "axes.formatter.limits": (-4, 5),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
}


@dataclass(frozen=True)
class Line:
    """A line of a chart; NaN breaks it.

    Attributes:
        label: its name in the legend.
        x, y: the points.
        colour: the number of its colour, from 0.
        dashed: whether it is dashed.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dashed: bool = False


def lines(
    title: str, given: Sequence[Line], caption: str = "", zero: bool = False, x: str = "hyper-step"
) -> str:
    """A figure with lines and their legend; empty if there is no point. ``zero`` draws the line y = 0."""
    drawn = [line for line in given if any(map(is_number, line.y))]
    if not drawn:
        return ""

    def draw(axes: "Axes") -> None:
        for line in drawn:
            at, values = _thinned(line.x, line.y)
            style = ("--" if line.dashed else "-") + ("o" if len(at) < 40 else "")
            axes.plot(at, values, style, color=_colour(line.colour), linewidth=1.5, markersize=3)
        if zero:
            axes.axhline(0.0, color=_INK, linewidth=0.8)
        _scale(axes, [y for line in drawn for y in line.y if is_number(y)])
        axes.set_xlabel(x)

    entries = [(line.colour, line.dashed, f"{line.label}: {_last(line.y)}") for line in drawn]
    return page.figure(title, page.legend(entries) + _svg(title, draw), caption)


def fan(title: str, x: Sequence[float], quantiles: Sequence[Sequence[float]], caption: str = "") -> str:
    """A figure of many values over time: bands between minimum, 5, 25, 50, 75 and 95 per cent, and maximum."""
    columns = [list(column) for column in zip(*quantiles, strict=False)]
    if not columns or not any(map(is_number, columns[len(columns) // 2])):
        return ""
    step = math.ceil(len(x) / _POINTS)
    at, bands = list(x)[::step], [column[::step] for column in columns]

    def draw(axes: "Axes") -> None:
        for inner in range(len(bands) // 2):
            low, high = bands[inner], bands[-1 - inner]
            axes.fill_between(
                at, low, high, color=_colour(0), alpha=(0.15, 0.25, 0.4)[min(inner, 2)], linewidth=0
            )
        axes.plot(at, bands[len(bands) // 2], color=_colour(0), linewidth=1.8)
        _scale(axes, [value for band in bands for value in band if is_number(value)])
        axes.set_xlabel("hyper-step")

    return page.figure(title, _svg(title, draw), caption)


def histogram(title: str, last: Row, first: Row | None = None, caption: str = "") -> str:
    """A figure with a histogram, {"edges": [n + 1], "counts": [n]}, and the outline of an earlier one."""
    parts = [part for part in (first, last) if part is not None]
    logarithmic = all(part["edges"][0] > 0.0 for part in parts) and _wide(last["edges"])

    def draw(axes: "Axes") -> None:
        if logarithmic:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(_number)
        density = _density(last, logarithmic)
        axes.stairs(density, last["edges"], color=_colour(0), fill=True, alpha=0.5)
        if first is not None:
            axes.stairs(_density(first, logarithmic), first["edges"], color=_colour(5))
        axes.set_ylim(0.0, 1.25 * max(density))  # equal values at the start would flatten the rest

    return page.figure(title, _svg(title, draw), caption)


def _density(histogram: Row, logarithmic: bool) -> list[float]:
    """The share of values by unit of the axis."""
    edges, counts = histogram["edges"], histogram["counts"]
    places = [math.log10(edge) if logarithmic else edge for edge in edges]
    return [n / sum(counts) / (b - a) for n, (a, b) in zip(counts, pairwise(places), strict=True)]


def _wide(values: Sequence[float]) -> bool:
    """Whether they are positive and span more than a factor of thirty, which asks for a logarithmic axis."""
    return min(values) > 0.0 and max(values) >= 30.0 * min(values)


def image(pixels: Sequence[Any], title: str) -> str:
    """An array of numbers from 0 to 1, [height, width] or [height, width, 3], as an image within the page."""
    require_package("matplotlib", "a report", "report")
    from matplotlib.image import imsave

    with io.BytesIO() as file:
        imsave(file, pixels, format="png", cmap="gray", vmin=0.0, vmax=1.0)
        return embedded(file.getvalue(), title)


def embedded(png: bytes, title: str) -> str:
    """A PNG file as an image within the page."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<img alt="{page.text(title)}" src="{source}">'


def _svg(title: str, draw: Any) -> str:
    """What ``draw`` makes of the axes of a figure."""
    require_package("matplotlib", "a report", "report")
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(_RC), io.StringIO() as file:
        figure = Figure(figsize=(4.6, 2.7), facecolor="none")
        axes = figure.add_axes(
            (0.145, 0.165, 0.84, 0.82)
        )  # a layout that measures the labels takes twice the time
        axes.locator_params(axis="x", nbins=7)
        axes.yaxis.set_major_formatter(_number)
        draw(axes)
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(file, metadata={"Date": None, "Creator": None, "Type": None})
        drawn = file.getvalue()
    return _themed(drawn[drawn.index("<svg") :], title)


def _themed(svg: str, title: str) -> str:
    """The SVG with the page's colours, without a fixed size, and with names that no other chart has."""
    svg = re.sub(_NEEDLESS, "", svg, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)  # tenths of a point
    own = re.sub(r"\W+", "-", title)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{own}-", svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{page.text(title)}">{rest}'


def _scale(axes: "Axes", values: Sequence[float]) -> None:
    """A logarithmic axis if positive values span more than a factor of thirty."""
    from matplotlib.ticker import LogLocator, NullLocator

    if not _wide(values):
        return
    axes.set_yscale("log")
    subs = (1.0, 3.0) if max(values) < 1e3 * min(values) else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axes.yaxis.set_major_formatter(_number)
    axes.yaxis.set_minor_locator(NullLocator())


def _number(value: float, _: float = 0.0) -> str:
    """A number beside an axis, without a common exponent above the chart."""
    return f"{value:.6g}"


def _thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """A line with fewer points but the same picture."""
    size = math.ceil(len(x) / _POINTS)
    if size <= 2:
        return list(x), list(y)
    kept: list[int] = []
    for start in range(0, len(x), size):
        group = range(start, min(start + size, len(x)))
        numbers = [i for i in group if is_number(y[i])]
        ends = {min(numbers, key=y.__getitem__), max(numbers, key=y.__getitem__)} if numbers else {start}
        kept += sorted(ends)
    return [x[i] for i in kept], [y[i] for i in kept]


def _last(values: Sequence[float]) -> str:
    return page.shown(values[-1] if is_number(values[-1]) else None)


def _colour(number: int) -> str:
    return f"#0a0b{number % 8:02x}"
