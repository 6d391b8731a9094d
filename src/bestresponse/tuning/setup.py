"""What a user's function returns to the command line, and how the command finds the function."""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import ArgumentError, ArgumentTypeError, Error, nearest
from ..methods import Method
from ..problem import Problem
from ..runs.weight_steps import WeightStep

_PLACE = "package.module:function or path/to/file.py:function"


@dataclass
class Setup:
    """A problem with its data and optimisers: what the function of ``bestresponse tune`` returns.

    Args:
        problem: the two losses.
        train_batches: a loader or a list of training batches.
        val_batches: the same for the validation loss.
        watch: a loader or a list of a third part of the data, which no gradient sees; the command keeps the state that
            is best on it. None keeps the last state.
        weight_optimizer: an optimiser of ``problem.weights``, or a function (problem, batch) -> None that moves them;
            None means Adam with rate 0.001.
        hyper_optimizer: an optimiser of ``problem.hyperparameters``; None means Adam with rate 0.01.
        method: the hypergradient, unless ``--method`` names one; None means ``Implicit()``. Methods that need
            functions, such as ``Implicit(curvature=GaussNewton(predict, loss))``, are given here.
        weight_scheduler: as in `Tuner`.
        hyper_scheduler: as in `Tuner`.
        callbacks: as in `Tuner`.

    Raises:
        ArgumentTypeError: ``problem`` is no `Problem`.
    """

    problem: Problem
    train_batches: Iterable[Any]
    val_batches: Iterable[Any]
    watch: Iterable[Any] | None = None
    weight_optimizer: Optimizer | WeightStep | None = None
    hyper_optimizer: Optimizer | None = None
    method: Method | None = None
    weight_scheduler: LRScheduler | None = None
    hyper_scheduler: LRScheduler | None = None
    callbacks: Sequence[Callable[[Any], None]] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.problem, Problem):
            raise ArgumentTypeError(
                f"Setup.problem must be a Problem; got {type(self.problem).__name__}. Make it by "
                "Problem(model, hyper, train_loss, val_loss)."
            )

    def optimizers(self) -> tuple[Optimizer | WeightStep, Optimizer]:
        """The optimisers of weights and hyperparameters, made where there are none."""
        weight, hyper = self.weight_optimizer, self.hyper_optimizer
        return (
            Adam(self.problem.weights.values(), 1e-3) if weight is None else weight,
            Adam(self.problem.hyperparameters.values(), 1e-2) if hyper is None else hyper,
        )


def made(place: str) -> Setup:
    """What the function at a place returns.

    The function returns a `Setup`, or the tuple (problem, train_batch, val_batch), or these and the weight optimiser.

    Args:
        place: package.module:function or path/to/file.py:function.

    Raises:
        Error: there is no such function, it fails, or it returns something else.
    """
    module_name, colon, name = place.rpartition(":")
    if not (module_name and colon and name) or (module_name.startswith(".") and not _is_file(module_name)):
        raise Error(
            f"a problem needs a function, as {_PLACE}; got {place!r}. `bestresponse init` writes one."
        )
    module = _module(module_name)
    if not callable(function := getattr(module, name, None)):
        own = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise Error(f"the module {module_name!r} has no {name!r} to call.{nearest(name, own)}")
    try:
        result = function()
    except Exception as error:
        raise Error(f"{place} must make a problem; it raised {_description(error)}.") from error
    if isinstance(result, Setup):
        return result
    if not isinstance(result, tuple | list) or len(result) not in (3, 4):
        raise Error(
            f"{place} must return (problem, train_batch, val_batch), these and the weight optimiser, or a "
            f"bestresponse.tuning.Setup; got {type(result).__name__}."
        )
    problem, train, val, *optimizer = result
    return Setup(problem, [train], [val], weight_optimizer=optimizer[0] if optimizer else None)


def first_batch(name: str, batches: Iterable[Any]) -> Any:
    """The first batch of a collection; raises if there is none."""
    for batch in batches:
        return batch
    raise ArgumentError(f"{name} must hold at least one batch; got none. Is drop_last dropping all of it?")


def _is_file(module_name: str) -> bool:
    return module_name.endswith(".py")


def _module(name: str) -> ModuleType:
    """The module with this name, or in this file."""
    folder = Path(name).parent if _is_file(name) else Path()
    sys.path.insert(0, str(folder.resolve()))
    try:
        return _from_file(Path(name)) if _is_file(name) else import_module(name)
    except Error:
        raise
    except ModuleNotFoundError as error:
        raise Error(
            f"{name!r} needs the module {error.name!r}; it is neither in {folder.resolve()} nor installed."
        ) from error
    except Exception as error:
        raise Error(f"the module {name!r} can't be imported: {_description(error)}.") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise Error(f"a problem needs a function, as {_PLACE}; there is no file {path}.{_nearest_file(path)}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Error(f"{path} must be a file of Python; it can't be loaded.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # worker processes of loaders import it by this name
    spec.loader.exec_module(module)
    return module


def _nearest_file(path: Path) -> str:
    return nearest(path.name, [each.name for each in path.parent.glob("*.py")])


def _description(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
