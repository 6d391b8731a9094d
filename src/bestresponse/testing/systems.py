"""Linear systems with known answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree


@dataclass(frozen=True)
class LinearSystem:
    """A dense symmetric A and a right-hand side, over two tensors of different shapes.

    Attributes:
        name: the special property of the system.
        matrix: A, [n, n].
        b: the right-hand side, [n].
        definite: whether A is positive definite.
    """

    name: str
    matrix: Tensor
    b: Tensor
    definite: bool

    @property
    def tree(self) -> Tree:
        """The right-hand side as a dict of tensors."""
        return self.unflatten(self.b)

    @property
    def eps(self) -> float:
        """The relative precision of its dtype."""
        return torch.finfo(self.b.dtype).eps

    def unflatten(self, vector: Tensor) -> Tree:
        """A vector as a dict of tensors."""
        vector = vector.to(self.b.dtype)
        return {"first": vector[:4].reshape(2, 2).clone(), "second": vector[4:].clone()}

    def product(self, v: Tree) -> Tree:
        """A v."""
        return self.unflatten(self.matrix @ _tree.flatten(v))

    def residual(self, x: Tree, damping: float = 0.0) -> float:
        """‖b − (A + δI) x‖ / ‖b‖, computed in float64."""
        flat, b = _tree.flatten(x).double(), self.b.double()
        return float((b - self.matrix.double() @ flat - damping * flat).norm() / b.norm())


def linear_systems(seed: int = 0, scales: Sequence[float] = (300.0, 1e-3)) -> Iterator[LinearSystem]:
    """Definite, indefinite and singular systems, with eigenvalues up to two, in both precisions.

    Args:
        seed: draws the directions of the eigenvectors and the right-hand side; the eigenvalues are fixed.
        scales: factors of additional definite systems.
    """
    n = 9
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    b = torch.randn(n, generator=generator, dtype=torch.float64)

    def symmetric(*values: float) -> Tensor:
        matrix: Tensor = basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T
        return (matrix + matrix.T) / 2

    spread = symmetric(0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 1.7, 1.9, 2.0)
    singular = symmetric(0, 0, 0.5, 0.8, 1.0, 1.2, 1.5, 1.8, 2.0)
    yield LinearSystem("definite", spread, b, True)
    for scale in scales:
        yield LinearSystem(f"definite, times {scale:g}", scale * spread, b / scale, True)
    yield LinearSystem("a multiple of the identity", 2.0 * torch.eye(n, dtype=torch.float64), b, True)
    yield LinearSystem("indefinite", symmetric(-1.0, -0.5, 0.5, 0.8, 1.0, 1.2, 1.5, 1.8, 2.0), b, False)
    yield LinearSystem("singular", singular, b, False)
    yield LinearSystem("singular, consistent", singular, singular @ b, False)
    yield LinearSystem("negative definite", -spread, b, False)
    yield LinearSystem("zero", torch.zeros(n, n, dtype=torch.float64), b, False)
    yield LinearSystem("definite, float32", spread.float(), b.float(), True)
    yield LinearSystem("singular, float32", singular.float(), b.float(), False)
    yield LinearSystem("singular, consistent, float32", singular.float(), (singular @ b).float(), False)
