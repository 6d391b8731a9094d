"""A small problem for other libraries' training loops, and the loop that they must agree with."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import bestresponse as br

BATCH = 8


def data(dtype=torch.float32):
    """Eight training batches and four validation batches, as data sets."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 6, generator=generator, dtype=dtype)
    y = (x[:, 0] + 0.5 * torch.randn(96, generator=generator, dtype=dtype) > 0).long()
    return TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])


def batches(dataset, size=BATCH):
    return [dataset[i : i + size] for i in range(0, len(dataset), size)]


def network(dtype=torch.float32):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def fit(model, hyper, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def train_loss(model, hyper, batch):
    return fit(model, hyper, batch) + hyper(model)


def problem(model, **settings):
    decay = br.hyperparameters.WeightDecay(model, initial=0.05, **settings)
    return br.Problem(model, decay, train_loss, fit)


def by_hand(one, steps, weight_steps, accumulated=1, clip=None, rate=0.1, hyper_rate=0.05, method=None):
    """The rates after a loop by hand, with hyper-steps on the batches of the last weight step."""
    method = method or br.Implicit(br.Neumann(3, 0.1))
    train, val = data()
    train, val = batches(train), batches(val)
    weights = torch.optim.SGD(one.weights.values(), rate)
    hyper = torch.optim.Adam(one.hyperparameters.values(), hyper_rate)
    inputs = list(one.weights.values())
    for step in range(steps):
        own = [train[(step * accumulated + i) % len(train)] for i in range(accumulated)]
        weights.zero_grad()
        for batch in own:
            loss = one.train_loss(one.model, one.hyper, batch) / accumulated
            loss.backward(inputs=inputs)
        if clip:
            nn.utils.clip_grad_norm_(inputs, clip)
        weights.step()
        if step % weight_steps == weight_steps - 1:
            number = step // weight_steps
            hyper.zero_grad()
            together = br.Batches(own, [1] * accumulated) if accumulated > 1 else own[0]
            br.backward(one, together, val[number % len(val)], method)
            hyper.step()
            one.hyper.project_()
    return {n: p.detach().clone() for n, p in one.hyperparameters.items()}
