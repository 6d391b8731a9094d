"""Gradients that are only differentiated leave values out: the same products, at less work."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import bestresponse as br
from bestresponse import _tree
from bestresponse.curvatures.several_batches import linear_system
from bestresponse.passes import linear as linears
from bestresponse.passes import unread
from bestresponse.passes.forms import second_derivatives
from cases import orders

WORDS = 11


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The form for small matrices too."""
    monkeypatch.setattr(linears, "_SMALL", 1)


class Net(nn.Module):
    """Words, convolution, attention, norms, GELU and layers, of which one shares its weights with the words."""

    def __init__(self, again=lambda block, x: block(x), width=6):
        super().__init__()
        self.again = again
        self.words, self.mixed = nn.Embedding(WORDS, width), nn.Conv1d(width, width, 3, padding=1)
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.batch_norm = nn.BatchNorm1d(width)

    def block(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, words):
        x = self.words(words).transpose(1, 2)
        x = self.again(self.block, self.batch_norm(self.mixed(x)).transpose(1, 2))
        return F.linear(x, self.words.weight)


def checkpointed():
    return Net(lambda block, x: checkpoint(block, x, use_reentrant=False))


class Scaled(nn.Module):
    def forward(self, w):
        return w / w.norm()


def parametrised():
    net = Net()
    parametrize.register_parametrization(net.up, "weight", Scaled())
    return net


def hooked():
    net = Net()
    net.up.weight.register_hook(lambda g: 2.0 * g)
    net.down.weight.register_hook(lambda g: g / (1.0 + g.norm()))
    return net


def divided():
    net = Net()
    net.up.register_forward_hook(lambda m, given, y: y.register_hook(lambda g: g / g.norm()) and None)
    return net


def module_hooked():
    net = Net()
    net.up.register_full_backward_hook(lambda m, to, g: (to[0].clamp(-1e-4, 1e-4),))
    return net


def clip(g):
    return g / (1e-2 + g.norm())


class Clipped(torch.autograd.Function):
    """An identity that clips its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return clip(g)


class Inside(torch.autograd.Function):
    """A layer that takes gradients itself, and clips those of its weights."""

    @staticmethod
    def forward(ctx, x, w):
        with torch.enable_grad():
            ctx.x, ctx.w = x.detach().requires_grad_(), w
            ctx.y = F.linear(ctx.x, w)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, g):
        found = torch.autograd.grad(
            ctx.y, (ctx.x, ctx.w), g, create_graph=torch.is_grad_enabled(), retain_graph=True
        )
        return found[0], clip(found[1])


def with_hook(hook, make=Net):
    net = make()
    net.up.register_forward_hook(hook)
    return net


def clipped(make=Net):
    return with_hook(lambda m, given, y: Clipped.apply(y), make)


def clipped_in_a_checkpoint():
    return clipped(checkpointed)


def node_hooked(make=Net):
    """With a hook on a node of the graph."""
    return with_hook(
        lambda m, given, y: void(y.grad_fn.register_hook(lambda g, _: (clip(g[0]), *g[1:]))), make
    )


def node_hooked_in_a_checkpoint():
    return node_hooked(checkpointed)


def late_hooked():
    """With a hook on weights that comes after their layer."""
    return with_hook(
        lambda m, given, y: void(m.weight.register_hook(clip) if not m.weight._backward_hooks else 0)
    )


def old_hooked():
    """With a hook of the kind that torch no longer recommends."""
    net = Net()
    net.mixed.register_backward_hook(lambda m, to, g: tuple(None if t is None else clip(t) for t in to))
    return net


def gradients_inside():
    return with_hook(lambda m, given, y: y + Inside.apply(given[0], m.weight))


def void(_):
    pass


def frozen():
    net = Net()
    for p in (*net.up.parameters(), *net.mixed.parameters(), *net.norm.parameters()):
        p.requires_grad_(False)
    return net


def train_loss(model, hyper, words):
    losses = F.cross_entropy(model(words)[:, :-1].transpose(1, 2), words[:, 1:], reduction="none").mean(1)
    penalty = (hyper["decay"].exp() * model.qkv.weight.square()).sum()
    return (losses * hyper["logs"].exp()).mean() + penalty


def moved_loss(model, hyper, words):
    """A loss whose outputs depend on a hyperparameter."""
    logits = model(words) * hyper["decay"].exp()
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), words[:, 1:])


def penalised_loss(model, hyper, words):
    """A loss that reads a gradient of its own."""
    loss = F.mse_loss(model(words), model(words).detach() + 1.0)
    weights = [model.up.weight, model.qkv.weight]
    sizes = torch.autograd.grad(model(words).square().mean(), weights, create_graph=True)
    return loss * hyper["logs"].exp().sum() + hyper["decay"].exp() * sum(g.square().sum() for g in sizes)


def val_loss(model, hyper, words):
    return F.cross_entropy(model(words)[:, :-1].transpose(1, 2), words[:, 1:])


def problem(make=Net, loss=train_loss, tokens=7):
    torch.manual_seed(0)
    hyper = nn.ParameterDict({"logs": torch.randn(4), "decay": torch.tensor(-2.0)}).double()
    return br.Problem(make().double(), hyper, loss, val_loss), torch.randint(WORDS, (4, tokens))


def maps(made, words, curvature):
    """A product and its mixed term, and how often there were zeros without memory."""
    torch.manual_seed(1)
    count = []
    own = unread.nothing
    with pytest.MonkeyPatch.context() as patch, made.undisturbed(None) as passes:
        for module in ("linear", "convolution", "gelu", "norms", "attention_blocks", "rerun"):
            patch.setattr(f"bestresponse.passes.{module}.nothing", lambda *g: count.append(0) or own(*g))
        system = linear_system(curvature, passes, words)
        v = {n: torch.randn_like(made.weights[n]) for n in system.names}
        product = system(v)
        return product, system.mixed(v), len(count)


def same(found, expected):
    for n, x in expected.items():
        assert (found[n] is None) == (x is None)
        if x is not None:
            assert torch.isfinite(x).all()
            assert (found[n] - x).norm() <= 1e-13 * (x.norm() + 1e-3)


PLAIN = [Net, checkpointed, parametrised, frozen]
NETS = [
    *(*PLAIN, hooked, divided, module_hooked, clipped, clipped_in_a_checkpoint, node_hooked),
    *(node_hooked_in_a_checkpoint, late_hooked, old_hooked, gradients_inside),
]
CASES = [
    *(("Hessian", make, loss) for make in NETS for loss in (train_loss, moved_loss)),
    *(("Hessian", make, penalised_loss) for make in NETS if make not in (frozen, parametrised)),
    *(("GaussNewton", make, loss) for make in NETS for loss in (train_loss, moved_loss)),
    *(("split", make, train_loss) for make in NETS if make is not divided),  # that pulls zeros back
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("curvature", "make", "loss"), CASES)
def test_products_are_the_same(curvature, make, loss, monkeypatch):
    made, words = problem(make, loss)
    given = {
        "Hessian": br.Hessian(),
        "GaussNewton": br.GaussNewton(),
        "split": br.GaussNewton(
            lambda m, h, b: m(b),
            lambda o, b: F.cross_entropy(o[:, :-1].transpose(1, 2), b[:, 1:]),
        ),
    }[curvature]
    found = maps(made, words, given)
    monkeypatch.setattr(unread.Unread, "of_weights", False)
    expected = maps(made, words, given)
    assert (found[2] > expected[2]) == (make in PLAIN)
    same(found[0], expected[0])
    same(found[1], expected[1])


def test_attention_in_blocks_leaves_its_gradient_out(monkeypatch):
    made, words = problem(tokens=128)
    found = maps(made, words, br.GaussNewton())
    monkeypatch.setattr(unread.Unread, "of_weights", False)
    expected = maps(made, words, br.GaussNewton())
    assert found[2] > expected[2]
    same(found[0], expected[0])
    same(found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("live", [(True, True, True), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3), (2, 2, 2, 3)])
def test_three_orders_of_a_linear_layer(shape, live, dtype):
    torch.manual_seed(0)
    x, w, b = torch.randn(shape), torch.randn(4, 3), torch.randn(4)
    given = [t.to(dtype).requires_grad_(one) for t, one in zip((x, w, b), live, strict=True)]
    for inputs in (given, given[:2]):
        expected = orders(F.linear, inputs)
        with second_derivatives():
            found = orders(F.linear, inputs)
            assert "_Linear" in str(F.linear(*inputs).grad_fn)
        for ours, others in zip(found, expected, strict=True):
            for one, other in zip(ours, others, strict=True):
                assert one.dtype == dtype
                bound = 1e-12 if dtype == torch.float64 else 1e-5
                assert (one - other).norm() <= bound * (other.norm() + 1e-3)


def test_linear_layers_that_are_torchs(monkeypatch):
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)

    def forms(function):
        with second_derivatives():
            return "_Linear" in str(function().grad_fn)

    assert forms(lambda: layer(x))
    assert not forms(lambda: layer(x[0]))
    assert not forms(lambda: torch.func.vmap(layer)(x))
    assert not forms(lambda: F.linear(x, layer.weight[0]))
    with torch.autocast("cpu", torch.bfloat16):
        assert not forms(lambda: layer(x))
    monkeypatch.setattr(linears, "_SMALL", 2**24)
    assert not forms(lambda: layer(x))


def test_batched_gradients_of_a_linear_layer():
    layer, x = nn.Linear(3, 4).double(), torch.randn(2, 5, 3).double()
    with second_derivatives():
        of = torch.autograd.functional.jacobian(layer, x, create_graph=True, vectorize=True)
    assert torch.allclose(of, torch.autograd.functional.jacobian(layer, x))


def test_outputs_of_a_linear_layer_may_be_changed_in_place():
    layer, x = nn.Linear(3, 4), torch.randn(2, 5, 3)
    with second_derivatives():
        F.relu_(layer(x)).sum().backward()
    own = layer.weight.grad.clone()
    layer.weight.grad = None
    F.relu(layer(x)).sum().backward()
    assert torch.allclose(own, layer.weight.grad)


class Multiplications(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name().split(".")[0] in (
            "aten::mm",
            "aten::addmm",
            "aten::bmm",
            "aten::baddbmm",
        )
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("curvature", "products"), [(br.Hessian(), 3 + 2), (br.GaussNewton(), 3)])
def test_a_gradient_that_is_only_differentiated_leaves_matrix_products_out(curvature, products):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    hyper = nn.ParameterDict({"log": torch.zeros(())})
    loss = lambda m, h, b: h["log"].exp() * F.cross_entropy(m(b[0]), b[1])  # noqa: E731
    made = br.Problem(model, hyper, loss, loss)
    batch = torch.randn(16, 8), torch.randint(8, (16,))
    with made.undisturbed(None) as passes:
        linear_system(curvature, passes, batch)  # the first compares the loss with that without cuts
        with Multiplications() as counted:
            linear_system(curvature, passes, batch)
    assert counted.count == products


def test_a_pass_along_checkpoints_costs_no_gradient():
    made, words = problem(checkpointed, tokens=128)
    plain, _ = problem()
    costs = []
    for one in (made, plain):
        with one.undisturbed(None) as passes:
            system = linear_system(br.GaussNewton(), passes, words)
            v = {n: torch.randn_like(one.weights[n]) for n in system.names}
            with Multiplications() as counted:
                system(v)
            costs.append(counted.count)
    with Multiplications() as forward, second_derivatives():
        plain.model.block(torch.randn(4, 128, 6).double())
    # The block runs again for J v and for the gradient that follows, and nothing else is added.
    assert costs[0] - costs[1] == 2 * forward.count


@pytest.mark.usefixtures("verifying")
def test_a_hypergradient_with_forms_is_that_of_differences():
    made, words = problem(tokens=9)
    method = br.Implicit(br.Exact(damping=1.0), br.GaussNewton())
    found = br.hypergradient(made, words, words.flip(0), method)
    assert found.verification == "verified"
    assert _tree.norm(found.total) > 0.0
