import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
import cases
from bestresponse.testing import check_curvature


def example_loss(model, hyper, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


RESTS = {
    "a module": lambda problem: problem.hyper,
    "a function": lambda problem: lambda model, hyper, batch: hyper(model),
    "none": lambda problem: None,
}


def dense_fisher(problem, train, seed):
    """(1/N) Σ g gᵀ from the gradient of each example by itself, and the decay's diagonal."""
    weights = list(problem.weights.values())
    torch.manual_seed(seed)
    losses = example_loss(problem.model, problem.hyper, train)
    rows = [torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses]
    g = torch.stack([torch.cat([x.reshape(-1) for x in row]) for row in rows])
    decays = problem.hyper.curvature_diagonal(problem.model)
    diagonal = [decays.get(n, torch.zeros_like(w)).reshape(-1) for n, w in problem.weights.items()]
    return g.T @ g / len(g) + torch.diag(torch.cat(diagonal))


@pytest.mark.parametrize("hidden", [nn.Identity, lambda: nn.Dropout(0.4)], ids=["smooth", "dropout"])
@pytest.mark.parametrize("decayed", [True, False])
@pytest.mark.parametrize("rest", RESTS)
def test_it_equals_the_dense_matrix(rest, decayed, hidden):
    problem, train, _ = cases.network(hidden(), decayed)
    matrix = dense_fisher(problem, train, seed=11)
    torch.manual_seed(11)
    check_curvature(br.EmpiricalFisher(example_loss, RESTS[rest](problem)), problem, train, matrix)


@pytest.mark.parametrize("damping", [0.01, 1.0])
def test_exact_with_it_is_larsens_method(damping):
    problem, train, val = cases.network()
    matrix = dense_fisher(problem, train, seed=0)
    live = [*problem.weights.values()]
    of_val = torch.autograd.grad(problem.val_loss(problem.model, problem.hyper, val), live)
    b = torch.cat([g.reshape(-1) for g in of_val])
    x = torch.linalg.solve(matrix + damping * torch.eye(len(b)), b).split([w.numel() for w in live])
    loss = problem.train_loss(problem.model, problem.hyper, train)
    gradient = torch.autograd.grad(loss, live, create_graph=True)
    inner = sum((g * v.view_as(g)).sum() for g, v in zip(gradient, x, strict=True))
    expected = torch.autograd.grad(-inner, list(problem.hyperparameters.values()))
    method = br.Implicit(br.Exact(damping), br.EmpiricalFisher(example_loss, problem.hyper))
    h = br.hypergradient(problem, train, val, method)
    for found, wanted in zip(h.total.values(), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-7, atol=1e-12)
    assert "EmpiricalFisher(example_loss=" in repr(method)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda m, h, b: example_loss(m, h, b).mean(),
            r"loss for each example, \[N\], with a graph; got shape \[\]",
        ),
        (lambda m, h, b: m(b[0]), r"got shape \[12, 2\]"),
        (lambda m, h, b: 2 * example_loss(m, h, b), "must equal train_loss"),
        (lambda m, h, b: 1.0, "got float"),
        (
            lambda m, h, b: example_loss(m, h, b).detach(),
            "EmpiricalFisher.example_loss.*a tensor without a graph",
        ),
    ],
)
def test_a_wrong_example_loss_is_told(loss, message):
    problem, train, val = cases.network()
    with pytest.raises(br.Error, match=message):
        br.hypergradient(problem, train, val, br.Implicit(curvature=br.EmpiricalFisher(loss, problem.hyper)))
    with pytest.raises(br.Error, match="must be a function"):
        br.EmpiricalFisher(None)
    with pytest.raises(br.Error, match=r"EmpiricalFisher\.rest must be a function"):
        br.EmpiricalFisher(loss, rest=0.1)
