"""The experiments of the command line, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from . import (
    augment,
    best_response,
    distill,
    distilled_set,
    inverse_error,
    inverse_hessian,
    lstm,
    methods,
    overfit,
    overfit_all,
    runs,
    shapes,
    split,
)
from .options import Options


@dataclass(frozen=True)
class Experiment:
    """What runs and draws one experiment.

    Attributes:
        presets: the options of each preset; their class makes the command line.
        run: runs it and returns its folder.
        draw: draws the figures of a folder from its configuration and rows, and returns their paths.
    """

    presets: Mapping[Any, Options]
    run: Callable[[Any], Path]
    draw: Callable[[Path, dict[str, Any], list[dict[str, Any]]], list[Path]]


EXPERIMENTS = {
    "augment": Experiment(augment.PRESETS, augment.run, augment.draw),
    "best-response": Experiment(best_response.PRESETS, best_response.run, best_response.draw),
    "shapes": Experiment(shapes.PRESETS, shapes.run, shapes.draw),
    "distill": Experiment(distill.PRESETS, distill.run, distilled_set.draw),
    "inverse-error": Experiment(inverse_error.PRESETS, inverse_error.run, inverse_error.draw),
    "inverse-hessian": Experiment(inverse_hessian.PRESETS, inverse_hessian.run, inverse_hessian.draw),
    "lstm": Experiment(lstm.PRESETS, lstm.run, lstm.draw),
    "methods": Experiment(methods.PRESETS, methods.run, methods.draw),
    "overfit": Experiment(overfit.PRESETS, overfit.run, overfit.draw),
    "overfit-all": Experiment(overfit_all.PRESETS, overfit_all.run, overfit_all.draw),
    "split": Experiment(split.PRESETS, split.run, split.draw),
}


def draw(folder: Path) -> list[Path]:
    """Draw the figures of the run in ``folder`` into it, from its files alone, and return their paths.

    Raises:
        ArgumentError: the folder holds no run, or none of its rows yet.
    """
    config = runs.read_config(folder)
    experiment = EXPERIMENTS.get(config.get("experiment", ""))
    if experiment is None:
        raise ArgumentError(
            f"{folder} must be the run of one of {list(EXPERIMENTS)}; its config.json says "
            f"{config.get('experiment')!r}. Name another."
        )
    rows = runs.read_rows(folder)
    if not rows:
        raise ArgumentError(f"{folder} must hold rows to draw; it has none. Has the run begun?")
    return experiment.draw(folder, config, rows)
