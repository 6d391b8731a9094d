"""The paper's tables 1 and 2 as measurements: how right each method is, and what it costs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.lines import Line2D
from tqdm.auto import tqdm

from ..errors import ArgumentError
from . import accuracy, orders, plots, runs
from .options import Options, Preset

# A direction nearer than this is drawn here.
_ROUNDING = 1e-7
_LABELS = {
    "away": "1 − cosine (1e-7 at least)",
    "time": "time, training gradients",
    "memory": "memory, training gradients",
}
_COLOURS = {
    "implicit": plots.BLUE,
    "through the steps": plots.RED,
    "learned response": plots.GREEN,
    "gradients alone": plots.PURPLE,
    "search": plots.ORANGE,
}


@dataclass(kw_only=True)
class Methods(Options):
    """Measure the paper's tables 1 and 2: each method's error and cost, and how memory grows.

    Two problems are small enough for the exact hypergradient: a linear model on a regression set and softmax
    regression on scikit-learn's digits, with a decay for each weight. Those through the steps begin at the initial
    weights, all others at the optimum w*(λ), from where the learned responses are trained. Searches try values
    around λ, and the direction from it to the best one stands for their hypergradient. Time and memory are in units
    of a training gradient. The second table has the slopes of log memory against the logarithms of steps, weights and
    hyperparameters: 1 where memory is proportional.
    """

    data: Literal["diabetes", "boston"] = "diabetes"
    """The regression set. diabetes comes with scikit-learn; boston is read from --data-dir."""
    classes: int = 3
    """Of the digits, from 0 on; 60 examples of each, half of them for validation."""
    steps: int = 50
    """Steps that are unrolled, in all of these methods."""
    last: int = 10
    """Of them, those that truncated unrolling differentiates."""
    terms: tuple[int, ...] = (1, 5, 20)
    """Neumann terms and conjugate-gradient steps."""
    training: int = 500
    """Steps in which hypernetworks are trained, by Adam."""
    trials: int = 20
    """Of a search."""
    log_decay: float = -3.0
    """λ: the natural logarithm of each decay."""
    sizes: int = 3
    """Of the memory's growth: each size is twice the one before."""
    repeats: int = 3
    """Times that each method is timed; the median counts."""


PRESETS: dict[Preset, Methods] = {
    "smoke": Methods(),
    "cpu": Methods(
        preset="cpu",
        seeds=3,
        data="boston",
        classes=10,
        steps=100,
        last=20,
        training=2000,
        trials=50,
        sizes=7,
    ),
    "paper": Methods(
        preset="paper",
        seeds=5,
        data="boston",
        classes=10,
        steps=1000,
        last=100,
        training=10000,
        trials=200,
        sizes=8,
    ),
}


def run(config: Methods) -> Path:
    """Run the experiment and return its folder."""
    config.begin(("steps", "last", "training", "trials", "repeats"))
    if config.device != "cpu":
        raise ArgumentError(f"--device must be cpu, where memory is counted; got {config.device}.")
    for name, holds, required in (
        ("last", config.last <= config.steps, "at most --steps"),
        ("terms", min(config.terms, default=0) >= 1, "numbers ≥ 1"),
        ("classes", 2 <= config.classes <= 10, "from 2 to 10"),
        ("sizes", 2 <= config.sizes <= 10, "from 2 to 10"),
        ("log_decay", -14 < config.log_decay < 3, "between -14 and 3"),
    ):
        if not holds:
            value = getattr(config, name)
            raise ArgumentError(f"--{name.replace('_', '-')} must be {required}; got {value}.")
    cases = [(seed, case) for seed in config.all_seeds() for case in accuracy.cases(config, seed)]
    folder = config.out or Path("runs") / f"methods-{config.data}"
    record = runs.Run(folder, "methods", config, figures=["methods.png", "orders.png"])
    with tqdm(unit="row", dynamic_ncols=True) as bar:
        for seed, case in cases:
            for row in accuracy.rows(config, case, seed):
                record.write(row)
                bar.set_postfix_str(f"{case.name}, seed {seed}: {row['method']}", refresh=False)
                bar.update()
        for row in orders.rows(config.sizes):
            record.write(row)
            bar.set_postfix_str(f"memory against {row['grows']}: {row['method']}", refresh=False)
            bar.update()
    rows = runs.read_rows(folder)
    draw(folder, runs.read_config(folder), rows)
    table, growth = _table(rows), orders.slopes([row for row in rows if row["table"] == 2])
    print("the growth of memory: slopes of its logarithm\n")
    print(runs.table(growth), end="\n\n")
    print("error, and time and memory in training gradients; trained: steps that were needed beforehand\n")
    best = [row for row in table if row["method"] == "recommended here"]
    headline = {f"cosine of the recommended, {row['problem']}": row["cosine"] for row in best}
    here = {row["method"]: row["here"] for row in rows if row["table"] == 1}
    record.finish(headline, table, config.seed, orders=growth, here=here)
    return folder


def _table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means and deviations over seeds."""
    of_methods = [row for row in rows if row["table"] == 1]
    keys, values = ["problem", "method", "trained"], ["cosine", "relative error", "time", "memory"]
    table = runs.mean_and_deviation(of_methods, keys, values)
    return [{k: x for k, x in row.items() if k not in ("time ±", "memory ±")} for row in table]


def draw(folder: Path, config: dict[str, Any], rows: list[dict[str, Any]]) -> list[Path]:
    """Error against time for each problem, and the growth of memory: from the rows alone."""
    measured, grown = ([row for row in rows if row["table"] == number] for number in (1, 2))
    return [_draw_errors(folder / "methods.png", measured), *(_draw_orders(folder, grown) if grown else [])]


def _draw_errors(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A line for each method: how far its direction is from the exact one, its time and its memory."""
    quantities = ["away", "time", "memory"]
    rows = [row | {"away": max(1.0 - row["cosine"], _ROUNDING)} for row in rows]
    table = runs.mean_and_deviation(rows, ["problem", "method", "family"], quantities)
    problems, names = (list(dict.fromkeys(row[key] for row in table)) for key in ("problem", "method"))
    with plots.panels(path, 1, 3, (9.6, 0.24 * len(names) + 1.4), sharey=True) as axes:
        for panel, quantity in zip(axes[0], quantities, strict=True):
            for problem, marker in zip(problems, "os", strict=False):
                for family, colour in _COLOURS.items():
                    of = [r for r in table if (r["problem"], r["family"]) == (problem, family)]
                    of = [r for r in of if r[quantity] is not None]
                    heights = [names.index(r["method"]) for r in of]
                    fill = colour if marker == "o" else "white"
                    style = {"color": colour, "markerfacecolor": fill, "markersize": 6}
                    panel.plot([r[quantity] for r in of], heights, marker, **style)
            panel.set_xscale("log")
            plots.style(panel, _LABELS[quantity], "")
        axes[0, 0].set_yticks(range(len(names)), names, fontsize=8)
        axes[0, 0].invert_yaxis()
        figure = axes[0, 0].figure
        shapes = [
            Line2D([], [], color="black", marker=m, markerfacecolor=f, linestyle="", label=problem)
            for problem, m, f in zip(problems, "os", ("black", "white"), strict=False)
        ]
        kinds = [Line2D([], [], color=c, marker="o", linestyle="", label=n) for n, c in _COLOURS.items()]
        figure.legend(handles=shapes + kinds, loc="outside lower center", ncols=7, frameon=False, fontsize=8)
    return path


def _draw_orders(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    """Memory against steps, weights and hyperparameters."""
    path = folder / "orders.png"
    with plots.panels(path, 1, 3, (10.2, 4.2), sharey=True) as axes:
        for panel, quantity in zip(axes[0], orders.QUANTITIES, strict=True):
            for number, name in enumerate(orders.METHODS):
                of = [r for r in rows if (r["method"], r["grows"]) == (name, quantity)]
                panel.plot(
                    [r[quantity] for r in of],
                    [r["MiB"] for r in of],
                    ("o-", "s--", "^:")[number % 3],
                    color=f"C{number}",
                    label=name,
                    markersize=3.5,
                    linewidth=1.6,
                )
            panel.set(xscale="log", yscale="log")
            panel.set_xscale("log", base=2)
            plots.style(panel, quantity, "peak memory [MiB]" if panel is axes[0, 0] else "")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure = axes[0, 0].figure
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return [path]
