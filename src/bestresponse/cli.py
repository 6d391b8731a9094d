"""The command ``bestresponse``, whose options come from the dataclasses of the experiments."""

import inspect
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from . import _layout
from .diagnostics import check
from .errors import Error

_COMMANDS = {
    "bestresponse reproduce NAME [options]": "run an experiment of the paper",
    "bestresponse reproduce NAME --help": "show every option with its default",
    "bestresponse plot FOLDER": "draw the figures of a run again from its files",
    "bestresponse check MODULE:FUNCTION": "check a problem and compare methods on it",
    "bestresponse --version": "",
}

_Options = TypeVar("_Options")


@dataclass
class Plot:
    """Draw the figures of a run again from the files in its folder."""

    folder: Path
    """The folder of the run."""


@dataclass
class CheckProblem:
    """Check whether a problem is ready for tuning, and compare the results and costs of all methods on it."""

    place: str
    """A function, as package.module:function, that returns (problem, train_batch, val_batch) or these and the weight
    optimiser. The module may be in the current folder."""
    json: Path | None = None
    """A JSON file for all results."""
    retrain_steps: int = 100
    """Steps in each of the five retraining runs that hypergradients are compared with; 0 skips the comparison."""
    seed: int = 0
    """The seed of the random state of each pass."""

    def run(self) -> int:
        """Check, print, and return the exit status: 1 if the problem has an error, 2 if there is no problem."""
        try:
            if self.json is not None:
                self.json.touch()  # fail before the long check, not after it
            problem, train_batch, val_batch, *optimizer = _made(self.place)
            found = check(
                problem,
                train_batch,
                val_batch,
                weight_optimizer=optimizer[0] if optimizer else None,
                retrain_steps=self.retrain_steps,
                seed=self.seed,
                progress=_say,
            )
        except (Error, OSError) as error:
            print(f"bestresponse: {error}", file=sys.stderr)
            return 2
        print(found)
        if self.json is not None:
            text = json.dumps(found.data(), indent=2, allow_nan=False)
            self.json.write_text(text + "\n", encoding="utf-8")
        return 0 if found.ok else 1


def _say(part: str) -> None:
    print(_layout.fold(f"checking: {part}", " " * 4), file=sys.stderr, flush=True)


def _made(place: str) -> tuple[Any, ...]:
    """The result of the function at a place."""
    module_name, colon, name = place.partition(":")
    if not (module_name and colon and name) or module_name.startswith("."):
        raise Error(f"check needs a function as package.module:function; got {place!r}.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise Error(
            f"{place!r} needs the module {error.name!r}; it is neither in {Path.cwd()} nor installed."
        ) from error
    except Exception as error:
        raise Error(f"the module {module_name!r} can't be imported: {_description(error)}.") from error
    if not callable(function := getattr(module, name, None)):
        raise Error(f"the module {module_name!r} has no {name!r} to call.")
    try:
        made = function()
    except Exception as error:
        raise Error(f"{place} must make a problem; it raised {_description(error)}.") from error
    if not isinstance(made, tuple | list) or len(made) not in (3, 4):
        raise Error(
            f"{place} must return (problem, train_batch, val_batch) or these and the weight optimiser; got "
            f"{type(made).__name__}."
        )
    return tuple(made)


def _description(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except Error as error:
        print(f"bestresponse: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbestresponse: interrupted", file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        print(version("bestresponse"))
        return 0
    try:
        from .experiments import catalogue, experiment
    except ModuleNotFoundError as error:
        raise Error(
            f"the command line needs the package {error.name!r}, which is not installed. "
            "Run: pip install 'bestresponse[experiments]'"
        ) from error
    experiments = catalogue.EXPERIMENTS
    about = {name: (kind.__doc__ or "").splitlines()[0] for name, kind in experiments.items()}
    names = [_layout.fold(f"  {name:16} {text}", " " * 19) for name, text in about.items()]
    usage = "\n".join([_usage(), "", "experiments:", *names])
    match words:
        case ["reproduce", name, *rest] if name in experiments:
            kind = experiments[name]
            default = kind.of_preset(_preset(rest))
            experiment.run(_parsed(kind, f"reproduce {name}", rest, default))
        case ["plot", *rest]:
            plot = _parsed(Plot, "plot", rest)
            print("\n".join(str(path) for path in catalogue.draw(plot.folder)))
        case ["check", *rest]:
            return _parsed(CheckProblem, "check", rest).run()
        case ["reproduce", name, *_] if not name.startswith("-"):
            known = ", ".join(experiments)
            print(
                f"{usage}\n\nbestresponse: no experiment {name!r}; the experiments are {known}.",
                file=sys.stderr,
            )
            return 2
        case [] | ["reproduce"] | ["-h" | "--help", *_] | ["reproduce", "-h" | "--help", *_]:
            print(usage)
        case _:
            print(f"{usage}\n\nbestresponse: no such command: {' '.join(words[:2])}", file=sys.stderr)
            return 2
    return 0


def _parsed(kind: type[_Options], name: str, words: Sequence[str], default: Any = None) -> _Options:
    """The options of a command, from its words."""
    import tyro

    if empty := [
        word for word in words if word in ("", "--out=") or (word.startswith("--") and word.endswith("="))
    ]:
        raise Error(f"each option needs a value; got {empty[0]!r}. Give one, or leave the option out.")
    conf = tyro.conf
    options: _Options = tyro.cli(
        kind,
        prog=f"bestresponse {name}",
        description=_about(kind),
        args=words,
        default=default,
        config=(conf.PositionalRequiredArgs, conf.PositionalMetavarFromFieldName, conf.DisallowNone),
    )
    return options


def _about(kind: type) -> str:
    """The docstring of a class in lines that fit; tyro keeps breaks only before lines that begin with a space."""
    paragraphs = inspect.getdoc(kind) or ""
    return "\n\n".join(_layout.fold(f" {text}", " ") for text in paragraphs.split("\n\n"))


def _usage() -> str:
    lines = [_layout.fold(f"  {command:38} {text}".rstrip(), " " * 8) for command, text in _COMMANDS.items()]
    return "\n".join(["usage:", *lines])


def _preset(words: Sequence[str]) -> str:
    """The last value of --preset, which sets the defaults of the other options."""
    preset = "smoke"
    for word, following in pairwise([*words, ""]):
        if word == "--preset":
            preset = following
        elif word.startswith("--preset="):
            preset = word.removeprefix("--preset=")
    return preset
