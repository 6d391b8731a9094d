"""The errors and warnings of the library.

Each message states what was required, what was received, and what to do.
"""

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any


class Error(Exception):
    """The base of every error that the library raises itself."""


class ArgumentError(Error, ValueError):
    """An argument of the right type with a value that cannot be used."""


class ArgumentTypeError(Error, TypeError):
    """An argument of the wrong type."""


class EvaluationError(Error, RuntimeError):
    """A problem found while a loss or its graph ran: not a scalar, not finite, detached, or out of reach."""


class NotFiniteError(EvaluationError):
    """A loss or a gradient is NaN or infinite."""


class DivergedError(EvaluationError):
    """Steps that look ahead of the weights diverged; `Tuner` can skip the hyper-step."""


class OutOfMemoryError(EvaluationError, MemoryError):
    """A device has too little memory for a hypergradient; the message names what needs less."""


class SecondDerivativeError(EvaluationError):
    """An operation in the training loss has no second derivative, or would lose it silently."""


class SolveError(EvaluationError):
    """A linear solve failed, and the policy was to raise."""


class FileError(ArgumentError, OSError):
    """A file cannot be written, or is damaged or not what it should be."""


class MissingPackageError(Error, ImportError):
    """A package that belongs to an extra is not installed."""


class BestResponseWarning(UserWarning):
    """The category of all warnings of the library; use it to filter them."""


def named(names: Iterable[object], most: int = 5) -> str:
    """A list of names as text, for messages."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(map(str, listed[:most])) + more


def require_parameters(owner: str, function: Callable[..., Any], names: str) -> None:
    """Raise if the function cannot be called with these arguments, by position."""
    called = getattr(function, "forward", function)  # a module's own call takes anything
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind(*names.split(", "))
    except TypeError as error:
        batch = ", or take them from the batch" if "batch" in names else ""
        raise ArgumentTypeError(
            f"{owner} must be a function ({names}); got one with the parameters {signature}: {error}. Give it these "
            f"parameters, and bind further ones with functools.partial{batch}."
        ) from error


def require(condition: bool, name: str, required: str, got: object) -> None:
    """Raise if an argument is out of its range."""
    if not condition:
        raise ArgumentError(f"{name} must be {required}; got {got!r}.")


def require_number(name: str, value: object) -> None:
    """Raise if an argument is not a number, for example a tensor or a string."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(
            f"{name} must be a number; got {type(value).__name__} {value!r}. Pass a Python float or int."
        )


def require_integer(name: str, value: object, minimum: int) -> None:
    """Raise if an argument is not an integer ≥ minimum."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be an integer ≥ {minimum}; got {value!r}. Pass a Python int.")
    require(value >= minimum, name, f"an integer ≥ {minimum}", value)


def require_package(package: str, owner: str, extra: str) -> None:
    """Raise if a package that belongs to an extra is not installed."""
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{owner} needs the package {error.name!r}, which is not installed. "
            f"Run: pip install 'bestresponse[{extra}]'"
        ) from error
