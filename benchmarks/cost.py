"""What a hypergradient costs: time and peak memory against the number of products K.

The unit is one plain training gradient of the same model and batch, timed in the same run.

    python benchmarks/cost.py --threads 2

prints one table, and writes cost.json and cost.png into --out.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import bestresponse as br
from bestresponse._layout import table
from bestresponse.diagnostics import measuring
from bestresponse.experiments.classification import Batch, predict, train_loss, val_loss
from bestresponse.experiments.runs import versions, write_whole

PRODUCTS = (0, 1, 3, 10, 20)


def multilayer() -> tuple[nn.Module, Tensor]:
    """A multilayer perceptron 784-512-512-10 and a batch of 256."""
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, torch.randn(256, 784)


def convolutional(training: bool = False) -> tuple[nn.Module, Tensor]:
    """A convolutional network with batch norm, in eval mode or not, 3×32×32 images and a batch of 128."""
    layers: list[nn.Module] = []
    for inside, outside in ((3, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))
    return model.train(training), torch.randn(128, 3, 32, 32)


class Recurrent(nn.Module):
    """A language model of two recurrent layers."""

    def __init__(self, words: int, units: int) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(words, units), nn.LSTM(units, units, 2)
        self.decoder = nn.Linear(units, words)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.decoder(self.lstm(self.table(x))[0]).flatten(0, 1)
        return outputs


def recurrent() -> tuple[nn.Module, Tensor]:
    """Torch's LSTM of two layers of 200 units, a vocabulary of 1,000, 20 sequences of 35 words."""
    return Recurrent(1000, 200), torch.randint(1000, (35, 20))


CASES = {
    "MLP": multilayer,
    "CNN": convolutional,
    "CNN, training mode": partial(convolutional, training=True),
    "LSTM": recurrent,
}
CURVATURES = ("Hessian", "GaussNewton")


def make(name: str) -> tuple[br.Problem, Batch]:
    torch.manual_seed(0)
    model, x = CASES[name]()
    decay = br.hyperparameters.WeightDecay(model)
    y = torch.randint(10, (len(x),)) if x.is_floating_point() else torch.randint(1000, (x.numel(),))
    return br.Problem(model, decay, train_loss, val_loss), (x, y)


def training_gradient(problem: br.Problem, batch: Batch) -> None:
    loss = problem.train_loss(problem.model, problem.hyper, batch)
    torch.autograd.grad(loss, list(problem.weights.values()))


def method(problem: br.Problem, curvature: str, products: int) -> br.Implicit:
    """K products in one hypergradient; the scale is small enough for any network of these cases."""
    outer = br.GaussNewton(predict, br.losses.CrossEntropy(lambda batch: batch[1]), rest=problem.hyper)
    chosen: br.Curvature = br.Hessian() if curvature == "Hessian" else outer
    return br.Implicit(br.Identity() if products == 0 else br.Neumann(products, scale=1e-3), chosen)


def rows_of(name: str, repeats: int) -> list[dict[str, object]]:
    problem, batch = make(name)
    work: dict[str, Callable[[], object]] = {"gradient": lambda: training_gradient(problem, batch)}
    for curvature in CURVATURES:
        for products in PRODUCTS:
            chosen = method(problem, curvature, products)
            work[f"{curvature} {products}"] = partial(br.hypergradient, problem, batch, batch, chosen)
    seconds = measuring.seconds(work, repeats)
    unit = seconds["gradient"]
    unit_bytes = measuring.peak_bytes(work["gradient"])
    assert all(w.grad is None for w in problem.weights.values())
    rows: list[dict[str, object]] = []
    for curvature in CURVATURES:
        first, last = (seconds[f"{curvature} {k}"] / unit for k in (PRODUCTS[1], PRODUCTS[-1]))
        rows += [
            {
                "case": name,
                "curvature": curvature,
                "K": products,
                "time / gradient": seconds[f"{curvature} {products}"] / unit,
                "memory / gradient": measuring.peak_bytes(work[f"{curvature} {products}"]) / unit_bytes,
                "time a product": (last - first) / (PRODUCTS[-1] - PRODUCTS[1]),
                "gradient [ms]": 1e3 * unit,
                "gradient [MiB]": unit_bytes / 2**20,
            }
            for products in PRODUCTS
        ]
    return rows


def summary(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """A row for each case and curvature: the price without products, of a product, and memory."""
    told = []
    for name in CASES:
        for curvature in CURVATURES:
            of = {r["K"]: r for r in rows if (r["case"], r["curvature"]) == (name, curvature)}
            told.append(
                {
                    "case": name,
                    "curvature": curvature,
                    **{f"K = {k}": of[k]["time / gradient"] for k in PRODUCTS},
                    "a product": of[0]["time a product"],
                    "memory, K = 0": of[0]["memory / gradient"],
                    "memory, K = 1": of[1]["memory / gradient"],
                    "memory, K = 20": of[PRODUCTS[-1]]["memory / gradient"],
                }
            )
    return told


def draw(rows: list[dict[str, object]], path: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
    colours = dict(zip(CASES, ("#4d4d4d", "#2a6f97", "#61a5c2", "#c1442e"), strict=True))
    for name in CASES:
        for curvature, line in zip(CURVATURES, ("o-", "s--"), strict=True):
            of_case = [row for row in rows if (row["case"], row["curvature"]) == (name, curvature)]
            for axes, key in zip(panels, ("time / gradient", "memory / gradient"), strict=True):
                values = [row[key] for row in of_case]
                axes.plot(PRODUCTS, values, line, ms=4, color=colours[name], label=f"{name}, {curvature}")
                axes.set_xlabel("products, K")
                axes.set_ylabel(f"{key.split(' / ')[0]} [training gradients]")
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    labels = panels[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="processor threads for torch")
    parser.add_argument("--repeats", type=int, default=7, help="counted rounds; the median is reported")
    parser.add_argument("--out", type=Path, default=Path("runs/cost"), help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [row for name in CASES for row in rows_of(name, options.repeats)]
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"rows": rows, "versions": versions(), "repeats": options.repeats}
    write_whole(options.out / "cost.json", result)
    draw(rows, options.out / "cost.png")
    print(table(summary(rows)))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
