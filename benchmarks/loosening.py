"""Whether the hypergradient of many hyperparameters points to a lower test loss, on the linear settings of
``bestresponse reproduce generalisation``.

One decay is tuned by cross-validation. There, the hypergradient g of a decay for each feature or pixel, around that
one, is computed. The logarithms of the decays go a step t along −g / max |g|, new weights are trained on all examples,
and the test loss is compared with that of the one decay. A step of 1 changes at least one decay by the factor e. If
validation examples told which features need more decay, a small enough step would lower the test loss.

    python benchmarks/loosening.py --seeds 5 --threads 1

prints one table of the relative change of the test loss (mean and standard error over seeds), and writes
loosening.json into --out.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import bestresponse as br
from bestresponse._layout import table
from bestresponse.experiments.generalisation_settings import settings
from bestresponse.experiments.runs import versions, write_whole
from bestresponse.experiments.tuned_models import TRAINER, Convex
from bestresponse.experiments.ways_of_tuning import WAYS, Clock, mean_and_error, retrained

STEPS = (0.1, 0.3, 1.0)


def run(setting: Convex, seed: int) -> dict[str, Any]:
    """The relative change of the test loss at each step, from the decay that is tuned by cross-validation."""
    examples, test = setting.data(seed)
    torch.manual_seed(seed)
    few = WAYS["few"](setting, examples, Clock(setting.seconds), seed).hyper
    base = float(retrained(setting, few, examples, test, seed).mean())
    model = setting.model()
    many = setting.many(model, len(examples[0]), few, 0.5)
    problem, train, val = setting.cross_validation(model, many, examples)
    train, val = next(iter(train)), next(iter(val))
    TRAINER(problem, train)
    method = br.Implicit(br.ConjugateGradient(max_steps=200, tolerance=1e-4))
    found = br.hypergradient(problem, train, val, method).total
    # The differences from the centre: the other tensor is the centre itself.
    name = max(found, key=lambda key: found[key].numel())
    g = found[name] / found[name].abs().max()
    changes = []
    start = many.get_parameter(name).detach().clone()
    for step in STEPS:
        with torch.no_grad():
            many.get_parameter(name).copy_(start - step * g)
        changes.append(float(retrained(setting, many, examples, test, seed).mean()) / base - 1.0)
    return {"setting": setting.name, "seed": seed, "test loss": base, "changes": changes}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    lines = []
    for name in dict.fromkeys(row["setting"] for row in rows):
        line = {"setting": name}
        for number, step in enumerate(STEPS):
            values = torch.tensor([row["changes"][number] for row in rows if row["setting"] == name])
            mean, error = mean_and_error(100.0 * values) if len(values) > 1 else (100.0 * float(values), 0.0)
            line[f"step {step:g}, %"] = f"{mean:+.2f} ± {error:.2f}"
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="processor threads for torch")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/loosening"), help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = [s for s in settings(options.data_dir, False).values() if isinstance(s, Convex)]
    rows = [run(setting, seed) for setting in chosen for seed in range(options.seeds)]
    print(table(summary(rows)))
    options.out.mkdir(parents=True, exist_ok=True)
    write_whole(options.out / "loosening.json", {"rows": rows, "versions": versions()})
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
