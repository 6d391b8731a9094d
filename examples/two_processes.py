"""Two processes, each with half of the data: hypergradients are those of the joined batch, not means of two.

This file starts its processes itself. Under `torchrun --nproc-per-node 2`, each process calls
`init_process_group("gloo")` instead ("nccl" on GPUs), and then makes its problem as `work` does here.

    python examples/two_processes.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, Tensor]
METHOD = br.Implicit(br.ConjugateGradient(50, tolerance=1e-10))


def fit(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train_loss(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    return fit(model, decay, batch) + decay(model)


def task(group: dist.ProcessGroup | None = None) -> tuple[br.Problem, Batch, Batch]:
    """The same data, weights and decays in each process."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    y = (x[:, 0] + torch.randn(256) > 0).long()
    model = nn.Linear(10, 2)
    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=0.1)
    return br.Problem(model, decay, train_loss, fit, group=group), (x[:64], y[:64]), (x[64:], y[64:])


def part(batch: Batch, rank: int) -> Batch:
    return batch[0][rank::2], batch[1][rank::2]


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    problem, train, val = task(dist.group.WORLD)
    train, val = part(train, rank), part(val, rank)  # each process sees its own rows only
    joined = br.hypergradient(problem, train, val, METHOD).total
    alone = br.hypergradient(problem.alone(), train, val, METHOD).total
    tuner = br.Tuner(
        problem,
        torch.optim.Adam(problem.weights.values(), 0.05),
        torch.optim.Adam(problem.hyperparameters.values(), 0.1),
        weight_steps=2,
    )
    history = tuner.fit([train], [val], hyper_steps=20)
    torch.save((joined, alone, history[-1]["val_loss"]), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=2)
        (joined, one, loss), (_, two, same) = (torch.load(Path(folder) / f"{rank}.pt") for rank in (0, 1))
    problem, train, val = task()
    right = br.hypergradient(problem, train, val, METHOD).total

    def distance(found: dict[str, Tensor]) -> float:
        squares = sum(float((found[n] - g).square().sum()) for n, g in right.items())
        return (squares / sum(float(g.square().sum()) for g in right.values())) ** 0.5

    print(f"two processes: relative distance from one process {distance(joined):.0e}")
    mean = {n: (one[n] + two[n]) / 2 for n in right}
    print(f"the mean of each process's own hypergradient: relative distance {distance(mean):.2f}")
    print(f"validation loss after tuning in both processes: {loss:.6f} and {same:.6f}")


if __name__ == "__main__":
    main()
