"""The training losses of all folds as a function of their weights, a row for each fold."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..hyperparameters.orthant import joint_rates
from ..passes.checked_loss import checked_loss
from ..passes.norm_calls import moving
from ..problem import Problem
from ..runs.requirements import penalties_at_zero
from .folds import Folds


class Objective:
    """The training losses and their derivatives; a problem over one copy of the weights has one row.

    Args:
        problem: the problem; its live weights change.
        pieces: batches with their weights.

    Attributes:
        rates: the slopes of penalties next to weights of zero, [K, n].
    """

    def __init__(self, problem: Problem, pieces: Sequence[tuple[Any, float]]) -> None:
        self._problem, self._pieces = problem, pieces
        self._rows = [list(single.weights.values()) for single in problem.singles]
        self._every = [p for row in self._rows for p in row]
        buffers = (*problem.model.buffers(), *problem.hyper.buffers())
        self._buffers = [(x, x.clone()) for x in buffers]
        self.rates = torch.stack([_rates(single) for single in problem.singles])

    def weights(self) -> Tensor:
        """The live weights, [K, n]."""
        return torch.stack([_flat(row) for row in self._rows])

    @torch.no_grad()
    def write(self, w: Tensor) -> None:
        """Put rows into the live weights."""
        sizes = [p.numel() for p in self._rows[0]]
        values = [x for row in w for x in torch.split(row, sizes)]
        torch._foreach_copy_([*self._every], [x.view_as(p) for x, p in zip(values, self._every, strict=True)])

    def settle(self, w: Tensor) -> None:
        """Put rows into the live weights, and make running statistics those of the batches there.

        The number of evaluations, some of them of steps that were given up, must not decide where they end.
        """
        self.write(w)
        norms: dict[Any, Any] = {x: x.momentum for x in moving(self._problem.model.modules())}
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
        try:
            if self._buffers:
                with torch.enable_grad():
                    for piece, _ in self._pieces:
                        self._losses(piece)
        finally:
            for norm, momentum in norms.items():
                norm.momentum = momentum

    def __call__(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """The losses, [K], and their gradients, [K, n]."""
        self.write(w)
        losses, gradients = torch.zeros_like(w[:, 0]), torch.zeros_like(w)
        with torch.enable_grad(), self._buffers_kept():
            for piece, weight in self._pieces:
                values = self._losses(piece)
                losses = losses + weight * values.detach()
                gradients = gradients + weight * self._by_row(self._gradient(values.sum()), ())
        return losses, gradients

    def hessian(self, w: Tensor) -> Tensor:
        """The Hessian of each row, [K, n, n], from the n products with the same unit vector in each row."""
        self.write(w)
        n = w.shape[1]
        unit = torch.eye(n, dtype=w.dtype, device=w.device)
        pieces = torch.split(unit, [p.numel() for p in self._rows[0]], dim=1)
        vectors = [x.reshape(n, *p.shape) for row in self._rows for x, p in zip(pieces, row, strict=True)]
        total = w.new_zeros(len(self._rows), n, n)
        with torch.enable_grad(), self._buffers_kept():
            for piece, weight in self._pieces:
                gradient = self._gradient(self._losses(piece).sum(), create_graph=True)
                total = total + weight * self._by_row(self._products(gradient, vectors), (n,)).transpose(0, 1)
        return (total + total.transpose(1, 2)) / 2

    def one_sided(self, w: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The slope to the side that lowers the loss (zero if a kink holds the weight), and the weights at a kink."""
        at_kink = (w == 0) & (self.rates > 0)
        held = gradient.clamp(-self.rates, self.rates)
        return torch.where(at_kink, gradient - held, gradient), at_kink

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Put the buffers back as they were before the first evaluation."""
        try:
            yield
        finally:
            with torch.no_grad():
                for x, value in self._buffers:
                    x.copy_(value)

    def _losses(self, piece: Any) -> Tensor:
        problem = self._problem
        if isinstance(problem, Folds):
            return problem.losses(piece)
        return checked_loss("train_loss", problem.train_loss(problem.model, problem.hyper, piece)).reshape(1)

    def _gradient(self, loss: Tensor, create_graph: bool = False) -> list[Tensor]:
        found = torch.autograd.grad(loss, self._every, create_graph=create_graph, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(self._every, found, strict=True)]

    def _products(self, gradient: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
        """The products of the Hessian with n vectors, [n, ...] for each weight."""
        curved = [(g, v) for g, v in zip(gradient, vectors, strict=True) if g.requires_grad]
        if not curved:
            return [torch.zeros_like(v) for v in vectors]
        outputs, along = zip(*curved, strict=True)
        found = torch.autograd.grad(outputs, self._every, along, allow_unused=True, is_grads_batched=True)
        return [torch.zeros_like(v) if x is None else x for x, v in zip(found, vectors, strict=True)]

    def _by_row(self, tensors: Sequence[Tensor], leading: tuple[int, ...]) -> Tensor:
        """Tensors of all weights, with leading dimensions, as [..., K, n]."""
        per, dim = len(self._rows[0]), len(leading)
        flat = [x.detach().reshape(*leading, -1) for x in tensors]
        rows = [torch.cat(flat[i : i + per], dim=dim) for i in range(0, len(flat), per)]
        return torch.stack(rows, dim=dim)


def dots(a: Tensor, b: Tensor) -> Tensor:
    """The dot product of each row."""
    return (a * b).sum(dim=1)


def _rates(problem: Problem) -> Tensor:
    rates = joint_rates(problem.model, penalties_at_zero(problem))
    weights = problem.weights.items()
    return _flat([rates[n].expand_as(w) if n in rates else torch.zeros_like(w) for n, w in weights])


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.detach().reshape(-1) for x in tensors])
