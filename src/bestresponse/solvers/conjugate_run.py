"""What a run of conjugate gradient keeps beside its directions."""

import math

import torch

from .. import _tree
from .._tree import Tree
from .base import Status
from .preconditioning import Pair


class Run:
    """The iterate, its residual (in the place of b), and the best of them; what was met on the way."""

    def __init__(self, b: Tree, preconditioned_target: float | None) -> None:
        self.x, self.r = _tree.zeros_like(b), b
        self.step = 0
        self.residual = self.smallest = 1.0
        self.lowest, self.highest = math.inf, -math.inf
        self.status = Status.STEP_LIMIT
        self.pairs: list[Pair] = []
        # The tridiagonal matrix of the Lanczos process in its factors: 1/α_j and β_j.
        self.pivots: list[float] = []
        self.ratios: list[float] = []
        self._kept: Tree | None = None
        eps = max(torch.finfo(x.dtype).eps for x in b.values())
        self._precision = 4.0 * min(torch.finfo(x.dtype).eps for x in b.values())
        # Steps along a residual of this size change nothing in the sum, and its square may underflow. A
        # preconditioner mixes the entries of a residual below the precision of b, which makes it rounding.
        self.floor = eps * eps if preconditioned_target is None else eps * preconditioned_target
        # Whether the coefficients have stopped to be those of the Lanczos process.
        self.at_rounding = False
        # The smallest and the largest pᵀ(A + δI)p by the norm that the preconditioner makes.
        self._least, self._most = math.inf, 0.0

    @property
    def best(self) -> Tree:
        """The iterate with the smallest residual, which is the present one unless another was kept."""
        return self.x if self._kept is None else self._kept

    def accepts(self, along: float, square: float, damping: float, rz: float | None) -> bool:
        """Whether the curvature along a direction is positive, beyond rounding.

        With a preconditioner rᵀz stands for pᵀp: it makes curvatures alike that lie far apart in A.
        """
        if not math.isfinite(along) or not square > 0.0:
            self.status = Status.NOT_FINITE
            return False
        curvature = along / square
        self.lowest, self.highest = min(self.lowest, curvature), max(self.highest, curvature)
        scaled = (along + damping * square) / (rz or square)
        earlier, self._most = self._least, max(self._most, scaled)
        self._least = min(earlier, scaled)
        rounding = self._precision * self._most
        if earlier <= rounding:
            # A step was made along a curvature that now shows to be rounding: nothing of it can be trusted.
            self._kept, self.smallest = _tree.zeros_like(self.x), 1.0
        elif scaled > rounding:
            return True
        self.status = Status.NEGATIVE_CURVATURE
        return False

    def ritz_values(self, damping: float) -> tuple[float, float] | None:
        """The smallest and largest eigenvalue of A on the Krylov space, from the coefficients of the iteration."""
        size = len(self.pivots)
        before = [0.0, *(ratio * pivot for ratio, pivot in zip(self.ratios, self.pivots, strict=False))]
        diagonal = [pivot + more for pivot, more in zip(self.pivots, before, strict=False)]
        beside = [math.sqrt(max(b, 0.0)) * p for b, p in zip(self.ratios, self.pivots, strict=False)][
            : size - 1
        ]
        if not size or not all(map(math.isfinite, [*diagonal, *beside])):
            return None
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if beside:
            off = torch.diag(torch.tensor(beside, dtype=torch.float64), 1)
            matrix = matrix + off + off.T
        values = torch.linalg.eigvalsh(matrix)
        return float(values[0]) - damping, float(values[-1]) - damping

    def recompute(self, residual: Tree, p: Tree, product: Tree, step: float, damping: float) -> None:
        """Take the residual that was computed anew; where the recurrence has drifted from it, conjugacy is lost."""
        _tree.add_(_tree.add_(self.r, product, -step), p, -step * damping)
        drift = _tree.norm(_tree.add_(self.r, residual, -1.0))
        self.at_rounding = self.at_rounding or not drift <= 0.1 * _tree.norm(residual)
        self.r = residual

    def advance(self, p: Tree, step: float) -> None:
        self.step += 1
        _tree.add_(self.x, p, step)

    def measure(self, p: Tree, step: float) -> bool:
        """Measure the residual; keep the iterate before this one where it was the best."""
        self.residual = _tree.norm(self.r)
        if self.residual <= self.smallest:
            self.smallest, self._kept = self.residual, None
        elif self._kept is None:
            # The first iterate's predecessor is zero, exactly: a huge step would leave rounding in its place.
            self._kept = _tree.zeros_like(p) if self.step == 1 else _tree.add(self.x, p, -step)
        if not math.isfinite(self.residual):
            self.status = Status.NOT_FINITE
            return False
        return True
