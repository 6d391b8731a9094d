"""A method of your own: the hypergradient of one training step, by differences of two gradients.

A method has one function, `differentiate`. It runs the losses through `passes`, which leave no trace and replay the
same random state, and returns a `Hypergradient` in its two parts. `testing.check_method` checks names, shapes, traces
and the answer.

    python examples/own_method.py
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br


@dataclass(frozen=True, eq=False)
class OneStep(br.Method):
    """The hypergradient of L_V(w − α ∂L_T/∂w, λ), without any second derivative.

        indirect = −α (∂L_T/∂λ(w + εv) − ∂L_T/∂λ(w − εv)) / 2ε,    v = ∂L_V/∂w at the weights

    Args:
        step_size: α, the step of the weights.
        size: ε ‖v‖, how far the weights are moved.

    Reference: Liu, Simonyan and Yang (2019), DARTS.
    """

    step_size: float
    size: float = 1e-4

    twice = False  # attention and the like keep their fast forms, which have no second derivative

    def differentiate(self, passes: Any, train_batch: Any, val_batch: Any) -> br.Hypergradient:
        problem = passes.problem
        weights, tuned = problem.weights, problem.hyperparameters
        with passes.validating():  # the mode of the validation loss, for its backward pass too
            loss = passes.val_loss(val_batch)
            found = torch.autograd.grad(loss, [*weights.values(), *tuned.values()], allow_unused=True)
        v = {
            n: torch.zeros_like(w) if g is None else g
            for (n, w), g in zip(weights.items(), found, strict=False)
        }
        direct = {
            n: torch.zeros_like(p) if g is None else g
            for (n, p), g in zip(tuned.items(), found[len(weights) :], strict=True)
        }
        norm = torch.sqrt(sum((g * g).sum() for g in v.values()))
        step = self.size / norm.clamp(min=1e-30)
        sides = []
        for sign in (1.0, -1.0):
            moved = {n: w.detach() + sign * step * v[n] for n, w in weights.items()}
            train_loss = passes.train_loss(train_batch, moved)
            slopes = torch.autograd.grad(train_loss, list(tuned.values()), allow_unused=True)
            sides.append(
                [torch.zeros_like(p) if g is None else g for p, g in zip(tuned.values(), slopes, strict=True)]
            )
        indirect = {
            n: -self.step_size * (ahead - behind) / (2.0 * step)
            for n, ahead, behind in zip(tuned, *sides, strict=True)
        }
        total = {n: direct[n] + indirect[n] for n in tuned}
        return br.Hypergradient(total, direct, indirect, float(loss.detach()))


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=0.1, maximum=1.0)
    fit = lambda m, h, b: F.mse_loss(m(b[0]), b[1])  # noqa: E731
    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit)
    train, val = [(x, x.sum(1, keepdim=True).sin() + 0.5 * torch.randn(50, 1)) for x in torch.randn(2, 50, 5)]

    alpha = 0.1
    # To first order in α the step does not move ∂L_V/∂w, so that this is α times the identity in the place of A⁻¹.
    exact = br.hypergradient(problem, train, val, br.Implicit(br.Neumann(terms=0, scale=alpha)))
    br.testing.check_method(OneStep(alpha), problem, train, val, exact.total)
    print("OneStep agrees with the exact mixed term.")

    tuner = br.Tuner(
        problem,
        torch.optim.SGD(problem.weights.values(), alpha),
        torch.optim.Adam(problem.hyperparameters.values(), 0.05),
        OneStep(alpha),
    )
    history = tuner.fit([train], [val], hyper_steps=200)
    print(f"validation loss {history[0]['val_loss']:.3f} → {history[-1]['val_loss']:.3f}")


if __name__ == "__main__":
    main()
