import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

import bestresponse as br
import cases
from bestresponse.methods import rules
from bestresponse.testing import check_method


def vector(tree):
    return torch.cat([x.reshape(-1) for x in tree.values()])


def cosine(one, other):
    return float(F.cosine_similarity(vector(one), vector(other), dim=0))


def begun(problem, train, make, steps=3):
    """An optimiser whose state has seen gradients, with the weights put back."""
    kept = {n: w.detach().clone() for n, w in problem.weights.items()}
    optimizer = make(problem.weights.values())
    cases.train(problem, train, optimizer, steps)
    with torch.no_grad():
        for name, w in problem.weights.items():
            w.copy_(kept[name])
    return optimizer


@pytest.mark.parametrize("curvature", [br.FiniteDifference(), br.Hessian()], ids=repr)
def test_sama_with_gradient_descent_is_the_identity(curvature):
    problem, train, val = cases.network()
    identity = br.hypergradient(problem, train, val, br.Implicit(br.Identity()))
    check_method(br.SAMA(rules.SGD(), curvature), problem, train, val, identity.total, 1e-7)
    sgd = torch.optim.SGD(problem.weights.values(), 0.3)
    same = br.hypergradient(problem, train, val, br.SAMA(curvature=curvature), weight_optimizer=sgd)
    assert torch.allclose(vector(same.total), vector(identity.total), rtol=1e-6)


def adam_slope(state, g, beta1=0.9, beta2=0.999, eps=1e-8):
    """∂u/∂g of Adam's next step, written out."""
    t = int(state["step"]) + 1
    mean = (beta1 * state["exp_avg"] + (1 - beta1) * g) / (1 - beta1**t)
    root = ((beta2 * state["exp_avg_sq"] + (1 - beta2) * g**2) / (1 - beta2**t)).sqrt()
    of_mean = (1 - beta1) / (1 - beta1**t) / (root + eps)
    of_root = (1 - beta2) / (1 - beta2**t) * g / root
    return of_mean - mean * of_root / (root + eps) ** 2


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_sama_with_adam_is_its_formula(kind):
    problem, train, val = cases.network()
    optimizer = begun(problem, train, lambda p: kind(p, 0.05))
    live = [*problem.weights.values()]
    loss = problem.train_loss(problem.model, problem.hyper, train)
    gradient = torch.autograd.grad(loss, live, create_graph=True)
    of_val = torch.autograd.grad(problem.val_loss(problem.model, problem.hyper, val), live)
    slopes = [adam_slope(optimizer.state[w], g.detach()) for w, g in zip(live, gradient, strict=True)]
    inner = sum((g * d * b).sum() for g, d, b in zip(gradient, slopes, of_val, strict=True))
    expected = torch.autograd.grad(-inner, list(problem.hyperparameters.values()))
    for method in (br.SAMA(), br.SAMA(rules.like(optimizer), br.Hessian())):
        h = br.hypergradient(problem, train, val, method, weight_optimizer=optimizer)
        assert torch.allclose(
            vector(h.total), torch.cat([x.view(-1) for x in expected]), rtol=1e-6, atol=1e-9
        )


def test_the_bias_of_sama_falls_as_the_curvature_nears_what_the_optimiser_assumes():
    """Least squares with A = diag(a) + s S, and moments with √v ∝ a: at s = 0 the direction is exact, and the angle
    grows in proportion to s. Without the moments the identity is far off."""
    scales = torch.tensor([1.0, 3.0, 10.0, 30.0])
    spread = torch.randn(4, 4)
    spread = spread + spread.T

    def angles(s):
        matrix = torch.diag(scales) + s * spread
        model, hyper = nn.Linear(4, 1, bias=False), nn.ParameterDict({"pull": torch.randn(4)})

        def train_loss(model, hyper, batch):
            return 0.5 * model.weight[0] @ matrix @ model.weight[0] - hyper["pull"] @ model.weight[0]

        with torch.no_grad():
            model.weight[0] = torch.linalg.solve(matrix, hyper["pull"])
        problem = br.Problem(model, hyper, train_loss, lambda m, h, b: m.weight.sum().square())
        adam = torch.optim.Adam(problem.weights.values())
        state = {"exp_avg": torch.zeros(1, 4), "exp_avg_sq": scales.square()[None]}
        adam.state[model.weight] = {"step": torch.tensor(5000.0), **state}
        exact = br.hypergradient(problem, None, None, br.Implicit(br.Exact()))
        methods = (br.SAMA(), br.Implicit(br.Identity()))
        found = [br.hypergradient(problem, None, None, m, weight_optimizer=adam).total for m in methods]
        return [torch.tensor(cosine(h, exact.total)).clamp(max=1).arccos().item() for h in found]

    exact_scales, _ = angles(0.0)
    one, identity = angles(1e-2)
    other, _ = angles(1e-3)
    assert exact_scales < 1e-6
    assert 8.0 < one / other < 12.5
    assert one < 0.1 < 0.5 < identity


@pytest.mark.filterwarnings("ignore:Exact needs an invertible")
@pytest.mark.parametrize("case", cases.EXACT_CASES)
def test_sama_points_downhill(case):
    known = cases.EXACT_CASES[case]()
    bound = 0.99 if "softmax" in case else 0.9
    kept = {n: w.detach().clone() for n, w in known.problem.weights.items()}
    with torch.no_grad():
        for w in known.problem.weights.values():
            w += 0.3 * torch.randn_like(w)
    for make in (lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.Adam(p, 1e-3)):
        optimizer = begun(known.problem, known.train, make, steps=20)
        with torch.no_grad():
            for name, w in known.problem.weights.items():
                w.copy_(kept[name])
        h = br.hypergradient(known.problem, known.train, known.val, br.SAMA(), weight_optimizer=optimizer)
        expected = {n: x - h.direct[n] for n, x in known.expected.items()}
        assert cosine(h.indirect, expected) > bound


def test_sama_needs_an_optimiser_that_has_begun():
    problem, train, val = cases.network()
    adam = torch.optim.Adam(problem.weights.values())
    for method, optimizer, message in (
        (br.SAMA(), None, "needs the optimiser that trains the weights"),
        (br.SAMA(rules.Adam()), None, "needs the moments of Adam for each weight.*got none"),
        (br.SAMA(), adam, "after a step or more; got Adam, without those of"),
        (br.SAMA(rules.AdamW()), adam, "moments of AdamW.*got Adam"),
        (br.SAMA(), torch.optim.RMSprop(problem.weights.values()), "got RMSprop"),
    ):
        with pytest.raises(br.Error, match=message):
            br.hypergradient(problem, train, val, method, weight_optimizer=optimizer)
    with pytest.raises(br.Error, match="weight_optimizer must be"):
        br.hypergradient(problem, train, val, br.SAMA(), weight_optimizer="adam")


@pytest.mark.parametrize(
    ("case", "steps", "rate"), [("ridge, weak decay", 150, 0.5), ("softmax, strong decay", 250, 1.0)]
)
def test_the_bias_of_the_penalty_falls_as_its_inverse(case, steps, rate):
    known = cases.EXACT_CASES[case]()
    method = br.Penalty(steps, rate, lambda call: 1e3 * 2**call, rules.SGD(0.9))
    errors = []
    for _ in range(3):
        h = br.hypergradient(known.problem, known.train, known.val, method)
        errors.append(
            float((vector(h.total) - vector(known.expected)).norm() / vector(known.expected).norm())
        )
    assert errors[0] < 0.05
    for larger, smaller in itertools.pairwise(errors):
        assert 1.8 < larger / smaller < 2.2, errors


@pytest.mark.parametrize("case", cases.EXACT_CASES)
def test_the_penalty_is_a_neumann_series_that_goes_on(case):
    """At a stationary point: K terms in the first call, 2K after the second, up to what falls as 1/γ."""
    known = cases.EXACT_CASES[case]()
    method = br.Penalty(4, 0.2, 1e6)
    for call in (1, 2, 3):
        h = br.hypergradient(known.problem, known.train, known.val, method)
        neumann = br.Implicit(br.Neumann(4 * call - 1, 0.2))
        expected = br.hypergradient(known.problem, known.train, known.val, neumann).total
        assert torch.allclose(vector(h.total), vector(expected), rtol=1e-4, atol=1e-7)
        assert h.solve.warm is (call > 1)
        assert h.val_loss == pytest.approx(
            float(known.problem.val_loss(known.problem.model, known.problem.hyper, known.val).detach())
        )
    residuals = []
    for _ in range(30):
        residuals.append(br.hypergradient(known.problem, known.train, known.val, method).solve.residual)
    assert residuals[-1] < 0.3 * h.solve.residual < 0.3


def test_the_penalty_remembers_its_momentum():
    """Two calls differ from two first ones, and a new object begins anew."""
    problem, train, val = cases.network()
    method = br.Penalty(5, 0.02, 5.0, rules.SGD(0.9))
    first = br.hypergradient(problem, train, val, method)
    second = br.hypergradient(problem, train, val, method)
    state = problem.state(method)
    assert state.memory["calls"] == 2
    assert set(state.memory["y"]["counts"].values()) == {10}
    assert not torch.allclose(vector(first.total), vector(second.total), rtol=1e-2)
    problem.forget(method)
    assert torch.equal(vector(br.hypergradient(problem, train, val, method).total), vector(first.total))


def test_the_way_that_the_weights_still_have_to_go_cancels():
    """Far from a stationary point the answer does not grow with γ, and points where unrolling points."""
    problem, train, val = cases.network()
    unrolled = br.hypergradient(problem, train, val, br.Unrolled(5, 0.1)).total
    totals = [br.hypergradient(problem, train, val, br.Penalty(5, 0.1, gamma)).total for gamma in (1e2, 1e4)]
    assert cosine(*totals) > 0.999
    assert vector(totals[1]).norm() / vector(totals[0]).norm() == pytest.approx(1.0, abs=0.05)
    assert cosine(totals[0], unrolled) > 0.9


def test_the_penalty_is_its_formula():
    """One step of y and z by hand, at live weights that stay as they are."""
    problem, train, val = cases.network()
    gamma, kept = 3.0, {n: w.detach().clone() for n, w in problem.weights.items()}
    live, inputs = list(problem.weights.values()), list(problem.hyperparameters.values())

    def after_a_step(pull):
        loss = problem.train_loss(problem.model, problem.hyper, train)
        loss = loss + pull * problem.val_loss(problem.model, problem.hyper, val)
        step = torch.autograd.grad(loss, live)
        with torch.no_grad():
            for w, g in zip(live, step, strict=True):
                w -= 0.3 * g
        found = torch.autograd.grad(problem.train_loss(problem.model, problem.hyper, train), inputs)
        with torch.no_grad():
            for name, w in problem.weights.items():
                w.copy_(kept[name])
        return found

    pairs = zip(problem.hyperparameters, after_a_step(1 / gamma), after_a_step(0.0), strict=True)
    expected = {n: gamma * (at_y - at_z) for n, at_y, at_z in pairs}
    check_method(br.Penalty(1, 0.3, gamma), problem, train, val, expected, 1e-10)
    check_method(br.Penalty(1, 0.3, lambda call: 3.0 + call), problem, train, val, expected, 1e-10)


def test_the_multiplier_grows_with_the_calls():
    problem, train, val = cases.network()
    seen = []
    method = br.Penalty(1, 0.1, lambda call: seen.append(call) or 2.0**call)
    for _ in range(3):
        br.hypergradient(problem, train, val, method)
    assert seen == [0, 1, 2]
    with pytest.raises(br.Error, match="Penalty.multiplier must be positive"):
        br.hypergradient(problem, train, val, br.Penalty(1, 0.1, lambda call: -1.0))


def test_a_penalty_that_diverges_is_told_and_begins_again():
    problem, train, val = cases.network()
    with pytest.raises(br.errors.DivergedError, match="step_size below 1000"):
        br.hypergradient(problem, train, val, br.Penalty(5, 1e3))
    weights, hyper = (torch.optim.SGD(p.values(), 0.01) for p in (problem.weights, problem.hyperparameters))
    with pytest.warns(br.BestResponseWarning, match="hyper-step 1 is skipped"):
        rows = br.Tuner(problem, weights, hyper, br.Penalty(6, 1e3), policy="skip").fit([train], [val], 2)
    assert [row["stepped"] for row in rows] == [False, False]
    # Second weights that are far off are left behind, and the answer is that of a first call.
    method = br.Penalty(3, 0.1)
    first = br.hypergradient(problem, train, val, method)
    state = problem.state(method)
    for y in state.solution.values():
        y += 10.0
    again = br.hypergradient(problem, train, val, method)
    assert torch.equal(vector(again.total), vector(first.total))


def test_a_failed_penalty_leaves_its_state():
    problem, train, val = cases.network()
    method = br.Penalty(2, 0.1)
    br.hypergradient(problem, train, val, method)
    kept = problem.state(method)
    spoilt = br.Problem(problem.model, problem.hyper, problem.train_loss, problem.val_loss)
    spoilt.remember(method, kept)

    def spoilt_loss(model, hyper, batch):
        kink = sum((p - p.detach()).abs().sqrt().sum() for p in hyper.parameters())
        return problem.train_loss(model, hyper, batch) + kink

    spoilt.train_loss = spoilt_loss
    with pytest.raises(br.Error, match="hypergradient must be finite"):
        br.hypergradient(spoilt, train, val, method)
    assert spoilt.state(method) is kept


def test_sama_where_a_weight_had_no_gradient_yet():
    """Rows of an embedding that occur in the validation batch alone: at zero moments Adam's derivative is 1/ε."""
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Embedding(8, 3), nn.Flatten(), nn.Linear(6, 1))
    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=0.05, exclude="0.weight")
    fit = lambda model, decay, batch: (model(batch)[:, 0] - 1).square().mean()  # noqa: E731
    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit)
    train, val = torch.randint(6, (10, 2)), torch.randint(8, (10, 2))
    optimizer = begun(problem, train, lambda p: torch.optim.Adam(p, 0.01))
    one, other = (
        br.hypergradient(problem, train, val, method, weight_optimizer=optimizer).total
        for method in (br.SAMA(), br.SAMA(curvature=br.Hessian()))
    )
    assert torch.allclose(vector(one), vector(other), rtol=1e-2, atol=1e-4)


class Once(torch.autograd.Function):
    """tanh, whose backward is marked as one that cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class Kernel(nn.Module):
    def forward(self, x):
        return Once.apply(x)


@pytest.mark.parametrize("make", [lambda: br.SAMA(), lambda: br.Penalty(4, 0.3)], ids=["SAMA", "Penalty"])
def test_an_operation_without_a_second_derivative(make):
    """The same values as with one that has it, where `Implicit` refuses."""
    results = []
    for hidden in (Kernel(), nn.Tanh()):
        torch.manual_seed(5)
        problem, train, val = cases.network(hidden)
        optimizer = begun(problem, train, lambda p: torch.optim.Adam(p, 0.01))
        results.append(br.hypergradient(problem, train, val, make(), weight_optimizer=optimizer))
        if isinstance(hidden, Kernel):
            with pytest.raises(br.Error, match="once_differentiable"):
                br.hypergradient(problem, train, val, br.Implicit())
    assert torch.allclose(vector(results[0].total), vector(results[1].total), rtol=1e-9, atol=1e-13)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(8, 24), nn.Linear(8, 1)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.inward(x).chunk(3, -1))
        return self.outward(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mean((1, 2))


def test_fused_attention():
    torch.set_default_dtype(torch.float32)
    model = Attention()
    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=0.01)

    def fit(model, decay, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit)
    train, val = ((torch.randn(6, 5, 8), torch.randn(6)) for _ in range(2))
    results, exact, method = [], [], br.Penalty(5, 0.1)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            results.append(br.hypergradient(problem, train, val, method).total)
            problem.forget(method)
            exact.append(br.hypergradient(problem, train, val, br.Implicit(br.Neumann(3, 0.1))).total)
    # Second derivatives take the math backend by themselves.
    assert torch.equal(vector(exact[0]), vector(exact[1]))
    assert torch.allclose(vector(results[0]), vector(results[1]), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: br.Penalty(0, 0.1), "Penalty.steps"),
        (lambda: br.Penalty(1, -0.1), "Penalty.step_size"),
        (lambda: br.Penalty(1, 0.1, 0.0), "Penalty.multiplier must be positive"),
        (lambda: br.Penalty(1, 0.1, rule=rules.Adam()), "Penalty.rule must be gradient descent"),
        (lambda: br.SAMA("adam"), "SAMA.rule must be an update rule"),
        (lambda: br.SAMA(curvature=br.Exact()), "SAMA.curvature must be a curvature"),
    ],
)
def test_arguments(make, message):
    with pytest.raises(br.Error, match=message):
        make()
