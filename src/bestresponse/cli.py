"""The command ``bestresponse``, whose options come from dataclasses."""

import inspect
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from . import _layout, commands
from .errors import Error, MissingPackageError, nearest, require_package
from .tuning.run import Tune

_COMMANDS = {
    "bestresponse init [FILE]": "write a small problem of your own to start from",
    "bestresponse check MODULE:FUNCTION": "check a problem and compare methods on it",
    "bestresponse tune MODULE:FUNCTION": "tune a problem; FILE.py:FUNCTION works too",
    "bestresponse report FOLDER": "write the report of a run as one HTML file",
    "bestresponse compare FOLDER FOLDER": "lay runs side by side in one HTML file",
    "bestresponse reproduce NAME [options]": "run an experiment of the paper",
    "bestresponse plot FOLDER": "draw the figures of an experiment again from its files",
    "bestresponse COMMAND --help": "show every option with its default",
    "bestresponse --version": "",
}
# Named here, since the help would take seconds longer if it imported them.
_EXPERIMENTS = {
    "adapters": "weights of sources of text for adapters: which ones help a new task?",
    "augment": "a network that changes training images, tuned in six ways",
    "best-response": "both losses over one weight and one hyperparameter, with the best response",
    "shapes": "every matrix of one hypergradient, with its shape and its entries",
    "distill": "one image a class, every pixel tuned, on which a classifier learns the task",
    "generalisation": "few and many tuned hyperparameters on new data, at equal CPU time",
    "influence": "the training images that helped and harmed most, and training without them",
    "inverse-error": "hypergradients of approximate inverses beside the exact one",
    "inverse-hessian": "the inverse of a training Hessian by Neumann series and exactly",
    "lstm": "the dropout rates of a language model, tuned in seven ways",
    "methods": "tables 1 and 2: the error and cost of each method, and its memory",
    "mixture": "weights of sources of text and of documents, for a language model",
    "noisy-labels": "weights of images whose labels may be wrong, tuned on a few right ones",
    "overfit": "a weight decay for every weight, until the validation set is overfitted",
    "overfit-all": "the same with each network on each data set, side by side",
    "split": "weight decay tuned on each split of a fixed number of examples",
}
_KINDS: dict[str, Any] = {
    "init": commands.Init,
    "check": commands.CheckProblem,
    "tune": Tune,
    "report": commands.WriteReport,
    "compare": commands.Compare,
    "plot": commands.Plot,
}
_Options = TypeVar("_Options")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Under torchrun, rank 0 runs the command, and the others have nothing to do.
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0":
        return 0
    try:
        return _run(words)
    except Error as error:
        print(f"bestresponse: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbestresponse: interrupted", file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    match words:
        case ["--version"]:
            print(version("bestresponse"))
        case [] | ["reproduce"] | ["-h" | "--help", *_] | ["reproduce", "-h" | "--help", *_]:
            print(_usage())
        case ["reproduce", name, *rest]:
            return _reproduce(name, rest)
        case ["init"]:
            commands.Init(Path("problem.py")).run()
        case [name, *rest] if name in _KINDS:
            return _parsed(_KINDS[name], name, rest).run() or 0
        case _:
            guess = nearest(words[0], [*_KINDS, "reproduce"])
            print(
                f"{_usage()}\n\nbestresponse: no such command: {' '.join(words[:2])}{guess and '.'}{guess}",
                file=sys.stderr,
            )
            return 2
    return 0


def _reproduce(name: str, words: list[str]) -> int:
    """Run an experiment of the paper."""
    if name not in _EXPERIMENTS:
        known = ", ".join(_EXPERIMENTS)
        message = f"no experiment {name!r}; the experiments are {known}.{nearest(name, _EXPERIMENTS)}"
        print(f"{_usage()}\n\nbestresponse: {message}", file=sys.stderr)
        return 2
    try:
        from .experiments import catalogue, experiment
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"the experiments need the package {error.name!r}, which is not installed. "
            "Run: pip install 'bestresponse[experiments]'"
        ) from error
    kind = catalogue.EXPERIMENTS[name]
    experiment.run(_parsed(kind, f"reproduce {name}", words, kind.of_preset(_preset(words))))
    return 0


def _parsed(kind: type[_Options], name: str, words: Sequence[str], default: Any = None) -> _Options:
    """The options of a command, from its words."""
    require_package("tyro", "the command line", "report")
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
    names = [_layout.fold(f"  {name:16} {text}", " " * 19) for name, text in _EXPERIMENTS.items()]
    return "\n".join(["usage:", *lines, "", "experiments:", *names])


def _preset(words: Sequence[str]) -> str:
    """The last value of --preset, which sets the defaults of the other options."""
    preset = "smoke"
    for word, following in pairwise([*words, ""]):
        if word == "--preset":
            preset = following
        elif word.startswith("--preset="):
            preset = word.removeprefix("--preset=")
    return preset
