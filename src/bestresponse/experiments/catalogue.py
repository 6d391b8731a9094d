"""The experiments of the command line, by name."""

from importlib import import_module
from pathlib import Path

from ..errors import ArgumentError
from . import experiment, runs
from .experiment import Experiment

# File and class of each experiment, in the order that the command line lists them.
_KINDS = (
    ("augment", "Augment"),
    ("best_response", "BestResponse"),
    ("shapes", "Shapes"),
    ("distill", "Distill"),
    ("inverse_error", "InverseError"),
    ("inverse_hessian", "InverseHessian"),
    ("lstm", "LSTM"),
    ("methods", "Methods"),
    ("overfit", "Overfit"),
    ("overfit_all", "OverfitAll"),
    ("split", "Split"),
)
_CLASSES: list[type[Experiment]] = [getattr(import_module(f".{f}", __package__), c) for f, c in _KINDS]
EXPERIMENTS = {kind.name: kind for kind in _CLASSES}


def draw(folder: Path) -> list[Path]:
    """Draw the figures of the run in ``folder`` from its files alone, and return their paths.

    Raises:
        ArgumentError: the folder holds no run, or a run without rows.
    """
    name = runs.read_config(folder).get("experiment", "")
    if name not in EXPERIMENTS:
        raise ArgumentError(
            f"{folder} must be a run of one of {list(EXPERIMENTS)}; its config.json says {name!r}. Choose another."
        )
    paths = experiment.draw(folder, EXPERIMENTS[name])
    if not paths:
        raise ArgumentError(f"{folder} must hold rows to draw; it has none. Has the run started?")
    return paths
