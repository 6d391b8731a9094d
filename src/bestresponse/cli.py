"""The command ``bestresponse``: the paper's experiments, generated from their dataclasses."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from .errors import Error

_USAGE = """\
usage: bestresponse reproduce NAME [options]   run an experiment of the paper
       bestresponse plot FOLDER                draw the figures of a run again, from what it has written
       bestresponse reproduce NAME --help      every option with its default
       bestresponse --version

experiments:
{names}"""


@dataclass
class Plot:
    """Draw the figures of a run again, from the files in its folder alone."""

    folder: Path
    """The folder of the run."""


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
    try:
        import tyro

        from .experiments import catalogue
    except ModuleNotFoundError as error:
        raise Error(
            f"the command line needs the package {error.name!r}, which is not installed. "
            "Run: pip install 'bestresponse[experiments]'"
        ) from error
    experiments = catalogue.EXPERIMENTS
    usage = _USAGE.format(
        names="\n".join(
            f"  {name:16} {(type(experiment.presets['smoke']).__doc__ or '').splitlines()[0]}"
            for name, experiment in experiments.items()
        )
    )
    match words:
        case ["reproduce", name, *rest] if name in experiments:
            experiment = experiments[name]
            default: Any = experiment.presets.get(_preset(rest), experiment.presets["smoke"])
            prog = f"bestresponse reproduce {name}"
            experiment.run(tyro.cli(type(default), prog=prog, args=rest, default=default))
        case ["plot", *rest]:
            plot = tyro.cli(tyro.conf.PositionalRequiredArgs[Plot], prog="bestresponse plot", args=rest)
            print("\n".join(str(path) for path in catalogue.draw(plot.folder)))
        case ["--version", *_]:
            print(version("bestresponse"))
        case ["reproduce", name, *_] if not name.startswith("-"):
            known = ", ".join(experiments)
            print(f"{usage}\n\nbestresponse: no experiment {name!r}; there is {known}.", file=sys.stderr)
            return 2
        case [] | ["reproduce"] | ["-h" | "--help", *_] | ["reproduce", "-h" | "--help", *_]:
            print(usage)
        case _:
            print(f"{usage}\n\nbestresponse: no such command: {' '.join(words[:2])}", file=sys.stderr)
            return 2
    return 0


def _preset(words: Sequence[str]) -> str:
    """The last value of --preset, which says where all other options begin."""
    preset = "smoke"
    for word, following in pairwise([*words, ""]):
        if word == "--preset":
            preset = following
        elif word.startswith("--preset="):
            preset = word.removeprefix("--preset=")
    return preset
