"""Validation losses in eval mode read running statistics, which follow the weights: against training again."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bestresponse as br
from bestresponse.methods.validation import validation_gradient
from bestresponse.passes import graph
from bestresponse.passes.running_statistics import Reading


class Tuned(nn.Module):
    """A decay of all weights, and a scale of the inputs that the training loss alone sees."""

    def __init__(self, inputs=3):
        super().__init__()
        self.log_decay = nn.Parameter(torch.tensor(-2.0))
        self.scale = nn.Parameter(torch.linspace(0.7, 1.4, inputs))


def squares(model):
    return sum(w.square().sum() for w in model.parameters())


def train_loss(model, hyper, batch):
    x = batch[0] * hyper.scale.view(-1, *(1,) * (batch[0].ndim - 2))
    return (model(x) - batch[1]).square().mean() + 0.5 * hyper.log_decay.exp() * squares(model)


def val_loss(model, hyper, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def data(*shape, outputs=2):
    return torch.randn(*shape) + 0.5, torch.randn(shape[0], outputs)


class Functional(nn.Module):
    """A norm by torch's function, with buffers under names of its own, part of which it uses."""

    def __init__(self, units):
        super().__init__()
        self.register_buffer("means", torch.zeros(units + 2))
        self.register_buffer("variances", torch.ones(units + 2))

    def forward(self, x):
        c = x.shape[1]
        return F.batch_norm(x, self.means[:c], self.variances[:c], training=self.training, momentum=0.8)


class Subclass(nn.BatchNorm1d):
    def forward(self, x):
        y = torch.batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.training, 0.8, 1e-3, False
        )
        return y + 0.1 * y.square()


class Twice(nn.Module):
    """One norm at two places of a pass."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 4), nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.6)
        self.c = nn.Linear(4, 2)

    def forward(self, x):
        z = torch.tanh(self.norm(self.a(x)))
        return self.c(torch.tanh(self.norm(2 * self.b(z) + 1)))


def dense(*middle):
    return lambda: nn.Sequential(nn.Linear(3, 4), *[m() for m in middle], nn.Linear(4, 2))


def convolutional(kind=nn.BatchNorm2d, **settings):
    def make():
        first, second = (kind(2, momentum=0.8, affine=affine, **settings) for affine in (True, False))
        head = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
        return nn.Sequential(
            nn.Conv2d(1, 2, 2), first, nn.Tanh(), nn.Conv2d(2, 2, 2), nn.Tanh(), second, head
        )

    return make


def norm(affine=True, momentum=0.8):
    return lambda: nn.BatchNorm1d(4, affine=affine, momentum=momentum)


NETWORKS = {
    "before the non-linearity": (dense(norm(), nn.Tanh), (20, 3)),
    "after it, not affine": (dense(nn.Tanh, norm(False)), (20, 3)),
    "two in a row": (dense(nn.Tanh, norm(False), norm(), nn.Tanh), (20, 3)),
    "on the inputs": (lambda: nn.Sequential(nn.BatchNorm1d(3, momentum=0.8), *dense(nn.Tanh)()), (20, 3)),
    "cumulative": (dense(norm(momentum=None), nn.Tanh), (20, 3)),
    "synchronised": (dense(lambda: nn.SyncBatchNorm(4, momentum=0.8), nn.Tanh), (20, 3)),
    "by a function": (dense(nn.Tanh, lambda: Functional(4), nn.Tanh), (20, 3)),
    "subclass": (dense(lambda: Subclass(4, momentum=0.8)), (20, 3)),
    "called twice": (Twice, (20, 3)),
    "convolutions": (convolutional(), (7, 1, 4, 4)),
    "instances": (convolutional(nn.InstanceNorm2d, track_running_stats=True), (7, 1, 4, 4)),
}


def problem_of(name, train=train_loss, val=val_loss):
    make, shape = NETWORKS[name]
    return br.Problem(make(), Tuned(shape[1]), train, val), data(*shape), data(*shape)


def converge(problem, batch, passes=24):
    """The running statistics to those of the training passes, each with the same random state."""
    for module in problem.model.modules():
        if isinstance(module, nn.BatchNorm1d) and module.momentum is None:
            module.reset_running_stats()
    state = torch.get_rng_state()
    with torch.no_grad():
        for _ in range(passes):
            for piece in batch if isinstance(batch, br.Batches) else [batch]:
                torch.manual_seed(3)
                problem.train_loss(problem.model, problem.hyper, piece)
    torch.set_rng_state(state)


def evaluated(problem, batch):
    problem.model.eval()
    pieces = zip(batch.batches, batch.weights, strict=True) if isinstance(batch, br.Batches) else [(batch, 1)]
    value = sum(w * float(problem.val_loss(problem.model, problem.hyper, b).detach()) for b, w in pieces)
    problem.model.train()
    return value


def gradient_of(problem, train, val):
    """What the validation loss is differentiated to, by weights and hyperparameters, and the norms in it."""
    converge(problem, train)
    with problem.undisturbed(seed=3) as passes:
        read = Reading(passes, train)
        value, of_weights, direct = validation_gradient(passes, val, read)
    direct = {
        n: torch.zeros_like(p) if direct[n] is None else direct[n] for n, p in problem.hyperparameters.items()
    }
    assert value == pytest.approx(evaluated(problem, val), rel=1e-14)
    return flat(of_weights), flat(direct), read.norms


def check_gradient(problem, train, val, norms):
    """Against differences of a validation loss whose statistics converge anew, along some directions."""
    of_weights, direct, found = gradient_of(problem, train, val)
    assert found == norms
    for tensors, gradient in ((problem.weights, of_weights), (problem.hyperparameters, direct)):
        for _ in range(2):
            d = {n: torch.randn_like(x) for n, x in tensors.items()}
            ends = []
            for step in (1e-5, -1e-5):
                kept = {n: x.detach().clone() for n, x in tensors.items()}
                with torch.no_grad():
                    for n, x in tensors.items():
                        x.add_(d[n], alpha=step)
                converge(problem, train)
                ends.append(evaluated(problem, val))
                with torch.no_grad():
                    for n, x in tensors.items():
                        x.copy_(kept[n])
            slope = (ends[0] - ends[1]) / 2e-5
            assert slope == pytest.approx(float(flat(d) @ gradient), rel=1e-6, abs=1e-8)


def flat(tensors):
    return torch.cat([x.reshape(-1) for x in tensors.values()])


def off(measured, expected):
    return float((flat(measured) - flat(expected)).norm() / flat(expected).norm())


PLACES = {
    "two in a row": ("2", "3"),
    "on the inputs": ("0",),
    "called twice": ("norm",),
    "convolutions": ("1", "5"),
    "instances": ("1", "5"),
    "before the non-linearity": ("1",),
    "cumulative": ("1",),
    "synchronised": ("1",),
    "subclass": ("1",),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_running_statistics_follow_weights_and_hyperparameters(name):
    check_gradient(*problem_of(name), PLACES.get(name, ("2",)))


@pytest.mark.parametrize("name", ["before the non-linearity", "called twice", "cumulative"])
def test_statistics_of_several_batches_are_those_of_their_updates_in_turn(name):
    problem, *_ = problem_of(name)
    train = br.Batches([data(n, 3) for n in (6, 9, 4)], [5, 1, 2])
    check_gradient(problem, train, br.Batches([data(5, 3), data(8, 3)], [2, 1]), PLACES[name])


def test_a_momentum_of_one_takes_the_last_batch():
    problem = br.Problem(dense(norm(momentum=1.0), nn.Tanh)(), Tuned(), train_loss, val_loss)
    check_gradient(problem, br.Batches([data(6, 3), data(9, 3)], [1, 1]), data(8, 3), ("1",))


def test_dropout_before_the_norm_and_an_activation_in_place():
    model = dense(nn.Tanh, lambda: nn.Dropout(0.4), norm(), lambda: nn.SiLU(inplace=True))()
    check_gradient(br.Problem(model, Tuned(), train_loss, val_loss), data(20, 3), data(20, 3), ("3",))


@pytest.mark.parametrize("name", ["before the non-linearity", "after it, not affine", "instances"])
def test_a_validation_loss_that_holds_a_gradient(name):
    def penalised(model, hyper, batch):
        x = batch[0].clone().requires_grad_()
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return val_loss(model, hyper, batch) + g.square().mean()

    check_gradient(*problem_of(name, val=penalised), PLACES.get(name, ("2",)))


def test_several_forward_passes_in_the_training_loss():
    def train(model, hyper, batch):
        apart = model(2 * batch[0]) - model(batch[0])
        return train_loss(model, hyper, batch) + apart.square().mean()

    check_gradient(*problem_of("after it, not affine", train), ("2",))


def test_pixels_that_are_tuned_at_the_norm_itself():
    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.pixels = nn.Parameter(torch.randn(6, 3))

    def train(model, hyper, batch):
        return model(hyper.pixels).square().mean() + squares(model)

    problem = br.Problem(NETWORKS["on the inputs"][0](), Pixels(), train, val_loss)
    check_gradient(problem, None, data(20, 3), ("0",))
    found = br.hypergradient(problem, None, data(20, 3), br.Direct())
    assert found.norms == ("0",)
    assert float(found.total["pixels"].norm()) > 0


class Checkpointed(nn.Module):
    def __init__(self, affine):
        super().__init__()
        self.block = dense(nn.Tanh, norm(affine), nn.Tanh, lambda: nn.Dropout(0.3))()
        self.on = True

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) if self.on else self.block(x)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("twice", [True, False])
def test_checkpoints_in_both_losses(affine, twice):
    problem = br.Problem(Checkpointed(affine), Tuned(), train_loss, val_loss)
    train, val = data(20, 3), data(20, 3)
    converge(problem, train)
    inputs, found = [*problem.weights.values(), *problem.hyperparameters.values()], []
    for problem.model.on in (True, False):
        with problem.undisturbed(seed=1, twice=twice) as passes:
            read = Reading(passes, train)
            with read:
                loss = passes.val_loss(val)
            with passes.eval_mode():
                of_loss = read.gradients(loss, inputs)
            through = read.followed(inputs)
        found.append([graph.plus(a, b) for a, b in zip(of_loss, through, strict=True)])
        assert read.norms == ("block.2",)
    for a, b in zip(*found, strict=True):
        assert a is b is None or torch.allclose(a, b, rtol=1e-12, atol=1e-15)


def solve(problem, batch, steps=200):
    """To a minimum of the training loss by Newton's method in directions of descent, and the statistics to theirs."""
    weights = list(problem.weights.values())
    damping = 1.0
    for _ in range(steps):
        value = problem.train_loss(problem.model, problem.hyper, batch)
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, weights, create_graph=True)])
        if float(gradient.detach().norm()) < 1e-11:
            break
        rows = [torch.autograd.grad(g, weights, retain_graph=True) for g in gradient]
        hessian = torch.stack([torch.cat([x.reshape(-1) for x in row]) for row in rows])
        values, vectors = torch.linalg.eigh(hessian)
        step = vectors @ (vectors.T @ gradient.detach() / (values.abs() + damping * (damping > 1e-6)))
        kept = [w.detach().clone() for w in weights]
        with torch.no_grad():
            for w, piece in zip(weights, step.split([w.numel() for w in weights]), strict=True):
                w -= piece.view(w.shape)
            worse = float(problem.train_loss(problem.model, problem.hyper, batch)) > float(value) + 1e-12
            for w, before in zip(weights, kept, strict=True):
                w.copy_(before if worse else w)
        damping = damping * 10 if worse else damping / 5
    assert float(gradient.detach().norm()) < 1e-9
    converge(problem, batch)


def slope_of_training_again(problem, train, val, direction, step=1e-4):
    """The difference of the validation loss of problems that are solved again, along a change of hyperparameters."""
    kept = {n: x.clone() for n, x in problem.model.state_dict().items()}
    before = {n: p.detach().clone() for n, p in problem.hyperparameters.items()}
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for n, p in problem.hyperparameters.items():
                p.copy_(before[n] + sign * step * direction[n])
        solve(problem, train)
        ends.append(evaluated(problem, val))
        problem.model.load_state_dict(kept)
    with torch.no_grad():
        for n, p in problem.hyperparameters.items():
            p.copy_(before[n])
    return (ends[0] - ends[1]) / (2 * step)


def test_training_again_says_the_same_and_steps_ahead_are_the_series(capsys):
    problem, train, val = problem_of("after it, not affine")
    solve(problem, train)
    exact = br.hypergradient(problem, train, val, br.Implicit(br.Exact()))
    for _ in range(2):
        d = {n: torch.randn_like(p) for n, p in problem.hyperparameters.items()}
        again = slope_of_training_again(problem, train, val, d)
        assert float(flat(d) @ flat(exact.total)) == pytest.approx(again, rel=1e-5)
    assert exact.norms == ("2",)
    assert exact.solve.detail == "running statistics of 1 norm differentiated"
    series = br.hypergradient(problem, train, val, br.Implicit(br.Neumann(terms=5, scale=0.004))).total
    for method in (
        br.Unrolled(6, 0.004),
        br.Unrolled(6, 0.004, checkpoint_every=2),
        br.Unrolled(6, 0.004, trajectory="interpolated"),
        br.Forward(6, 0.004),
    ):
        found = br.hypergradient(problem, train, val, method)
        assert off(found.total, series) < 1e-9
        assert found.norms == ("2",)
    found.summary()
    assert "running statistics of: 2\n" in capsys.readouterr().out
    identity = br.hypergradient(problem, train, val, br.Implicit(br.Identity())).total
    optimizer = torch.optim.SGD(problem.weights.values(), 0.1)
    found = br.hypergradient(problem, train, val, br.SAMA(), weight_optimizer=optimizer)
    assert off(found.total, identity) < 1e-5
    assert found.norms == ("2",)


def test_gauss_newton_and_the_hessian_where_the_statistics_are_written_out():
    """The same validation loss, with the statistics of the training batch as operations in its graph."""
    problem, train, val = problem_of("after it, not affine")
    converge(problem, train)

    def written_out(model, hyper, batch):
        first, _, normalise, last = model
        z, z_val = (torch.tanh(first(x)) for x in (train[0] * hyper.scale, batch[0]))
        return (last((z_val - z.mean(0)) * torch.rsqrt(z.var(0) + normalise.eps)) - batch[1]).square().mean()

    other = br.Problem(problem.model, problem.hyper, train_loss, written_out)
    split = br.GaussNewton(
        lambda m, h, b: m(b[0] * h.scale),
        lambda outputs, b: (outputs - b[1]).square().mean(),
        lambda m, h, b: 0.5 * h.log_decay.exp() * squares(m),
    )
    for curvature in (br.Hessian(), split, br.FiniteDifference()):
        one, two = (
            br.hypergradient(p, train, val, br.Implicit(br.Exact(), curvature)).total
            for p in (problem, other)
        )
        assert off(one, two) < 1e-9


def test_penalty_follows_the_statistics():
    model = nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False, momentum=0.8), nn.Linear(3, 1, bias=False)
    )
    model[0].requires_grad_(False)
    problem = br.Problem(model, Tuned(), train_loss, val_loss)
    train, val = data(20, 3, outputs=1), data(20, 3, outputs=1)
    solve(problem, train)
    exact = br.hypergradient(problem, train, val, br.Implicit(br.Exact()))
    found = br.hypergradient(problem, train, val, br.Penalty(150, 0.2, multiplier=1e5))
    assert off(found.total, exact.total) < 1e-3
    assert found.norms == exact.norms == ("1",)
    assert "running statistics" in found.solve.detail


def test_a_hypernetwork_moves_the_statistics_of_its_own_copy():
    problem, train, val = problem_of("after it, not affine")
    network = br.hypernetworks.LinearHypernetwork(problem, scale=0.1, samples=3)
    with torch.no_grad():
        for slopes in network.slopes:
            slopes.normal_(0.0, 0.3)
    check_gradient(network.problem, train, val, ("_template.model.2",))


@pytest.mark.parametrize("how", ["in eval mode", "momentum of zero", "as is", "untracked"])
def test_statistics_that_do_not_move_or_are_not_read_cost_nothing(how):
    passes = []

    def counted(model, hyper, batch):
        passes.append(model.training)
        return train_loss(model, hyper, batch)

    problem, train, val = problem_of("after it, not affine", counted)
    layer = problem.model[2]
    converge(problem, train)
    if how == "in eval mode":
        layer.eval()
    if how == "momentum of zero":
        layer.momentum = 0.0
    if how == "as is":
        problem.val_mode = "as_is"
    if how == "untracked":
        layer.running_mean = layer.running_var = None
    passes.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = br.hypergradient(problem, train, val, br.Implicit(br.Exact()))
    assert found.norms == ()
    assert found.solve.detail.count("statistics") == 0
    # A norm whose statistics are read might have moved in the training pass, which must be looked at.
    assert len(passes) == (2 if how in ("in eval mode", "momentum of zero") else 1)
    constant = validation_constants(problem, val)
    assert torch.allclose(flat(found.direct), constant, rtol=1e-12, atol=0)


def validation_constants(problem, val):
    if problem.val_mode == "eval":
        problem.model.eval()
    loss = problem.val_loss(problem.model, problem.hyper, val)
    direct = torch.autograd.grad(loss, list(problem.hyperparameters.values()), allow_unused=True)
    problem.model.train()
    pairs = zip(direct, problem.hyperparameters.values(), strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])


def in_a_transform(model, hyper, batch):
    return (torch.func.vmap(lambda x: model(x[None])[0])(batch[0]) - batch[1]).square().mean()


def without_a_graph(model, hyper, batch):
    with torch.no_grad():
        model(3 * batch[0])
    return train_loss(model, hyper, batch)


def in_both_modes(model, hyper, batch):
    moved = train_loss(model, hyper, batch)
    read = train_loss(model.eval(), hyper, batch)
    model.train()
    return moved + read


@pytest.mark.parametrize(
    ("losses", "cause"),
    [
        ((train_loss, in_a_transform), "transform of torch.func"),
        ((without_a_graph, val_loss), "under no_grad"),
        ((in_both_modes, val_loss), "which it also moves"),
    ],
)
def test_statistics_that_cannot_be_followed_are_named(losses, cause):
    problem, train, val = problem_of("before the non-linearity", *losses)
    with pytest.warns(br.errors.BestResponseWarning, match=cause) as caught:
        br.hypergradient(problem, train, val, br.Implicit(br.Exact()))
    assert "'1'" in str(caught[0].message)


def test_a_scripted_norm_is_named_and_one_in_eval_mode_is_not():
    model = torch.jit.script(dense(norm(), nn.Tanh)())
    problem = br.Problem(model, Tuned(), train_loss, val_loss)
    train, val = data(20, 3), data(20, 3)
    with pytest.warns(br.errors.BestResponseWarning, match="compiled or scripted"):
        br.hypergradient(problem, train, val, br.Implicit(br.Exact()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", br.errors.BestResponseWarning)
        frozen = br.Problem(model.eval(), Tuned(), train_loss, val_loss)
        br.hypergradient(frozen, train, val, br.Implicit(br.Exact()))


def test_autocast_and_single_precision():
    def low(loss):
        def run(model, hyper, batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss(model, hyper, batch).float()

        return run

    for name in ("before the non-linearity", "after it, not affine"):
        problem, *batches = problem_of(name)
        problem.model.float(), problem.hyper.float()
        train, val = (tuple(x.float() for x in batch) for batch in batches)
        same = br.Problem(problem.model, problem.hyper, low(train_loss), low(val_loss))
        single, half = (br.hypergradient(p, train, val, br.Direct()) for p in (problem, same))
        assert single.norms == half.norms != ()
        assert off(half.total, single.total) < 0.03


def test_steps_on_several_batches_leave_the_statistics_of_all():
    """Each step lets the statistics see one piece after the other, as a training loop does."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.5), nn.Tanh(), nn.Linear(4, 2))
    first, second, val = ((torch.randn(n, 3), torch.randn(n, 2)) for n in (12, 12, 20))
    second = second[0] + 2.0, second[1]
    for _ in range(60):
        net(first[0])
        net(second[0])
    decay = br.hyperparameters.WeightDecay(net)
    loss = lambda m, h, b: F.mse_loss(m(b[0]), b[1])  # noqa: E731
    problem = br.Problem(net, decay, lambda m, h, b: loss(m, h, b) + h(m), loss)
    pieces = br.Batches([first, second])
    here = br.hypergradient(problem, pieces, val, br.Implicit()).val_loss
    for method in (br.Unrolled(4, 1e-9), br.Forward(4, 1e-9)):
        assert br.hypergradient(problem, pieces, val, method).val_loss == pytest.approx(here, rel=1e-6)
