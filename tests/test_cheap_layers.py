"""Convolutions and batch norms in forms whose gradient is cheap to differentiate, against torch's and definitions.

(Torch's third derivative of batch norm in training mode is wrong: it takes mean and variance for constants.)
"""

import copy
import pickle

import pytest
import torch
from torch import nn

import bestresponse as br
from bestresponse.passes import batch_norm as batch_norms
from bestresponse.passes import convolution as convolutions
from bestresponse.passes.forms import second_derivatives
from bestresponse.passes.tensors import plain

CONVOLUTIONS = {
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
DIMENSIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {"1": nn.BatchNorm1d, "1 in time": nn.BatchNorm1d, "2": nn.BatchNorm2d, "3": nn.BatchNorm3d}
SHAPES = {"1": (5, 3), "1 in time": (4, 3, 5), "2": (4, 3, 2, 3), "3": (4, 3, 2, 2, 2)}


def convolution(dimensions, options):
    chosen = {"kernel_size": 3, **options}
    layer = DIMENSIONS[dimensions](4, 4, **chosen)
    return layer, torch.randn(2, 4, *(7, 6, 8)[:dimensions], requires_grad=True)


def norm(kind, training, **options):
    layer = NORMS[kind](3, **options)
    if layer.running_mean is not None:
        layer.running_mean.uniform_(-1, 1)
        layer.running_var.uniform_(0.5, 2)
    for p in layer.parameters():
        nn.init.uniform_(p, 0.5, 2)
    return layer.train(training), torch.randn(SHAPES[kind], requires_grad=True)


def derivatives(layer, x, inputs):
    """The value, its gradients, those of a function of these, and once more."""
    orders = [[layer(x)]]
    for _ in range(3):
        value = sum((t.sin() * torch.linspace(0.5, 1, t.numel()).view(t.shape)).sum() for t in orders[-1])
        found = torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True)
        orders.append([g for g in found if g is not None])
    return [t for order in orders for t in order]


def plain_norm(layer, x):
    """Its definition."""
    dims, shape = [0, *range(2, x.ndim)], (1, -1, *(1,) * (x.ndim - 2))
    of_batch = layer.training or layer.running_mean is None
    mean = x.mean(dims) if of_batch else layer.running_mean
    var = (x - mean.view(shape)).square().mean(dims) if of_batch else layer.running_var
    normal = (x - mean.view(shape)) * torch.rsqrt(var + layer.eps).view(shape)
    return normal if layer.weight is None else normal * layer.weight.view(shape) + layer.bias.view(shape)


def same(plain, ours):
    assert len(plain) == len(ours)
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_three_orders_of_derivatives_of_a_convolution_are_torchs(dimensions, case):
    layer, x = convolution(dimensions, CONVOLUTIONS[case])
    inputs = [x, *layer.parameters()]
    plain = derivatives(layer, x, inputs)
    with second_derivatives():
        ours = derivatives(layer, x, inputs)
        cheap = "_Convolution" in str(layer(x).grad_fn)
    assert cheap == (case != "same with unequal sides")
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", NORMS)
def test_three_orders_of_derivatives_of_a_batch_norm_are_those_of_its_definition(
    kind, training, affine, tracked
):
    layer, x = norm(kind, training, affine=affine, track_running_stats=tracked)
    inputs = [x, *layer.parameters()]
    plain = derivatives(lambda x: plain_norm(layer, x), x, inputs)
    torch.testing.assert_close(plain[0], copy.deepcopy(layer)(x))
    with second_derivatives():
        ours = derivatives(layer, x, inputs)
        assert ("_Normalised" in str(layer(x).grad_fn)) == (training or not tracked)
    same(plain, ours)


LAYERS = {
    "convolution": lambda: convolution(2, {"padding": 1, "stride": 2}),
    "batch norm": lambda: norm("2", True),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("wanted", [["x"], ["weight"], ["bias"], ["weight", "bias"]])
def test_what_is_asked_for_alone(name, wanted):
    """First derivatives with and without a graph, and second ones, of each argument without the others."""
    layer, x = LAYERS[name]()
    of = {"x": x, **dict(layer.named_parameters())}
    inputs = [of[name] for name in wanted]

    def found():
        y = layer(x).sin().sum()
        first = torch.autograd.grad(y, inputs, retain_graph=True)
        again = torch.autograd.grad(y, inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in again), inputs)
        return [*first, *again, *second]

    plain = found()
    with second_derivatives():
        same(plain, found())


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_what_requires_no_gradient_is_left_out(name, frozen):
    layer, x = LAYERS[name]()
    of = {"x": x, **dict(layer.named_parameters())}
    of[frozen].requires_grad_(False)
    inputs = [t for name, t in of.items() if name != frozen]
    reference = layer if name == "convolution" else lambda x: plain_norm(layer, x)
    plain = derivatives(reference, x, inputs)
    with second_derivatives():
        same(plain, derivatives(layer, x, inputs))


@pytest.mark.parametrize("momentum", [0.3, None])
def test_running_statistics_move_as_torchs(momentum):
    layer, x = norm("2", True, momentum=momentum)
    other = copy.deepcopy(layer)
    for factor in (1.0, 2.0):
        expected = layer(factor * x)
        with second_derivatives():
            torch.testing.assert_close(other(factor * x), expected)
    for a, b in zip(layer.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert other.num_batches_tracked == 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, of its forward mode
def test_where_torch_has_more_to_say_its_convolution_runs():
    layer, x = convolution(2, {})
    x = x.detach()

    class Own(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return 2 * super()._conv_forward(input, weight, bias)

    own = Own(4, 4, 3)
    expected = own(x)
    with second_derivatives():
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
        shifting = nn.BatchNorm2d(4).eval()
        with second_derivatives():
            shifted = torch.func.vmap(lambda b: torch.func.functional_call(shifting, {"bias": b}, (x,)))(
                torch.randn(5, 4)
            )
        assert shifted.shape == (5, *x.shape)
        torch.testing.assert_close(torch.compile(layer, backend="eager")(x), layer(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, of its forward mode
def test_where_torch_has_more_to_say_its_batch_norm_runs():
    layer, x = norm("2", True)
    expected = layer(x)
    with second_derivatives():
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            layer(x[:1, :, :1, :1])
        with pytest.raises(ValueError, match="4D input"):
            layer(x[0])
        with pytest.raises(RuntimeError):
            layer(x[:, :2])
        compiled = torch.compile(layer, backend="eager")
        torch.testing.assert_close(compiled(x), expected)
        layer.eval()
        tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1]
        torch.testing.assert_close(tangent, layer(x + 1) - layer(x))
        shifted = torch.func.vmap(lambda b: torch.func.functional_call(layer, {"bias": b}, (x,)))(
            torch.randn(5, 3)
        )
        assert shifted.shape == (5, *x.shape)
        layer.float()
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x.float()).shape == x.shape


def test_autocast_casts_as_it_does_for_torchs():
    layer, x = convolution(2, {"padding": 1})
    layer, x = layer.float(), x.detach().float()

    def found():
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        first = torch.autograd.grad(y.float().sin().sum(), list(layer.parameters()), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), list(layer.parameters()))
        return [y, *first, *second]

    plain = found()
    with second_derivatives():
        assert "_Convolution" in str(found()[0].grad_fn)
        for a, b in zip(plain, found(), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2 * float(a.detach().abs().max()))


@pytest.mark.parametrize("curvature", ["Hessian", "GaussNewton"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_hypergradients_are_those_by_torchs_layers(curvature, channels_last, monkeypatch):
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4), nn.Tanh()),
        *(nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3)),
    )
    x, y = torch.randn(6, 3, 5, 5), torch.randint(3, (6,))
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    decay = br.hyperparameters.WeightDecay(model, initial=0.1)
    loss = br.losses.CrossEntropy(lambda batch: batch[1])

    def predict(m, h, b):
        return m(b[0])

    problem = br.Problem(
        model,
        decay,
        lambda m, h, b: loss(predict(m, h, b), b) + h(m),
        lambda m, h, b: loss(predict(m, h, b), b),
    )
    chosen = br.Hessian() if curvature == "Hessian" else br.GaussNewton(predict, loss, decay)
    method = br.Implicit(br.Neumann(3, scale=1e-3), chosen)
    before = copy.deepcopy(model.state_dict())
    used = []
    monkeypatch.setattr(convolutions, "plain", lambda given: used.append(1) or plain(given))
    ours = br.hypergradient(problem, (x, y), (x, y), method)
    assert all(torch.equal(a, before[n]) for n, a in model.state_dict().items())
    assert used
    monkeypatch.setattr(convolutions, "plain", lambda given: False)
    monkeypatch.setattr(batch_norms, "plain", lambda given: False)
    torchs = br.hypergradient(problem, (x, y), (x, y), method)
    for name, h in ours.total.items():
        torch.testing.assert_close(h, torchs.total[name], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_of_other_channels_is_refused_and_writes_nowhere_else(training, tracked, channels):
    layer = nn.BatchNorm2d(3, track_running_stats=tracked).train(training)
    room = torch.zeros(100)
    if tracked:
        layer.running_mean = room[:3]
    with second_derivatives(), pytest.raises(RuntimeError):
        layer(torch.randn(4, channels, 5, 5))
    assert not room.any()


def test_copies_are_of_torchs_layers_and_run_with_weights_of_their_own():
    layers = [norm("2", True)[0], convolution(2, {})[0]]
    x = torch.randn(4, 4, 5, 5)
    with second_derivatives():
        for layer, inputs in zip(layers, (x[:, :3], x), strict=True):
            for twin in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
                assert type(twin) in (nn.BatchNorm2d, nn.Conv2d)
                assert set(vars(twin)) == set(vars(layer))
            shallow = layer.__new__(type(layer))
            shallow.__dict__ = layer.__dict__.copy()
            shallow._parameters = {n: torch.zeros_like(p) for n, p in layer._parameters.items()}
            assert not shallow(inputs).any()
            assert layer(inputs).any()


def test_a_change_in_place_between_two_derivatives_is_refused():
    layer, x = norm("2", True)
    with second_derivatives():
        y = layer(x)
        (g,) = torch.autograd.grad(
            (y * torch.linspace(0, 1, y.shape[-1])).sum(), layer.weight, create_graph=True
        )
        with torch.no_grad():
            x.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(g.square().sum(), x)


@pytest.mark.parametrize("name", LAYERS)
def test_batched_gradients_with_a_graph_are_torchs(name):
    layer, x = LAYERS[name]()
    inputs = [x, *layer.parameters()]
    vectors = torch.eye(3)

    def found():
        y = layer(x).sin().flatten()[:3]
        rows = torch.autograd.grad(y, inputs, vectors, is_grads_batched=True, create_graph=True)
        second = torch.autograd.grad(sum(r.square().sum() for r in rows), inputs)
        return [y, *rows, *second]

    plain_found = found()
    with second_derivatives():
        same(plain_found, found())
        y = layer(x).sin().flatten()[:3]
        each = torch.func.vmap(lambda v: torch.autograd.grad(y, inputs, v, create_graph=True))(vectors)
        same(plain_found[1:4], list(each))


def test_settings_of_a_convolution_that_were_changed():
    layer, x = convolution(2, {})
    for changed in (
        *({"padding": 1}, {"stride": 2, "dilation": 1}, {"padding": "same", "stride": (1, 1)}),
        *({"dilation": (1,)}, {"stride": (2,), "padding": (1,)}),
    ):
        vars(layer).update(changed)
        expected = layer(x)
        with second_derivatives():
            assert torch.equal(layer(input=x), expected)
            torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    wide = nn.Conv2d(4, 4, 3, padding="same")
    wide.weight = nn.Parameter(torch.randn(4, 4, 5, 5))
    expected = wide(x)
    with second_derivatives():
        torch.testing.assert_close(wide(x), expected)


def test_a_changed_class_is_left_alone(monkeypatch):
    stock = nn.Conv2d._conv_forward
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", lambda self, i, w, b: 2 * stock(self, i, w, b))
    layer, x = convolution(2, {})
    expected = layer(x)
    with second_derivatives():
        assert torch.equal(layer(x), expected)


def test_compiled_parts_are_compiled_once_more():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    class Extractor(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2)

        def forward(self, x):
            return self.norm(self.convolution(x))

    whole = torch.compile(Extractor().eval().requires_grad_(False), backend=backend, fullgraph=True)
    x = torch.randn(2, 4, 5, 5)
    for _ in range(12):
        whole(x)
        with second_derivatives():
            whole(x)
    assert len(compiled) <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_norms_are_as_precise_as_torchs_far_from_zero(dtype):
    layer = nn.BatchNorm2d(3).eval()
    layer.running_mean.fill_(100.0)
    x = (100 + torch.randn(8, 3, 4, 4)).to(dtype)
    exact = layer(x.double())
    layer.to(dtype)
    with second_derivatives():
        found = layer(x)
    assert (found - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()
    torchs = layer(x)
    assert (found - torchs).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()


def test_complex_and_integer_inputs_under_autocast_are_torchs():
    layer = nn.Conv2d(4, 4, 3, dtype=torch.complex64)
    with second_derivatives(), torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(1, 4, 5, 5, dtype=torch.complex64)).is_complex()
        with pytest.raises(RuntimeError):
            nn.Conv2d(4, 4, 3)(torch.ones(1, 4, 5, 5, dtype=torch.int64))


@pytest.mark.parametrize("start", [["x", "weight", "bias"], ["x"], ["weight"], ["bias"]], ids=" ".join)
@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_in_batches_are_torchs(name, start):
    layer, x = LAYERS[name]()
    of = {"x": x, **dict(layer.named_parameters())}
    inputs = list(of.values())

    def found():
        first = torch.autograd.grad(layer(x).sin().sum(), [of[n] for n in start], create_graph=True)
        some = torch.cat([g.flatten()[:2] for g in first])
        return torch.autograd.grad(some, inputs, torch.eye(len(some)), is_grads_batched=True)

    plain_found = found()
    with second_derivatives():
        same(plain_found, found())


METHODS = [(nn.Conv1d, "_conv_forward"), (nn.Conv2d, "_conv_forward"), (nn.BatchNorm2d, "forward")]


def test_classes_stay_as_they_are_while_a_pass_runs_and_passes_nest():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 2))
    batch = torch.randn(5, 2, 5, 5), torch.randint(2, (5,))
    before, inner = [getattr(kind, method) for kind, method in METHODS], []

    def loss(m, h, b):
        assert [getattr(kind, method) for kind, method in METHODS] == before
        assert [type(layer) for layer in m] == [nn.Conv2d, nn.BatchNorm2d, nn.Flatten, nn.Linear]
        return nn.functional.cross_entropy(m(b[0]), b[1]) + h(m)

    def nested(m, h, b):
        inner.append(br.hypergradient(br.Problem(m, h, loss, loss), b, b, method).total)
        assert "_Convolution" in str(m[0](b[0]).grad_fn)
        return loss(m, h, b)

    decay, method = br.hyperparameters.WeightDecay(model), br.Implicit(br.Identity())
    total = br.hypergradient(br.Problem(model, decay, nested, loss), batch, batch, method).total
    assert inner
    for found in inner:
        assert all(torch.equal(found[name], total[name]) for name in total)


def test_subclasses_and_parametrizations_made_in_a_pass():
    class Own(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return 2 * super()._conv_forward(input, weight / 3, bias)

    class Scaled(nn.Module):
        def forward(self, w):
            return 1.5 * w

    own, x = Own(4, 4, 3), torch.randn(2, 4, 6, 6)
    expected = [own(x), own(x[0])]
    with second_derivatives():
        same(expected, [own(x), own(x[0])])
        layer = nn.Conv2d(4, 4, 3)
        plain_found = [layer(x), layer(x[0])]
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", Scaled())
        bias = layer.bias.view(-1, 1, 1)
        same([1.5 * (y - bias) + bias for y in plain_found], [layer(x), layer(x[0])])
    same([1.5 * (y - bias) + bias for y in plain_found], [layer(x), layer(x[0])])


def test_traces_in_a_pass():
    model = nn.Sequential(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3)).eval()
    x = torch.randn(2, 4, 6, 6)
    with second_derivatives():
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))
        assert isinstance(model[0], nn.Conv2d)
