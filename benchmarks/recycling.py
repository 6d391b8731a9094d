"""How near a few products come to the exact hypergradient along a run: softmax regression, full batches.

scikit-learn's digits (pixels from 0 to 1), 300 training and 300 validation examples, a weight decay for each of the
640 weights on a logarithmic scale, five gradient steps of 0.5 between hyper-steps, Adam 0.02 on the logarithms, 300
hyper-steps. At each hyper-step the hypergradient is compared with the exact one at the same weights, from the dense
Hessian in float64.

    python benchmarks/recycling.py --seeds 3 --threads 1

prints one table, and writes recycling.json and recycling.png into --out.
"""

import argparse
import math
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
from bestresponse._layout import table
from bestresponse.experiments.classification import Batch, train_loss, val_loss
from bestresponse.experiments.runs import versions, write_whole

BEGIN = 40


def warm(steps: int, **settings: Any) -> br.Method:
    return br.Implicit(br.ConjugateGradient(steps, **settings), warm_start=True)


METHODS: dict[str, Callable[[], br.Method]] = {
    "Neumann, 20 terms": lambda: br.Implicit(br.Neumann(20, scale=0.5)),
    "conjugate gradient, 20 steps, cold": lambda: br.Implicit(br.ConjugateGradient(20)),
    "Implicit()": lambda: br.Implicit(),
    "2 steps, warm": lambda: warm(2),
    "3 steps, warm": lambda: warm(3),
    "2 steps, warm, diagonal": lambda: warm(2, diagonal=True),
    "2 steps, warm, recycle=10": lambda: warm(2, recycle=10),
    "2 steps, warm, recycle=20": lambda: warm(2, recycle=20),
    "1 step, warm, recycle=20, diagonal": lambda: warm(1, recycle=20, diagonal=True),
}


def draw_batches(seed: int) -> tuple[Batch, Batch]:
    """300 training and 300 validation examples."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    y = torch.tensor(digits.target)
    train, val = order[:300], order[300:600]
    return (x[train], y[train]), (x[val], y[val])


def exact_hypergradient(w: Tensor, rate: Tensor, train: Batch, val: Batch) -> Tensor:
    """−A⁻¹ ∂L_V/∂w ⊙ ∂²L_T/∂w∂λ in float64, with softmax regression's Hessian A written out."""
    x, x_val = train[0].double(), val[0].double()
    w, decay = w.double(), rate.double().exp()
    p = (x @ w.T).softmax(1)
    output_hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    classes, features = w.shape
    # [class, feature, class, feature]: one product of features for each pair of classes.
    blocks = torch.stack(
        [(x * output_hessian[:, i, j, None]).T @ x for i in range(classes) for j in range(classes)]
    )
    A = blocks.view(classes, classes, features, features).transpose(1, 2).reshape(w.numel(), w.numel()) / len(
        x
    )
    A += torch.diag(decay.flatten())
    error = (x_val @ w.T).softmax(1) - F.one_hot(val[1], classes)
    b = error.T @ x_val / len(x_val)
    response = torch.cholesky_solve(b.reshape(-1, 1), torch.linalg.cholesky(A)).view_as(w)
    return -response * decay * w


def run(method: str, seed: int, hyper_steps: int, log_decay: float) -> dict[str, Any]:
    train, val = draw_batches(seed)
    torch.manual_seed(seed)
    model = nn.Linear(64, 10, bias=False)
    decay = br.hyperparameters.WeightDecay(model, initial=math.exp(log_decay))
    problem = br.Problem(model, decay, train_loss, val_loss)
    chosen = METHODS[method]()
    (w,), (rate,) = problem.weights.values(), problem.hyperparameters.values()
    descent = torch.optim.SGD([w], 0.5)
    adam = torch.optim.Adam([rate], 0.02)
    cosines, products = [], 0
    for _ in range(hyper_steps):
        for _ in range(5):
            loss = train_loss(model, decay, train)
            descent.zero_grad()
            loss.backward(inputs=[w])
            descent.step()
        adam.zero_grad()
        h = br.backward(problem, train, val, chosen)
        (mine,) = h.total.values()
        exact = exact_hypergradient(w.detach(), rate.detach(), train, val)
        cosines.append(float(F.cosine_similarity(mine.double().flatten(), exact.flatten(), dim=0)))
        assert h.solve is not None
        products += h.solve.products
        adam.step()
        decay.project_()
    return {
        "method": method,
        "seed": seed,
        "worst cosine": min(cosines[BEGIN:]) if len(cosines) > BEGIN else float("nan"),
        "products": products / hyper_steps,
        "validation loss": float(val_loss(model, decay, val).detach()),
        "cosines": cosines,
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        lines.append(
            {
                "method": method,
                f"worst cosine after step {BEGIN}": " ".join(f"{row['worst cosine']:.4f}" for row in mine),
                "products": sum(row["products"] for row in mine) / len(mine),
                "validation loss": " ".join(f"{row['validation loss']:.3f}" for row in mine),
            }
        )
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """1 − cosine for the first seed: zero is the exact direction, two the opposite one."""
    figure, axes = plt.subplots(figsize=(8.4, 4.0), layout="constrained")
    for index, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        row = next(row for row in rows if row["method"] == method)
        away = [max(1 - c, 1e-7) for c in row["cosines"]]
        axes.semilogy(range(1, len(away) + 1), away, color=f"C{index}", linewidth=1.3, label=method)
    axes.set_xlabel("hyper-step")
    axes.set_ylabel("1 − cosine to the exact hypergradient")
    axes.set_ylim(1e-6, 2.5)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hyper-steps", type=int, default=300)
    parser.add_argument(
        "--log-decay", type=float, default=-5.0, help="the logarithm of each decay at the start"
    )
    parser.add_argument("--threads", type=int, default=1, help="processor threads for torch")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="names, or parts of them")
    parser.add_argument("--out", type=Path, default=Path("runs/recycling"), help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = [name for name in METHODS if any(given in name for given in options.methods)]
    rows = [
        run(name, seed, options.hyper_steps, options.log_decay)
        for name in chosen
        for seed in range(options.seeds)
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    write_whole(options.out / "recycling.json", {"rows": rows, "versions": versions()})
    draw(rows, options.out / "recycling.png")
    print(table(summary(rows)))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
