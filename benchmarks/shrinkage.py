"""Whether many decays hold on new data: test loss along a run, and after training again on all data.

A part of MNIST, half to train on and half to validate: an MLP (784-128-10) on 2,000 images, and softmax regression on
500. Batches of 128, Adam 1e-3 for the weights and 0.1 for the logarithms of the decays, five weight steps before each
of 600 hyper-steps, `Implicit(curvature=Hessian())`. Then the weights are trained again from scratch on all images,
3,000 steps, under the tuned decays. "watched" rows take 15 % of the images from the validation part: their loss chooses
the state.

    python benchmarks/shrinkage.py --setting mlp --seeds 3 --threads 1
    python benchmarks/shrinkage.py --setting softmax --seeds 3 --threads 1
    python benchmarks/shrinkage.py --setting mlp --seeds 3 --threads 1 --agreement

Each prints a table and writes SETTING.json into --out. With --agreement, the hypergradients are those of two halves of
each validation batch, and the table shows the test loss where the mean agreement of 25 hyper-steps first falls below
0.05.
"""

import argparse
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from settings import Shuffled, mlp
from torch import nn

import bestresponse as br
from bestresponse._layout import table
from bestresponse.experiments import data
from bestresponse.experiments.classification import accuracy, train_loss, val_loss
from bestresponse.experiments.runs import versions, write_whole

WINDOW, LEAST = 25, 0.05
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp": (mlp, 2_000),
    "softmax": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), 500),
}
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "one decay": ({"per": "global"}, False),
    "one for each tensor": ({"per": "tensor"}, False),
    "one for each weight": ({"per": "weight"}, False),
    "one for each weight, watched": ({"per": "weight"}, True),
    "the same, shrinkage 0.1": ({"per": "weight", "shrinkage": 0.1}, False),
    "the same, around one centre": ({"per": "weight", "shrinkage": 0.1, "around": "global"}, False),
    "the same, shrinkage 0.3": ({"per": "weight", "shrinkage": 0.3, "around": "global"}, False),
}


@torch.no_grad()
def loss_of(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    model.eval()
    value = float(F.cross_entropy(model(pair[0]), pair[1]))
    model.train()
    return value


def initialise(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()


def run(setting: str, way: str, seed: int, images: data.Images, steps: int, halves: bool) -> dict[str, Any]:
    make, number = NETWORKS[setting]
    how, watched = WAYS[way]
    part = number // 2
    kept = number * 3 // 20 if watched else 0
    train, val, third = images.draw(part, number - part - kept, kept, seed=seed)
    together = tuple(torch.cat(pair) for pair in zip(train, val, third, strict=True))
    test = images.x_test, images.y_test
    torch.manual_seed(seed)
    model = make()
    decay = br.hyperparameters.WeightDecay(model, **how)
    problem = br.Problem(model, decay, train_loss, val_loss)
    generator = torch.Generator().manual_seed(seed)
    curve: list[tuple[int, float]] = []

    def measure(tuner: br.Tuner) -> None:
        if tuner.hyper_step % WINDOW == 0:
            curve.append((tuner.hyper_step, loss_of(model, test)))

    implicit = br.Implicit(curvature=br.Hessian())
    tuner = br.Tuner(
        problem,
        torch.optim.Adam(problem.weights.values(), 1e-3),
        torch.optim.Adam(decay.parameters(), 0.1),
        br.Halves(implicit) if halves else implicit,
        weight_steps=5,
        seed=seed,
        callbacks=[measure],
        watch=[third] if watched else None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", br.BestResponseWarning)
        tuner.fit(Shuffled(train, generator), Shuffled(val, generator), steps)
    row: dict[str, Any] = {"way": way, "seed": seed, "validation loss": loss_of(model, val)}
    row |= {"test loss at the end": curve[-1][1], "lowest on the way": min(loss for _, loss in curve)}
    if halves:
        agreement = [row["agreement"] for row in tuner.history]
        means = {k: statistics.fmean(agreement[k - WINDOW : k]) for k, _ in curve}
        stop = next((k for k, _ in curve if means[k] < LEAST), curve[-1][0])
        row |= {"stop": stop, "test loss there": dict(curve)[stop]}
    if watched:
        tuner.watch.restore(tuner)
        row["test loss there"] = loss_of(model, test)
    torch.manual_seed(seed + 100)
    tuner.retrain(Shuffled(together, generator), 3_000, initialise)
    return row | {
        "trained again: test loss": loss_of(model, test),
        "accuracy": 100 * accuracy(model.eval(), test),
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        line = {"decays": way}
        for key in dict.fromkeys(key for row in mine for key in row if key not in ("way", "seed")):
            line[key] = " ".join(f"{row[key]:.3g}" for row in mine)
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", choices=NETWORKS, default="mlp")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hyper-steps", type=int, default=600)
    parser.add_argument("--agreement", action="store_true", help="take two halves of each validation batch")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), help="names, or their beginnings")
    parser.add_argument("--threads", type=int, default=1, help="processor threads for torch")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/shrinkage"), help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    images = data.load("mnist", options.data_dir)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    name = f"{options.setting}{'-agreement' if options.agreement else ''}.json"
    for seed in range(options.seeds):
        for way in WAYS:
            if any(way.startswith(given) for given in options.ways):
                rows.append(run(options.setting, way, seed, images, options.hyper_steps, options.agreement))
                write_whole(options.out / name, {"rows": rows, "versions": versions()})
    print(table(summary(rows)))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
