"""Forms by function: which calls they take, beside other modes, threads, transforms, checkpoints and compilers."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import bestresponse as br
from bestresponse.passes.forms import first_derivatives, paused, second_derivatives
from bestresponse.passes.recurrent import gru_step, lstm_step, recurrent, rnn_step


def modes():
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def switches():
    cuda = torch.backends.cuda
    return (
        *(torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled, cuda.flash_sdp_enabled()),
        *(cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        *(vars(kind)["forward"] for kind in (nn.Conv2d, nn.LayerNorm, nn.LSTM)),
    )


def statistics(x, dims, eps=1e-5):
    mean = x.mean(dims, keepdim=True)
    return mean, torch.rsqrt((x - mean).square().mean(dims, keepdim=True) + eps)


def normal(x, dims):
    mean, r = statistics(x, dims)
    return (x - mean) * r


def orders(function, inputs, count=3):
    """The value and derivatives of up to this order, of sums with weights of which none is alike."""
    found = [[function(*inputs)]]
    for _ in range(count):
        value = sum((t.sin() * torch.linspace(0.5, 1, t.numel()).view(t.shape)).sum() for t in found[-1])
        slopes = torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True)
        found.append([s for s in slopes if s is not None])
    return [t for order in found for t in order]


def same(ones, others, **tolerances):
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, **(tolerances or {"rtol": 1e-8, "atol": 1e-9}))


def tensors(*shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


aten = torch.ops.aten
ROWS = {
    "F": lambda x, w, b: F.layer_norm(x, (3, 4), w, b),
    "keywords": lambda x, w, b: F.layer_norm(bias=b, input=x, weight=w, normalized_shape=[3, 4]),
    "torch": lambda x, w, b: torch.layer_norm(x, (3, 4), w, b, 1e-5, False),
    "native": lambda x, w, b: torch.native_layer_norm(x, (3, 4), w, b, 1e-5)[0],
    "aten": lambda x, w, b: aten.layer_norm(x, (3, 4), w, b),
    "aten overload": lambda x, w, b: aten.native_layer_norm.default(x, (3, 4), w, b, 1e-5)[0],
}
CHANNELS = {
    "F": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "keywords": lambda x, w, b: F.batch_norm(
        x, training=True, bias=b, weight=w, running_var=None, running_mean=None
    ),
    "torch": lambda x, w, b: torch.batch_norm(x, w, b, None, None, True, 0.1, 1e-5, False),
    "native": lambda x, w, b: torch.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)[0],
    "aten": lambda x, w, b: aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)[0],
}
EXAMPLES = {
    "F": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "torch": lambda x, w, b: torch.instance_norm(x, w, b, None, None, True, 0.1, 1e-5, False),
    "aten": lambda x, w, b: aten.instance_norm.default(x, w, b, None, None, True, 0.1, 1e-5, False),
    "module": lambda x, w, b: torch.func.functional_call(
        nn.InstanceNorm1d(3, affine=True), {"weight": w, "bias": b}, (x,)
    ),
}
GROUPS = {"F": lambda x, w, b: F.group_norm(x, 1, w, b)}
NORMS = [
    *(("layer", call, (3, 4), [1, 2], (3, 4)) for call in ROWS.values()),
    *(("batch", call, (3,), [0, 2], (3, 1)) for call in CHANNELS.values()),
    *(("instance", call, (3,), [2], (3, 1)) for call in EXAMPLES.values()),
    *(("group", call, (3,), [1, 2], (3, 1)) for call in GROUPS.values()),
]


@pytest.mark.parametrize(("kind", "call", "weights", "dims", "along"), NORMS)
def test_three_orders_of_derivatives_of_norms_by_all_their_names(kind, call, weights, dims, along):
    inputs = tensors((5, 3, 4), weights, weights)
    expected = orders(lambda x, w, b: normal(x, dims) * w.view(along) + b.view(along), inputs)
    with second_derivatives():
        same(orders(call, inputs), expected)
        if kind != "group":  # which are torch's own, and right
            assert "_NormalisedBackward" in str(call(*inputs).grad_fn.next_functions) + str(
                call(*inputs).grad_fn
            )


@pytest.mark.parametrize(
    ("call", "dims"),
    [
        (lambda x: F.layer_norm(x, (4,)), [2]),
        (lambda x: F.layer_norm(x, x.shape), [0, 1, 2]),
        (lambda x: F.batch_norm(x, None, None, training=True), [0, 2]),
        (lambda x: F.instance_norm(x), [2]),
    ],
    ids=["layer", "layer, all", "batch", "instance"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_three_orders_of_derivatives_of_norms_without_weights(call, dims, dtype):
    (x,) = tensors((5, 3, 4))
    expected = orders(lambda x: normal(x, dims), [x])
    x = x.detach().to(dtype).requires_grad_()
    with second_derivatives():
        found = orders(call, [x])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert (one - other).norm() <= (1e-12 if dtype == torch.float64 else 1e-3) * other.norm()


@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 1], [1, 2]], ids=str)
@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_layer_norms_of_which_a_part_is_asked_for(wanted, frozen):
    x, w, b = tensors((5, 3, 4), (4,), (4,))
    if frozen is not None:
        (x, w)[frozen].requires_grad_(False)
    inputs = [t for t in (x, w, b) if t.requires_grad]
    some = [t for i, t in enumerate((x, w, b)) if i in wanted and t.requires_grad]
    if not some:
        return

    def found(call):
        first = torch.autograd.grad(call(x, w, b).sin().sum(), some, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]

    expected = found(lambda x, w, b: normal(x, [2]) * w + b)
    with second_derivatives():
        same(found(lambda x, w, b: F.layer_norm(x, (4,), w, b)), expected)


def test_native_norms_give_mean_and_scale_with_derivatives():
    (x,) = tensors((5, 3, 4))
    with second_derivatives():
        rows = torch.native_layer_norm(x, (4,), None, None, 1e-5)
        channels = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    for found, dims in ((rows, [2]), (channels, [0, 2])):
        for one, other in zip(found[1:], statistics(x, dims), strict=True):
            torch.testing.assert_close(one, other.view(one.shape))
            slopes = [torch.autograd.grad(t.sin().sum(), x)[0] for t in (one, other)]
            torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("momentum", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("call", [F.batch_norm, F.instance_norm])
def test_running_statistics_move_as_torchs(call, dtype, momentum):
    x = tensors((5, 3, 4))[0].to(dtype)
    ours, torchs = ([torch.rand(3).to(dtype) for _ in range(2)] for _ in range(2))
    for one, other in zip(ours, torchs, strict=True):
        one.copy_(other)
    settings = {"training" if call is F.batch_norm else "use_input_stats": True, "momentum": momentum}
    for _ in range(2):
        expected = call(x, *torchs, **settings)
        with second_derivatives():
            found = call(x, *ours, **settings)
        close = {"rtol": 2e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-12}
        same([found, *ours], [expected, *torchs], **close)
        x = 2 * x + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "call", [ROWS["F"], CHANNELS["F"], EXAMPLES["F"]], ids=["layer", "batch", "instance"]
)
def test_norms_under_autocast_have_torchs_types_and_float32_derivatives(call, dtype):
    weights = (3, 4) if call is ROWS["F"] else (3,)
    dims = {ROWS["F"]: [1, 2], CHANNELS["F"]: [0, 2], EXAMPLES["F"]: [2]}[call]
    inputs = [t.detach().float().requires_grad_() for t in tensors((5, 3, 4), weights, weights)]
    x = inputs[0].to(dtype)
    along = weights if len(weights) == 2 else (3, 1)

    def second(y):
        (g,) = torch.autograd.grad(y.float().sin().sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(g.square().sum(), inputs)

    with torch.autocast("cpu", torch.bfloat16):
        torchs = call(x, *inputs[1:])
        with second_derivatives():
            ours = call(x, *inputs[1:])
            found = second(ours)
    assert ours.dtype == torchs.dtype
    torch.testing.assert_close(ours, torchs)
    expected = second((normal(x.float(), dims) * inputs[1].view(along) + inputs[2].view(along)).to(dtype))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= (5e-2 if dtype == torch.bfloat16 else 1e-5) * other.norm()


# --- transforms, subclasses, other modes ---------------------------------------------------------


class Own(torch.Tensor):
    """A subclass that changes nothing."""


def penalty(call, transform):
    """The second derivative of a loss with a gradient in it: three orders."""

    def of(x, w, b):
        if transform == "grad":
            slope = torch.func.grad(lambda x: call(x, w, b).sin().sum())(x)
        elif transform == "jacrev over vmap":
            slope = torch.func.vmap(torch.func.jacrev(lambda one: call(one.unsqueeze(0), w, b).sin().sum()))(
                x
            )
        elif transform == "jvp":
            slope = torch.func.jvp(lambda x: call(x, w, b).sin(), (x,), (torch.ones_like(x),))[1]
        elif transform == "checkpoint":
            y = checkpoint(lambda x: call(x, w, b).sin(), x, use_reentrant=False)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        elif transform == "subclass":
            (slope,) = torch.autograd.grad(call(x.as_subclass(Own), w, b).sin().sum(), x, create_graph=True)
        elif transform == "batched":
            y = call(x, w, b).sin().flatten(1).sum(1)
            rows = torch.autograd.grad(y, x, torch.eye(len(y)), is_grads_batched=True, create_graph=True)[0]
            slope = rows.sum(0)
        return slope

    return of


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, of its forward mode
@pytest.mark.parametrize(
    "transform", ["grad", "jacrev over vmap", "jvp", "checkpoint", "subclass", "batched"]
)
@pytest.mark.parametrize("name", ["layer", "batch", "instance", "convolution", "attention"])
def test_derivatives_inside_the_loss(name, transform):
    shape, w, along, dims = (2, 3, 4), (3,), (3, 1), None
    if name == "layer":
        call, w, along, dims = ROWS["F"], (3, 4), (3, 4), [1, 2]
    elif name == "batch":
        call, dims = CHANNELS["F"], [0, 2]
    elif name == "instance":
        call, dims = EXAMPLES["F"], [2]
    elif name == "attention":

        def reference(x, w, b):
            return ((x * w.view(3, 1)) @ x.transpose(-1, -2) / 2).softmax(-1) @ (x + b.view(3, 1))

        def call(x, w, b):
            return F.scaled_dot_product_attention(x * w.view(3, 1), x, x + b.view(3, 1))

    else:
        w = (3, 3, 3)

        def call(x, w, b):
            return F.conv1d(x, w, b[0, 0], padding=1)

        reference = call
    if dims is not None:

        def reference(x, w, b):
            return normal(x, dims) * w.view(along) + b.view(along)

    inputs = tensors(shape, w, w)
    expected = orders(penalty(reference, transform), inputs, 2)
    with second_derivatives():
        found = orders(penalty(call, transform), inputs, 2)
    same([t.as_subclass(torch.Tensor) for t in found], expected)


class Doubled(TorchFunctionMode):
    """A user's mode, which changes a function and notes what it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        outputs = function(*args, **(kwargs or {}))
        return 2 * outputs if function is F.layer_norm else outputs


@pytest.mark.parametrize("where", ["outside", "inside", "device outside", "device inside"])
def test_modes_of_the_user(where):
    inputs = tensors((5, 3, 4), (3, 4), (3, 4))
    double, user = "device" not in where, Doubled() if "device" not in where else torch.device("cpu")
    expected = orders(lambda x, w, b: (1 + double) * (normal(x, [1, 2]) * w + b), inputs)
    outer, inner = (user, second_derivatives()) if "outside" in where else (second_derivatives(), user)
    with outer:
        with inner:
            found = orders(ROWS["F"], inputs)
            assert len(modes()) == 2
        assert len(modes()) == 1
    assert not modes()
    same(found, expected)
    if double:
        assert F.layer_norm in user.seen
        assert torch.native_layer_norm not in user.seen


def test_nested_contexts_errors_and_pauses():
    with second_derivatives():
        (ours,) = modes()
        with second_derivatives(), first_derivatives():
            assert ours in modes()
            assert len(modes()) == 2
            with paused() as resumed:
                assert not modes()
                assert len(resumed(modes)()) == 2
                assert not modes()
        assert modes() == [ours]
        with pytest.raises(KeyError), Doubled(), second_derivatives():
            raise KeyError
        assert modes() == [ours]
    assert not modes()


def test_frozen_and_detached_calls_are_torchs_own():
    x, w = torch.randn(2, 3, 4), torch.randn(3, 3, 3)
    with second_derivatives():
        assert torch.equal(F.conv1d(x, w), aten.conv1d(x, w))
        with torch.no_grad():
            assert F.layer_norm(x.requires_grad_(), (4,)).grad_fn is None
        assert "_Convolution" in str(F.conv1d(x, w).grad_fn)


def test_a_backward_call_sees_checkpoints_too():
    x, w, b = tensors((5, 3, 4), (3, 4), (3, 4))
    with second_derivatives():
        checkpoint(ROWS["F"], x, w, b, use_reentrant=False).sin().sum().backward()
    expected = torch.autograd.grad(ROWS["F"](x, w, b).sin().sum(), [x, w, b])
    same([t.grad for t in (x, w, b)], expected)


def test_compiled_and_scripted_code():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.norm = nn.Conv1d(3, 2, 2), nn.LayerNorm(3)

        def forward(self, x):
            return self.norm(self.convolution(x))

    model, x = Normed(), torch.randn(5, 3, 4)
    whole = torch.compile(model, backend=backend, fullgraph=True)
    traced = torch.jit.trace(model, x)
    for _ in range(5):
        expected = whole(x)
        with second_derivatives():
            torch.testing.assert_close(whole(x), expected)
            torch.testing.assert_close(traced(x), expected)
    assert len(compiled) <= 2


# --- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"is_causal": True, "scale": 0.3},
        {"attn_mask": torch.eye(4, dtype=torch.bool)},
        {"attn_mask": torch.linspace(-1, 1, 16).view(4, 4)},
        {"dropout_p": 0.4},
        {"enable_gqa": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16", "autocast"])
def test_attention_is_bit_for_bit_that_of_the_math_backend(settings, kind):
    dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
    q = torch.randn(2, 4, 4, 8).to(dtype)
    k, v = (torch.randn(2, 2 if "enable_gqa" in settings else 4, 4, 8).to(dtype) for _ in range(2))
    mask = settings.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        settings = {"attn_mask": mask.to(dtype)}
    with torch.autocast("cpu", torch.bfloat16, kind == "autocast"):
        torch.manual_seed(1)
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(q, k, v, **settings)
        torch.manual_seed(1)
        with second_derivatives():
            found = F.scaled_dot_product_attention(q, key=k, value=v, **settings)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_multihead_attention_has_second_derivatives():
    layer, (x,) = nn.MultiheadAttention(4, 2, batch_first=True), tensors((2, 3, 4))

    def found(weights):
        y = layer(x, x, x, need_weights=weights)[0]
        (g,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return [y, g, *torch.autograd.grad(g.square().sum(), list(layer.parameters())[:2])]

    expected = found(True)  # which torch computes by plain operations
    with second_derivatives():
        same(found(False), expected)


# --- recurrent layers ----------------------------------------------------------------------------

KINDS = {
    "LSTM": (nn.LSTM, lstm_step, torch.lstm),
    "GRU": (nn.GRU, gru_step, torch.gru),
    "tanh": (nn.RNN, rnn_step(torch.tanh), torch.rnn_tanh),
    "relu": (lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k), rnn_step(torch.relu), torch.rnn_relu),
}
SETTINGS = [
    {},
    {"batch_first": True, "bias": False},
    {"num_layers": 2, "bidirectional": True, "dropout": 0.4},
    {"num_layers": 2, "proj_size": 2, "bidirectional": True},
]


class Ours(TorchFunctionMode):
    """Run one recurrent function by its form, as on a GPU."""

    def __init__(self, function, step):
        super().__init__()
        self.function, self.form = function, recurrent(step, lambda x, train: True)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is self.function:
            return self.form(None, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_are_torchs(kind, settings, packed):
    if "proj_size" in settings and kind != "LSTM":
        return
    make, step, function = KINDS[kind]
    layer = make(3, 4, **settings)
    (x,) = tensors((4, 3, 3) if settings.get("batch_first") else (3, 4, 3))
    inputs = [x, *layer.parameters()]

    def found():
        torch.manual_seed(2)
        first = settings.get("batch_first", False)
        given = pack_padded_sequence(x, torch.tensor([3, 3, 2, 1]), batch_first=first) if packed else x
        y, state = layer(given)
        states = state if kind == "LSTM" else (state,)
        values = [y.data if packed else y, *states]
        slopes = torch.autograd.grad(sum(t.sin().sum() for t in values), inputs, create_graph=True)
        return [*values, *slopes, *torch.autograd.grad(sum(g.square().sum() for g in slopes), inputs)]

    expected = found()
    with Ours(function, step):
        same(found(), expected)


def test_the_lstm_runs_without_onednn_and_the_switch_stays():
    layer, x = nn.LSTM(3, 4).float(), torch.randn(2, 5, 3, dtype=torch.float32)
    kept = switches()
    with second_derivatives():
        graph = str(layer(x)[0].grad_fn)
        assert switches() == kept
    assert "Mkldnn" not in graph
    with first_derivatives():
        assert "Mkldnn" in str(layer(x)[0].grad_fn)


# --- whole hypergradients ------------------------------------------------------------------------


class Net(nn.Module):
    """Convolution, three norms, attention and an LSTM."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.rows, self.lstm, self.last = nn.LayerNorm(4), nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        z = F.instance_norm(self.norm(self.convolution(x))).transpose(1, 2)
        z = self.rows(z + self.attention(z, z, z, need_weights=False)[0])
        return self.last(self.lstm(z)[0][:, -1])


def tuned(seed):
    generator = torch.Generator().manual_seed(seed)
    model = Net().float()
    with torch.no_grad():
        for w in model.parameters():
            w.copy_(0.5 * torch.randn(w.shape, generator=generator))
    decay = br.hyperparameters.WeightDecay(model, initial=0.1, per="tensor").float()
    x, y = torch.randn(6, 2, 5, generator=generator).float(), torch.arange(6) % 2
    problem = br.Problem(
        model,
        decay,
        lambda m, h, b: F.cross_entropy(m(b[0]), b[1]) + h(m),
        lambda m, h, b: F.cross_entropy(m(b[0]), b[1]),
    )
    total = br.hypergradient(problem, (x, y), (x, y), br.Implicit(br.Neumann(4, 0.01))).total
    return torch.cat([h.reshape(-1) for h in total.values()])


def test_threads_do_not_meet():
    """Each gets bit for bit what it gets alone, as does one that only uses torch, and no switch moves."""
    kept, alone = switches(), [tuned(seed) for seed in range(3)]
    net, x = Net().float().eval(), torch.randn(6, 2, 5, dtype=torch.float32)
    values, found, other, wrong = net(x), {}, [], threading.Event()
    stop, start = threading.Event(), threading.Barrier(4)

    def tune(seed):
        start.wait()
        found[seed] = [tuned(seed) for _ in range(3)]

    def use():
        start.wait()
        while not stop.is_set():
            other.append(torch.equal(net(x), values))
            if switches() != kept or modes():
                wrong.set()

    tuners = [threading.Thread(target=tune, args=(seed,)) for seed in range(3)]
    user = threading.Thread(target=use)
    for thread in (*tuners, user):
        thread.start()
    for thread in tuners:
        thread.join()
    stop.set()
    user.join()
    assert other
    assert all(other)
    assert not wrong.is_set()
    assert switches() == kept
    for seed, expected in enumerate(alone):
        assert all(torch.equal(one, expected) for one in found[seed])


def penalised(m, h, b):
    x = b[0].clone().requires_grad_()
    (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    return (m(b[0]) - b[1]).square().mean() + h(m) + 0.5 * g.square().sum(1).mean()


class Penalised(nn.Module):
    def __init__(self, norm, by_hand):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), norm, nn.Linear(8, 1)
        self.by_hand = by_hand

    def forward(self, x):
        z = self.first(x).view(len(x), 2, 4)
        return self.last(torch.tanh((self.by_hand or self.norm)(z).flatten(1)))


@pytest.mark.parametrize(
    ("norm", "dims"),
    [
        (lambda: nn.InstanceNorm1d(2), [2]),
        (lambda: F.instance_norm, [2]),
        (lambda: nn.LayerNorm(4, elementwise_affine=False), [2]),
        (lambda: lambda z: F.layer_norm(z, (2, 4)), [1, 2]),
        (lambda: nn.BatchNorm1d(2, affine=False), [0, 2]),
        (lambda: lambda z: F.batch_norm(z, None, None, training=True), [0, 2]),
        (lambda: nn.GroupNorm(1, 2, affine=False), [1, 2]),
        (lambda: lambda z: F.group_norm(z, 2), [2]),
    ],
    ids=[
        f"{norm}, {how}" for norm in ("instance", "layer", "batch", "group") for how in ("module", "function")
    ],
)
def test_hypergradients_of_a_gradient_penalty_through_norms(norm, dims):
    net = Penalised(norm(), None)
    decay = br.hyperparameters.WeightDecay(net, initial=2.0, per="tensor")
    batch = torch.randn(12, 4), torch.randn(12, 1)
    problem = br.Problem(
        net, decay, penalised, lambda m, h, b: (m(b[0]) - b[1]).square().mean(), val_mode="as_is"
    )
    method = br.Implicit(br.Exact())
    found = br.hypergradient(problem, batch, batch, method).total
    net.by_hand = lambda z: normal(z, dims)
    expected = br.hypergradient(problem, batch, batch, method).total
    same(list(found.values()), list(expected.values()))
