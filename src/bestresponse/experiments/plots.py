"""The style of the figures, and how they are saved."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from .._files import replacing
from . import runs

# Legend handles are long enough to distinguish dashed lines from solid ones.
plt.rcParams.update({"legend.frameon": False, "legend.handlelength": 3.5})

BLUE, RED, GREEN, ORANGE, PURPLE, GREY = "#2a6f97", "#c1442e", "#4c8c4a", "#d98c21", "#7a5195", "#4d4d4d"
_EIGHT = (GREY, "#b8b8b8", ORANGE, GREEN, PURPLE, BLUE, RED, "#8c6d46")


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each of at most eight names."""
    return dict(zip(names, _EIGHT, strict=False))


@contextmanager
def panels(
    path: Path, rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.0, 3.8), **more: Any
) -> Iterator[Any]:
    """A figure with panels [rows, columns], which is saved at ``path`` and closed at the end.

    The entry "Source" of the picture's metadata identifies the ``metrics.jsonl`` beside it.
    """
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **more)
    try:
        yield axes
        with replacing(path, "--out") as file:
            metadata = {"Source": runs.digest(path.parent)}
            figure.savefig(file, dpi=150, format=path.suffix[1:], metadata=metadata)
    finally:
        plt.close(figure)


def style(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Labels, a faint grid and a small title."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    if title:
        axes.set_title(title, fontsize=10)


def legend_below(axes: Axes, columns: int, handles: Sequence[Artist] = (), size: int = 8) -> None:
    """One legend under all panels, by default with the labels of these axes."""
    handles = handles or axes.get_legend_handles_labels()[0]
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=size)


def curve(
    axes: Axes,
    rows: Iterable[Mapping[str, Any]],
    x: str,
    y: str,
    line: str = "-",
    scale: float = 1.0,
    band: Callable[[Sequence[float]], tuple[float, float]] | None = None,
    **look: Any,
) -> None:
    """Draw the mean of y over the rows with equal x, against x.

    Rows without y are left out. ``band`` maps several values of y to the lower and the upper edge of a band. ``scale``
    multiplies y, ``line`` is matplotlib's format, and ``look`` goes to its ``plot``.
    """
    values: dict[float, list[float]] = {}
    for row in rows:
        if row.get(y) is not None:
            values.setdefault(row[x], []).append(scale * row[y])
    at = sorted(values)
    axes.plot(at, [statistics.fmean(values[place]) for place in at], line, **{"linewidth": 1.8, **look})
    several = [place for place in at if len(values[place]) > 1]
    if band is not None and several:
        low, high = zip(*(band(values[place]) for place in several), strict=True)
        axes.fill_between(several, low, high, color=look["color"], alpha=0.2, linewidth=0)
