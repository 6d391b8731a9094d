"""The errors and warnings of the library.

Each message states what was required, what was received, and what to do.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
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


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence with the known name that is most like an unknown one, after a space; empty if none is like it."""
    by_lower = {each.lower(): each for each in known}
    begun = [each for each in by_lower if name and each.startswith(name.lower())]
    found = begun or difflib.get_close_matches(name.lower(), by_lower, 1)
    return f" Did you mean {by_lower[found[0]]!r}?" if found else ""


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
    # A larger integer does not fit into torch's numbers.
    require(isinstance(value, float) or abs(value) < 2**63, name, "below 2**63", value)


def require_positive(name: str, value: object) -> None:
    """Raise if an argument is neither None nor a positive, finite number."""
    if value is not None:
        require_number(name, value)
        require(0 < value < math.inf, name, "positive and finite, or None", value)  # type: ignore[operator]


def require_integer(name: str, value: object, minimum: int) -> None:
    """Raise if an argument is not an integer ≥ minimum."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be an integer ≥ {minimum}; got {value!r}. Pass a Python int.")
    require(value >= minimum, name, f"an integer ≥ {minimum}", value)


def require_integers(name: str, value: object, minimum: int) -> None:
    """Raise if an argument is not a list or tuple of integers ≥ minimum, and below 2**31."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ArgumentTypeError(f"{name} must be a list or tuple of integers; got {value!r}.")
    for number in value:
        require_integer(f"each number of {name}", number, minimum)
        require(number < 2**31, f"each number of {name}", "below 2**31", number)


def require_flag(name: str, value: object) -> None:
    """Raise if an argument is not True or False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be True or False; got {value!r}.")


def require_text(name: str, value: object) -> None:
    """Raise if an argument is not a str."""
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{name} must be a str; got {value!r}.")


def require_function(name: str, value: object, names: str) -> None:
    """Raise if an argument cannot be called with these arguments, by position."""
    if not callable(value):
        raise ArgumentTypeError(f"{name} must be a function ({names}); got {value!r}.")
    require_parameters(name, value, names)


def require_seed(name: str, value: object) -> None:
    """Raise if an argument is neither None nor an integer that torch takes as a seed."""
    if value is not None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentTypeError(f"{name} must be an integer or None; got {value!r}.")
        require(abs(value) < 2**63, name, "between -2**63 and 2**63", value)


def require_package(package: str, owner: str, extra: str) -> None:
    """Raise if a package that belongs to an extra is not installed."""
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{owner} needs the package {error.name!r}, which is not installed. "
            f"Run: pip install 'bestresponse[{extra}]'"
        ) from error
