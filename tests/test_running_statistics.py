"""Validation losses in eval mode read running statistics, which follow the weights: against training again."""

import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br


class Tuned(nn.Module):
    """A decay of all weights, and a scale of the inputs that the training loss alone sees."""

    def __init__(self, inputs=3):
        super().__init__()
        self.log_decay = nn.Parameter(torch.tensor(-2.0))
        self.scale = nn.Parameter(torch.linspace(0.7, 1.4, inputs))


def squares(model):
    return sum(w.square().sum() for w in model.parameters())


def train_loss(model, hyper, batch):
    x = batch[0] * hyper.scale.view(-1, *(1,) * (batch[0].ndim - 2))
    return (model(x) - batch[1]).square().mean() + 0.5 * hyper.log_decay.exp() * squares(model)


def val_loss(model, hyper, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def data(*shape, outputs=2):
    return torch.randn(*shape) + 0.5, torch.randn(shape[0], outputs)


class Functional(nn.Module):
    """A norm by torch's function, with buffers under names of its own, part of which it uses."""

    def __init__(self, units):
        super().__init__()
        self.register_buffer("means", torch.zeros(units + 2))
        self.register_buffer("variances", torch.ones(units + 2))

    def forward(self, x):
        c = x.shape[1]
        return F.batch_norm(x, self.means[:c], self.variances[:c], training=self.training, momentum=0.5)


class Subclass(nn.BatchNorm1d):
    def forward(self, x):
        y = torch.batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.training, 0.5, 1e-3, False
        )
        return y + 0.1 * y.square()


class Twice(nn.Module):
    """One norm at two places of a pass."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 4), nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.3)
        self.c = nn.Linear(4, 2)

    def forward(self, x):
        z = torch.tanh(self.norm(self.a(x)))
        return self.c(torch.tanh(self.norm(2 * self.b(z) + 1)))


def dense(*middle):
    return lambda: nn.Sequential(nn.Linear(3, 4), *[m() for m in middle], nn.Linear(4, 2))


def convolutional(kind=nn.BatchNorm2d, **settings):
    def make():
        first, second = (kind(2, momentum=0.5, affine=affine, **settings) for affine in (True, False))
        head = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
        return nn.Sequential(
            nn.Conv2d(1, 2, 2), first, nn.Tanh(), nn.Conv2d(2, 2, 2), nn.Tanh(), second, head
        )

    return make


def norm(affine=True, momentum=0.5):
    return lambda: nn.BatchNorm1d(4, affine=affine, momentum=momentum)


NETWORKS = {
    "before the non-linearity": (dense(norm(), nn.Tanh), (20, 3)),
    "after it, not affine": (dense(nn.Tanh, norm(False)), (20, 3)),
    "two in a row": (dense(nn.Tanh, norm(False), norm(), nn.Tanh), (20, 3)),
    "on the inputs": (lambda: nn.Sequential(nn.BatchNorm1d(3, momentum=0.5), *dense(nn.Tanh)()), (20, 3)),
    "cumulative": (dense(norm(momentum=None), nn.Tanh), (20, 3)),
    "synchronised": (dense(lambda: nn.SyncBatchNorm(4, momentum=0.5), nn.Tanh), (20, 3)),
    "by a function": (dense(nn.Tanh, lambda: Functional(4), nn.Tanh), (20, 3)),
    "subclass": (dense(lambda: Subclass(4, momentum=0.5)), (20, 3)),
    "called twice": (Twice, (20, 3)),
    "convolutions": (convolutional(), (7, 1, 4, 4)),
    "instances": (convolutional(nn.InstanceNorm2d, track_running_stats=True), (7, 1, 4, 4)),
}


def solve(problem, batch, steps=100):
    """To a minimum of the training loss by Newton's method, in directions of descent; then the statistics to theirs."""
    weights = list(problem.weights.values())
    damping = 1.0
    for _ in range(steps):
        value = problem.train_loss(problem.model, problem.hyper, batch)
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, weights, create_graph=True)])
        if float(gradient.detach().norm()) < 1e-11:
            break
        rows = [torch.autograd.grad(g, weights, retain_graph=True) for g in gradient]
        values, vectors = torch.linalg.eigh(torch.stack([flat(dict(enumerate(row))) for row in rows]))
        step = vectors @ (vectors.T @ gradient.detach() / (values.abs() + damping * (damping > 1e-6)))
        kept = [w.detach().clone() for w in weights]
        with torch.no_grad():
            for w, piece in zip(weights, step.split([w.numel() for w in weights]), strict=True):
                w -= piece.view(w.shape)
            worse = float(problem.train_loss(problem.model, problem.hyper, batch)) > float(value) + 1e-12
            for w, before in zip(weights, kept, strict=True):
                w.copy_(before if worse else w)
        damping = damping * 10 if worse else damping / 5
    assert float(gradient.detach().norm()) < 1e-9, float(gradient.detach().norm())
    converge(problem, batch)


def converge(problem, batch):
    """The running statistics to those of the training passes."""
    for module in problem.model.modules():
        if isinstance(module, nn.BatchNorm1d) and module.momentum is None:
            module.reset_running_stats()
    with torch.no_grad():
        for _ in range(60):
            for piece in batch if isinstance(batch, br.Batches) else [batch]:
                problem.train_loss(problem.model, problem.hyper, piece)


def evaluated(problem, val):
    problem.model.eval()
    with torch.no_grad():
        value = float(problem.val_loss(problem.model, problem.hyper, val))
    problem.model.train()
    return value


def trained_again(problem, train, val, step=1e-4):
    """Differences of the validation loss of problems that are solved again."""
    kept = {n: x.clone() for n, x in problem.model.state_dict().items()}
    slopes = []
    for p in problem.hyperparameters.values():
        flat = p.detach().view(-1)
        for i in range(flat.numel()):
            ends = []
            for sign in (1, -1):
                flat[i] += sign * step
                solve(problem, train)
                ends.append(evaluated(problem, val))
                problem.model.load_state_dict(kept)
                flat[i] -= sign * step
            slopes.append((ends[0] - ends[1]) / (2 * step))
    return torch.tensor(slopes)


def flat(tensors):
    return torch.cat([x.reshape(-1) for x in tensors.values()])
