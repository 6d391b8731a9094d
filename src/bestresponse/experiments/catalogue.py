"""The experiments of the command line, by name."""

from pathlib import Path

from ..errors import ArgumentError
from . import experiment, runs
from .adapters import Adapters
from .augment import Augment
from .best_response import BestResponse
from .distill import Distill
from .experiment import Experiment
from .generalisation import Generalisation
from .influence import InfluencePictures
from .inverse_error import InverseError
from .inverse_hessian import InverseHessian
from .lstm import LSTM
from .methods import Methods
from .mixture import Mixture
from .noisy_labels import NoisyLabels
from .overfit import Overfit
from .overfit_all import OverfitAll
from .shapes import Shapes
from .split import Split

# In the order that the command line lists them.
_CLASSES: list[type[Experiment]] = [Adapters, Augment, BestResponse, Shapes, Distill, Generalisation]
_CLASSES += [InfluencePictures, InverseError, InverseHessian, LSTM, Methods, Mixture, NoisyLabels]
_CLASSES += [Overfit, OverfitAll, Split]
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
