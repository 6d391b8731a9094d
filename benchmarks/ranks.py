"""What several processes cost: reductions, bytes and memory of a hypergradient, and its distance from one process.

    python benchmarks/ranks.py

A network of equal blocks, tuned by the default method without a warm start, on 1, 2 and 4 processes by gloo: with whole
weights (DistributedDataParallel) and with sharded ones (fully_shard). The ranks share the cores of one machine, so the
table shows correctness, calls and bytes, not speed. Memory is the peak of a rank above its memory with the library and
its part of the weights. Bytes are those of the buffers of a rank; single numbers (dot products) are not counted.

prints one table, and writes ranks.json into --out.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bestresponse as br
from bestresponse._layout import table
from bestresponse.experiments.runs import versions, write_whole

ROWS = 16


def train_loss(model: Any, hyper: Any, batch: Any) -> Tensor:
    """The fit, and a decay with one rate."""
    decay = sum(w.square().sum() for w in model.parameters())
    return F.mse_loss(model(batch[0]), batch[1]) + hyper["rate"].exp() * decay


def val_loss(model: Any, hyper: Any, batch: Any) -> Tensor:
    """The fit alone."""
    return F.mse_loss(model(batch[0]), batch[1])


def make(
    width: int, blocks: int, form: str, dtype: torch.dtype
) -> tuple[br.Problem, list[tuple[Tensor, ...]]]:
    """The problem in a form, and the batches of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = [tuple(torch.randn(2, ROWS, width, dtype=dtype)) for _ in range(2)]
    layers = [nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.Tanh()) for _ in range(blocks)]
    model = nn.Sequential(*layers)
    if form == "sharded":
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in (*layers, model):
            fully_shard(layer, mesh=mesh)
    hyper = nn.ParameterDict({"rate": nn.Parameter(torch.tensor(-7.0, dtype=dtype))})
    wrapped = DistributedDataParallel(model) if form == "whole" else model
    problem = br.Problem(wrapped, hyper, train_loss, val_loss, verify=False)
    return problem, [tuple(x[rank::ranks] for x in batch) for batch in data]


def memory(key: str) -> int:
    """The memory of this process in bytes: VmRSS now, VmHWM at its largest since `begin`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def begin() -> int:
    """Forget the largest memory so far, and return the present one."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return memory("VmRSS")


def measure(width: int, blocks: int, form: str) -> dict[str, Any]:
    """One hypergradient on this rank."""
    problem, (train, val) = make(width, blocks, form, torch.float32)
    method = br.Implicit(br.ConjugateGradient(4, damping=None))
    before, began = begin(), time.process_time()
    h = br.hypergradient(problem, train, val, method)
    assert h.solve is not None
    row = {
        "weights": sum(w.numel() for w in problem.weights.values()),
        "products": h.solve.products,
        "reductions": problem.group.calls,
        "MB": round(problem.group.bytes / 1e6, 1),
        "peak MB": round((memory("VmHWM") - before) / 1e6),
        "CPU s": round(time.process_time() - began, 2),
    }
    small, (train, val) = make(24, 2, form, torch.float64)
    row["value"] = float(
        br.hypergradient(small, train, val, br.Implicit(br.ConjugateGradient(40, damping=1.0))).total["rate"]
    )
    return row


def run(ranks: int, *arguments: object) -> dict[str, Any]:
    """The row of rank 0 of a new group of processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
        place["MALLOC_MMAP_THRESHOLD_"] = "262144"  # else glibc keeps freed memory, and the peak counts it
    command = [sys.executable, __file__, "--rank-of", *map(str, arguments)]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **place, "WORLD_SIZE": str(ranks), "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate()[0] for process in processes]
    row: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/ranks"))
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        width, blocks, form = options.rank_of
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        print(json.dumps(measure(int(width), int(blocks), form)), flush=True)
        dist.destroy_process_group()
        return
    rows, one = [], None
    for form in ("whole", "sharded"):
        for ranks in (1, 2, 4):
            row = run(ranks, options.width, options.blocks, form)
            value = row.pop("value")
            one = value if one is None else one
            rows.append(
                {"weights are": form, "ranks": ranks, **row, "off by": f"{abs(value / one - 1.0):.0e}"}
            )
    print(table(rows))
    options.out.mkdir(parents=True, exist_ok=True)
    write_whole(options.out / "ranks.json", {"rows": rows, "versions": versions()})


if __name__ == "__main__":
    main()
