"""How the figures look, and how they are saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

BLUE, RED, GREEN, ORANGE, PURPLE, GREY = "#2a6f97", "#c1442e", "#4c8c4a", "#d98c21", "#7a5195", "#4d4d4d"


@contextmanager
def panels(
    path: Path, rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.0, 3.8), **more: Any
) -> Iterator[Any]:
    """A figure with rows × columns panels, [rows, columns], that is saved at ``path`` and closed at the end."""
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **more)
    try:
        yield axes
        figure.savefig(path, dpi=150)
    finally:
        plt.close(figure)


def style(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Labels, a faint grid and a small title."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    if title:
        axes.set_title(title, fontsize=10)
