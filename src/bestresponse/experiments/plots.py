"""Figures, drawn from the files that a run has written and from nothing else."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ..errors import ArgumentError
from . import runs


def draw(folder: Path) -> list[Path]:
    """Draw the figures of the run in ``folder`` into it, and return their paths."""
    config = runs.read_config(folder)
    drawing = _FIGURES.get(config.get("experiment", ""))
    if drawing is None:
        raise ArgumentError(
            f"{folder} must be the run of one of {list(_FIGURES)}; its config.json says "
            f"{config.get('experiment')!r}. Name another."
        )
    return drawing(folder, config, runs.read_rows(folder))


def _overfit(folder: Path, config: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[Path]:
    """Training, validation and test error against hyper-steps: the paper's figure 5."""
    keys = {"hyper_step", "train_error", "val_error", "test_error"}
    measured = [row for row in rows if keys <= row.keys()]
    if not measured:
        raise ArgumentError(f"{folder} must hold rows with errors to draw; it has none. Has the run begun?")
    steps = [row["hyper_step"] for row in measured]
    figure, axes = plt.subplots(figsize=(6.0, 3.8), layout="constrained")
    curves = (
        ("test_error", "test", "#c1442e", "-"),
        ("val_error", "validation (tuned on)", "#2a6f97", "-"),
        ("train_error", "training", "#4d4d4d", "--"),
    )
    for key, label, colour, style in curves:
        axes.plot(
            steps, [100 * row[key] for row in measured], style, color=colour, label=label, linewidth=1.8
        )
    axes.set_xlabel("hyper-steps")
    axes.set_ylabel("error [%]")
    axes.set_ylim(-2, 102)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.set_title(
        f"{config.get('model')} on {config.get('data')}, a weight decay for each weight", fontsize=10
    )
    path = folder / "errors.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return [path]


_FIGURES: dict[str, Callable[[Path, dict[str, Any], Sequence[dict[str, Any]]], list[Path]]] = {
    "overfit": _overfit,
}
