"""`GaussNewton()` finds the outputs at the loss functions of torch, and equals a split that is given."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bestresponse as br
from bestresponse import _tree
from bestresponse.curvatures.several_batches import linear_system

pytestmark = pytest.mark.usefixtures("verifying")

SOLVERS = [br.Exact(damping=0.05), br.ConjugateGradient(7, damping=0.1), br.Identity()]


def network(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def classes(n=24):
    return torch.randn(n, 5), torch.randint(3, (n,))


def values(n=24):
    return torch.randn(n, 5), torch.randn(n, 3)


def entropy(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def agrees(problem, given, train, val, rtol=1e-12):
    """Whether hypergradients, outcomes of the verification and counts of products are the same."""
    for solver in SOLVERS:
        calls = (br.Implicit(solver, curvature) for curvature in (br.GaussNewton(), given))
        found, expected = (br.hypergradient(problem, train, val, method, seed=1) for method in calls)
        assert found.verification == expected.verification == "verified"
        assert found.solve.products == expected.solve.products
        error = _tree.norm(_tree.add(found.total, expected.total, -1.0))
        assert error <= rtol * _tree.norm(expected.total), solver


def plain(model, hyper, fit, rest=lambda m, h, b: h(m)):
    """A loss of the outputs and a rest, and the split that says so."""
    loss = lambda m, h, b: fit(m(b[0]), b) + rest(m, h, b)  # noqa: E731
    problem = br.Problem(model, hyper, loss, lambda m, h, b: fit(m(b[0]), b))
    return problem, br.GaussNewton(lambda m, h, b: m(b[0]), fit, rest)


def decayed(model, fit, **settings):
    decay = br.hyperparameters.WeightDecay(model, initial=0.1, **settings)
    problem, _ = plain(model, decay, fit)
    return problem, br.GaussNewton(lambda m, h, b: m(b[0]), fit, decay)


LOSSES = {
    "mse": lambda o, b: F.mse_loss(o, b[1]),
    "mse, exchanged": lambda o, b: F.mse_loss(b[1], o),
    "mse, by name": lambda o, b: F.mse_loss(target=b[1], input=o),
    "mse of both": lambda o, b: F.mse_loss(o, 0.3 * o.flip(0)),
    "mse module": lambda o, b: nn.MSELoss()(o, b[1]),
    "huber": lambda o, b: F.huber_loss(o, b[1], delta=0.5),
    "smooth l1": lambda o, b: F.smooth_l1_loss(o, b[1], beta=0.7),
    "bce with logits": lambda o, b: F.binary_cross_entropy_with_logits(o, b[1].sigmoid()),
    "bce": lambda o, b: F.binary_cross_entropy(o.sigmoid(), b[1].sigmoid()),
    "poisson": lambda o, b: F.poisson_nll_loss(o, b[1].abs()),
    "gaussian": lambda o, b: F.gaussian_nll_loss(o, b[1], torch.ones_like(o)),
    "soft margin": lambda o, b: F.soft_margin_loss(o, b[1].sign()),
    "soft targets": lambda o, b: F.cross_entropy(o, b[1].softmax(1), label_smoothing=0.1),
    "kl": lambda o, b: F.kl_div(o.log_softmax(1), b[1].softmax(1), reduction="batchmean"),
    "nll": lambda o, b: F.nll_loss(F.log_softmax(o, 1), b[1].argmax(1)),
    "nll of a view": lambda o, b: F.nll_loss(F.log_softmax(o, 1).view(-1, 3), b[1].argmax(1)),
    "multilabel": lambda o, b: F.multilabel_soft_margin_loss(o, (b[1] > 0).double()),
    "nll modules": lambda o, b: nn.NLLLoss()(nn.LogSoftmax(1)(o), b[1].argmax(1)),
    "of single examples": lambda o, b: F.mse_loss(o, b[1], reduction="none").mean(1).exp().mean(),
}
# The outputs of these are not the logits, or there are two.
PREDICTED = {
    "bce": (lambda o: o.sigmoid(), lambda o, b: F.binary_cross_entropy(o, b[1].sigmoid())),
    "mse of both": (lambda o: (o, 0.3 * o.flip(0)), lambda o, b: F.mse_loss(*o)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_function_is_found(name):
    model = network()
    problem, given = decayed(model, LOSSES[name])
    if name in PREDICTED:
        outputs, loss = PREDICTED[name]
        given = br.GaussNewton(lambda m, h, b: outputs(m(b[0])), loss, problem.hyper)
    agrees(problem, given, values(), values())


@pytest.mark.parametrize("per", ["global", "weight"])
@pytest.mark.parametrize("layer", [nn.Identity, lambda: nn.BatchNorm1d(8), lambda: nn.LayerNorm(8)])
def test_a_decay_is_the_rest(layer, per):
    problem, given = decayed(network(layer()), entropy, per=per)
    agrees(problem, given, classes(), classes())


def test_dropout_rates_are_within_the_outputs():
    drop = br.hyperparameters.ConcreteDropout(initial=0.3)
    model = network(drop)
    sizes = lambda m, h, b: 0.05 * (m[0].weight.square().sum() + m[-1].weight.square().sum())  # noqa: E731
    problem, given = plain(model, drop, entropy, rest=sizes)
    agrees(problem, given, classes(), classes())


class Tuned(nn.Module):
    """Weights of examples, a temperature of the logits and a decay."""

    def __init__(self, examples):
        super().__init__()
        self.logs = nn.Parameter(0.3 * torch.randn(examples))
        self.temperature, self.decay = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(-2.0))


def test_hyperparameters_may_be_before_beside_and_behind_the_loss_function():
    model, train = network(), classes()
    tuned = Tuned(len(train[1]))
    rest = lambda m, h, b: h.decay.exp() * sum(w.square().sum() for w in m.parameters())  # noqa: E731

    def weighed(outputs, batch):
        logits, logs = outputs
        return (logs.exp() * F.cross_entropy(logits, batch[1], reduction="none")).mean()

    def predict(m, h, b):
        return m(b[0]) * h.temperature.exp(), h.logs

    problem = br.Problem(
        model,
        tuned,
        lambda m, h, b: weighed(predict(m, h, b), b) + rest(m, h, b),
        lambda m, h, b: entropy(m(b[0]), b),
    )
    agrees(problem, br.GaussNewton(predict, weighed, rest), train, classes())


def test_several_loss_functions_add_up():
    both = lambda o, b: entropy(o[0], b) + 0.3 * F.mse_loss(o[1], torch.ones_like(o[1]))  # noqa: E731
    model = network()
    problem, _ = decayed(model, lambda o, b: both((o, o.sin()), b))
    given = br.GaussNewton(lambda m, h, b: (lambda o: (o, o.sin()))(m(b[0])), both, problem.hyper)
    agrees(problem, given, classes(), classes())


@pytest.mark.parametrize("recompute", [False, True])
def test_several_batches_are_their_mean(recompute):
    problem, given = decayed(network(), entropy)
    agrees(problem, given, br.Batches([classes(), classes()], recompute=recompute), classes())


def test_weights_held_by_an_l1_penalty_are_left_out():
    model = network()
    with torch.no_grad():
        model[0].weight[:3] = 0.0
    penalty = br.hyperparameters.WeightDecay(model, initial=0.05, power=1)
    problem, _ = plain(model, penalty, entropy)
    agrees(problem, br.GaussNewton(lambda m, h, b: m(b[0]), entropy, penalty), classes(), classes())
    method = br.Implicit(br.Exact(1e-3), br.GaussNewton())
    report = str(br.hypergradient(problem, classes(), classes(), method).solve)
    assert "outputs found at cross_entropy; " in report
    assert "held at zero" in report


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


def test_checkpoints_are_run_again():
    problem, given = decayed(Checkpointed(), entropy)
    agrees(problem, given, classes(), classes())


def test_paths_past_the_loss_functions_keep_their_exact_curvature():
    """A term of the outputs by hand counts as the rest: the matrix is that of its Hessian and of Gauss-Newton."""
    model, train = network(), classes()
    by_hand = lambda m, h, b: 0.1 * m(b[0]).sin().mean() + h(m)  # noqa: E731
    decay = br.hyperparameters.WeightDecay(model, initial=0.1)
    problem, given = plain(model, decay, entropy, rest=by_hand)
    agrees(problem, given, train, classes())


def test_a_model_may_compute_its_own_loss():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x, y=None):
            logits = self.body(x)
            return logits if y is None else nn.CrossEntropyLoss()(logits, y)

    model = WithLoss()
    decay = br.hyperparameters.WeightDecay(model, initial=0.1)
    problem = br.Problem(model, decay, lambda m, h, b: m(*b) + h(m), lambda m, h, b: m(*b))
    agrees(problem, br.GaussNewton(lambda m, h, b: m(b[0]), entropy, decay), classes(), classes())


def test_the_matrix_has_no_negative_eigenvalue_where_the_hessian_has():
    model, train = network(), classes()
    problem, _ = plain(model, nn.ParameterList([torch.zeros(())]), entropy, rest=lambda m, h, b: 0 * h[0])
    lowest = {}
    for curvature in (br.GaussNewton(), br.Hessian()):
        with problem.undisturbed(None) as passes:
            system = linear_system(curvature, passes, train)
            weights = {n: problem.weights[n] for n in system.names}
            size = sum(w.numel() for w in weights.values())
            rows = [_flat(system(_tree.unflatten(row, weights))) for row in torch.eye(size)]
        lowest[type(curvature)] = float(torch.linalg.eigvalsh(torch.stack(rows)).min())
    assert lowest[br.GaussNewton] > -1e-12
    assert lowest[br.Hessian] < -1e-3


def _flat(v):
    return torch.cat([x.reshape(-1) for x in v.values()])


def test_a_loss_by_hand_is_refused_with_what_to_write():
    problem, _ = decayed(network(), lambda o, b: (o - b[1]).square().mean())
    with pytest.raises(br.Error, match=r"made of none.*GaussNewton\(predict, loss, rest\)"):
        br.hypergradient(problem, values(), values(), br.Implicit(curvature=br.GaussNewton()))
    with pytest.raises(TypeError, match="must be a function"):
        br.GaussNewton(rest=problem.hyper)


def test_logarithms_of_no_probabilities_are_not_taken_for_outputs():
    """The loss is linear in them: as outputs they would have no curvature at all."""
    problem, _ = decayed(network(), lambda o, b: F.nll_loss(F.log_softmax(o, 1) + 1.0, b[1]))
    with pytest.raises(br.Error, match="made of none.*calls nll_loss where that cannot be followed"):
        br.hypergradient(problem, classes(), classes(), br.Implicit(curvature=br.GaussNewton()))


def test_a_loss_function_that_is_only_logged_does_not_count():
    by_hand = lambda o, b: (o - b[1]).square().mean() + 0.0 * F.mse_loss(o, b[1]).detach()  # noqa: E731
    problem, _ = decayed(network(), by_hand)
    with pytest.raises(br.Error, match="made of none"):
        br.hypergradient(problem, values(), values(), br.Implicit(curvature=br.GaussNewton()))


def test_a_loss_function_without_effect_is_left_out():
    def logged(m, h, b):
        F.mse_loss(m[0](b[0]), torch.zeros(len(b[0]), 8))
        return entropy(m(b[0]), b) + h(m)

    model = network()
    decay = br.hyperparameters.WeightDecay(model, initial=0.1)
    problem = br.Problem(model, decay, logged, lambda m, h, b: entropy(m(b[0]), b))
    agrees(problem, br.GaussNewton(lambda m, h, b: m(b[0]), entropy, decay), classes(), classes())


@pytest.mark.parametrize("dim", [1, 2])
def test_logarithms_of_equal_probabilities_have_the_dimension_of_their_log_softmax(dim):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 9))
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    x, targets = torch.randn(12, 5), torch.randn(12, 3, 3).softmax(dim)
    fit = lambda o, b: F.kl_div(o.view(-1, 3, 3).log_softmax(dim), b[1], reduction="batchmean")  # noqa: E731
    problem, given = decayed(model, fit)
    agrees(problem, given, (x, targets), (x.flip(0), targets))


def test_lassos_in_blocks_beside_loss_functions_inside_each_other():
    def in_block(m, x, y):
        return checkpoint(
            lambda x: (F.cross_entropy(m(x), y, reduction="none"), 0.01 * m[0].weight.abs().sum()),
            x,
            use_reentrant=False,
        )

    def losses(m, b):
        (first, one), (second, other) = in_block(m, b[0], b[1]), in_block(m, b[0] + 0.1, b[1])
        return second - first, one + other

    def fit(outputs, b):
        return F.binary_cross_entropy_with_logits(outputs[0], torch.ones(len(b[1]))) + F.mse_loss(
            outputs[1], b[2]
        )

    model, train = network(), (*classes(), torch.randn(24, 3))
    decay = br.hyperparameters.WeightDecay(model, initial=0.1)
    loss = lambda m, h, b: fit((losses(m, b)[0], m(2 * b[0])), b) + losses(m, b)[1] + h(m)  # noqa: E731
    problem = br.Problem(model, decay, loss, lambda m, h, b: entropy(m(b[0]), b))
    given = br.GaussNewton(
        lambda m, h, b: (losses(m, b)[0], m(2 * b[0])), fit, lambda m, h, b: losses(m, b)[1] + h(m)
    )
    agrees(problem, given, train, train)


class Padded(nn.Module):
    """Embeddings whose norm is zero where words are missing."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 2)

    def forward(self, x):
        e = self.words(x)
        return torch.cat([self.last(e), e.norm(dim=-1, keepdim=True) * self.last.weight.sum()], -1)


def test_norms_at_zero_are_allowed_where_targets_are_ignored():
    torch.manual_seed(0)
    x = torch.randint(1, 9, (24,))
    x[::4] = 0
    y = torch.randint(3, (24,)).masked_fill(x == 0, -100)
    problem, given = decayed(Padded(), entropy)
    agrees(problem, given, (x, y), (x, y))


def test_a_loss_function_that_cannot_be_followed_is_noted():
    def of_each(o, b):
        return F.cross_entropy(o, b[1]) + 0.1 * torch.vmap(F.mse_loss)(o, torch.ones_like(o)).mean()

    problem, _ = decayed(network(), of_each)
    h = br.hypergradient(problem, classes(), classes(), br.Implicit(br.Exact(1.0), br.GaussNewton()))
    assert "outputs found at cross_entropy; not followed: mse_loss" in str(h.solve)


class InBlock(nn.Module):
    """The loss within a checkpointed block, with the head or with the whole network."""

    def __init__(self, whole, function):
        super().__init__()
        self.body, self.whole, self.function = network(), whole, function

    def forward(self, x, y):
        if self.whole:
            return checkpoint(lambda x: self.function(self.body(x), y), x, use_reentrant=False)
        hidden = self.body[:-1](x)
        return checkpoint(lambda h: self.function(self.body[-1](h), y), hidden, use_reentrant=False)


@pytest.mark.parametrize("function", [F.cross_entropy, lambda z, y: F.nll_loss(z.log_softmax(1), y)])
@pytest.mark.parametrize("whole", [False, True])
def test_a_loss_function_may_be_in_a_checkpointed_block(whole, function):
    model = InBlock(whole, function)
    decay = br.hyperparameters.WeightDecay(model, initial=0.1)
    problem = br.Problem(model, decay, lambda m, h, b: m(*b) + h(m), lambda m, h, b: m(*b))
    agrees(problem, br.GaussNewton(lambda m, h, b: m.body(b[0]), entropy, decay), classes(), classes())


def test_of_loss_functions_inside_each_other_the_outer_one_counts():
    def distances(o):
        return -F.mse_loss(
            o[:, None].expand(-1, 3, -1), torch.eye(3).expand(len(o), 3, 3), reduction="none"
        ).sum(-1)

    model = network()
    problem, _ = decayed(model, lambda o, b: entropy(distances(o), b))
    given = br.GaussNewton(lambda m, h, b: distances(m(b[0])), entropy, problem.hyper)
    agrees(problem, given, classes(), classes())


def attacked(m, b):
    """Inputs a step along the sign of the loss's gradient."""
    shift = torch.zeros_like(b[0], requires_grad=True)
    (slope,) = torch.autograd.grad(entropy(m(b[0] + shift), b), shift)
    return b[0] + 0.1 * slope.sign()


def sloped(m, b):
    """The size of the slopes of the loss in the inputs."""
    x = b[0].clone().requires_grad_()
    (g,) = torch.autograd.grad(entropy(m(x), b), x, create_graph=True)
    return g.square().mean()


def caught(m, b):
    try:
        return sloped(m, b)
    except br.Error:
        return 0.0


@pytest.mark.parametrize("term", [lambda m, b: entropy(m(attacked(m, b)), b), sloped, caught])
def test_a_gradient_of_a_loss_function_inside_the_loss_is_refused(term):
    model = network()
    decay = br.hyperparameters.WeightDecay(model, initial=0.1)
    loss = lambda m, h, b: entropy(m(b[0]), b) + term(m, b) + h(m)  # noqa: E731
    problem = br.Problem(model, decay, loss, lambda m, h, b: entropy(m(b[0]), b))
    modes = torch._C._len_torch_function_stack()
    with pytest.raises(br.Error, match=r"takes a gradient of a loss function.*GaussNewton\(predict"):
        br.hypergradient(problem, classes(), classes(), br.Implicit(curvature=br.GaussNewton()))
    assert torch._C._len_torch_function_stack() == modes


def test_a_gradient_of_the_outputs_inside_the_loss_is_allowed():
    def slopes(m, h, b):
        x = b[0].clone().requires_grad_()
        (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return h[0].exp() * g.square().mean()

    model, hyper = network(), nn.ParameterList([torch.tensor(-1.0)])
    problem, given = plain(model, hyper, entropy, rest=slopes)
    agrees(problem, given, classes(), classes())


def test_a_penalty_of_weights_may_be_a_loss_function():
    model = network()
    before = [w.detach() + 0.1 for w in model.parameters()]

    def near(m, h, b):
        pairs = zip(m.parameters(), before, strict=True)
        return h[0].exp() * sum(F.mse_loss(w.view(-1), x.view(-1), reduction="sum") for w, x in pairs)

    problem, given = plain(model, nn.ParameterList([torch.tensor(-2.0)]), entropy, rest=near)
    agrees(problem, given, classes(), classes())


def test_squares_at_zero_are_refused_within_a_loss_function():
    model = nn.Linear(5, 3)
    nn.init.zeros_(model.bias)
    size = lambda m, h, b: F.mse_loss(m.bias.abs(), torch.zeros(3)) + h(m)  # noqa: E731
    problem, _ = plain(model, br.hyperparameters.WeightDecay(model, initial=0.1), entropy, rest=size)
    with pytest.raises(br.errors.SecondDerivativeError, match="x.square"):
        br.hypergradient(problem, classes(), classes(), br.Implicit(br.Exact(), br.GaussNewton()))


def test_a_loss_that_differs_from_pass_to_pass_is_refused_each_time():
    passes = []

    def growing(m, h, b):
        passes.append(1)
        return entropy(m(b[0]), b) * (1.0 + 0.1 * len(passes)) + h(m)

    model = network()
    decay = br.hyperparameters.WeightDecay(model, initial=0.1)
    problem = br.Problem(model, decay, growing, lambda m, h, b: entropy(m(b[0]), b), verify=False)
    method = br.Implicit(br.Exact(0.1), br.GaussNewton())
    for _ in range(2):
        with pytest.raises(br.Error, match="one value in all passes"):
            br.hypergradient(problem, classes(), classes(), method)


def test_a_lost_path_within_the_outputs_is_refused():
    class Lost(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            with torch.no_grad():
                return g * ctx.saved_tensors[0].cos()

    class Layer(nn.Module):
        def forward(self, x):
            return Lost.apply(x)

    problem, _ = decayed(network(Layer()), entropy)
    with pytest.raises(br.errors.SecondDerivativeError, match="Lost"):
        br.hypergradient(problem, classes(), classes(), br.Implicit(br.Exact(0.1), br.GaussNewton()))
