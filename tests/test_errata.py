"""The evidence of docs/errata.md: what the paper's formulas give as they are printed, and what is right."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import hessian, jacrev

import bestresponse as br

PAGE = Path(__file__).parent.parent / "docs" / "errata.md"


class Vector(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.values = nn.Parameter(values)


def train(w, h):
    """A training loss with four weights and two hyperparameters."""
    a = torch.diag(torch.tensor([0.4, 0.8, 1.2, 1.6]))
    return 0.5 * w @ a @ w - h[0] * w.sum() + 0.5 * h[1] * w.square().sum()


def val(w, h):
    """A validation loss that depends on the hyperparameters directly too."""
    return (w - 1.0).square().sum() + 3.0 * h.square().sum()


H = torch.tensor([0.5, 0.2], dtype=torch.float64)


def at_minimum():
    curvature = hessian(train)(torch.zeros(4), H)
    w = torch.linalg.solve(curvature, H[0] * torch.ones(4))
    problem = br.Problem(
        Vector(w.clone()),
        Vector(H.clone()),
        lambda model, hyper, batch: train(model.values, hyper.values),
        lambda model, hyper, batch: val(model.values, hyper.values),
    )
    return problem, w, curvature


def total(problem, method):
    return br.hypergradient(problem, None, None, method).total["values"]


def test_algorithm_3_returns_the_inverse_only_with_another_sign_and_another_factor():
    _, w, curvature = at_minimum()
    v, scale = jacrev(val)(w, H), 0.3
    printed, plus, term = v, v, v
    for _ in range(300):
        term = term - scale * curvature @ term
        printed, plus = printed - term, plus + term
    inverse = torch.linalg.solve(curvature, v)
    assert torch.allclose(plus, inverse / scale)
    assert torch.allclose(printed, 2 * v - inverse / scale)  # what is printed
    solution = br.Neumann(300, scale).solve(lambda u: {"w": curvature @ u["w"]}, {"w": v})
    assert torch.allclose(solution.x["w"], scale * plus)


def test_algorithm_2_multiplies_from_the_other_side():
    problem, w, curvature = at_minimum()
    v = torch.linalg.solve(curvature, jacrev(val)(w, H))
    w, h = w.requires_grad_(), H.clone().requires_grad_()
    by_weights, by_tuned = torch.autograd.grad(train(w, h), (w, h), create_graph=True)
    with pytest.raises(RuntimeError, match="Mismatch in shape"):  # what is printed: 4 values for 2 outputs
        torch.autograd.grad(by_tuned, w, grad_outputs=v, retain_graph=True)
    (indirect,) = torch.autograd.grad(by_weights, h, grad_outputs=v)
    assert torch.allclose(total(problem, br.Implicit(br.Exact())), jacrev(val, 1)(w, H) - indirect)


@pytest.mark.parametrize("i", [1, 3])
def test_the_theorem_has_as_many_summands_as_there_are_steps(i):
    problem, w, curvature = at_minimum()
    mixed = jacrev(jacrev(train), 1)(w, H)

    def response(summands):
        powers = [torch.linalg.matrix_power(torch.eye(4) - curvature * 0.5, j) for j in range(summands)]
        return jacrev(val, 1)(w, H) - 0.5 * jacrev(val)(w, H) @ sum(powers) @ mixed

    steps = total(problem, br.Unrolled(i + 1, 0.5))  # to the weights that the paper calls w with index i + 1
    assert torch.allclose(steps, response(i + 1))
    assert torch.allclose(steps, total(problem, br.Implicit(br.Neumann(i, 0.5))))
    assert not torch.allclose(steps, response(i), rtol=1e-3)  # what section 4 has: j < i


def test_unrolling_converges_where_i_minus_h_contracts():
    problem, _, curvature = at_minimum()
    largest = torch.linalg.eigvalsh(curvature).abs().max()
    assert 1 - largest > -1  # I − H contracts
    assert 1 + largest > 1  # and I + H does not
    exact = total(problem, br.Implicit(br.Exact()))
    assert torch.allclose(total(problem, br.Unrolled(60, 1.0)), exact)


def test_the_hypergradient_is_the_slope_of_the_validation_loss():
    """With a direct part, whose sign the authors' code has the other way round."""
    problem, w, curvature = at_minimum()

    def after_training(h):
        return val(torch.linalg.solve(hessian(train)(w, h), h[0] * torch.ones(4)), h)

    right = jacrev(after_training)(H)
    h = br.hypergradient(problem, None, None, br.Implicit(br.Exact()))
    assert torch.allclose(h.total["values"], right)
    assert not torch.allclose(h.indirect["values"] - h.direct["values"], right, rtol=0.1)


def test_the_counts_of_the_page():
    products = re.findall(r"([\d·,]+(?: \+ [\d·,]+)*) = ([\d,]+)", PAGE.read_text(encoding="utf-8"))
    assert len(products) >= 3
    for left, right in products:
        terms = [left_part.replace(",", "").split("·") for left_part in left.split(" + ")]
        value = sum(torch.tensor([int(n) for n in term]).prod().item() for term in terms)
        assert value == int(right.replace(",", "")), left
