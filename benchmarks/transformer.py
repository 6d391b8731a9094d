"""What a hypergradient of a transformer costs: time, floating-point operations and peak memory, in training gradients.

    python benchmarks/transformer.py --threads 1

A GPT whose sources of data have a weight each, in the settings of `NETWORKS`. Each row runs in a fresh process. CPU
time is the median of rounds in which a training gradient and each number of products take turns. "A step" is that of
the series of products, "a product" the product in it alone. Operations are those that torch's FlopCounterMode counts,
for causal attention those of the whole matrix. Memory is the peak of another process above its memory with the network
and all libraries loaded (a second derivative makes torch load sympy, 43 MiB), where freed memory returns to the system
(MALLOC_MMAP_THRESHOLD_).

prints one table, and writes transformer.json into --out.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import bestresponse as br
from bestresponse._layout import table
from bestresponse.curvatures.several_batches import linear_system
from bestresponse.experiments.runs import versions, write_whole

WORDS, SOURCES = 2000, 4
PRODUCTS = (0, 1, 4)


class Size(NamedTuple):
    """The size of a network and its batch; each head has 32 features."""

    tokens: int
    sequences: int
    width: int
    layers: int


NETWORKS = {
    "8 × 128 tokens": Size(128, 8, 128, 4),
    "2 × 1,024 tokens": Size(1024, 2, 128, 4),
    "1 × 4,096 tokens": Size(4096, 1, 128, 4),
}
CURVATURES = ("gradient", "Hessian", "GaussNewton")


class Block(nn.Module):
    """Attention and a layer of four times the width, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], x.shape[2] // 32, 32)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(seen)
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """Blocks between an embedding and its transpose."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, size.width), nn.Embedding(size.tokens, size.width)
        self.blocks = nn.Sequential(*[Block(size.width) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        # As in GPT-2. With torch's initial size, softmax gives denormal numbers, with which kernels are slow.
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight
        return F.linear(self.norm(self.blocks(x)), self.words.weight)


def entropy(outputs: Tensor, words: Tensor) -> Tensor:
    """The mean cross-entropy of each sequence."""
    losses = F.cross_entropy(outputs[:, :-1].flatten(0, 1), words[:, 1:].flatten(), reduction="none")
    return losses.view(len(words), -1).mean(1)


class Work:
    """A problem with its batches, and what is measured on it."""

    def __init__(self, size: Size, make: Callable[[Size], nn.Module] = GPT, verify: bool = True) -> None:
        torch.manual_seed(0)
        self.model = make(size)
        self.hyper = nn.ParameterDict({"logs": nn.Parameter(torch.zeros(SOURCES))})
        self.source = torch.arange(size.sequences) % SOURCES
        self.train, self.val = (torch.randint(WORDS, (size.sequences, size.tokens)) for _ in range(2))
        self.problem = br.Problem(self.model, self.hyper, self.train_loss, self.val_loss, verify=verify)

    def train_loss(self, model: Any, hyper: Any, batch: Tensor) -> Tensor:
        return (hyper["logs"].exp()[self.source[: len(batch)]] * entropy(model(batch), batch)).mean()

    def val_loss(self, model: Any, hyper: Any, batch: Tensor) -> Tensor:
        return entropy(model(batch), batch).mean()

    def gradient(self) -> None:
        loss = self.train_loss(self.model, self.hyper, self.train)
        torch.autograd.grad(loss, list(self.problem.weights.values()))

    def hypergradient(self, curvature: str, products: int) -> Callable[[], None]:
        """A call with a Neumann series of this many products."""
        solver = br.Neumann(products, scale=1e-3) if products else br.Identity()
        method = br.Implicit(solver, named(curvature), estimate_error=False)
        return lambda: void(br.hypergradient(self.problem, self.train, self.val, method))

    def product(self, curvature: str, rounds: int) -> float:
        """The time of a product alone, in training gradients."""
        with self.problem.undisturbed(None) as passes:
            system = linear_system(named(curvature), passes, self.train)
            v = {n: torch.randn_like(self.problem.weights[n]) for n in system.names}
            times = medians({"gradient": self.gradient, "product": lambda: void(system(v))}, rounds)
        return times["product"] / times["gradient"]

    def calls(self, what: str) -> dict[str, Callable[[], None]]:
        """A gradient, and hypergradients with each number of products, unless ``what`` is the gradient."""
        of_products = {} if what == "gradient" else {str(k): self.hypergradient(what, k) for k in PRODUCTS}
        return {"gradient": self.gradient, **of_products}


def named(curvature: str) -> br.curvatures.Curvature:
    """The curvature with this name."""
    return br.GaussNewton() if curvature == "GaussNewton" else br.Hessian()


def medians(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The median CPU time of each call; in each round all take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if number:  # the first round warms up, and verifies
                times[name].append(time.process_time() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def void(_: object) -> None:
    """Drop a result."""


def row(size: Size, what: str, repeats: int) -> dict[str, float]:
    """The measurements of one process."""
    for call in Work(Size(4, 1, 32, 1)).calls(what).values():
        call()  # which loads the libraries
    work = Work(size)
    base = resident()
    calls = work.calls(what)
    times = medians(calls, repeats)
    peak = resident() - base
    alone = 0.0 if what == "gradient" else work.product(what, 3 * repeats)
    operations = {name: count(call) for name, call in calls.items()}
    found = {f"time {n}": t / times["gradient"] for n, t in times.items()}
    found |= {f"count {n}": x / operations["gradient"] for n, x in operations.items()}
    weights = sum(w.numel() for w in work.problem.weights.values())
    return found | {"product": alone, "memory": peak, "seconds": times["gradient"], "weights": weights}


def resident() -> float:
    """The largest memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(script: str, row: list[str], repeats: int, threads: int) -> dict[str, Any]:
    """The row of a process, with the memory of another one."""
    command = [sys.executable, script, "--threads", str(threads), "--row", *row, "--repeats"]
    found = []
    for number, more in ((repeats, {}), (1, {"MALLOC_MMAP_THRESHOLD_": str(2**16)})):
        output = subprocess.run(
            [*command, str(number)], check=True, capture_output=True, text=True, env=os.environ | more
        ).stdout
        found.append(json.loads(output.splitlines()[-1]))
    return found[0] | {"memory": found[1]["memory"]}


def count(call: Callable[[], None]) -> int:
    """The floating-point operations of a call."""
    aten = torch.ops.aten
    fused: Any = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
            sdpa_backward_flop_count(g, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=fused) as counter:
        call()
    return counter.get_total_flops()


def lines(rows: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, str]]:
    """The rows of the table."""
    lines = []
    for name, found in rows.items():
        alone = found["gradient"]["memory"]
        for curvature in CURVATURES[1:]:
            r = found[curvature]
            step = (r["time 4"] - r["time 1"]) / 3
            lines.append(
                {
                    "network": f"{r['weights'] / 1e6:.1f} M weights, {name}",
                    "curvature": curvature,
                    **{f"K = {k}": f"{r[f'time {k}']:.1f}" for k in PRODUCTS},
                    "fixed": f"{r['time 1'] - step:.1f}",
                    "a step": f"{step:.2f}",
                    "a product": f"{r['product']:.2f}",
                    "by count": f"{(r['count 4'] - r['count 1']) / 3:.2f}",
                    "gradient": f"{alone:.0f} MiB",
                    "hypergradient": f"{r['memory']:.0f} MiB",
                    "ratio": f"{r['memory'] / alone:.1f}",
                }
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS)[:2])
    parser.add_argument("--out", type=Path, default=Path("runs/transformer"))
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    if options.row:
        print(json.dumps(row(NETWORKS[options.row[0]], options.row[1], options.repeats)))
        return
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for name in options.networks:
        for what in CURVATURES:
            found = measured(__file__, [name, what], options.repeats, options.threads)
            rows.setdefault(name, {})[what] = found
    print(f"torch {torch.__version__}, {options.threads} thread(s); times in training gradients")
    print(table(lines(rows)))
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"rows": rows, "threads": options.threads, "repeats": options.repeats, "versions": versions()}
    write_whole(options.out / "transformer.json", record)


if __name__ == "__main__":
    main()
