"""Whether the agreement of two halves shows when to stop: the test loss along runs on the ten settings of
``bestresponse reproduce generalisation``.

The many hyperparameters of each setting, free, by `Halves`, with the Hessian. Half of the examples is for validation.
A linear model is trained to the minimum before each of 100 hyper-steps; a network trains along, for at most 600. The
table shows the test loss of the running weights after the first hyper-steps, where it is lowest, at the end, and where
the mean agreement of 25 hyper-steps first falls below 0.05 (the end if it never does).

    python benchmarks/stopping.py --seeds 3 --threads 1

prints one table, and writes stopping.json into --out. The same command again makes only the runs that are missing.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import bestresponse as br
from bestresponse._layout import table
from bestresponse.cross_validation import Minimise
from bestresponse.experiments.generalisation_settings import settings
from bestresponse.experiments.runs import versions, write_whole
from bestresponse.experiments.tuned_models import Convex, Network, Setting, split

WINDOW, LEAST = 25, 0.05
STEPS = {Convex: 100, Network: 600}
MEASUREMENTS = 40


def run(setting: Setting, seed: int) -> dict[str, Any]:
    """The test loss along a run, and the agreements."""
    examples, test = setting.data(seed)
    torch.manual_seed(seed)
    model = setting.model()
    problem = setting.problem(model, setting.many(model, len(examples[0]), None, 0.0))
    steps = STEPS[Convex if isinstance(setting, Convex) else Network]
    curve: list[tuple[int, float]] = []

    def measure(tuner: br.Tuner) -> None:
        if tuner.hyper_step % max(1, steps // MEASUREMENTS) == 0 or tuner.hyper_step == steps:
            model.eval()
            curve.append((tuner.hyper_step, float(setting.example_losses(model, test).mean())))
            model.train()

    train, val = split(examples, 0.5)
    if isinstance(setting, Network):
        tuner = br.Tuner(
            problem,
            torch.optim.Adam(problem.weights.values(), setting.rate),
            torch.optim.Adam(problem.hyperparameters.values(), setting.hyper_rate),
            br.Halves(br.Implicit(curvature=br.Hessian())),
            weight_steps=setting.weight_steps,
            warmup_steps=setting.steps // 4,
            clip_weights=1.0,
            policy="skip",
            callbacks=[measure],
        )
        batches = setting.batches(train), setting.batches(val)
    else:
        solver = br.ConjugateGradient(max_steps=50, tolerance=1e-3)
        tuner = br.Tuner(
            problem,
            Minimise(max_steps=100, tolerance=1e-6, newton_limit=0),
            torch.optim.Adam(problem.hyperparameters.values(), setting.hyper_rate),
            br.Halves(br.Implicit(solver, warm_start=True)),
            callbacks=[measure],
        )
        batches = [train], [val]
    history = tuner.fit(*batches, steps)
    agreements = [row.get("agreement") or 0.0 for row in history]
    return {"setting": setting.name, "seed": seed, "curve": curve, "agreements": agreements}


def stop_of(row: dict[str, Any]) -> int:
    """The hyper-step at which the rule stops a run."""
    agreements = row["agreements"]
    means = ((k, statistics.fmean(agreements[k - WINDOW : k])) for k in range(WINDOW, len(agreements) + 1))
    return next((k for k, mean in means if mean < LEAST), len(agreements))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    lines = []
    for name in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == name]
        line: dict[str, list[str]] = {}
        for row in mine:
            at, stop = dict(row["curve"]), stop_of(row)
            lowest = min(at, key=lambda k: at[k])
            there = at[min(at, key=lambda k: abs(k - stop))]
            end = max(at)
            for key, value in (
                ("first", f"{at[min(at)]:.3f}"),
                ("lowest", f"{at[lowest]:.3f}"),
                ("at step", str(lowest)),
                ("at the stop", f"{there:.3f}"),
                ("stop", "–" if stop == end else str(stop)),
                ("at the end", f"{at[end]:.3f}"),
            ):
                line.setdefault(key, []).append(value)
        lines.append({"setting": name, **{key: ", ".join(values) for key, values in line.items()}})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=None, help="names; all ten by default")
    parser.add_argument("--threads", type=int, default=1, help="processor threads for torch")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/stopping"), help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = settings(options.data_dir, False)
    file = options.out / "stopping.json"
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if file.exists() else []
    made = {(row["setting"], row["seed"]) for row in rows}
    for name in options.settings or chosen:
        for seed in range(options.seeds):
            if (name, seed) not in made:
                rows.append(run(chosen[name], seed))
                write_whole(file, {"rows": rows, "versions": versions()})
    rows = [row for row in rows if row["setting"] in (options.settings or chosen)]
    print(table(summary(rows)))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
