"""Several processes under accelerate: the decay of each layer is tuned on the joined batches.

accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no \
    examples/accelerate_launcher.py

``--multi_gpu`` is accelerate's option for several processes; with ``Accelerator(cpu=True)`` they run on CPUs, by gloo.

`Accelerator.prepare` wraps the model in DistributedDataParallel, which tells `Problem` its group. In one process
(`python examples/accelerate_launcher.py`) the same file runs on all rows.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

import bestresponse as br


def train_loss(model, hyper, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets) + hyper(model)


def val_loss(model, hyper, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def main():
    torch.manual_seed(0)  # the same data, weights and hyperparameters on each rank
    accelerator = Accelerator(cpu=True)
    x = torch.randn(320, 10)
    y = (x[:, 0] + 0.5 * torch.randn(320) > 0).long()
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=0.05)
    problem = br.Problem(accelerator.prepare(model), decay, train_loss, val_loss)
    mine = slice(accelerator.process_index, None, accelerator.num_processes)  # the rows of this process
    train, val = (x[:64][mine], y[:64][mine]), (x[64:][mine], y[64:][mine])
    tuner = br.Tuner(
        problem,
        torch.optim.Adam(problem.weights.values(), 1e-2),
        torch.optim.Adam(decay.parameters(), 5e-2),
        weight_steps=2,
    )
    history = tuner.fit([train], [val], hyper_steps=40)
    accelerator.print(
        f"{accelerator.num_processes} processes: validation loss {history[0]['val_loss']:.4f} → "
        f"{history[-1]['val_loss']:.4f}; {problem.group.calls} reductions, {problem.group.bytes:,} bytes"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
