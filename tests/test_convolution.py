"""Convolutions in the form whose gradient is cheap to differentiate, against torch's own."""

import pytest
import torch
from torch import nn

from bestresponse._layers import cheap_layers

CASES = {
    "plain": {},
    "stride that leaves a rest": {"stride": 2},
    "stride above the kernel": {"stride": 3, "kernel_size": 2},
    "padding": {"padding": 2},
    "dilation and padding": {"dilation": 2, "padding": 1, "stride": 2},
    "groups": {"groups": 2},
    "one channel a group": {"groups": 4, "padding": 1},
    "a kernel of one": {"kernel_size": 1},
    "without bias": {"bias": False},
    "same": {"padding": "same"},
    "same with unequal sides": {"padding": "same", "kernel_size": 2},
    "valid": {"padding": "valid"},
    "reflected": {"padding": 1, "padding_mode": "reflect"},
    "circular and same": {"padding": "same", "padding_mode": "circular"},
}
KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def layer_and_input(dimensions, options):
    chosen = {"kernel_size": 3, **options}
    layer = KINDS[dimensions](4, 4, **chosen)
    return layer, torch.randn(2, 4, *(7, 6, 8)[:dimensions], requires_grad=True)


def derivatives(layer, x, inputs):
    """The value, its gradients, those of a function of these, and once more."""
    y = layer(x)
    orders = [[y]]
    for _ in range(3):
        value = sum((t.sin() * torch.linspace(0, 1, t.numel()).view(t.shape)).sum() for t in orders[-1])
        found = torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True)
        orders.append([g for g in found if g is not None])
    return [t for order in orders for t in order]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dimensions", KINDS)
def test_three_orders_of_derivatives_are_torchs(dimensions, case):
    layer, x = layer_and_input(dimensions, CASES[case])
    inputs = [x, *layer.parameters()]
    plain = derivatives(layer, x, inputs)
    with cheap_layers([layer]):
        ours = derivatives(layer, x, inputs)
        cheap = "_Convolution" in str(layer(x).grad_fn)
    assert cheap == (case != "same with unequal sides")
    assert "_conv_forward" not in vars(layer)
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("wanted", [["x"], ["weight"], ["bias"], ["weight", "bias"]])
def test_what_is_asked_for_alone(wanted):
    """First derivatives with and without a graph, and second ones, of each argument without the others."""
    layer, x = layer_and_input(2, {"padding": 1, "stride": 2})
    of = {"x": x, **dict(layer.named_parameters())}
    inputs = [of[name] for name in wanted]

    def found():
        y = layer(x).sin().sum()
        first = torch.autograd.grad(y, inputs, retain_graph=True)
        again = torch.autograd.grad(y, inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in again), inputs)
        return [*first, *again, *second]

    plain = found()
    with cheap_layers([layer]):
        for a, b in zip(plain, found(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_what_requires_no_gradient_is_left_out(frozen):
    layer, x = layer_and_input(2, {})
    of = {"x": x, **dict(layer.named_parameters())}
    of[frozen].requires_grad_(False)
    inputs = [t for name, t in of.items() if name != frozen]
    plain = derivatives(layer, x, inputs)
    with cheap_layers([layer]):
        for a, b in zip(plain, derivatives(layer, x, inputs), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, of its forward mode
def test_where_torch_has_more_to_say_its_own_convolution_runs():
    layer, x = layer_and_input(2, {})
    x = x.detach()

    class Own(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return 2 * super()._conv_forward(input, weight, bias)

    own = Own(4, 4, 3)
    expected = own(x)
    with cheap_layers([layer, own]):
        assert torch.equal(own(x), expected)
        with pytest.raises(RuntimeError, match="channels"):
            layer(x[:, :2])
        assert "_Convolution" not in str(layer(x[0]).grad_fn)  # without a dimension of examples
        assert layer(x[:0]).shape == (0, *layer(x).shape[1:])
        each = torch.func.vmap(lambda one: layer(one.unsqueeze(0)).squeeze(0))(x)
        torch.testing.assert_close(each, layer(x))
        state = dict(layer.named_parameters())
        slope = torch.func.grad(lambda s: torch.func.functional_call(layer, s, (x,)).sin().sum())(state)
        expected = torch.autograd.grad(layer(x).sin().sum(), list(layer.parameters()))
        torch.testing.assert_close(list(slope.values()), list(expected))
        _, tangent = torch.func.jvp(layer, (x,), (x,))
        torch.testing.assert_close(tangent, layer(x) - layer.bias.view(-1, 1, 1))
        norm = nn.BatchNorm2d(4).eval()
        with cheap_layers([norm]):
            shifted = torch.func.vmap(lambda b: torch.func.functional_call(norm, {"bias": b}, (x,)))(
                torch.randn(5, 4)
            )
        assert shifted.shape == (5, *x.shape)
        compiled = torch.compile(layer, backend="eager")
        assert "_Convolution" not in str(compiled(x).grad_fn)


def test_autocast_casts_as_it_does_for_torchs():
    layer, x = layer_and_input(2, {"padding": 1})
    layer, x = layer.float(), x.detach().float()

    def found():
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        first = torch.autograd.grad(y.float().sin().sum(), list(layer.parameters()), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), list(layer.parameters()))
        return [y, *first, *second]

    plain = found()
    with cheap_layers([layer]):
        assert "_Convolution" in str(found()[0].grad_fn)
        for a, b in zip(plain, found(), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2 * float(a.detach().abs().max()))
