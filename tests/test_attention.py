"""Attention in blocks: equal to torch's math backend to three orders, and its matrix never kept whole."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import bestresponse as br
from bestresponse.diagnostics.measuring import peak_bytes
from bestresponse.passes import attention, attention_blocks
from bestresponse.passes.forms import second_derivatives
from cases import orders


@pytest.fixture(params=[1, 24, 2**17], ids=["a row", "some rows", "one block"])
def blocks(request, monkeypatch):
    """Blocks for small matrices too, of three sizes."""
    monkeypatch.setattr(attention, "_SMALL", 0)
    monkeypatch.setattr(attention_blocks, "_CPU", request.param)
    monkeypatch.setattr(attention_blocks, "_FEWEST_ROWS", 1)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "_SMALL", 0)
    monkeypatch.setattr(attention_blocks, "_CPU", 24)
    monkeypatch.setattr(attention_blocks, "_FEWEST_ROWS", 2)


def math_backend(*inputs, **settings):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*inputs, **settings)


def same(found, expected):
    for ours, others in zip(found, expected, strict=True):
        one, other = (torch.cat([t.detach().flatten() for t in order]) for order in (ours, others))
        bound = 1e-12 if one.dtype == torch.float64 else 1e-5
        assert one.dtype == other.dtype
        assert (one - other).norm() <= bound * (other.norm() + 1.0)


def tensors(*shapes, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def added(*shape):
    """A mask that is added, with entries of minus infinity and a row of nothing else."""
    mask = torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, -torch.inf)
    mask[..., -1, :] = -torch.inf
    return mask


def allowed(*shape):
    mask = torch.rand(shape) < 0.6
    mask[..., -1, :] = False
    return mask


SAME = ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4))
CALLS = {
    "plain": (SAME, lambda: {}),
    "scale": (SAME, lambda: {"scale": -0.7}),
    "causal": (SAME, lambda: {"is_causal": True}),
    "causal, more queries": (((2, 7, 4), (2, 5, 4), (2, 5, 3)), lambda: {"is_causal": True}),
    "causal, square": (((1, 6, 4), (1, 6, 4), (1, 6, 4)), lambda: {"is_causal": True}),
    "no batch": (((5, 4), (7, 4), (7, 2)), lambda: {}),
    "five dimensions": (((2, 1, 3, 5, 2), (2, 2, 3, 4, 2), (2, 2, 1, 4, 2)), lambda: {}),
    "one mask": (SAME, lambda: {"attn_mask": allowed(5, 7)}),
    "a mask of keys": (SAME, lambda: {"attn_mask": torch.arange(7).expand(2, 1, 1, 7) < 4}),
    "a mask for each": (SAME, lambda: {"attn_mask": allowed(2, 3, 5, 7)}),
    "an added mask": (SAME, lambda: {"attn_mask": added(5, 7)}),
    "an added mask for each": (SAME, lambda: {"attn_mask": added(2, 1, 5, 7)}),
    "an added column": (SAME, lambda: {"attn_mask": added(3, 5, 1)}),
    "groups": (((2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)), lambda: {"enable_gqa": True}),
    "groups, causal": (
        ((4, 5, 3), (2, 5, 3), (2, 5, 3)),
        lambda: {"enable_gqa": True, "is_causal": True},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CALLS)
def test_three_orders_are_those_of_the_math_backend(name, dtype, blocks):
    shapes, make = CALLS[name]
    inputs, settings = tensors(*shapes, dtype=dtype), make()
    mask = settings.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        settings["attn_mask"] = mask.to(dtype)
    expected = orders(lambda *x: math_backend(*x, **settings), inputs)
    with second_derivatives():
        found = orders(lambda *x: F.scaled_dot_product_attention(*x, **settings), inputs)
        assert "_Attention" in graph_of(found[0][0])
    same(found, expected)


def graph_of(x):
    names, pending = [], [x.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None:
            names.append(node.name())
            pending += [following for following, _ in node.next_functions]
    return " ".join(names)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_frozen_arguments(frozen, small_blocks):
    inputs = tensors((2, 5, 4), (2, 5, 4), (2, 5, 4))
    for i in frozen:
        inputs[i].requires_grad_(False)
    expected = orders(math_backend, inputs)
    with second_derivatives():
        same(orders(F.scaled_dot_product_attention, inputs), expected)


@pytest.mark.parametrize("live", [0, 1, 2])
def test_one_argument_with_a_gradient_that_is_constant(live, small_blocks):
    inputs = [x.detach() for x in tensors((2, 5, 4), (2, 5, 4), (2, 5, 4))]
    x = inputs[live].requires_grad_()

    def found(call):
        (first,) = torch.autograd.grad(call(*inputs).sum(), x, create_graph=True)
        if live == 2:  # which the gradient does not depend on
            return [[first]]
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return [[first], [second], torch.autograd.grad(second.sin().sum(), x)]

    expected = found(math_backend)
    with second_derivatives():
        same(found(F.scaled_dot_product_attention), expected)
        if live == 2:
            (first,) = torch.autograd.grad(
                F.scaled_dot_product_attention(*inputs).sum(), x, create_graph=True
            )
            for graph in (False, True):
                second = torch.autograd.grad(first.sum(), x, create_graph=graph, retain_graph=True)
                assert not second[0].any()


@pytest.mark.parametrize("asked", [["g"], ["q"], ["k", "v"], ["v", "g"], ["q", "k", "v", "g"]], ids=str)
@pytest.mark.parametrize("leaves", [True, False])
def test_products_of_which_a_part_is_asked_for(asked, leaves, small_blocks):
    """Also where the arguments are leaves, and where the derivative of g alone makes the product cheaper."""
    named = dict(zip("qkvg", tensors(*[(2, 5, 4)] * 4), strict=True))
    vectors = [torch.randn(2, 5, 4) for _ in range(3)]

    def found(call):
        q, k, v, g = (x if leaves else x * 1.0 for x in named.values())
        first = torch.autograd.grad(call(q, k, v, is_causal=True), [q, k, v], g, create_graph=True)
        return [torch.autograd.grad(first, [named[n] for n in asked], vectors)]

    expected = found(math_backend)
    with second_derivatives():
        same(found(F.scaled_dot_product_attention), expected)
        same(found(lambda q, k, v, is_causal: blocks_of_three(q, k, v)), expected)


def blocks_of_three(q, k, v):
    """The function itself, whose arguments may be leaves."""
    call = attention_blocks.Attention(True, 0.0, 0, None)
    return call(q, k * 0.5, v, None)


@pytest.mark.parametrize("function", ["backward", "whole hypergradient"])
def test_accumulated_gradients(function, small_blocks):
    inputs = tensors((2, 5, 4), (2, 5, 4), (2, 5, 4))
    first = torch.autograd.grad(math_backend(*inputs).sin().sum(), inputs, create_graph=True)
    expected = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    with second_derivatives():
        y = F.scaled_dot_product_attention(*inputs)
        first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        sum(g.square().sum() for g in first).backward()
    same([[x.grad for x in inputs]], [expected])


# --- dropout --------------------------------------------------------------------------------------


def test_dropout_draws_the_same_masks_in_each_derivative(small_blocks):
    """Gradients of the outputs, which are linear in v, give the masked matrix, and differences its derivatives."""
    q, k, v = tensors((2, 5, 4), (2, 6, 4), (2, 6, 3))

    def run(q, k, v):
        torch.manual_seed(3)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)

    with second_derivatives():
        matrix = run(q, k, torch.eye(6).expand(2, 6, 6))
        kept = matrix.detach() != 0

        def by_hand(q, k, v):
            return ((q @ k.mT / 2).softmax(-1) * kept / 0.6) @ v

        same(orders(run, [q, k, v]), orders(by_hand, [q, k, v]))
        assert 0.3 < kept.double().mean() < 0.9
        assert torch.equal(run(q, k, v), run(q, k, v))
        assert not torch.equal(F.scaled_dot_product_attention(q, k, v, dropout_p=0.4), run(q, k, v))
        low = run(*(x.float() for x in (q, k, v)))  # the masks do not depend on the precision
        torch.testing.assert_close(low.double(), run(q, k, v), rtol=1e-5, atol=1e-5)


def test_dropout_rates_are_kept(monkeypatch):
    q = torch.zeros(4, 200, 2)
    with second_derivatives():
        y = F.scaled_dot_product_attention(q, q, torch.eye(200).expand(4, 200, 200), dropout_p=0.25)
    kept = (y != 0).double()
    assert abs(kept.mean() - 0.75) < 0.01
    assert abs(y.mean() - 1 / 200) < 1e-4
    assert kept.mean(-1).std() < 0.04  # as independent draws have
    assert kept.mean(1).std() < 0.04
    assert not torch.equal(kept[0], kept[1])


# --- where blocks do not serve -------------------------------------------------------------------


def test_a_mask_with_a_gradient_has_its_derivatives(small_blocks):
    q, k, v, mask = tensors((2, 5, 4), (2, 5, 4), (2, 5, 4), (5, 5))
    expected = orders(lambda q, k, v, m: math_backend(q, k, v, attn_mask=m), [q, k, v, mask])
    with second_derivatives():
        found = orders(
            lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), [q, k, v, mask]
        )
    same(found, expected)


@pytest.mark.parametrize(
    ("shapes", "settings"),
    [
        (((2, 5, 4), (2, 5, 3), (2, 5, 4)), {}),
        (((2, 5, 4), (2, 5, 4), (2, 6, 4)), {}),
        (((2, 5, 4), (3, 5, 4), (3, 5, 4)), {}),
        (((5, 5, 4), (2, 5, 4), (2, 5, 4)), {"enable_gqa": True}),
        (((2, 5, 4),) * 3, {"attn_mask": torch.ones(5, 4, dtype=torch.bool)}),
        (((2, 5, 4),) * 3, {"attn_mask": torch.ones(5, 5, dtype=torch.bool), "is_causal": True}),
        (((2, 5, 4),) * 3, {"attn_mask": torch.ones(5, 5, dtype=torch.int64)}),
        (((2, 5, 4),) * 3, {"dropout_p": 1.5}),
    ],
)
def test_arguments_that_torch_refuses_are_refused(shapes, settings, small_blocks):
    inputs = tensors(*shapes)
    with pytest.raises(RuntimeError):
        math_backend(*inputs, **settings)
    with second_derivatives(), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(*inputs, **settings)


@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 0, 4), (2, 5, 0)])
def test_empty_arguments(shape, small_blocks):
    inputs = tensors(shape, shape, shape)
    with second_derivatives():
        found = F.scaled_dot_product_attention(*inputs)
    torch.testing.assert_close(found, math_backend(*inputs))


def test_all_is_dropped(small_blocks):
    with second_derivatives():
        assert not F.scaled_dot_product_attention(*tensors(*[(2, 5, 4)] * 3), dropout_p=1.0).any()


def test_batched_gradients_and_transforms(small_blocks):
    q, k, v, g = tensors(*[(2, 5, 4)] * 4)
    rows = torch.randn(3, 2, 5, 4)

    def found(call):
        y = call(q, k, v, is_causal=True)
        batched = torch.autograd.grad(y, [q, k, v], rows, is_grads_batched=True, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in batched), [q, k, v], retain_graph=True)
        first = torch.autograd.grad(y, [q, k, v], g, create_graph=True)
        products = torch.autograd.grad(
            first, [q, k, v, g], [rows] * 3, is_grads_batched=True, retain_graph=True
        )
        each = torch.func.vmap(lambda u: torch.autograd.grad(first, [q, g], [u, u, u], retain_graph=True))(
            rows
        )
        third = torch.autograd.grad(first[0].square().sum(), [q], create_graph=True)
        inside = torch.func.hessian(lambda q: call(q, k, v).sin().sum())(q)
        return [
            batched,
            second,
            products,
            each,
            torch.autograd.grad(third[0].square().sum(), [q, k]),
            [inside],
        ]

    expected = found(math_backend)
    with second_derivatives():
        same(found(F.scaled_dot_product_attention), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_and_autocast(dtype, small_blocks):
    exact = tensors(*[(2, 3, 6, 4)] * 3, dtype=torch.float32)
    inputs = [x.detach().to(dtype).requires_grad_() for x in exact]
    with torch.autocast("cpu", torch.bfloat16, dtype == torch.float32):
        torchs = orders(lambda *x: math_backend(*x, is_causal=True), inputs, 2)
        with second_derivatives():
            found = orders(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), inputs, 2)
    expected = orders(lambda *x: math_backend(*x, is_causal=True), exact, 2)
    for ours, theirs, right in zip(found, torchs, expected, strict=True):
        for one, other, exactly in zip(ours, theirs, right, strict=True):
            assert one.dtype == other.dtype
            off = (one - exactly).norm()
            assert off <= 5e-2 * exactly.norm()
            assert off <= 3 * (other - exactly).norm() + 1e-6


# --- checkpoints, modules, hypergradients --------------------------------------------------------


def test_a_change_in_place_between_two_derivatives_is_refused(small_blocks):
    q, k, v = tensors(*[(2, 5, 4)] * 3)
    v = v * 1.0
    with second_derivatives():
        y = F.scaled_dot_product_attention(q, k, v)
        (g,) = torch.autograd.grad(y.sin().sum(), q, create_graph=True)
        v.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(g.sum(), q)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpoints_replay_the_same_masks(dropout, small_blocks):
    inputs = tensors(*[(2, 5, 4)] * 3)

    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).sin()

    def found(run):
        torch.manual_seed(1)
        return orders(run, inputs, 2)

    with second_derivatives():
        same(found(lambda *x: checkpoint(call, *x, use_reentrant=False)), found(call))


class Block(nn.Module):
    """A transformer's block with torch's own module of attention."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(x).mean(1)


def tuned(model, method, dtype=torch.float64):
    x, y = torch.randn(3, 6, 4).to(dtype), torch.arange(3) % 2
    decay = br.hyperparameters.WeightDecay(model, initial=0.3, per="tensor").to(dtype)
    problem = br.Problem(
        model,
        decay,
        lambda m, h, b: F.cross_entropy(m(b[0]), b[1]) + h(m),
        lambda m, h, b: F.cross_entropy(m(b[0]), b[1]),
    )
    result = br.hypergradient(problem, (x, y), (x + 0.1, y), method, seed=1)
    return torch.cat([t.flatten() for t in result.total.values()]), result


CURVATURES = {
    "Hessian": br.Hessian(),
    "GaussNewton": br.GaussNewton(
        lambda m, h, b: m(b[0]), lambda o, b: F.cross_entropy(o, b[1]), lambda m, h, b: h(m)
    ),
}


@pytest.mark.parametrize("curvature", CURVATURES)
def test_hypergradients_are_those_by_plain_operations(curvature, monkeypatch):
    method = br.Implicit(br.Neumann(4, 0.1), CURVATURES[curvature])
    model = Block()
    torch.manual_seed(0)
    expected = tuned(model, method)[0]
    monkeypatch.setattr(attention, "_SMALL", 0)
    monkeypatch.setattr(attention_blocks, "_CPU", 24)
    torch.manual_seed(0)
    torch.testing.assert_close(tuned(model, method)[0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_hypergradients_verify_themselves(dropout, verifying, small_blocks):
    result = tuned(Block(dropout), br.Implicit(br.Neumann(2, 0.1)))[1]
    assert "verified" in str(result.verification)
    assert "not verified" not in str(result.verification)


def test_memory_is_linear_in_the_length():
    """Four times the length takes about four times the memory; the matrix itself would take sixteen times."""

    def peak(length):
        inputs = tensors(*[(1, 1, length, 8)] * 3, dtype=torch.float32)

        def product():
            y = F.scaled_dot_product_attention(*inputs, is_causal=True)
            first = torch.autograd.grad(y.sum(), inputs, create_graph=True)
            torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

        with second_derivatives():
            return peak_bytes(product)

    short, long = peak(512), peak(2048)
    assert long < 4 * 2048 * 2048 / 4
    assert long < 4.5 * short


@pytest.mark.parametrize("length", [64, 160])
def test_the_outputs_may_be_changed_in_place(length):
    """As torch's own outputs may."""
    found = []
    for forms in (second_derivatives, nullcontext):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3))
        with sdpa_kernel(SDPBackend.MATH), forms():
            outputs = F.scaled_dot_product_attention(q, k, v)
            outputs += 1.0
            moved = outputs.transpose(1, 2)
            moved.mul_(2.0)
            (slope,) = torch.autograd.grad(outputs.square().sum(), q, create_graph=True)
            found.append(torch.autograd.grad(slope.square().sum(), (q, k, v)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
