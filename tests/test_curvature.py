import math
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import bestresponse as br
import cases
from bestresponse.hyperparameters import WeightDecay
from bestresponse.testing import check_curvature


def batch():
    return torch.linspace(-1, 1, 36).view(12, 3), torch.arange(12) % 2


@pytest.mark.parametrize("hidden", [nn.Identity, lambda: nn.Dropout(0.4), lambda: nn.BatchNorm1d(4)])
def test_hessian_equals_differences_of_the_gradient(hidden):
    problem, train, _ = cases.network(hidden())
    check_curvature(br.Hessian(), problem, train)


@pytest.mark.parametrize("step", [None, 1e-6])
@pytest.mark.parametrize("hidden", [nn.Identity, lambda: nn.Dropout(0.4), lambda: nn.BatchNorm1d(4)])
def test_finite_differences_equal_the_hessian(hidden, step):
    problem, train, _ = cases.network(hidden())
    check_curvature(br.FiniteDifference(step), problem, train, tolerance=1e-7)


def predict(model, hyper, batch):
    return model(batch[0])


def output_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def penalty(model, hyper, batch):
    return hyper(model)


def dense_gauss_newton(problem, train, seed=None):
    """JᵀHJ by the Jacobian of the outputs, and the Hessian of the decay by differences."""
    weights = {n: w.detach() for n, w in problem.weights.items()}

    def outputs(values):
        if seed is not None:
            torch.manual_seed(seed)
        return torch.func.functional_call(problem.model, values, (train[0],))

    jacobian = torch.autograd.functional.jacobian(
        lambda *values: outputs(dict(zip(weights, values, strict=True))), tuple(weights.values())
    )
    z = outputs(weights)
    jacobian = torch.cat([j.reshape(z.numel(), -1) for j in jacobian], dim=1)
    hessian = torch.autograd.functional.hessian(lambda x: output_loss(x, train), z).view(z.numel(), z.numel())
    decays = problem.hyper.curvature_diagonal(problem.model) if isinstance(problem.hyper, WeightDecay) else {}
    diagonal = torch.cat([decays.get(n, torch.zeros_like(w)).reshape(-1) for n, w in weights.items()])
    return jacobian.T @ hessian @ jacobian + torch.diag(diagonal)


RESTS = {
    "a module": lambda problem: problem.hyper,
    "a function": lambda problem: penalty,
    "none": lambda problem: None,
}


@pytest.mark.parametrize("hidden", [nn.Identity, lambda: nn.Dropout(0.4)], ids=["smooth", "dropout"])
@pytest.mark.parametrize("rest", RESTS)
def test_gauss_newton_equals_the_dense_matrix(rest, hidden):
    problem, train, _ = cases.network(hidden())
    torch.manual_seed(11)
    matrix = dense_gauss_newton(problem, train, seed=11)
    torch.manual_seed(11)
    curvature = br.GaussNewton(predict, output_loss, RESTS[rest](problem))
    check_curvature(curvature, problem, train, matrix)


@pytest.mark.parametrize("shape", [(7,), (2, 3), (2, 2, 2)])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("ignored", [0, 1, 2])
def test_cross_entropy_knows_its_output_hessian(shape, smoothing, ignored):
    logits = 3 * torch.randn(*shape, 5)
    targets = torch.randint(5, shape)
    targets.view(-1)[:ignored] = 99
    loss = br.losses.CrossEntropy(lambda batch: batch[1], ignore_index=99, label_smoothing=smoothing)
    expected = F.cross_entropy(
        logits.view(-1, 5), targets.view(-1), ignore_index=99, label_smoothing=smoothing
    )
    assert torch.allclose(loss(logits, (None, targets)), expected)
    hessian = torch.autograd.functional.hessian(lambda z: loss(z, (None, targets)), logits)
    u = torch.randn_like(logits)
    product = loss.output_hessian(logits, (None, targets))(u)
    dense = (hessian.reshape(u.numel(), u.numel()) @ u.reshape(-1)).view_as(u)
    assert torch.allclose(product, dense, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rest", RESTS)
def test_gauss_newton_with_a_closed_output_hessian_equals_the_dense_matrix(rest):
    problem, train, _ = cases.network()
    loss = br.losses.CrossEntropy(lambda batch: batch[1])
    check_curvature(
        br.GaussNewton(predict, loss, RESTS[rest](problem)),
        problem,
        train,
        dense_gauss_newton(problem, train),
    )


@pytest.mark.parametrize("kind", ["namedtuple", "dict", "list"])
def test_gauss_newton_hands_other_outputs_on(kind):
    """Masks, indices and constants beside the outputs, and outputs that the loss does not use."""
    problem, train, _ = cases.network()
    named = namedtuple("Out", ["index", "logits", "unused", "constant"])

    def predict_more(model, hyper, batch):
        out = named(torch.arange(3), model(batch[0]), model[0](batch[0]), torch.ones(2))
        return {"namedtuple": out, "dict": out._asdict(), "list": list(out)}[kind]

    def loss(out, batch):
        logits = {"namedtuple": lambda: out.logits, "dict": lambda: out["logits"], "list": lambda: out[1]}[
            kind
        ]()
        return F.cross_entropy(logits, batch[1])

    check_curvature(
        br.GaussNewton(predict_more, loss, problem.hyper), problem, train, dense_gauss_newton(problem, train)
    )


@pytest.mark.parametrize(
    ("predict_", "loss", "rest", "words"),
    [
        (predict, lambda z, b: F.cross_entropy(z, b[1], reduction="none"), penalty, "GaussNewton.loss must"),
        (predict, lambda z, b: 1.0, penalty, "GaussNewton.loss must"),
        (
            lambda m, h, b: m(b[0]).detach(),
            output_loss,
            penalty,
            "outputs of GaussNewton.predict must depend",
        ),
        (predict, output_loss, WeightDecay, "GaussNewton.rest must be a function"),
        (predict, output_loss, lambda m, h, b: 0.0, "must equal train_loss"),
    ],
)
def test_gauss_newton_says_what_it_needs(predict_, loss, rest, words):
    problem, train, val = cases.network()
    with pytest.raises(br.Error, match=words):
        br.hypergradient(problem, train, val, br.Implicit(curvature=br.GaussNewton(predict_, loss, rest)))


def test_hyperparameters_in_the_loss_are_handed_on_as_outputs():
    """The weighted cross-entropy of sources, as the documentation has it."""
    problem, (x, y), val = cases.network()
    source = torch.arange(12) % 3
    hyper = nn.ParameterDict({"logits": torch.randn(3)})
    decay = WeightDecay(problem.model, initial=0.1)
    for parameter in decay.parameters():
        parameter.requires_grad_(False)

    def weighted(logits, weights):
        return (weights * F.cross_entropy(logits, y, reduction="none")).mean()

    def train_loss(model, hyper, batch):
        return weighted(model(x), hyper["logits"].sigmoid()[source]) + decay(model)

    tuned = br.Problem(problem.model, hyper, train_loss, problem.val_loss)
    method = br.Implicit(
        br.Exact(),
        br.GaussNewton(
            lambda model, hyper, batch: (model(x), hyper["logits"].sigmoid()[source]),
            lambda outputs, batch: weighted(*outputs),
            rest=decay,
        ),
    )
    h = br.hypergradient(tuned, (x, y), val, method)
    fixed = hyper["logits"].detach().sigmoid()[source]
    without = br.GaussNewton(lambda m, h, b: m(x), lambda z, b: weighted(z, fixed), rest=decay)
    with tuned.undisturbed() as passes:
        systems = [c.linearise(passes, (x, y)) for c in (method.curvature, without)]
        v = {n: torch.randn_like(w) for n, w in tuned.weights.items()}
        one, other = (system(v) for system in systems)
    assert all(torch.allclose(one[n], other[n], rtol=1e-12) for n in v)
    exact = br.hypergradient(tuned, (x, y), val, br.Implicit(br.Exact()))
    assert h.norm > 0
    assert h.total["logits"].shape == exact.total["logits"].shape


def test_gauss_newton_sees_a_loss_that_is_not_finite_at_any_call():
    problem, train, val = cases.network()
    method = br.Implicit(curvature=br.GaussNewton(predict, output_loss, problem.hyper))
    br.hypergradient(problem, train, val, method)
    with pytest.raises(br.Error, match="train_loss must be finite"):
        br.hypergradient(problem, (train[0] * math.nan, train[1]), val, method)


def test_cross_entropy_says_what_does_not_fit():
    loss = br.losses.CrossEntropy(lambda batch: batch)
    with pytest.raises(br.Error, match="int64"):
        loss(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(br.Error, match="logits alone"):
        loss((torch.zeros(2, 3),), torch.zeros(2, dtype=torch.long))
    assert float(loss(torch.zeros(3), torch.tensor(1))) > 0
    with pytest.raises(br.Error, match="must be a function"):
        br.losses.CrossEntropy(torch.zeros(3))
    with pytest.raises(br.Error, match="between 0 and 1"):
        br.losses.CrossEntropy(lambda batch: batch, label_smoothing=2.0)
    with pytest.raises(br.Error, match="Put the classes last"):
        br.losses.CrossEntropy(lambda batch: batch)(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize("power", [1.5, 3])
def test_gauss_newton_with_a_decay_of_another_power(power):
    problem, train, _ = cases.network()
    decay = WeightDecay(problem.model, power=power, initial=0.1)
    problem = br.Problem(problem.model, decay, problem.train_loss, problem.val_loss)
    matrix = dense_gauss_newton(problem, train)
    for rest in (decay, penalty, None):
        check_curvature(br.GaussNewton(predict, output_loss, rest), problem, train, matrix, tolerance=1e-5)


def test_gauss_newton_without_a_regulariser_and_hyperparameters_inside_the_model():
    problem, train, _ = cases.network(nn.PReLU(init=0.6))
    scale = problem.model[1]
    problem = br.Problem(
        problem.model,
        scale,
        lambda m, h, b: output_loss(predict(m, h, b), b),
        lambda m, h, b: output_loss(predict(m, h, b), b),
    )
    matrix = dense_gauss_newton(problem, train)
    for rest in (None, lambda m, h, b: 0.0 * m[0].weight.sum()):
        check_curvature(br.GaussNewton(predict, output_loss, rest), problem, train, matrix)


def test_gauss_newton_equals_the_hessian_for_a_linear_model():
    known = cases.softmax()
    for rest in (known.problem.hyper, None):
        check_curvature(br.GaussNewton(predict, output_loss, rest), known.problem, known.train)


def test_gauss_newton_takes_outputs_of_several_tensors():
    problem, train, _ = cases.network()
    matrix = dense_gauss_newton(problem, train)
    for pack, unpack in (
        (lambda z: (z[:, :1], z[:, 1:]), lambda z: torch.cat(list(z), dim=1)),
        (lambda z: {"a": z[:, :1], "b": z[:, 1:]}, lambda z: torch.cat([z["a"], z["b"]], dim=1)),
    ):
        curvature = br.GaussNewton(
            lambda m, h, b, pack=pack: pack(m(b[0])),
            lambda z, b, unpack=unpack: output_loss(unpack(z), b),
            problem.hyper,
        )
        check_curvature(curvature, problem, train, matrix)


def test_gauss_newton_refuses_parts_that_do_not_make_up_the_loss():
    problem, train, val = cases.network()
    method = br.Implicit(br.Exact(), br.GaussNewton(predict, output_loss, lambda m, h, b: 2 * h(m)))
    with pytest.raises(br.Error, match="must equal train_loss; got"):
        br.hypergradient(problem, train, val, method)
    with pytest.raises(br.Error, match="must return a tensor"):
        br.hypergradient(
            problem, train, val, br.Implicit(br.Exact(), br.GaussNewton(lambda m, h, b: 3.0, output_loss))
        )
    with pytest.raises(br.Error, match=r"GaussNewton\.loss must be a function"):
        br.GaussNewton(predict, None)


def test_finite_differences_in_float32_on_a_smooth_network():
    problem, train, _ = cases.network()
    problem.model.float(), problem.hyper.float()
    train = (train[0].float(), train[1])
    v = {n: torch.randn_like(w) for n, w in problem.weights.items()}
    products = []
    for curvature in (br.Hessian(), br.FiniteDifference()):
        with problem.undisturbed() as passes:
            products.append(torch.cat([x.view(-1) for x in curvature.linearise(passes, train)(v).values()]))
    assert float((products[0] - products[1]).norm() / products[0].norm()) < 3e-3


def test_finite_differences_warn_of_kinks_in_float32():
    problem, train, _ = cases.network(nn.ReLU())
    problem.model.float(), problem.hyper.float()
    train = (train[0].float(), train[1])
    with pytest.warns(br.BestResponseWarning, match="Relu"), problem.undisturbed() as passes:
        br.FiniteDifference().linearise(passes, train)


def test_finite_differences_refuse_half_precision():
    problem, train, _ = cases.network()
    problem.model.bfloat16()
    with pytest.raises(br.Error, match="float32 or float64"), problem.undisturbed() as passes:
        br.FiniteDifference().linearise(passes, (train[0].bfloat16(), train[1]))


def test_finite_differences_restore_the_weights_after_an_error():
    problem, train, val = cases.network()
    calls = 0

    def failing(model, hyper, batch):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return cases_loss(model, batch) + hyper(model)

    problem.train_loss = failing
    before = {n: w.detach().clone() for n, w in problem.weights.items()}
    method = br.Implicit(br.ConjugateGradient(3), br.FiniteDifference())
    with pytest.raises(KeyboardInterrupt):
        br.hypergradient(problem, train, val, method)
    assert all(torch.equal(before[n], w) for n, w in problem.weights.items())


def cases_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def test_weights_out_of_reach_are_left_out_and_named_once():
    problem, train, val = cases.network()
    problem.model.register_module("unused", nn.Linear(2, 2))
    weights = dict(problem.model[:4].named_parameters())
    decay = problem.hyper

    def train_loss(model, hyper, batch):
        fit = cases_loss(model[:4], batch)
        return fit + decay_of_used(hyper, model)

    def decay_of_used(hyper, model):
        return sum((r.exp() * weights[n].square()).sum() for n, r in hyper._rates().items()) / 2

    problem = br.Problem(problem.model, decay, train_loss, lambda m, h, b: cases_loss(m[:4], b))
    with pytest.warns(br.BestResponseWarning, match="unused.weight"):
        h = br.hypergradient(problem, train, val, br.Implicit(br.Exact()))
    assert all(x.isfinite().all() for x in h.total.values())
    br.hypergradient(problem, train, val, br.Implicit(br.Exact()))


def test_a_weight_that_the_loss_is_linear_in_has_no_curvature():
    class Affine(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.slope = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    model, hyper = Affine(), nn.ParameterDict({"rate": nn.Parameter(torch.tensor(0.5))})
    problem = br.Problem(
        model,
        hyper,
        lambda m, h, b: (h["rate"] * m.w.square()).sum() + (m.slope * b).sum(),
        lambda m, h, b: m.w.sum(),
    )
    with problem.undisturbed() as passes:
        system = br.Hessian().linearise(passes, torch.arange(3.0))
        product = system({"w": torch.ones(3), "slope": torch.ones(3)})
    assert torch.equal(product["w"], torch.ones(3))
    assert torch.equal(product["slope"], torch.zeros(3))


# --- defences against wrong second derivatives -------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def forward(self, x):
        q = self.inner(x).view(1, 1, 12, 4)
        return F.scaled_dot_product_attention(q, q, 2 * q).view(12, 4).mean(dim=1, keepdim=True)


class FusedAttention(Attention):
    """Whichever backend the user chooses, none but the math backend has second derivatives."""

    def forward(self, x):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return super().forward(x)


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):  # the module nn.EmbeddingBag has a form of its own
        return F.embedding_bag(torch.arange(12).view(12, 1) % 5, self.table).mean(dim=1, keepdim=True)


class Distances(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def forward(self, x):
        return torch.cdist(self.inner(x), 2 * self.inner(x)[:1] + 1)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = nn.Linear(3, 1), reentrant

    def forward(self, x):
        # An input that requires a gradient makes the re-entrant variant run at all.
        return checkpoint(lambda z: self.inner(z).tanh(), x.requires_grad_(), use_reentrant=self.reentrant)


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.function = nn.Linear(3, 1), function

    def forward(self, x):
        return self.function(self.inner(x))


def problem_of(model):
    decay = br.hyperparameters.WeightDecay(model, initial=0.1)

    def loss(model, hyper, batch):
        return (model(batch[0].clone()) - batch[1].view(12, 1)).square().mean()

    return br.Problem(model, decay, lambda m, h, b: loss(m, h, b) + h(m), loss)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Applied(cases.Cube.apply), "Cube.*once_differentiable.*FiniteDifference"),
        (
            lambda: Applied(lambda y: cases.Cube.apply(y).sum(dim=1, keepdim=True)),
            "Cube.*once_differentiable",
        ),
        (Bags, "embedding_bag.*FiniteDifference"),
        (lambda: Checkpointed(True), "checkpoint.*use_reentrant=False"),
        (lambda: torch.compile(nn.Linear(3, 1), backend="aot_eager"), "torch.compile.*without torch.compile"),
    ],
    ids=["once", "once, constant upstream", "embedding bag", "checkpoint", "compiled"],
)
@pytest.mark.parametrize(
    "method", [br.Implicit(br.ConjugateGradient(2)), br.Unrolled(2, 0.1)], ids=["implicit", "unrolled"]
)
def test_missing_second_derivatives_raise_and_name_the_way_out(model, words, method):
    problem = problem_of(model())
    with pytest.raises(br.Error, match=f"(?s){words}") as caught:
        br.hypergradient(problem, batch(), batch(), method)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    "method", [br.Implicit(br.Exact(damping=1.0)), br.Unrolled(2, 0.1)], ids=["implicit", "unrolled"]
)
def test_attention_is_right_whichever_backend_the_user_chooses(method):
    fused, plain = problem_of(FusedAttention()), problem_of(Attention())
    plain.model.load_state_dict(fused.model.state_dict())
    b = batch()
    with sdpa_kernel(SDPBackend.MATH):
        expected = br.hypergradient(plain, b, b, method).total
    found = br.hypergradient(fused, b, b, method).total
    assert all(torch.equal(found[n], expected[n]) for n in found)


@pytest.mark.parametrize(
    "method", [br.Implicit(br.Exact(damping=1.0)), br.Unrolled(2, 0.1)], ids=["implicit", "unrolled"]
)
def test_distances_raise_or_are_right(method):
    # Torch 2.13 lacks the second derivative of cdist, and 2.14 has it.
    problem = problem_of(Distances())
    b = batch()
    try:
        found = br.hypergradient(problem, b, b, method)
    except br.Error as error:
        named = str(error)
        found = None
    if found is None:
        assert "cdist" in named
        assert "FiniteDifference" in named
        return
    if isinstance(method, br.Implicit):
        other = br.hypergradient(problem, b, b, br.Implicit(br.Exact(damping=1.0), br.FiniteDifference()))
        assert all(torch.allclose(found.total[n], other.total[n], rtol=1e-4, atol=1e-8) for n in found.total)


def test_a_constant_upstream_gradient_does_not_hide_a_once_differentiable_function():
    # Here torch leaves no node at all in the gradient's graph: the product would be zero.
    model = nn.Linear(3, 1)
    hyper = nn.ParameterDict({"rate": nn.Parameter(torch.tensor(0.0))})
    problem = br.Problem(
        model,
        hyper,
        lambda m, h, b: (
            cases.Cube.apply(m.weight * h["rate"].exp()).sum() + m.weight.square().sum() + m.bias.sum()
        ),
        lambda m, h, b: m.weight.sum(),
    )
    with pytest.raises(br.Error, match="Cube"):
        br.hypergradient(problem, None, None, br.Implicit(br.ConjugateGradient(2)))


def test_the_ways_out_work():
    method = br.Implicit(br.Exact())
    checkpointed = Checkpointed(False)
    plain = Applied(torch.tanh)
    plain.inner = checkpointed.inner
    one = br.hypergradient(problem_of(checkpointed), batch(), batch(), method)
    other = br.hypergradient(problem_of(plain), batch(), batch(), method)
    assert all(torch.allclose(one.total[n], other.total[n]) for n in one.total)

    differences = br.Implicit(br.Exact(damping=0.1), br.FiniteDifference())
    exact = br.Implicit(br.Exact(damping=0.1))

    cubed = problem_of(Applied(cases.Cube.apply))
    written_out = problem_of(Applied(lambda y: y**3))
    written_out.model.inner.load_state_dict(cubed.model.inner.state_dict())
    one = br.hypergradient(cubed, batch(), batch(), differences)
    other = br.hypergradient(written_out, batch(), batch(), exact)
    assert all(torch.allclose(one.total[n], other.total[n], rtol=1e-5, atol=1e-9) for n in one.total)
