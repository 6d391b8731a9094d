import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
import cases
from bestresponse.hyperparameters import Shrinkage, WeightDecay
from bestresponse.hyperparameters.weight_decay import penalty


def layer_of(name):
    return f"layers.{name[0]}"


def model():
    return nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))


@pytest.mark.parametrize("power", [1, 2, 3.5])
@pytest.mark.parametrize("per", ["global", "tensor", "unit", "input", "weight", layer_of])
def test_value_and_diagonal(per, power):
    net = model()
    decay = WeightDecay(net, per, power, initial=0.2)
    value = decay(net)
    expected = sum(0.2 * w.abs().pow(power).sum() for w in net.parameters()) / power
    assert torch.allclose(value, expected)
    weights = dict(net.named_parameters())
    (gradient,) = torch.autograd.grad(decay(net), weights["0.weight"], create_graph=True)
    (diagonal,) = torch.autograd.grad(gradient.sum(), weights["0.weight"])
    assert torch.allclose(decay.curvature_diagonal(net)["0.weight"], diagonal, atol=1e-12)
    assert decay.curvature_diagonal(net).keys() == weights.keys()


@pytest.mark.parametrize("power", [1, 1.5, 2, 3.5])
@pytest.mark.parametrize("per", ["global", "tensor", "unit", "input", "weight", layer_of])
def test_mixed_product_is_that_of_autograd(per, power):
    net = model()
    decay = WeightDecay(net, per, power, initial=0.2, exclude=["1.bias"])
    v = {n: torch.randn_like(w) for n, w in net.named_parameters() if n != "0.bias"}
    weights = dict(net.named_parameters())
    of_weights = torch.autograd.grad(
        decay(net), [weights[n] for n in v], create_graph=True, allow_unused=True
    )
    along = sum((g * x).sum() for g, x in zip(of_weights, v.values(), strict=True) if g is not None)
    rates = dict(decay.named_parameters())
    expected = torch.autograd.grad(along, list(rates.values()), allow_unused=True)
    got = decay.mixed_product(net, v)
    known = {n for n, x in zip(rates, expected, strict=True) if x is not None}
    assert known == got.keys()
    for name, x in zip(rates, expected, strict=True):
        if x is not None:
            torch.testing.assert_close(got[name], x)
    half = model().to(torch.bfloat16)
    decay = WeightDecay(half, per, power)
    mixed = decay.mixed_product(half, dict(half.named_parameters()))
    assert all(mixed[n].dtype == p.dtype == torch.float32 for n, p in decay.named_parameters())
    diagonal = decay.curvature_diagonal(half)
    assert all(
        (diagonal[n].dtype, diagonal[n].shape) == (w.dtype, w.shape) for n, w in half.named_parameters()
    )


class Half(WeightDecay):
    """Other in its value and diagonal, and silent about the mixed term."""

    def forward(self, model):
        return super().forward(model) / 2

    def curvature_diagonal(self, model):
        return {n: d / 2 for n, d in super().curvature_diagonal(model).items()}


@pytest.mark.parametrize("per", ["global", "tensor", "unit", "input", "weight", layer_of])
@pytest.mark.parametrize("kind", ["itself", "subclass", "around", "compiled"])
def test_rest_of_any_kind_gives_the_mixed_term_of_its_function(kind, per):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    batch = torch.randn(8, 3), torch.randn(8, 2)
    decay = (Half if kind == "subclass" else WeightDecay)(net, per, initial=0.1)
    rest = {"around": cases.Around, "compiled": lambda d: torch.compile(d, backend="eager")}.get(
        kind, lambda d: d
    )(decay)

    def loss(outputs, batch):
        return F.mse_loss(outputs, batch[1])

    def predict(model, hyper, batch):
        return model(batch[0])

    problem = br.Problem(
        net,
        decay,
        lambda m, h, b: loss(m(b[0]), b) + h(m),
        lambda m, h, b: loss(m(b[0]), b),
    )
    found = [
        br.hypergradient(
            problem, batch, batch, br.Implicit(br.ConjugateGradient(9), br.GaussNewton(predict, loss, r))
        )
        for r in (rest, lambda m, h, b: h(m))
    ]
    for name, h in found[0].total.items():
        assert h.abs().max() > 0
        torch.testing.assert_close(h, found[1].total[name])


@pytest.mark.parametrize("per", ["global", "tensor"])
def test_gauss_newton_in_half_precision(per):
    net = nn.Linear(3, 2).to(torch.bfloat16)
    batch = torch.randn(8, 3, dtype=torch.bfloat16), torch.randn(8, 2, dtype=torch.bfloat16)
    decay = WeightDecay(net, per, initial=0.1)

    def loss(outputs, batch):
        return F.mse_loss(outputs, batch[1])

    def predict(model, hyper, batch):
        return model(batch[0])

    problem = br.Problem(
        net, decay, lambda m, h, b: loss(m(b[0]), b) + h(m), lambda m, h, b: loss(m(b[0]), b)
    )
    h = br.hypergradient(problem, batch, batch, br.Implicit(curvature=br.GaussNewton(predict, loss, decay)))
    assert all(x.isfinite().all() and x.dtype == torch.float32 for x in h.total.values())
    assert h.norm > 0


def test_gradients_in_batches_and_rates_coarser_than_weights():
    net = nn.Linear(3, 2)
    decay = WeightDecay(net, initial=0.1)
    both = torch.stack([decay(net), 2 * decay(net)])
    (rows,) = torch.autograd.grad(both, [net.weight], torch.eye(2), is_grads_batched=True)
    torch.testing.assert_close(rows[0], 0.1 * net.weight)
    torch.testing.assert_close(rows[1], 0.2 * net.weight)
    rate = torch.tensor([-9.0], dtype=torch.float16, requires_grad=True)
    w = torch.tensor([1e-3], dtype=torch.float64, requires_grad=True)
    value = penalty(w, rate, 3)
    torch.testing.assert_close(value, w.abs().pow(3).sum() * rate.double().exp().sum() / 3, rtol=1e-3, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(value, w)[0], w.square() * rate.double().exp(), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("power", [1, 2, 3.5])
@pytest.mark.parametrize("shape", [(), (4, 3)])
def test_both_orders_of_the_penalty_equal_those_of_plain_operations(shape, power):
    w = torch.randn(4, 3, requires_grad=True)
    rate = torch.randn(shape, requires_grad=True)
    factor = torch.tensor(1.7, requires_grad=True)

    def plain(w, rate):
        return (rate.exp() * w.abs().pow(power)).sum() / power

    results = []
    for function in (lambda w, rate: penalty(w, rate, power), plain):
        value = function(2 * w, rate) * factor
        gradient = torch.autograd.grad(value, [w, rate, factor], create_graph=True)
        combined = sum((g * torch.linspace(-1, 1, g.numel()).view(g.shape)).sum() for g in gradient)
        second = torch.autograd.grad(combined, [w, rate, factor])
        results.append([value, *gradient, *second])
    assert all(torch.allclose(a, b) for a, b in zip(*results, strict=True))
    (of_w,) = torch.autograd.grad(penalty(w, rate, power), w)
    (of_rate,) = torch.autograd.grad(penalty(w, rate, power), rate)
    assert torch.allclose(of_w, torch.autograd.grad(plain(w, rate), w)[0])
    assert torch.allclose(of_rate, torch.autograd.grad(plain(w, rate), rate)[0])


def test_a_decay_is_what_torch_calls_weight_decay():
    net = model()
    decay = WeightDecay(net, "global", initial=0.3)
    decay(net).backward(inputs=list(net.parameters()))
    assert torch.allclose(net[0].weight.grad, 0.3 * net[0].weight)


@pytest.mark.parametrize(
    ("per", "shapes"),
    [
        ("global", {"log_decay": ()}),
        (
            "tensor",
            {
                "log_decay.0.weight": (),
                "log_decay.0.bias": (),
                "log_decay.1.weight": (),
                "log_decay.1.bias": (),
            },
        ),
        (
            "weight",
            {
                "log_decay.0.weight": (2, 3),
                "log_decay.0.bias": (2,),
                "log_decay.1.weight": (2,),
                "log_decay.1.bias": (2,),
            },
        ),
    ],
)
def test_rates_are_named_as_the_weights(per, shapes):
    decay = WeightDecay(model(), per)
    assert {n: tuple(p.shape) for n, p in decay.named_parameters()} == shapes


def test_exclude():
    net = model()
    decay = WeightDecay(net, exclude=["*.bias", "1.*"])
    assert decay.names == ["0.weight"]
    assert WeightDecay(net, exclude="*.bias").names == ["0.weight", "1.weight"]
    assert float(decay(net).detach()) == pytest.approx(
        float(math.exp(-8) * net[0].weight.detach().square().sum() / 2)
    )


def test_bounds_and_values():
    decay = WeightDecay(model(), minimum=1e-3, maximum=2.0, initial=0.1)
    with torch.no_grad():
        decay.log_decay.get_parameter("0.weight").add_(100)
        decay.log_decay.get_parameter("0.bias").sub_(100)
    decay.project_()
    values = decay.values()
    assert torch.allclose(values["0.weight"], torch.tensor(2.0))
    assert torch.allclose(values["0.bias"], torch.tensor(1e-3))
    assert torch.allclose(values["1.bias"], torch.tensor(0.1))
    assert list(WeightDecay(model(), "global").values()) == ["all"]


def test_it_never_holds_the_model_and_copies_and_loads():
    net = model()
    decay = WeightDecay(net)
    assert sum(p.numel() for p in decay.parameters()) == 12
    assert list(decay.modules())[0] is decay
    assert not any(isinstance(m, nn.Linear) for m in decay.modules())
    other = WeightDecay(net, initial=0.5)
    other.load_state_dict(decay.state_dict())
    assert torch.equal(other(net), decay(net))


def test_it_may_be_a_submodule_of_the_model():
    net = model()
    decay = WeightDecay(net, initial=0.1)
    net.decay = decay
    problem = br.Problem(
        net, decay, lambda m, h, b: m[:2](b).square().mean() + h(m), lambda m, h, b: m[:2](b).mean()
    )
    h = br.hypergradient(problem, torch.randn(4, 3), torch.randn(4, 3), br.Implicit())
    assert h.total.keys() == dict(decay.named_parameters()).keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"per": "layer"}, "per must be"),
        ({"power": 0.5}, "power must be"),
        ({"initial": 0.0}, "minimum ≤ initial ≤ maximum"),
        ({"initial": 100.0}, "minimum ≤ initial ≤ maximum"),
        ({"minimum": 0.0}, "0 < minimum"),
        ({"exclude": ["*.bais"]}, r"'\*\.bais' matches none of"),
        ({"exclude": ["*"]}, "leaves none"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(br.Error, match=words):
        WeightDecay(model(), **arguments)


def test_another_model_is_refused():
    decay = WeightDecay(model())
    with pytest.raises(br.Error, match=r"needs the weight '0\.weight'"):
        decay(nn.Linear(3, 2))
    with pytest.raises(br.Error, match=r"shape \[2, 3\] for '0\.weight'.*\[5, 3\]"):
        decay(nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(2)))
    with pytest.raises(br.Error, match=r"must be on the model's device, meta.*decay.to\('meta'\)"):
        decay(model().to("meta"))
    with pytest.raises(br.Error, match="must be a module"):
        WeightDecay([torch.zeros(3)])


def test_shapes_of_shared_rates():
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Linear(5, 6), nn.BatchNorm1d(6))
    shapes = {
        per: {n: list(p.shape) for n, p in WeightDecay(net, per).named_parameters()}
        for per in ("unit", "input", layer_of)
    }
    assert shapes["unit"]["log_decay.0.weight"] == [4, 1, 1, 1]
    assert shapes["unit"]["log_decay.2.bias"] == [6]
    assert shapes["input"]["log_decay.0.weight"] == [1, 3, 1, 1]
    assert shapes["input"]["log_decay.2.bias"] == []
    assert shapes[layer_of] == {f"log_decay.layers.{i}": [] for i in range(3)}
    values = WeightDecay(net, layer_of, initial=0.5).values()
    assert values.keys() == dict(net.named_parameters()).keys()
    assert all(float(x) == pytest.approx(0.5) for x in values.values())


@pytest.mark.parametrize(
    "per",
    [
        lambda name: 3,
        lambda name: "",
        lambda name: "a.type",
        lambda name: name.split(".")[0] + ".x" * (name[2] == "b"),
    ],
)
def test_bad_names_of_groups(per):
    with pytest.raises(br.Error, match="must return the name of a group"):
        WeightDecay(model(), per)


def test_a_rate_of_a_group_is_the_sum_over_its_weights():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
    loose, tied = WeightDecay(net, "weight"), WeightDecay(net, layer_of)
    (single,) = torch.autograd.grad(tied(net), tied.log_decay.layers.get_parameter("0"))
    of_layer = [loose.log_decay.get_submodule("0").weight, loose.log_decay.get_submodule("0").bias]
    each = torch.autograd.grad(loose(net), of_layer)
    assert float(single) == pytest.approx(float(sum(g.sum() for g in each)))


@pytest.mark.parametrize(
    ("per", "around"),
    [
        ("weight", "global"),
        ("weight", "tensor"),
        ("weight", "unit"),
        ("input", layer_of),
        (layer_of, "global"),
    ],
)
@pytest.mark.parametrize("power", [1, 2, 3.0])
def test_rates_around_a_centre(per, around, power):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
    plain = WeightDecay(net, "weight", power, initial=0.2)
    decay = WeightDecay(net, per, power, initial=0.2, around=around).double()
    assert decay(net).item() == pytest.approx(plain(net).item())
    with torch.no_grad():
        for p in decay.parameters():
            p.add_(0.3 * torch.randn_like(p))
    br.testing.check_hyperparameters(decay, net)
    weights = dict(net.named_parameters())
    with torch.no_grad():
        expected = sum((decay.values()[n] * w.abs().pow(power)).sum() for n, w in weights.items()) / power
        assert float(decay(net)) == pytest.approx(float(expected))


def test_shrinkage_and_bounds_around_a_centre():
    net = nn.Linear(3, 2)
    decay = WeightDecay(net, "weight", initial=1.0, maximum=math.e, shrinkage=0.25, around="tensor").double()
    with torch.no_grad():
        decay.log_centre.weight.fill_(0.5)
        decay.log_decay.weight.copy_(torch.tensor([[1.0, -1.0, 0.0], [0.4, 0.0, 0.0]]))
    decay.shrink_()
    assert decay.log_decay.weight.tolist() == [[0.75, -0.75, 0.0], [pytest.approx(0.3), 0.0, 0.0]]
    assert decay.log_centre.weight.item() == 0.5
    decay.project_()
    assert decay.log_decay.weight.tolist()[0] == pytest.approx([0.5, -0.75, 0.0])
    assert decay.ranges()["log_decay.weight"] == pytest.approx((-15.0, 15.0))
    decay.shrinkage = Shrinkage(1.0, towards=math.e)
    decay.shrink_()
    assert decay.values()["weight"].flatten().tolist() == pytest.approx([math.e] * 6)


@pytest.mark.parametrize(
    ("per", "around"),
    [("tensor", "weight"), ("input", "unit"), ("global", "tensor"), ("weight", "x"), ("weight", "")],
)
def test_a_centre_is_coarser(per, around):
    with pytest.raises(br.Error, match="around must be"):
        WeightDecay(model(), per, around=around)


def test_a_centre_with_full_shrinkage_is_tuned_like_one_rate():
    def tuned(**how):
        torch.manual_seed(0)
        problem, train, val = cases.network()
        decay = WeightDecay(problem.model, initial=0.01, **how)
        problem = br.Problem(problem.model, decay, problem.train_loss, problem.val_loss)
        optimizers = (
            torch.optim.SGD(problem.weights.values(), 0.1),
            torch.optim.Adam(decay.parameters(), 0.05),
        )
        history = br.Tuner(problem, *optimizers, br.Implicit(br.Exact())).fit([train], [val], 10)
        return [row["val_loss"] for row in history]

    assert tuned(per="weight", around="global", shrinkage=1.0) == pytest.approx(tuned(per="global"), rel=1e-9)
