"""What a whole hyper-step of a transformer costs, in weight steps: CPU time, products and peak memory.

    python benchmarks/hyper_step.py --threads 1

A GPT whose sources of data have a weight each, trained for a few steps by Adam. Each row runs in a fresh process, in
which weight steps and hypergradients take turns; times are medians, without the first call, which verifies. A weight
step is a training gradient and Adam's step. Memory is the peak of the process above its memory before the first step.

prints one table, and writes hyper_step.json into --out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformer import Size, Work, resident

import bestresponse as br
from bestresponse._layout import table
from bestresponse.experiments.runs import versions, write_whole

NETWORKS = {
    "1.1 M weights": Size(128, 8, 128, 4),
    "8.7 M weights": Size(128, 8, 384, 4),
}
METHODS = ("weight step", "Implicit()", "GaussNewton, 2 steps", "T1 - T2", "SAMA")


class Training(Work):
    """The problem, some steps after the beginning."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        with torch.no_grad():  # the initial size in GPT-2; with that of torch the outputs are saturated
            for w in (self.model.words.weight, self.model.places.weight):
                w.mul_(0.02)
        self.optimizer = torch.optim.Adam(self.problem.weights.values(), 1e-3)

    def step(self) -> None:
        """A weight step."""
        self.optimizer.zero_grad()
        loss = self.train_loss(self.model, self.hyper, self.train)
        loss.backward(inputs=list(self.problem.weights.values()))
        self.optimizer.step()

    def hyper_step(self, name: str) -> Callable[[], Any]:
        """A hypergradient by a method of the table."""
        two = br.ConjugateGradient(2, damping=None)
        method: br.Method = {
            "Implicit()": br.Implicit(),
            "GaussNewton, 2 steps": br.Implicit(two, self.gauss_newton(), warm_start=True),
            "T1 - T2": br.Implicit(br.Identity()),
            "SAMA": br.SAMA(),
        }[name]
        return lambda: br.hypergradient(
            self.problem, self.train, self.val, method, weight_optimizer=self.optimizer
        )


def row(size: Size, what: str, repeats: int) -> dict[str, float]:
    """The measurements of one process."""
    small = Training(Size(4, 1, 32, 1))
    small.step()  # which loads the libraries of kernels
    training = Training(size)
    base = resident()
    for _ in range(5):
        training.step()
    call = (lambda: None) if what == "weight step" else training.hyper_step(what)
    times: dict[str, list[float]] = {"weight step": [], what: []}
    products = 0
    for number in range(repeats + 1):
        for name, measured in (("weight step", training.step), (what, call)):
            start = time.process_time()
            found = measured()
            if number:
                times[name].append(time.process_time() - start)
            if isinstance(found, br.Hypergradient) and found.solve is not None:
                products = found.solve.products
    step = statistics.median(times["weight step"])
    found = {"time": statistics.median(times[what]) / step, "seconds": step, "products": products}
    return found | {
        "memory": resident() - base,
        "weights": sum(w.numel() for w in training.problem.weights.values()),
    }


def lines(rows: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, str]]:
    """The rows of the table."""
    return [
        {
            "network": name,
            "method": what,
            "products": f"{r['products']:.0f}",
            "weight steps": f"{r['time']:.1f}",
            "memory": f"{r['memory']:.0f} MiB",
            "ratio": f"{r['memory'] / found['weight step']['memory']:.1f}",
        }
        for name, found in rows.items()
        for what, r in found.items()
        if what != "weight step"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("runs/hyper_step"))
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    if options.row:
        print(json.dumps(row(NETWORKS[options.row[0]], options.row[1], options.repeats)))
        return
    rows: dict[str, dict[str, dict[str, float]]] = {}
    settings = ["--threads", str(options.threads), "--repeats", str(options.repeats)]
    for name in options.networks:
        for what in dict.fromkeys(["weight step", *options.methods]):
            command = [sys.executable, __file__, *settings, "--row", name, what]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.setdefault(name, {})[what] = json.loads(output.splitlines()[-1])
    print(f"torch {torch.__version__}, {options.threads} thread(s); times in weight steps")
    print(table(lines(rows)))
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"rows": rows, "threads": options.threads, "repeats": options.repeats, "versions": versions()}
    write_whole(options.out / "hyper_step.json", record)


if __name__ == "__main__":
    main()
