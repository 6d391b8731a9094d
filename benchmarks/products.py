"""What one product with the curvature costs, by curvature: time and peak memory in units of one training gradient.

A 784-128-10 network with a weight decay for each weight, batch 128; and an output layer over a vocabulary of 16,384,
batch 512, where the output Hessian in closed form counts.

    python benchmarks/products.py --threads 2

prints one table, and writes products.json into --out.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bestresponse as br
from bestresponse import _tree
from bestresponse._layout import table
from bestresponse.diagnostics import measuring
from bestresponse.experiments.classification import Batch, output_loss, predict, train_loss, val_loss
from bestresponse.experiments.runs import versions, write_whole


def penalty(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = hyper(model)
    return loss


def network() -> tuple[nn.Module, Batch]:
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, (torch.randn(128, 784), torch.randint(10, (128,)))


def vocabulary() -> tuple[nn.Module, Batch]:
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 16_384))
    return model, (torch.randn(512, 64), torch.randint(16_384, (512,)))


CASES = {"784-128-10": network, "vocabulary of 16,384": vocabulary}
CURVATURES: dict[str, Callable[[nn.Module], br.Curvature]] = {
    "Hessian": lambda decay: br.Hessian(),
    "Gauss-Newton, rest a WeightDecay": lambda decay: br.GaussNewton(predict, output_loss, rest=decay),
    "the same, CrossEntropy": lambda decay: br.GaussNewton(
        predict, br.losses.CrossEntropy(lambda batch: batch[1]), rest=decay
    ),
    "Gauss-Newton, rest a function": lambda decay: br.GaussNewton(predict, output_loss, rest=penalty),
    "KFAC, CrossEntropy, one sample": lambda decay: br.KFAC(
        predict, br.losses.CrossEntropy(lambda batch: batch[1]), rest=decay, samples=1
    ),
    "Gauss-Newton, rest by difference": lambda decay: br.GaussNewton(predict, output_loss),
}


def run(case: str, repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = CASES[case]()
    decay = br.hyperparameters.WeightDecay(model)
    problem = br.Problem(model, decay, train_loss, val_loss)
    v = {name: torch.randn_like(w) for name, w in problem.weights.items()}
    v = _tree.scale(v, 1.0 / _tree.norm(v))

    def gradient() -> None:
        torch.autograd.grad(train_loss(model, decay, batch), list(problem.weights.values()))

    rows: list[dict[str, Any]] = []
    with problem.undisturbed() as passes:
        systems = {name: make(decay).linearise(passes, batch) for name, make in CURVATURES.items()}
        # Products are cheap: ten a turn, so that the clock's grain and the first touch of memory do not count.
        work: dict[str, Callable[[], object]] = {
            name: lambda system=system: [system(v) for _ in range(10)] for name, system in systems.items()
        }
        seconds = measuring.seconds({"gradient": lambda: [gradient() for _ in range(10)], **work}, repeats)
        systems.clear()
        unit = measuring.peak_bytes(gradient)
        for name, make in CURVATURES.items():
            memory = measuring.peak_bytes(lambda make=make: make(decay).linearise(passes, batch)(v)) / unit
            rows.append(
                {
                    "case": case,
                    "curvature": name,
                    "time, gradients": seconds[name] / seconds["gradient"],
                    "memory, gradients": memory,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="processor threads for torch")
    parser.add_argument("--out", type=Path, default=Path("runs/products"), help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [row for case in CASES for row in run(case, options.repeats)]
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"rows": rows, "threads": options.threads, "versions": versions()}
    write_whole(options.out / "products.json", result)
    print(table(rows))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
