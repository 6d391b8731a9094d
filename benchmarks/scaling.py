"""A weight decay for each weight, from ten thousand to a hundred million weights: time and memory beside training.

    python benchmarks/scaling.py --threads 2
    python benchmarks/scaling.py --weights 1e8 --threads 2

Networks 784-h-h-10 of growing h, batches of 128, labels that ten of the inputs tell, Adam for the weights and for the
logarithms of the decays, ten weight steps before each hyper-step, Gauss-Newton with two steps of conjugate gradient.
Each size runs in a process of its own, plain training before tuning: CPU seconds for each weight step, and the most
memory that the process held (its resident set), less that of the process without a model.

prints one table with the slopes of the logarithms, and writes scaling.json and scaling.png into --out.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch
from torch import nn

import bestresponse as br
from bestresponse._layout import table
from bestresponse.experiments import plots
from bestresponse.experiments.classification import predict, train_loss, val_loss
from bestresponse.experiments.runs import versions, write_whole

SIZES = (1e4, 1e5, 1e6, 1e7)
STEPS = 10


def peak() -> int:
    """The most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def network(weights: float) -> nn.Module:
    """784-h-h-10 with about so many weights: h² + 796 h + 10."""
    h = max(1, round((math.sqrt(796**2 + 4 * weights) - 796) / 2))
    return nn.Sequential(nn.Linear(784, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 10))


def run(weights: float, tuned: bool, hyper_steps: int, threads: int) -> dict[str, Any]:
    """One process: train, or train and tune."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    before = peak()
    model = network(weights)
    decay = br.hyperparameters.WeightDecay(model, initial=1e-5)
    inputs = torch.randn(2, 128, 784)
    train, val = ((x, x[:, :10].argmax(1)) for x in inputs)
    adam = torch.optim.Adam(model.parameters(), 1e-4)
    losses: list[float] = []
    if tuned:
        problem = br.Problem(model, decay, train_loss, val_loss)
        curvature = br.GaussNewton(predict, br.losses.CrossEntropy(lambda batch: batch[1]), rest=decay)
        solver = br.ConjugateGradient(2, damping=None)
        method = br.Implicit(solver, curvature, warm_start=True, estimate_error=False)
        tuner = br.Tuner(
            problem, adam, torch.optim.Adam(decay.parameters(), 1e-2), method, weight_steps=STEPS
        )
        tuner.fit([train], [val], 1)
        began = time.process_time()
        losses = [row["val_loss"] for row in tuner.fit([train], [val], hyper_steps)]
    else:
        decay.requires_grad_(False)

        def step() -> None:
            adam.zero_grad()
            train_loss(model, decay, train).backward()
            adam.step()

        step()
        began = time.process_time()
        for _ in range(STEPS * hyper_steps):
            step()
    seconds = (time.process_time() - began) / (STEPS * hyper_steps)
    count = sum(p.numel() for p in model.parameters())
    return {"weights": count, "seconds": seconds, "bytes": peak() - before, "losses": losses}


def measure(weights: float, hyper_steps: int, threads: int) -> dict[str, Any]:
    """Both runs of one size, each in a process of its own."""
    told = []
    for kind in ("plain", "tuned"):
        command = [sys.executable, __file__, "--worker", kind, "--weights", str(weights)]
        command += ["--hyper-steps", str(hyper_steps), "--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        told.append(json.loads(done.stdout.splitlines()[-1]))
    plain, tuned = told
    return {
        "weights and decays": tuned["weights"],
        "plain [s]": plain["seconds"],
        "tuned [s]": tuned["seconds"],
        "time / plain": tuned["seconds"] / plain["seconds"],
        "plain [GiB]": plain["bytes"] / 2**30,
        "tuned [GiB]": tuned["bytes"] / 2**30,
        "memory / plain": tuned["bytes"] / plain["bytes"],
        "vectors": tuned["bytes"] / 4 / tuned["weights"],
        "validation loss": f"{tuned['losses'][0]:.3f} → {tuned['losses'][-1]:.3f}",
    }


def slope(rows: list[dict[str, Any]], key: str) -> float:
    """The slope of log(key) over log(weights) between the two largest sizes."""
    first, last = rows[-2:]
    return math.log(last[key] / first[key]) / math.log(
        last["weights and decays"] / first["weights and decays"]
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    with plots.panels(path, 1, 2, (8.4, 3.4)) as axes:
        for axis, unit, label in zip(axes[0], ("s", "GiB"), ("a weight step", "memory"), strict=True):
            for kind, colour in (("plain", plots.GREY), ("tuned", plots.BLUE)):
                at = [r["weights and decays"] for r in rows]
                axis.loglog(at, [r[f"{kind} [{unit}]"] for r in rows], "o-", color=colour, ms=4, label=kind)
            plots.style(axis, "weights, and as many decays", f"{label} [{unit}]")
        axes[0][0].legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=float, nargs="+", default=list(SIZES), help="sizes to run")
    parser.add_argument("--hyper-steps", type=int, default=3, help="counted ones, after a first")
    parser.add_argument("--threads", type=int, default=2, help="processor threads for torch")
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"), help="folder to write to")
    parser.add_argument("--worker", choices=("plain", "tuned"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        (weights,) = options.weights
        print(json.dumps(run(weights, options.worker == "tuned", options.hyper_steps, options.threads)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for weights in options.weights:
        rows.append(measure(weights, options.hyper_steps if weights < 1e8 else 2, options.threads))
        print(table(rows[-1:]), flush=True)
    if len(rows) > 1:
        told = ", ".join(
            f"{key} {slope(rows, key):.2f}"
            for key in ("plain [s]", "tuned [s]", "plain [GiB]", "tuned [GiB]")
        )
        print(f"slopes at the largest sizes: {told}")
    write_whole(
        options.out / "scaling.json", {"rows": rows, "threads": options.threads, "versions": versions()}
    )
    draw(rows, options.out / "scaling.png")
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
