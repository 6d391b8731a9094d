"""A trained logistic regression with a weight for each example, for the tests of influence."""

import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
from bestresponse.hyperparameters import Weights
from conftest import SEED

N, CLASSES, DECAY = 30, 3, 0.1
EXACT = br.Implicit(br.Exact())


def drawn(number, size):
    g = torch.Generator().manual_seed(SEED + number)
    return torch.randn(size, 4, generator=g), torch.randint(CLASSES, (size,), generator=g)


def penalty(model):
    return DECAY * sum(w.square().sum() for w in model.parameters())


def weighted_losses(outputs, batch):
    logits, weights = outputs
    return (weights * F.cross_entropy(logits, batch[2], reduction="none")).mean()


def predict(model, hyper, batch):
    return model(batch[1]), hyper(batch[0])


def train_loss(model, hyper, batch):
    return weighted_losses(predict(model, hyper, batch), batch) + penalty(model)


def val_loss(model, hyper, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


PARTS = predict, weighted_losses, lambda model, hyper, batch: penalty(model)


class Data:
    """A trained logistic regression with a weight for each example, and its batches of unequal sizes."""

    def __init__(self, verify=True):
        torch.manual_seed(0)
        x, y = drawn(1, N)
        self.whole = (torch.arange(N), x, y)
        self.batches = [
            tuple(part[rows] for part in self.whole) for rows in torch.arange(N).split([4, 16, 10])
        ]
        self.queries = [drawn(2, 1), drawn(3, 12)]
        self.model, self.weights = nn.Linear(4, CLASSES), Weights(N, "clamp")
        self.problem = br.Problem(self.model, self.weights, train_loss, val_loss, verify=verify)
        self.train()

    def train(self):
        """Go to the minimum by Newton steps."""
        with torch.no_grad():
            for w in self.model.parameters():
                w.zero_()
        names, shapes = zip(*((n, w.shape) for n, w in self.model.named_parameters()), strict=True)
        sizes = [s.numel() for s in shapes]

        def loss(flat):
            parts = {n: p.view(s) for n, p, s in zip(names, flat.split(sizes), shapes, strict=True)}
            i, x, y = self.whole
            logits = torch.func.functional_call(self.model, parts, (x,))
            each = F.cross_entropy(logits, y, reduction="none")
            return (self.weights.table.detach() * each).mean() + DECAY * flat.square().sum()

        flat = torch.zeros(sum(sizes))
        for _ in range(12):
            slope = torch.autograd.functional.jacobian(loss, flat)
            flat = flat - torch.linalg.solve(torch.autograd.functional.hessian(loss, flat), slope)
        nn.utils.vector_to_parameters(flat, self.model.parameters())

    def losses(self):
        with torch.no_grad():
            return torch.stack([val_loss(self.model, None, query) for query in self.queries])
