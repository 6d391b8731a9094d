"""Methods compared where weights and many hyperparameters move together: validation and test loss, and time.

Four settings (see `settings.py`): mlp, cnn, softmax and lstm. RMSprop moves the hyperparameters. Each method runs at
each of five learning rates; the table shows it at the rate with the lowest validation loss (the quantity that a
hypergradient minimises), and the test loss at that rate at the end of the run and where it was lowest on the way.

    python benchmarks/weight_decay.py --setting mlp --seeds 3 --threads 1
    python benchmarks/weight_decay.py --setting cnn --seeds 3 --threads 1

Each prints one table, and writes SETTING.json and SETTING.png into --out. The same command again makes only the runs
that are missing there. The folder of the data is named by --data-dir or BESTRESPONSE_DATA.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from settings import FEW, SETTINGS, Setting

import bestresponse as br
from bestresponse._layout import table
from bestresponse.experiments.runs import versions, write_whole

RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
MEASUREMENTS = 24
PAPERS = "Neumann, 3 terms (the paper's)"
ONE = "one hyperparameter, or few"


def gauss_newton(setting: Setting, steps: int, **more: Any) -> br.Method:
    curvature = br.GaussNewton(*setting.split)
    return br.Implicit(br.ConjugateGradient(steps, **more), curvature, warm_start=True)


METHODS: dict[str, Callable[[Setting], br.Method]] = {
    PAPERS: lambda setting: br.Implicit(br.Neumann(3, scale=0.1)),
    "Neumann, 3 terms, automatic scale": lambda setting: br.Implicit(br.Neumann(3)),
    "Neumann, 20 terms": lambda setting: br.Implicit(br.Neumann(20, scale=0.1)),
    "T1 − T2 (identity)": lambda setting: br.Implicit(br.Identity()),
    # As the paper met it: cold, undamped, on the Hessian, which is indefinite.
    "conjugate gradient, 20 steps": lambda setting: br.Implicit(br.ConjugateGradient(20)),
    "Implicit()": lambda setting: br.Implicit(),
    "Implicit(curvature=Hessian())": lambda setting: br.Implicit(curvature=br.Hessian()),
    # A fixed damping keeps the scale of the hypergradients steady where batches are noisy.
    "Hessian, 4 steps, damping=0.5": lambda setting: br.Implicit(
        br.ConjugateGradient(4, damping=0.5), warm_start=True
    ),
    "GaussNewton, 2 steps": lambda setting: gauss_newton(setting, 2, damping=None),
    "GaussNewton, 2 steps, damping=0.1": lambda setting: gauss_newton(setting, 2, damping=0.1),
    "GaussNewton, 2 steps, recycle=20": lambda setting: gauss_newton(setting, 2, damping=None, recycle=20),
    ONE: lambda setting: br.Implicit(),
}


def run(
    name: str, method: str, seed: int, rate: float, hyper_steps: int = 0, folder: Path | None = None
) -> dict[str, Any]:
    """One run; ``hyper_steps`` = 0 makes those of the setting."""
    setting = (FEW if method == ONE else SETTINGS)[name](seed, folder)
    steps = hyper_steps or setting.hyper_steps
    every = max(1, steps // MEASUREMENTS)
    curve: list[tuple[int, float, float, float]] = []
    measuring = 0.0

    def measure(tuner: br.Tuner) -> None:
        nonlocal measuring
        if tuner.hyper_step % every == 0 or tuner.hyper_step == steps:
            now = time.process_time()
            losses = setting.loss(setting.val_whole), setting.loss(setting.test)
            curve.append((tuner.hyper_step, now - began - measuring, *losses))
            measuring += time.process_time() - now

    tuner = br.Tuner(
        setting.problem,
        setting.weight_optimizer,
        torch.optim.RMSprop(setting.problem.hyperparameters.values(), rate),
        METHODS[method](setting),
        weight_steps=setting.weight_steps,
        clip_weights=setting.clip,
        seed=seed,
        callbacks=[measure],
    )
    began = time.process_time()
    row: dict[str, Any] = {"method": method, "seed": seed, "rate": rate}
    try:
        tuner.fit(setting.train, setting.val, steps)
    except br.Error as error:
        row["error"] = str(error)
    history = tuner.history
    return row | {
        "validation loss": math.inf if "error" in row or not curve else curve[-1][2],
        "test loss": math.inf if "error" in row or not curve else curve[-1][3],
        "best test loss": min((test for *_, test in curve), default=math.inf),
        "test accuracy": setting.accuracy(),
        "seconds": time.process_time() - began - measuring,
        "products": sum(r.get("products") or 0 for r in history) / max(1, len(history)),
        "failed": sum(r.get("status") not in ("converged", "steps used") for r in history),
        "curve": curve,
    }


def best_rate(rows: list[dict[str, Any]], key: str = "validation loss") -> float:
    """The learning rate with the lowest geometric mean of a loss over the seeds."""
    means = {
        rate: statistics.mean(math.log(row[key]) for row in rows if row["rate"] == rate)
        for rate in {row["rate"] for row in rows}
    }
    return min(means, key=lambda rate: means[rate])


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    reference = [row for row in rows if row["method"] == PAPERS]
    unit = statistics.median(row["seconds"] for row in reference) if reference else 1.0
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        rate = best_rate(mine)
        chosen = sorted((row for row in mine if row["rate"] == rate), key=lambda row: row["seed"])
        line: dict[str, Any] = {"method": method, "rate": f"{rate:g}"}
        for key in ("validation loss", "test loss", "best test loss"):
            line[key] = " ".join(f"{row[key]:.3g}" for row in chosen)
        if chosen[0]["test accuracy"] is not None:
            line["test accuracy"] = " ".join(f"{100 * row['test accuracy']:.1f}" for row in chosen)
        line["products"] = statistics.mean(row["products"] for row in chosen)
        label = "time / the paper's" if reference else "seconds"
        line[label] = statistics.median(row["seconds"] for row in mine) / unit
        lines.append(line)
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Validation and test loss of each method at its best rate, against hyper-steps; a line for each seed."""
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    for index, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        mine = [row for row in rows if row["method"] == method]
        for row in (row for row in mine if row["rate"] == best_rate(mine) and row["curve"]):
            steps, _, val, test = zip(*row["curve"], strict=True)
            look = {"color": f"C{index % 10}", "alpha": 0.8, "linewidth": 1.2}
            look["linestyle"] = "-" if index < 10 else "--"
            for axes, losses in zip(panels, (val, test), strict=True):
                axes.plot(steps, losses, label=method if row["seed"] == 0 else None, **look)
    panels[0].set_yscale("log")
    for axes, title in zip(panels, ("validation loss", "test loss"), strict=True):
        axes.set_title(title)
        axes.set_xlabel("hyper-steps")
        axes.grid(alpha=0.25)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=8, handlelength=3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", choices=SETTINGS, default="mlp")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="of the hyperparameters")
    parser.add_argument("--hyper-steps", type=int, default=0, help="0 makes those of the setting")
    parser.add_argument("--threads", type=int, default=1, help="processor threads for torch")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="names, or their beginnings")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/weight_decay"), help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = [name for name in METHODS if any(name.startswith(given) for given in options.methods)]
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{options.setting}.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if file.exists() else []
    made = {(row["method"], row["seed"], row["rate"]) for row in rows}
    # Methods in turn within a seed, so that a drift of the machine's speed meets all of them.
    for seed in range(options.seeds):
        for rate in options.rates:
            for name in chosen:
                if (name, seed, rate) in made:
                    continue
                rows.append(run(options.setting, name, seed, rate, options.hyper_steps, options.data_dir))
                # As they come: a long run may be cut off.
                write_whole(file, {"rows": rows, "versions": versions()})
    rows = [row for row in rows if row["method"] in chosen]
    draw(rows, options.out / f"{options.setting}.png")
    print(table(summary(rows)))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
