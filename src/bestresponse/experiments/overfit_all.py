"""The overfitting experiment for every network and data set: the paper's figure 5 and its appendix, as one panel."""

from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from ..errors import ArgumentError
from . import data, overfit, plots, runs
from .options import Options, Preset
from .overfit import Overfit


@dataclass(kw_only=True)
class OverfitAll(Options):
    """Overfit the validation set with each network on each data set, and draw all of them side by side.

    Every run has a folder of its own. The same command again goes on after the runs that have ended. For the
    options, see `bestresponse reproduce overfit --help`.
    """

    data: tuple[Literal["digits", "mnist", "cifar10"], ...] = ("digits",)
    """The data sets, a row of the panel each."""
    model: tuple[Literal["linear", "mlp", "lenet", "alexnet", "resnet44"], ...] = ("linear", "mlp")
    """The networks, a column each."""
    steps: int = 100
    """Hyper-steps of each run."""
    weight_steps: int = 10
    """Weight steps before each hyper-step."""
    weight_rate: float = 1e-4
    """Adam's learning rate for the weights."""
    hyper_rate: float = 0.1
    """RMSprop's learning rate for the logarithms of the decays."""
    initial_log_decay: float = -6.0
    """The natural logarithm of each decay at the start."""


PRESETS: dict[Preset, OverfitAll] = {
    "smoke": OverfitAll(weight_rate=1e-3, steps=150),
    "cpu": OverfitAll(
        preset="cpu",
        threads=0,
        data=("mnist", "cifar10"),
        model=("linear", "mlp", "lenet"),
        steps=80,
        weight_rate=3e-4,
    ),
    "paper": OverfitAll(
        preset="paper",
        threads=0,
        data=("mnist", "cifar10"),
        model=("linear", "mlp", "lenet", "alexnet", "resnet44"),
        steps=20_000,
        weight_steps=1,
        hyper_rate=1e-2,
        initial_log_decay=-8.0,
    ),
}


def run(config: OverfitAll) -> Path:
    """Run the experiment and return its folder."""
    config.begin(("steps", "weight_steps", "weight_rate", "hyper_rate"), log_decays=("initial_log_decay",))
    if not config.data or not config.model:
        raise ArgumentError(
            f"--data and --model must name one each at least; got {config.data}, {config.model}."
        )
    folder = config.out or Path("runs/overfit-all")
    record = runs.Run(folder, "overfit-all", config, figures=["errors.png"])
    for name, cell in _cells(folder, config).items():
        result = _ended(cell) or _ended(replace(cell, out=overfit.run(cell)))
        if result is None:
            raise ArgumentError(f"{cell.out} must hold a result; it has none. Was it taken away meanwhile?")
        labels = {"data": cell.data, "model": cell.model, "seed": cell.seed, "folder": name}
        record.write({**labels, **result["rows"][0], "seconds": result["seconds"]})
    rows = runs.read_rows(folder)
    table = runs.mean_and_deviation(
        rows,
        ["data", "model", "hyperparameters"],
        ["train error", "validation error", "test error", "seconds", "time / plain"],
    )
    draw(folder, runs.read_config(folder), rows)
    worst = max(row["validation error"] for row in table)
    record.finish({"largest validation error": worst}, table, config.seed)
    return folder


def _cells(folder: Path, config: OverfitAll) -> dict[str, Overfit]:
    """The configuration of each run, by the name of its folder."""
    names = {field.name for field in fields(Overfit)} & {field.name for field in fields(config)}
    shared = {name: getattr(config, name) for name in names - {"preset", "seeds"}}
    shared["data_dir"] = data.folder_of(config.data_dir)
    cells = {}
    for images, model, seed in product(config.data, config.model, config.all_seeds()):
        name = f"{images}-{model}-{seed}"
        cells[name] = Overfit(
            **{**shared, "data": images, "model": model, "seed": seed, "out": folder / name}
        )
    return cells


def _ended(cell: Overfit) -> dict[str, Any] | None:
    """The result of a run of the same configuration that has ended, if there is one."""
    assert cell.out is not None
    try:
        result, config = runs.read_result(cell.out), runs.read_config(cell.out)
        ended = isinstance(result, dict) and result["interrupted"] is False and bool(result["rows"])
    except (ArgumentError, ValueError, KeyError):  # a damaged folder is one that has not ended
        return None
    expected = {"experiment": "overfit", **runs.as_json(cell)}
    same = all(config.get(key) == value for key, value in expected.items() if key != "threads")
    return result if ended and same else None


def draw(folder: Path, config: dict[str, Any], rows: list[dict[str, Any]]) -> list[Path]:
    """The error curves of the first seed's runs, a panel each: data sets down, networks across."""
    down, across = config["data"], config["model"]
    path = folder / "errors.png"
    size = (2.6 * len(across) + 0.4, 2.3 * len(down) + 0.4)
    with plots.panels(path, len(down), len(across), size, sharex=True, sharey=True) as axes:
        for row in rows:
            if row["seed"] == config["seed"]:
                panel = axes[down.index(row["data"]), across.index(row["model"])]
                title = f"{row['model']}, {row['data']}"
                overfit.draw_errors(panel, runs.read_rows(folder / row["folder"]), title)
                panel.label_outer()
        axes[0, 0].legend(frameon=False, fontsize=8)
    return [path]
