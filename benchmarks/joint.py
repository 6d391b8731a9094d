"""Whole tuning runs: what tuning adds to training, and the time to a validation loss, beside other libraries.

    pip install betty-ml torchopt hypergrad
    python benchmarks/joint.py --threads 1

First, a 784-512-512-10 network, batches of 256, a weight decay for each weight, Adam for weights and decays: CPU time
and the most tensor memory alive, all state counted, of training with tuning over training without (the same training
loss, its regulariser included, with constant decays), for several numbers of weight steps to a hyper-step.

Second, the run of `weight_decay.py` (MNIST, 1,000 training and 1,000 validation examples, 600 hyper-steps of five
weight steps): the CPU seconds at which each method reaches the validation loss that the paper's, a series of three
terms, ends with. Methods of other libraries stand in the place of ours in the same loop, with the same optimisers and
batches.

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
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch
import weight_decay
from torch import Tensor, nn

import bestresponse as br
from bestresponse import measuring
from bestresponse.experiments import data, plots
from bestresponse.experiments.classification import predict, train_loss, val_loss
from bestresponse.experiments.runs import table, versions, write_whole

WEIGHT_STEPS = (1, 5, 10, 50)
PAPERS = "Neumann, 3 terms (the paper's)"
SCALE = 0.1


def gauss_newton(decay: nn.Module) -> br.GaussNewton:
    return br.GaussNewton(predict, br.losses.CrossEntropy(lambda batch: batch[1]), rest=decay)


RECOMMENDED: dict[str, Callable[[nn.Module], br.Method]] = {
    "Implicit(curvature=GaussNewton(...))": lambda decay: br.Implicit(curvature=gauss_newton(decay)),
    "the same, 2 steps": lambda decay: br.Implicit(
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


@dataclass(frozen=True, eq=False)
class Other(br.Method):
    """A method of another library, on the problem and batch of the call."""

    solve: Callable[[Callable[..., Tensor], list[Tensor], list[Tensor], list[Tensor]], Any]

    def differentiate(self, passes: Any, train_batch: Any, val_batch: Any) -> br.Hypergradient:
        problem = passes.problem
        weights, rates = list(problem.weights.values()), list(problem.hyperparameters.values())
        value = passes.val_loss(val_batch)
        vector = list(torch.autograd.grad(value, weights))

        def loss(weights: Any, rates: Any) -> Tensor:
            named = dict(zip(problem.weights, weights, strict=True))
            outputs = torch.func.functional_call(problem.model, named, (train_batch[0],))
            fit = nn.functional.cross_entropy(outputs, train_batch[1])
            return fit + sum((r.exp() * w.square()).sum() for w, r in zip(weights, rates, strict=True)) / 2

        found = dict(zip(problem.hyperparameters, self.solve(loss, weights, rates, vector), strict=True))
        found = {n: x.detach() for n, x in found.items()}
        zeros = {n: torch.zeros_like(x) for n, x in found.items()}
        return br.Hypergradient(found, zeros, found, float(value.detach()))


def betty(method: str, steps: int) -> br.Method:
    from betty import hypergradient

    def solve(loss: Any, weights: Any, rates: Any, vector: Any) -> Any:
        config = SimpleNamespace(
            neumann_iterations=steps, neumann_alpha=SCALE, cg_iterations=steps, cg_alpha=1.0
        )
        current = SimpleNamespace(
            paths=[], cur_batch=None, config=config, training_step_exec=lambda _: loss(weights, rates),
            trainable_parameters=lambda: weights, parameters=lambda: weights,
        )  # fmt: skip
        return getattr(hypergradient, method)(
            vector, current, SimpleNamespace(trainable_parameters=lambda: rates)
        )

    return Other(solve)


def torchopt(steps: int) -> br.Method:
    from torchopt.linear_solve import solve_inv

    def solve(loss: Any, weights: Any, rates: Any, vector: Any) -> Any:
        gradient = torch.func.grad(loss)
        _, products = torch.func.vjp(lambda w: gradient(w, tuple(rates)), tuple(weights))
        x = solve_inv(ns=True, maxiter=steps, alpha=SCALE)(lambda v: products(v)[0], tuple(vector))
        _, mixed = torch.func.vjp(lambda r: gradient(tuple(weights), r), tuple(rates))
        return [-m for m in mixed(x)[0]]

    return Other(solve)


def hypergrad(steps: int) -> br.Method:
    from hypergrad.approx_hypergrad import neumann

    def solve(loss: Any, weights: Any, rates: Any, vector: Any) -> Any:
        at = tuple(w.detach() for w in weights)

        # Its outer gradient is that of this linear function of the weights.
        def outer(w: Any, r: Any) -> Tensor:
            return sum((a * b).sum() for a, b in zip(w, vector, strict=True)) + 0.0 * sum(x.sum() for x in r)

        return neumann(loss, outer, at, tuple(r.detach() for r in rates), num_iters=steps, lr=SCALE)

    return Other(solve)


OTHERS: dict[str, tuple[str, Callable[[], br.Method]]] = {
    "betty, Neumann, 3 terms": ("betty", lambda: betty("neumann", 3)),
    "betty, Neumann, 20 terms": ("betty", lambda: betty("neumann", 20)),
    "betty, conjugate gradient, 5 steps": ("betty", lambda: betty("cg", 5)),
    "torchopt, Neumann, 20 terms": ("torchopt", lambda: torchopt(20)),
    "hypergrad, Neumann, 3 terms": ("hypergrad", lambda: hypergrad(3)),
    "hypergrad, Neumann, 20 terms": ("hypergrad", lambda: hypergrad(20)),
}
OURS = (PAPERS, "Neumann, 20 terms", "Implicit()", "Implicit(curvature=GaussNewton)", "the same, 2 steps")


def race(images: data.Images, seeds: int, hyper_steps: int) -> list[dict[str, Any]]:
    """The runs of all methods, in turn within a seed."""
    missing = {module for module, _ in OTHERS.values() if find_spec(module) is None}
    methods: dict[str, Callable[[nn.Module], br.Method]] = {n: weight_decay.METHODS[n] for n in OURS}
    for name, (module, make) in OTHERS.items():
        if module not in missing:
            methods[name] = lambda _, make=make: make()
    weight_decay.METHODS.update(methods)
    rows = []
    for seed in range(seeds):
        for name in methods:
            try:
                rows.append(weight_decay.run("mlp", name, seed, images, hyper_steps))
            except (br.Error, RuntimeError) as error:
                rows.append({"method": name, "seed": seed, "curve": [], "error": str(error)[:120]})
    return rows


def arrivals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each method the CPU seconds to the loss that the paper's ends with, over the seconds of its whole run."""
    goal = {r["seed"]: r["curve"][-1][2] for r in rows if r["method"] == PAPERS}
    whole = {r["seed"]: r["curve"][-1][1] for r in rows if r["method"] == PAPERS}
    lines = []
    for name in dict.fromkeys(r["method"] for r in rows):
        mine = [r for r in rows if r["method"] == name]
        there = [
            next((seconds for _, seconds, loss in r["curve"] if loss <= goal[r["seed"]]), None) for r in mine
        ]
        shares = [
            "–" if t is None else f"{t / whole[r['seed']]:.2f}" for t, r in zip(there, mine, strict=True)
        ]
        ends = [f"{r['curve'][-1][2]:.4f}" if r["curve"] else r.get("error", "") for r in mine]
        lines.append(
            {
                "method": name,
                "time to the goal / the paper's run": " ".join(shares),
                "validation loss at the end": " ".join(ends),
                "time of a run / the paper's": " ".join(
                    f"{r['curve'][-1][1] / whole[r['seed']]:.2f}" if r["curve"] else "–" for r in mine
                ),
            }
        )
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    with plots.panels(path, size=(8.4, 4.2)) as axes:
        axis = axes[0][0]
        for index, name in enumerate(dict.fromkeys(r["method"] for r in rows)):
            first = next(r for r in rows if r["method"] == name)
            if first["curve"]:
                _, seconds, losses = zip(*first["curve"], strict=True)
                axis.semilogy(
                    seconds, losses, "-" if name in OURS else "--", color=f"C{index % 10}", lw=1.2, label=name
                )
        plots.style(axis, "CPU seconds", "validation loss")
        axis.set_ylim(top=3.0)
        axis.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


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
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/joint"), help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    first = added(options.repeats) if "added" in options.parts else []
    print(table(first) if first else "", flush=True)
    rows: list[dict[str, Any]] = []
    if "race" in options.parts:
        rows = race(data.load("mnist", options.data_dir), options.seeds, options.hyper_steps)
        print(table(arrivals(rows)))
        draw(rows, options.out / "joint.png")
    result = {"added": first, "race": rows, "threads": options.threads, "versions": versions()}
    write_whole(options.out / "joint.json", result)
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
