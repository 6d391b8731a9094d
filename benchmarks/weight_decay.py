"""A weight decay for each weight, tuned on MNIST in mini-batches: validation loss by method, against steps and time.

1,000 training and 1,000 validation examples, batches of 128 for everything, Adam 1e-3 for the weights, RMSprop 1e-2
for the logarithms of the decays (from -8), five weight steps before each hyper-step.

    python benchmarks/weight_decay.py --model mlp --seeds 3 --threads 1
    python benchmarks/weight_decay.py --model cnn --seeds 3 --threads 1

``mlp`` is a 784-128-10 network with 101,770 weights; ``cnn`` has two convolutions with batch norm, and dropout. Each
prints one table, and writes MODEL.json and MODEL.png into --out. The folder of MNIST is named by --data-dir or
BESTRESPONSE_DATA.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import nn

import bestresponse as br
from bestresponse._layout import table
from bestresponse.experiments import data
from bestresponse.experiments.classification import Batch, output_loss, predict, train_loss, val_loss
from bestresponse.experiments.runs import versions, write_whole


def gauss_newton(decay: nn.Module) -> br.GaussNewton:
    return br.GaussNewton(predict, output_loss, rest=decay)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.3), nn.Linear(400, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn}
METHODS: dict[str, Callable[[nn.Module], br.Method]] = {
    "Neumann, 3 terms (the paper's)": lambda decay: br.Implicit(br.Neumann(3, scale=0.1)),
    "Neumann, 20 terms": lambda decay: br.Implicit(br.Neumann(20, scale=0.1)),
    "T1 − T2 (identity)": lambda decay: br.Implicit(br.Identity()),
    # As the paper met it: cold, undamped, on the Hessian, which is indefinite.
    "conjugate gradient, 20 steps": lambda decay: br.Implicit(br.ConjugateGradient(20)),
    "Implicit()": lambda decay: br.Implicit(),
    "Implicit(curvature=GaussNewton)": lambda decay: br.Implicit(curvature=gauss_newton(decay)),
    "the same, 2 steps": lambda decay: br.Implicit(
        br.ConjugateGradient(2, damping=None), gauss_newton(decay), warm_start=True
    ),
    "the same, 2 steps, damping=0.1": lambda decay: br.Implicit(
        br.ConjugateGradient(2, damping=0.1), gauss_newton(decay), warm_start=True
    ),
    "the same, 2 steps, recycle=20": lambda decay: br.Implicit(
        br.ConjugateGradient(2, damping=None, recycle=20), gauss_newton(decay), warm_start=True
    ),
}


def batches(pair: Batch, generator: torch.Generator) -> torch.utils.data.DataLoader[Any]:
    """Shuffled batches of 128, the last one smaller."""

    class Shuffled:
        def __iter__(self) -> Any:
            order = torch.randperm(len(pair[0]), generator=generator)
            for rows in torch.split(order, 128):
                yield pair[0][rows], pair[1][rows]

    return Shuffled()  # type: ignore[return-value]


def run(
    model_name: str, method: str, seed: int, images: data.Images, hyper_steps: int, hyper_rate: float = 1e-2
) -> dict[str, Any]:
    train, val = images.draw(1_000, 1_000, seed=seed)
    torch.manual_seed(seed)
    model = MODELS[model_name]()
    decay = br.hyperparameters.WeightDecay(model)
    problem = br.Problem(model, decay, train_loss, val_loss)
    curve: list[tuple[int, float, float]] = []
    measuring = 0.0

    @torch.no_grad()
    def measure(tuner: br.Tuner) -> None:
        nonlocal measuring
        if tuner.hyper_step % 20 == 0:
            now = time.process_time()
            model.eval()
            curve.append((tuner.hyper_step, now - began - measuring, float(val_loss(model, decay, val))))
            model.train()
            measuring += time.process_time() - now

    tuner = br.Tuner(
        problem,
        torch.optim.Adam(problem.weights.values(), 1e-3),
        torch.optim.RMSprop(problem.hyperparameters.values(), hyper_rate),
        METHODS[method](decay),
        weight_steps=5,
        seed=seed,
        callbacks=[measure],
    )
    generator = torch.Generator().manual_seed(seed)
    began = time.process_time()
    tuner.fit(batches(train, generator), batches(val, generator), hyper_steps)
    seconds = time.process_time() - began - measuring
    model.eval()
    with torch.no_grad():
        correct = float((model(images.x_test).argmax(1) == images.y_test).float().mean())
    return {
        "method": method,
        "seed": seed,
        "validation loss": curve[-1][2] if curve else float("nan"),
        "test accuracy": correct,
        "seconds": seconds,
        "products": sum(row.get("products", 0) for row in tuner.history) / len(tuner.history),
        "failed": sum(row.get("status") not in ("converged", "steps used") for row in tuner.history),
        "curve": curve,
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first = next(iter(METHODS))
    paper = {row["seed"]: row for row in rows if row["method"] == first}
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        against = [paper[row["seed"]] for row in mine if row["seed"] in paper]
        line: dict[str, Any] = {"method": method}
        line["validation loss"] = " ".join(f"{row['validation loss']:.4f}" for row in mine)
        line["test accuracy"] = " ".join(f"{100 * row['test accuracy']:.1f}" for row in mine)
        line["products"] = sum(row["products"] for row in mine) / len(mine)
        if against:
            ratios = [
                p["validation loss"] / row["validation loss"] for p, row in zip(against, mine, strict=True)
            ]
            times = [row["seconds"] / p["seconds"] for p, row in zip(against, mine, strict=True)]
            line["times below the paper's"] = " ".join(f"{ratio:.1f}" for ratio in ratios)
            line["time / the paper's"] = sum(times) / len(times)
        lines.append(line)
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8), sharey=True, layout="constrained")
    for index, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        for row in (row for row in rows if row["method"] == method):
            steps, seconds, losses = zip(*row["curve"], strict=True)
            for axes, along in zip(panels, (steps, seconds), strict=True):
                label = method if row["seed"] == 0 else None
                axes.semilogy(along, losses, color=f"C{index}", alpha=0.8, linewidth=1.2, label=label)
    panels[0].set_ylabel("validation loss")
    panels[0].set_xlabel("hyper-steps")
    panels[1].set_xlabel("seconds")
    for axes in panels:
        axes.grid(alpha=0.25)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hyper-steps", type=int, default=600)
    parser.add_argument("--threads", type=int, default=1, help="processor threads for torch")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="names, or their beginnings")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/weight_decay"), help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    images = data.load("mnist", options.data_dir)
    chosen = [name for name in METHODS if any(name.startswith(given) for given in options.methods)]
    # Methods in turn within a seed, so that a drift of the machine's speed meets all of them.
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        for name in chosen:
            rows.append(run(options.model, name, seed, images, options.hyper_steps))
            # As they come: a long run may be cut off.
            result = {"rows": rows, "versions": versions()}
            write_whole(options.out / f"{options.model}.json", result)
    draw(rows, options.out / f"{options.model}.png")
    print(table(summary(rows)))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
