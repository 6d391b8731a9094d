"""An equilibrium model: its hidden state is the fixed point of a layer, and training differentiates through that point.

    z* = f(z*, x; θ) = tanh(W z* + U x + b),    outputs = V z* + c

The states of the examples are the weights here, and the layer's parameters θ are the hyperparameters. The fixed point
needs a training loss whose stationary point it is. ½ ‖z − f(z)‖² serves any layer: where it is zero, its Hessian is
JᵀJ and its mixed term is −Jᵀ ∂f/∂θ, with J = I − ∂f/∂z, so the response is dz*/dθ = J⁻¹ ∂f/∂θ, as it should be.

A loss with `detach()` and the gradient z − f(z) would be wrong: it has other second derivatives, and the first
hypergradient warns. If a function of your own has z − f(z) as its backward pass, `solvers.GMRES` is right.

    python examples/equilibrium_model.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, Tensor]
HIDDEN = 12


class States(nn.Module):
    """The hidden state of each example."""

    def __init__(self, examples: int) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.zeros(examples, HIDDEN))


class Network(nn.Module):
    """The layer that is applied again and again, and the outputs."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(inputs, HIDDEN)
        self.head = nn.Linear(HIDDEN, classes)

    def layer(self, z: Tensor, x: Tensor) -> Tensor:
        # A spectral norm below one makes the fixed point unique.
        w = self.inner.weight
        return torch.tanh(z @ (0.9 * w / torch.linalg.matrix_norm(w).clamp(min=0.9)).T + self.outer(x))

    def fixed_point(self, x: Tensor, z: Tensor | None = None, steps: int = 200) -> Tensor:
        """The state after so many steps, from ``z`` or from zero."""
        z = torch.zeros(len(x), HIDDEN) if z is None else z
        for _ in range(steps):
            z = self.layer(z, x)
        return z


def distance(states: States, network: Network, batch: Batch) -> Tensor:
    return 0.5 * (states.z - network.layer(states.z, batch[0])).square().sum()


def task_loss(states: States, network: Network, batch: Batch) -> Tensor:
    return F.cross_entropy(network.head(states.z), batch[1])


def data(examples: int) -> Batch:
    x = torch.randn(examples, 4)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    train, test = data(200), data(2000)
    network, states = Network(4, 2), States(200)

    @torch.no_grad()
    def settle(problem: br.Problem, batch: Batch) -> None:
        """Put the states at the fixed point, from the last one. Its steps are not differentiated."""
        states.z.copy_(network.fixed_point(batch[0], states.z, steps=200))

    problem = br.Problem(states, network, distance, task_loss)
    method = br.Implicit(br.ConjugateGradient(30, tolerance=1e-8))
    settle(problem, train)
    found = br.hypergradient(problem, train, train, method)
    # The same gradient through all 200 steps of the iteration, whose graph it keeps.
    through = F.cross_entropy(network.head(network.fixed_point(train[0])), train[1])
    right = dict(
        zip(found.total, torch.autograd.grad(through, list(problem.hyperparameters.values())), strict=True)
    )
    error = max(float((found.total[n] - g).norm() / g.norm()) for n, g in right.items())
    print(f"gradient: largest relative distance from that through 200 steps {error:.0e}")
    print(f"derivatives: {found.verification}")

    tuner = br.Tuner(problem, settle, torch.optim.Adam(network.parameters(), 0.03), method)
    history = tuner.fit([train], [train], hyper_steps=100)
    with torch.no_grad():
        right_ones = network.head(network.fixed_point(test[0])).argmax(1) == test[1]
    print(f"task loss {history[0]['val_loss']:.3f} → {history[-1]['val_loss']:.3f}")
    print(f"test accuracy {100 * right_ones.double().mean():.1f} % (guessing: 50 %)")


if __name__ == "__main__":
    main()
