"""How well a solve's report knows the error of its hypergradient: estimated against true, along runs.

scikit-learn's digits, 300 training and 300 validation examples in float64. Weights and hyperparameters move (Adam);
every fifth hyper-step the hypergradient is compared with that of a solve of the same system to a residual of 1e-9.

    python benchmarks/error_estimate.py --seeds 1 --threads 1

prints the share of estimates within a factor of three; error_estimate.json and error_estimate.png go into --out.
"""

import argparse
import math
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bestresponse as br
from bestresponse import _tree
from bestresponse._layout import table
from bestresponse.experiments.classification import Batch, output_loss, predict, train_loss, val_loss
from bestresponse.experiments.runs import versions, write_whole


class ExampleWeights(nn.Module):
    """A weight between 0 and 2 for each example, and a decay for all weights."""

    def __init__(self, examples: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(examples))
        self.log_decay = nn.Parameter(torch.tensor(-4.0))


def weighted_loss(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(hyper, ExampleWeights)
    losses = F.cross_entropy(predict(model, hyper, batch), batch[1], reduction="none")
    decay = hyper.log_decay.exp() / 2 * sum(w.square().sum() for w in model.parameters())
    return (losses * 2 * torch.sigmoid(hyper.logits[batch[2]])).mean() + decay


def linear() -> nn.Module:
    return nn.Linear(64, 10)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


# Model, hyperparameters, batch size (None: all).
PROBLEMS: dict[str, tuple[Callable[[], nn.Module], str, int | None]] = {
    "softmax regression, a decay for each weight": (linear, "weight", None),
    "softmax regression, weights of examples": (linear, "examples", None),
    "softmax regression, decays, batches of 64": (linear, "weight", 64),
    "network, a decay for each weight": (network, "weight", None),
    "network, decays, batches of 64": (network, "weight", 64),
    "network, two decays for each layer": (network, "tensor", None),
}
CG = br.ConjugateGradient
METHODS: dict[str, Callable[[br.Curvature], br.Method]] = {
    "recommended": lambda curvature: br.Implicit(curvature=curvature),
    "recycle=20, 3 steps": lambda curvature: br.Implicit(
        CG(3, damping=None, recycle=20), curvature, warm_start=True
    ),
    "conjugate gradient, 5 steps": lambda curvature: br.Implicit(CG(5, damping=1e-3), curvature),
    "conjugate gradient, 20 steps": lambda curvature: br.Implicit(CG(20, damping=1e-3), curvature),
    "Neumann, 20 terms": lambda curvature: br.Implicit(br.Neumann(20), curvature),
}


def run(name: str, method_name: str, seed: int, hyper_steps: int) -> list[tuple[float, float]]:
    """Pairs of the true and the estimated relative error."""
    make, kind, size = PROBLEMS[name]
    digits = load_digits()
    torch.manual_seed(seed)
    order = torch.randperm(len(digits.target))
    x, y = torch.tensor(digits.data) / 16.0, torch.tensor(digits.target)
    train, val = ((x[rows], y[rows], torch.arange(300)) for rows in (order[:300], order[300:600]))
    model = make().double()
    hyper: nn.Module
    curvature: br.Curvature
    if kind == "examples":
        hyper, curvature = ExampleWeights(300).double(), br.Hessian()
        problem = br.Problem(model, hyper, weighted_loss, val_loss)
    else:
        hyper = br.hyperparameters.WeightDecay(model, per=kind, initial=math.exp(-6))
        curvature = br.GaussNewton(predict, output_loss, rest=hyper)
        problem = br.Problem(model, hyper, train_loss, val_loss)
    method = METHODS[method_name](curvature)
    weights = torch.optim.Adam(problem.weights.values(), 1e-2)
    rates = torch.optim.Adam(problem.hyperparameters.values(), 0.03)

    def draw(batch: Batch) -> Batch:
        if size is None:
            return batch
        rows = torch.randperm(300)[:size]
        return batch[0][rows], batch[1][rows], batch[2][rows]

    pairs = []
    for step in range(hyper_steps):
        for _ in range(5):
            weights.zero_grad()
            problem.train_loss(model, hyper, draw(train)).backward(inputs=list(problem.weights.values()))
            weights.step()
        rates.zero_grad()
        train_batch, val_batch = draw(train), draw(val)
        h = br.backward(problem, train_batch, val_batch, method)
        assert h.solve is not None
        if step >= 10 and step % 5 == 0 and h.solve.hypergradient_error is not None:
            solver = CG(5_000, 1e-9, damping=h.solve.damping or 0.0)
            exact = br.hypergradient(problem, train_batch, val_batch, br.Implicit(solver, curvature))
            assert exact.solve is not None
            if exact.solve.status is br.Status.CONVERGED:
                true = _tree.norm(_tree.add(h.total, exact.total, -1.0)) / exact.norm
                pairs.append((true, h.solve.hypergradient_error))
        rates.step()
    return pairs


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = []
    for row in rows:
        pairs = row["pairs"]
        within = sum(1 / 3 <= estimate / true <= 3 for true, estimate in pairs) / len(pairs)
        lines.append(
            {
                "problem": row["problem"],
                "method": row["method"],
                "true error": f"{statistics.median(true for true, _ in pairs):.2g}",
                "estimate / true": f"{statistics.median(e / true for true, e in pairs):.2f}",
                "within a factor of 3": f"{100 * within:.0f} %",
            }
        )
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(5.6, 5.0), layout="constrained")
    line = [1e-7, 10.0]
    axes.loglog(line, line, color="0.4", linewidth=0.8)
    axes.fill_between(
        line, [x / 3 for x in line], [x * 3 for x in line], color="0.88", label="a factor of three"
    )
    for index, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        pairs = [pair for row in rows if row["method"] == method for pair in row["pairs"]]
        axes.loglog(*zip(*pairs, strict=True), ".", color=f"C{index}", markersize=4, alpha=0.6, label=method)
    axes.set_xlabel("true relative error of the hypergradient")
    axes.set_ylabel("estimated")
    axes.set_xlim(1e-6, 3)
    axes.set_ylim(1e-6, 3)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--hyper-steps", type=int, default=120)
    parser.add_argument("--threads", type=int, default=1, help="processor threads for torch")
    parser.add_argument("--out", type=Path, default=Path("runs/error_estimate"), help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", br.BestResponseWarning)
    rows = []
    for problem in PROBLEMS:
        for method in METHODS:
            pairs = [
                p for seed in range(options.seeds) for p in run(problem, method, seed, options.hyper_steps)
            ]
            if pairs:
                rows.append({"problem": problem, "method": method, "pairs": pairs})
                print(summary(rows[-1:])[0], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    write_whole(options.out / "error_estimate.json", {"rows": rows, "versions": versions()})
    draw(rows, options.out / "error_estimate.png")
    print(table(summary(rows)))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
