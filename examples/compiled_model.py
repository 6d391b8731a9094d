"""A model under torch.compile: train with the compiled one, and give `Problem` the model that was compiled.

Compiled code has a first derivative only, and most hypergradients need the second. The two modules share their
parameters, so the weights that the compiled one trains are the weights of the problem.

    python examples/compiled_model.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, Tensor]
BACKEND = "inductor"  # torch's default; "aot_eager" needs no C++ compiler, and is no faster than plain code


def fit(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train_loss(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    return fit(model, decay, batch) + decay(model)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(264, 20)
    y = (x[:, 0] + 0.5 * torch.randn(264) > 0).long()
    train, val = (x[:64], y[:64]), (x[64:], y[64:])
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2))
    compiled = torch.compile(model, backend=BACKEND)
    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=1e-2)
    problem = br.Problem(model, decay, train_loss, fit)  # the original
    weights = list(problem.weights.values())
    optimizer, hyper_optimizer = torch.optim.Adam(weights, 1e-2), torch.optim.Adam(decay.parameters(), 0.1)
    method, first = br.Implicit(), None

    for step in range(150):
        optimizer.zero_grad()
        loss = fit(compiled, decay, train) + decay(model)  # the compiled one, for all steps of the weights
        loss.backward(inputs=weights)
        optimizer.step()
        if step % 5 == 4:
            hyper_optimizer.zero_grad()
            h = br.backward(problem, train, val, method)
            hyper_optimizer.step()
            decay.project_()
            first = first or h
    print(f"validation loss {first.val_loss:.3f} → {h.val_loss:.3f}")

    # The compiled module itself is refused where second derivatives are needed, and serves where they are not.
    second = br.Problem(compiled, decay, lambda m, h, b: fit(m, h, b) + h(model), fit)
    try:
        br.hypergradient(second, train, val, br.Implicit())
    except br.Error as error:
        print(f"refused: {error}")
    solver = br.ConjugateGradient(20, damping=0.1)
    one = br.hypergradient(problem, train, val, br.Implicit(solver)).total
    other = br.hypergradient(second, train, val, br.Implicit(solver, br.FiniteDifference())).total
    error = sum((one[n] - other[n]).square().sum() for n in one) / sum(g.square().sum() for g in one.values())
    print(f"FiniteDifference with the compiled module: relative distance {float(error.sqrt()):.0e}")


if __name__ == "__main__":
    main()
