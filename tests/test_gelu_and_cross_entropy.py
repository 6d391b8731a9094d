"""GELU and cross-entropy: equal to torch's own to three orders, by fewer kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bestresponse.passes import cross_entropy as entropies
from bestresponse.passes import gelu as curves
from bestresponse.passes.forms import second_derivatives
from cases import orders

CURVES = {
    "GELU": F.gelu,
    "GELU, module": nn.GELU(),
    "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def same(found, expected):
    for ours, others in zip(found, expected, strict=True):
        for one, other in zip(ours, others, strict=True):
            assert one.dtype == other.dtype
            bound = 1e-10 if one.dtype == torch.float64 else 1e-4
            assert (one - other).norm() <= bound * (other.norm() + 1e-3)


class Count(TorchDispatchMode):
    """Counts the numbers that kernels write."""

    written = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        views = function.is_view or "empty" in str(function)
        self.written += 0 if views else sum(t.numel() for t in [found] if isinstance(t, torch.Tensor))
        return found


def cost(function, inputs):
    """What a product writes, for each number of the inputs."""
    first = torch.autograd.grad(function(*inputs).sin().sum(), inputs, create_graph=True)
    with Count() as count:
        torch.autograd.grad(first, inputs, [torch.ones_like(x) for x in inputs])
    return count.written / sum(x.numel() for x in inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CURVES)
def test_three_orders_of_curves(name, dtype):
    x = torch.cat([torch.linspace(-6, 6, 91), torch.zeros(1)]).to(dtype).requires_grad_()
    expected = orders(CURVES[name], [x])
    with second_derivatives():
        found = orders(CURVES[name], [x])
        assert "Value" in str(CURVES[name](x).grad_fn)
    same(found, expected)


@pytest.mark.parametrize("name", ["GELU", "GELU by tanh"])
def test_curves_are_straight_far_from_zero(name):
    x = torch.tensor([-1e5, -100.0, 100.0, 1e5], requires_grad=True)
    with second_derivatives():
        value, first, second, third = (order[0] for order in orders(CURVES[name], [x]))
    assert torch.equal(value, x.clamp(min=0.0))
    assert first.isfinite().all()
    assert second.isfinite().all()
    assert third.isfinite().all()


@pytest.mark.parametrize("name", ["GELU", "GELU by tanh"])
def test_a_product_through_a_curve_writes_less(name):
    x = torch.randn(1000, requires_grad=True)
    torchs = cost(CURVES[name], [x])
    with second_derivatives():
        assert cost(CURVES[name], [x]) < torchs


def test_curves_in_low_precision_and_without_gradients_are_torchs():
    x = torch.randn(5)
    with second_derivatives():
        assert torch.equal(F.gelu(x), torch._C._nn.gelu(x))
        low = x.bfloat16().requires_grad_()
        assert "Gelu" in str(F.gelu(low).grad_fn)
        with pytest.raises(RuntimeError, match="approximate"):
            F.gelu(x, approximate="other")


# --- cross-entropy --------------------------------------------------------------------------------

LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": 2},
    "ignored, each": {"ignore_index": 2, "reduction": "none"},
}


def entropy(settings, form=F.cross_entropy):
    """Of logits that two factors of the rows multiply, so that the gradient of the losses is differentiated too."""
    classes = torch.tensor([0, 3, 2, 1, 2, 3])

    def loss(z, factors):
        losses = form(z * factors.sin().unsqueeze(1), classes, **settings)
        return (losses * factors).sum() if losses.ndim else losses * factors.prod()

    return loss


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", LOSSES)
def test_three_orders_of_cross_entropy(name, dtype):
    z = (4 * torch.randn(6, 4)).to(dtype).requires_grad_()
    factors = (1 + torch.rand(6)).to(dtype).requires_grad_()
    loss = entropy(LOSSES[name])
    expected = orders(loss, [z, factors])
    with second_derivatives():
        found = orders(loss, [z, factors])
        assert "Losses" in str(F.cross_entropy(z, torch.zeros(6).long(), reduction="none").grad_fn)
    same(found, expected)


def test_products_of_cross_entropy_are_the_closed_one():
    z, y = torch.randn(50, 30, requires_grad=True), torch.randint(30, (50,))
    v = torch.randn(50, 30)
    torchs = cost(lambda z: F.cross_entropy(z, y), [z])
    with second_derivatives():
        assert cost(lambda z: F.cross_entropy(z, y), [z]) < 0.75 * torchs
        (g,) = torch.autograd.grad(F.cross_entropy(z, y), z, create_graph=True)
        (product,) = torch.autograd.grad(g, z, v)
    p = z.softmax(1)
    torch.testing.assert_close(product, (p * v - p * (p * v).sum(1, keepdim=True)) / 50)


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"label_smoothing": 0.1}, (6, 4)),
        ({"weight": torch.rand(4, dtype=torch.float64)}, (6, 4)),
        ({}, (4,)),
        ({}, (6, 4, 2)),
        ({"target": torch.rand(6, 4, dtype=torch.float64).softmax(1)}, (6, 4)),
    ],
)
def test_other_cross_entropies_are_torchs(settings, shape):
    settings = {"target": torch.zeros(shape[:1] + shape[2:] if len(shape) > 1 else ()).long(), **settings}
    z = torch.randn(shape, requires_grad=True)
    expected = F.cross_entropy(z, **settings)
    with second_derivatives():
        assert torch.equal(F.cross_entropy(z, **settings), expected)


def test_classes_that_torch_refuses_are_refused():
    z = torch.randn(3, 4, requires_grad=True)
    with second_derivatives():
        with pytest.raises(IndexError):
            F.cross_entropy(z, torch.tensor([0, 4, 1]))
        with pytest.raises(ValueError, match="batch_size"):
            F.cross_entropy(z, torch.tensor([0, 1]))
        with pytest.raises(ValueError, match="valid value for reduction"):
            F.cross_entropy(z, torch.tensor([0, 1, 2]), reduction="other")
        assert F.cross_entropy(z, torch.full((3,), -100)).isnan()


@pytest.mark.parametrize("call", [F.gelu, lambda z: F.cross_entropy(z, torch.tensor([1, 0, 3]))])
def test_batched_gradients_and_transforms(call):
    z = torch.randn(3, 4, requires_grad=True)
    rows = torch.randn(5, 3, 4)

    def found(call):
        y = call(z)
        weights = rows if y.ndim else rows[:, 0, 0]
        batched = torch.autograd.grad(y, z, weights, is_grads_batched=True, create_graph=True)
        (g,) = torch.autograd.grad(y.sum(), z, create_graph=True)
        products = torch.autograd.grad(g, z, rows, is_grads_batched=True, retain_graph=True)
        second = torch.autograd.grad(batched[0].square().sum(), z)
        return [batched, products, second, [torch.func.hessian(lambda z: call(z).sin().sum())(z)]]

    expected = found(call)
    with second_derivatives():
        same(found(call), expected)


def test_autocast():
    z, y = torch.randn(6, 4, dtype=torch.bfloat16, requires_grad=True), torch.randint(4, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        torchs = F.cross_entropy(z, y)
        with second_derivatives():
            ours = F.cross_entropy(z, y)
            (g,) = torch.autograd.grad(ours, z, create_graph=True)
    assert ours.dtype == torchs.dtype
    assert g.dtype == torch.bfloat16
    torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("name", [*CURVES, *LOSSES])
def test_products_by_blocks(name, monkeypatch):
    """Blocks that leave a rest, of numbers and of rows, also of a transposed argument."""
    monkeypatch.setattr(curves, "_BLOCK", 5)
    monkeypatch.setattr(entropies, "_BLOCK", 10)
    z = torch.randn(4, 6, dtype=torch.float64).T.requires_grad_()
    factors = (1 + torch.rand(6, dtype=torch.float64)).requires_grad_()
    inputs = [z, factors]
    loss = entropy(LOSSES[name]) if name in LOSSES else lambda z, f: CURVES[name](z * f.unsqueeze(1)).sin()

    def product():
        first = torch.autograd.grad(loss(*inputs).sum(), inputs, create_graph=True)
        return torch.autograd.grad(first, inputs, [x.detach().cos() for x in inputs])

    expected = product()
    with second_derivatives():
        same([product()], [expected])
