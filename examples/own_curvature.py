"""A curvature of your own: the Hessian's diagonal, estimated by random signs.

A curvature has one method, `linearise`, which returns the training gradient of a batch, linearised: a map v ↦ A v and
the mixed term v ↦ v · ∂²L_T/∂w∂λ. This one takes the mixed term from `Hessian`. `testing.check_curvature` compares
products with a matrix that you give it, and the mixed term with differences.

    python examples/own_curvature.py
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import bestresponse as br

Tree = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class HessianDiagonal(br.Curvature):
    """A = diag(d), with d = mean of z ⊙ H z over random signs z, which tends to the Hessian's diagonal.

    Args:
        samples: Hessian products in the mean.

    Reference: Bekas, Kokiopoulou and Saad (2007).
    """

    samples: int = 8

    def linearise(self, passes: Any, batch: Any) -> br.Linearisation:
        hessian = br.Hessian().linearise(passes, batch)
        generator = torch.Generator().manual_seed(0)  # the same signs in each call

        def signs(w: Tensor) -> Tensor:
            return (2.0 * torch.randint(2, w.shape, generator=generator) - 1.0).to(w.device, w.dtype)

        weights = {name: passes.problem.weights[name] for name in hessian.names}
        diagonal = {name: torch.zeros_like(w) for name, w in weights.items()}
        for _ in range(self.samples):
            z = {name: signs(w) for name, w in weights.items()}
            for name, product in hessian(z).items():
                diagonal[name] += z[name] * product / self.samples
        return _Diagonal(hessian, diagonal)


class _Diagonal(br.Linearisation):
    def __init__(self, hessian: br.Linearisation, diagonal: Tree) -> None:
        self._hessian, self._diagonal = hessian, diagonal
        self.names, self.reached, self.kinks = hessian.names, hessian.reached, hessian.kinks

    def __call__(self, v: Tree) -> Tree:
        return {name: self._diagonal[name] * x for name, x in v.items()}

    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        return self._hessian.mixed(v, last)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.linalg.qr(torch.randn(40, 6))[
        0
    ]  # orthonormal inputs: the Hessian is diagonal, and no sign matters
    model = nn.Linear(6, 1, bias=False)
    decay = br.hyperparameters.WeightDecay(model, initial=0.3)
    fit = lambda m, h, b: (m(b[0]) - b[1]).square().sum()  # noqa: E731
    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit)
    train, val = (x, torch.randn(40, 1)), (torch.randn(20, 6), torch.randn(20, 1))

    expected = 2.0 * x.T @ x + torch.diag(decay.log_decay.weight.detach().exp().reshape(-1))
    br.testing.check_curvature(HessianDiagonal(), problem, train, expected)
    print("HessianDiagonal has the products and the mixed term that it should have.")
    for curvature in (HessianDiagonal(), br.Hessian()):
        result = br.hypergradient(problem, train, val, br.Implicit(br.Exact(), curvature))
        print(type(curvature).__name__, result)


if __name__ == "__main__":
    main()
