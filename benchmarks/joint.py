"""Whole tuning runs: what tuning adds to training, and the time to a validation loss, beside other libraries.

    pip install betty-ml torchopt hypergrad
    python benchmarks/joint.py --threads 1

First, a 784-512-512-10 network, batches of 256, a weight decay for each weight, Adam for weights and decays: CPU time
and the most tensor memory alive, all state counted, of training with tuning over training without (the same training
loss, its regulariser included, with constant decays), for several numbers of weight steps to a hyper-step.

Second, the run of `weight_decay.py` (MNIST, 1,000 training and 1,000 validation examples, 600 hyper-steps of five
weight steps), for two learning rates of the decays: the CPU time at which each method reaches the validation loss that
the paper's, a series of three terms, ends with. Methods of other libraries stand in the place of ours in the same
loop, with the same optimisers and batches.

prints a table for each (--parts added race), and writes joint.json and joint.png into --out. What is not installed is
left out.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch
import weight_decay
from libraries import Tensors, betty, hypergrad, torchopt
from settings import Setting
from torch import Tensor, nn

import bestresponse as br
from bestresponse._layout import table
from bestresponse.diagnostics import measuring
from bestresponse.experiments import plots
from bestresponse.experiments.classification import predict, train_loss, val_loss
from bestresponse.experiments.runs import versions, write_whole

WEIGHT_STEPS = (1, 5, 10, 50)
PAPERS = "Neumann, 3 terms (the paper's)"
SCALE = 0.1


def gauss_newton(decay: nn.Module) -> br.GaussNewton:
    return br.GaussNewton(predict, br.losses.CrossEntropy(lambda batch: batch[1]), rest=decay)


RECOMMENDED: dict[str, Callable[[nn.Module], br.Method]] = {
    "Implicit(curvature=GaussNewton(...))": lambda decay: br.Implicit(curvature=gauss_newton(decay)),
    "GaussNewton, 2 steps": lambda decay: br.Implicit(
        br.ConjugateGradient(2, damping=None), gauss_newton(decay), warm_start=True, estimate_error=False
    ),
}


# --- what tuning adds to training ---------------------------------------------------------------------


def trained(method: str | None, weight_steps: int, steps: int) -> float:
    """Train for so many weight steps, tuned or not, from nothing; the CPU seconds of the steps after the first ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    decay = br.hyperparameters.WeightDecay(model, initial=1e-4)
    batches = [(torch.randn(256, 784), torch.randint(10, (256,))) for _ in range(2)]
    weights = torch.optim.Adam(model.parameters(), 1e-4)
    if method is None:
        decay.requires_grad_(False)

        def train(count: int) -> None:
            for _ in range(count):
                weights.zero_grad()
                train_loss(model, decay, batches[0]).backward()
                weights.step()

    else:
        problem = br.Problem(model, decay, train_loss, val_loss)
        hyper = torch.optim.Adam(decay.parameters(), 1e-3)
        tuner = br.Tuner(problem, weights, hyper, RECOMMENDED[method](decay), weight_steps=weight_steps)

        def train(count: int) -> None:
            tuner.fit(batches[:1], batches[1:], count // weight_steps)

    train(2 * weight_steps)  # optimisers make their state, and the first solve is longer
    began = time.process_time()
    train(steps)
    return time.process_time() - began


def added(repeats: int) -> list[dict[str, Any]]:
    """A row for each method and number of weight steps."""
    rows = []
    for name in RECOMMENDED:
        for weight_steps in WEIGHT_STEPS:
            steps = 100 if weight_steps > 1 else 40
            ratios = []
            for _ in range(repeats):  # in turn, so that a drift of the machine's speed meets both
                tuned = trained(name, weight_steps, steps)
                ratios.append(tuned / trained(None, weight_steps, steps))
            gc.collect()
            memory = measuring.peak_bytes(lambda n=name, k=weight_steps: trained(n, k, 2 * k))
            plain = measuring.peak_bytes(lambda k=weight_steps: trained(None, k, 2 * k))
            rows.append(
                {
                    "method": name,
                    "weight steps": weight_steps,
                    "time / plain": sorted(ratios)[len(ratios) // 2],
                    "memory / plain": memory / plain,
                }
            )
    return rows


# --- the race --------------------------------------------------------------------------------------------


class Task:
    """The losses of a problem as functions of its weights and rates, for one batch each."""

    def __init__(self, problem: br.Problem, train_batch: Any, val_batch: Any) -> None:
        self.problem, self.train_batch, self.val_batch = problem, train_batch, val_batch
        self.weights, self.rates = list(problem.weights.values()), list(problem.hyperparameters.values())
        self.value = float("nan")

    def train(self, weights: Tensors, rates: Tensors) -> Tensor:
        penalty = sum((r.exp() * w.square()).sum() for w, r in zip(weights, rates, strict=True))
        return self._fit(weights, self.train_batch) + penalty / 2

    def val(self, weights: Tensors) -> Tensor:
        loss = self._fit(weights, self.val_batch)
        self.value = float(loss.detach())
        return loss

    def _fit(self, weights: Tensors, batch: Any) -> Tensor:
        named = dict(zip(self.problem.weights, weights, strict=True))
        outputs = torch.func.functional_call(self.problem.model, named, (batch[0],))
        return nn.functional.cross_entropy(outputs, batch[1])


@dataclass(frozen=True, eq=False)
class Other(br.Method):
    """A method of another library, on the problem and the batches of the call."""

    solve: Callable[[Task], Tensors]

    def differentiate(self, passes: Any, train_batch: Any, val_batch: Any) -> br.Hypergradient:
        problem = passes.problem
        task = Task(problem, train_batch, val_batch)
        found = dict(zip(problem.hyperparameters, self.solve(task), strict=True))
        found = {n: x.detach() for n, x in found.items()}
        zeros = {n: torch.zeros_like(x) for n, x in found.items()}
        return br.Hypergradient(found, zeros, found, task.value)


OTHERS: dict[str, tuple[str, Callable[[Task], Tensors]]] = {
    "betty, Neumann, 3 terms": ("betty", lambda task: betty(task, "neumann", 3, SCALE)),
    "betty, Neumann, 20 terms": ("betty", lambda task: betty(task, "neumann", 20, SCALE)),
    "betty, conjugate gradient, 5 steps": ("betty", lambda task: betty(task, "cg", 5, 1.0)),
    "torchopt, Neumann, 20 terms": ("torchopt", lambda task: torchopt(task, 20, SCALE)),
    "hypergrad, Neumann, 3 terms": ("hypergrad", lambda task: hypergrad(task, 3, SCALE)),
    "hypergrad, Neumann, 20 terms": ("hypergrad", lambda task: hypergrad(task, 20, SCALE)),
}
OURS = (PAPERS, "Neumann, 20 terms", "Implicit()", "GaussNewton, 2 steps")


def race(folder: Path | None, hyper_rate: float, seeds: int, hyper_steps: int) -> list[dict[str, Any]]:
    """The runs of all methods, in turn within a seed."""
    missing = {module for module, _ in OTHERS.values() if find_spec(module) is None}
    methods: dict[str, Callable[[Setting], br.Method]] = {n: weight_decay.METHODS[n] for n in OURS}
    for name, (module, solve) in OTHERS.items():
        if module not in missing:
            methods[name] = lambda _, solve=solve: Other(solve)
    weight_decay.METHODS.update(methods)
    rows = []
    for seed in range(seeds):
        for name in methods:
            row: dict[str, Any] = {"method": name, "seed": seed, "curve": []}
            try:
                row |= weight_decay.run("mlp", name, seed, hyper_rate, hyper_steps, folder)
            except RuntimeError as error:
                row["error"] = str(error)[:120]
            rows.append(row | {"hyper rate": hyper_rate})
    return rows


def arrivals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each method when it comes to the loss that the paper's ends with, and what it ends with itself."""
    papers = {r["seed"]: r["curve"][-1] for r in rows if r["method"] == PAPERS}
    lines = []
    for name in dict.fromkeys(r["method"] for r in rows):
        cells: dict[str, list[str]] = {
            "hyper-steps to it": [],
            "time to it": [],
            "end": [],
            "time of a run": [],
        }
        for row in (r for r in rows if r["method"] == name):
            _, whole, goal, _ = papers[row["seed"]]
            steps, seconds, *_ = next((p for p in row["curve"] if p[2] <= goal), (None, None))
            _, last, end, _ = row["curve"][-1] if row["curve"] else (None, None, None, None)
            cells["hyper-steps to it"].append("–" if steps is None else str(steps))
            cells["time to it"].append("–" if seconds is None else f"{seconds / whole:.2f}")
            cells["end"].append(row.get("error", "–") if end is None else f"{end:.4f}")
            cells["time of a run"].append("–" if last is None else f"{last / whole:.2f}")
        lines.append({"method": name} | {column: " ".join(found) for column, found in cells.items()})
    return lines


def draw(races: dict[float, list[dict[str, Any]]], path: Path) -> None:
    with plots.panels(path, 1, len(races), (4.0 * len(races) + 3.0, 3.8)) as axes:
        for axis, (rate, rows) in zip(axes[0], races.items(), strict=True):
            for index, name in enumerate(dict.fromkeys(r["method"] for r in rows)):
                first = next(r for r in rows if r["method"] == name)
                if first["curve"]:
                    _, seconds, losses, _ = zip(*first["curve"], strict=True)
                    line = "-" if name in OURS else "--"
                    label = name if axis is axes[0][0] else None
                    axis.semilogy(seconds, losses, line, color=f"C{index % 10}", lw=1.2, label=label)
                if name == PAPERS and first["curve"]:
                    axis.set_xlim(0.0, 2.5 * first["curve"][-1][1])
                    axis.axhline(first["curve"][-1][2], color="0.6", lw=0.8)
            plots.style(axis, "CPU seconds", "validation loss", f"hyper learning rate {rate:g}")
            axis.set_ylim(5e-4, 1.0)
        axes[0][0].figure.legend(loc="outside right center", frameon=False, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1, help="processor threads for torch")
    parser.add_argument(
        "--repeats", type=int, default=5, help="pairs of runs for the first table; the median counts"
    )
    parser.add_argument("--parts", nargs="+", choices=("added", "race"), default=["added", "race"])
    parser.add_argument("--seeds", type=int, default=1, help="of the second table")
    parser.add_argument("--hyper-steps", type=int, default=600)
    parser.add_argument(
        "--hyper-rates", type=float, nargs="+", default=[1e-2, 1e-1], help="learning rates of the decays"
    )
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/joint"), help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    first = added(options.repeats) if "added" in options.parts else []
    print(table(first) if first else "", flush=True)
    races: dict[float, list[dict[str, Any]]] = {}
    if "race" in options.parts:
        for rate in options.hyper_rates:
            races[rate] = race(options.data_dir, rate, options.seeds, options.hyper_steps)
            print(f"hyper learning rate {rate:g}: CPU time over that of the whole run of the paper's method")
            print(table(arrivals(races[rate])), flush=True)
        draw(races, options.out / "joint.png")
    rows = [row for of_rate in races.values() for row in of_rate]
    result = {"added": first, "race": rows, "threads": options.threads, "versions": versions()}
    write_whole(options.out / "joint.json", result)
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
