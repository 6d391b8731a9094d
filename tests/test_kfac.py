import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
import cases
from bestresponse import _tree
from bestresponse.solvers.direct import dense
from bestresponse.testing import check_curvature, check_method


def predict(model, hyper, batch):
    return model(batch[0])


def squared(outputs, batch):
    return 2.0 * (outputs - batch[1]).square().mean()


def cross_entropy(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def problem_of(model, loss, **decay):
    decay = br.hyperparameters.WeightDecay(model, **{"initial": 0.05, "per": "tensor", **decay})
    return br.Problem(
        model,
        decay,
        lambda m, h, b: loss(predict(m, h, b), b) + h(m),
        lambda m, h, b: loss(predict(m, h, b), b),
    )


def matrix_of(curvature, problem, batch):
    """The dense matrix of its products, and what the report would say."""
    with problem.undisturbed() as passes:
        system = curvature.linearise(passes, batch)
        return dense(system, {n: problem.weights[n].detach() for n in system.names}), system.detail


def decays(problem):
    diagonal = problem.hyper.curvature_diagonal(problem.model)
    return torch.cat([diagonal.get(n, torch.zeros_like(w)).reshape(-1) for n, w in problem.weights.items()])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("loss", "examples"),
    [(squared, 12), (squared, 1), (cross_entropy, 1)],
    ids=["squared", "squared, one", "ce, one"],
)
def test_it_equals_gauss_newton_for_one_linear_layer(loss, examples, bias):
    problem = problem_of(nn.Linear(4, 3, bias=bias), loss)
    y = torch.randn(examples, 3) if loss is squared else torch.randint(3, (examples,))
    batch = (torch.randn(examples, 4), y)
    exact, _ = matrix_of(br.GaussNewton(predict, loss, problem.hyper), problem, batch)
    check_curvature(br.KFAC(predict, loss, problem.hyper), problem, batch, exact, 1e-10)


def test_it_differs_from_gauss_newton_where_it_is_an_approximation():
    problem = problem_of(nn.Linear(4, 3), cross_entropy)
    batch = (torch.randn(12, 4), torch.randint(3, (12,)))
    exact, _ = matrix_of(br.GaussNewton(predict, cross_entropy, problem.hyper), problem, batch)
    factored, _ = matrix_of(br.KFAC(predict, cross_entropy, problem.hyper), problem, batch)
    assert 0.02 < float((exact - factored).norm() / exact.norm()) < 0.8


def test_for_one_example_the_blocks_are_those_of_gauss_newton_and_the_rest_its_diagonal():
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    problem = problem_of(model, cross_entropy)
    batch = (torch.randn(1, 4), torch.randint(3, (1,)))
    exact, _ = matrix_of(br.GaussNewton(predict, cross_entropy, problem.hyper), problem, batch)
    expected = torch.diag(exact.diag())
    expected[:25, :25], expected[35:, 35:] = exact[:25, :25], exact[35:, 35:]
    factored, detail = matrix_of(br.KFAC(predict, cross_entropy, problem.hyper), problem, batch)
    assert torch.allclose(factored, expected, atol=1e-12)
    assert detail == "KFAC by its diagonal: 1.weight, 1.bias"


def reference(layer, x, rest_of_model, loss, batch):
    """A ⊗ G of one layer by definition: patches and slopes from dense Jacobians."""
    names = list(dict(layer.named_parameters()))
    values = tuple(p.detach() for p in layer.parameters())

    def output(*values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    s = output(*values)
    # Rows: one for each example and place; s is [N, O, places].
    flat = lambda s: s.reshape(len(s), s.shape[1], -1) if s.ndim > 2 else s.unsqueeze(2)  # noqa: E731
    channels_last = isinstance(layer, nn.Linear | nn.Embedding) and s.ndim == 3
    shaped = (lambda s: s.transpose(1, 2)) if channels_last else flat
    parts = torch.autograd.functional.jacobian(lambda *v: shaped(output(*v)), values)
    J = torch.cat([p.reshape(*shaped(s).shape, -1) for p in parts], -1)  # [N, O, T, n]
    z = rest_of_model(s).detach()
    Jz = torch.autograd.functional.jacobian(rest_of_model, s)  # [N, C, N, ...]
    examples = len(z)
    hessian = torch.autograd.functional.hessian(lambda z: loss(z, batch), z)
    G_full = 0
    for n in range(examples):
        H = hessian[n, :, n]
        slopes = shaped(Jz[n][:, n].reshape(z.shape[1], *s.shape[1:]))  # [C, O, T]
        G_full = G_full + torch.einsum("cot,cd,dpt->op", slopes, H, slopes)
    # Σ_{o,p} G_op · mean over rows of (∂s_o/∂w)(∂s_p/∂w)ᵀ is A ⊗ G in the layer's own parameters.
    rows = J.permute(0, 2, 1, 3).reshape(-1, J.shape[1], J.shape[3])
    return torch.einsum("rox,op,rpy->xy", rows, G_full, rows) / len(rows)


CONVOLUTIONS = {
    "2d": (nn.Conv2d(2, 3, 3, padding=1), (2, 5, 4)),
    "strided, dilated": (nn.Conv2d(2, 3, 2, stride=2, dilation=2, padding=1), (2, 6, 5)),
    "groups": (nn.Conv2d(4, 6, (1, 2), groups=2), (4, 3, 4)),
    "depthwise, no bias": (nn.Conv2d(3, 3, 2, groups=3, bias=False), (3, 3, 4)),
    "circular": (nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 6)),
    "same": (nn.Conv1d(2, 3, 3, padding="same"), (2, 6)),
    "3d": (nn.Conv3d(1, 2, 2), (1, 3, 3, 2)),
    "sequence": (nn.Linear(3, 4), (5, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("loss", [squared, cross_entropy])
def test_layers_with_many_places(loss, name):
    layer, shape = CONVOLUTIONS[name]
    layer = layer.double()
    x = torch.randn(4, *shape)
    width = layer(x)[0].numel()
    model = nn.Sequential(layer, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(width, 3))
    problem = problem_of(model, loss)
    batch = (x, torch.randn(4, 3) if loss is squared else torch.randint(3, (4,)))
    factored, detail = matrix_of(br.KFAC(predict, loss, problem.hyper), problem, batch)
    size = sum(p.numel() for p in layer.parameters())
    expected = reference(layer, x, nn.Sequential(nn.ReLU(), *model[2:]), loss, batch)
    block = (factored - torch.diag(decays(problem)))[:size, :size]
    if getattr(layer, "groups", 1) > 1:  # groups do not share inputs: each has a block of its own
        rows = layer.weight.numel() // layer.groups
        group = torch.cat([torch.arange(p.numel()) * layer.groups // p.numel() for p in layer.parameters()])
        assert rows
        expected = torch.where(group.unsqueeze(1) == group, expected, 0.0)
    assert torch.allclose(block, expected, atol=1e-12)
    assert float(expected.abs().max()) > 1e-6
    assert not detail


@pytest.mark.parametrize("padding", [None, 2])
def test_embeddings(padding):
    table = nn.Embedding(6, 3, padding_idx=padding)
    model = nn.Sequential(table, nn.Flatten(), nn.Tanh(), nn.Linear(12, 3))
    problem = problem_of(model, cross_entropy)
    batch = (torch.randint(6, (5, 4)), torch.randint(3, (5,)))
    assert (batch[0] == 2).any()
    factored, detail = matrix_of(br.KFAC(predict, cross_entropy, problem.hyper), problem, batch)
    block = (factored - torch.diag(decays(problem)))[:18, :18].view(6, 3, 6, 3)
    counts = torch.bincount(batch[0].view(-1), minlength=6).double()
    if padding is not None:
        counts[padding] = 0
    s = table(batch[0]).detach()
    slopes = torch.autograd.functional.jacobian(model[1:], s)
    hessian = torch.autograd.functional.hessian(lambda z: cross_entropy(z, batch), model[1:](s).detach())
    G = torch.zeros(3, 3)
    for n in range(5):
        mine = slopes[n, :, n][:, batch[0][n] != padding] if padding is not None else slopes[n, :, n]
        G += torch.einsum("cto,cd,dtp->op", mine, hessian[n, :, n], mine)
    expected = torch.einsum("vw,op->vowp", torch.diag(counts / counts.sum()), G)
    assert torch.allclose(block, expected, atol=1e-12)
    assert not detail


class Tied(nn.Module):
    """A table that is the decoder as well, through a module or a function; and a layer that is called twice."""

    def __init__(self, how):
        super().__init__()
        self.table, self.twice = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.how = how
        if how == "module":
            self.decoder = nn.Linear(4, 5, bias=False)
            self.decoder.weight = self.table.weight

    def forward(self, x):
        h = torch.tanh(self.twice(torch.tanh(self.twice(self.table(x)))))
        return self.decoder(h) if self.how == "module" else F.linear(h, self.table.weight)


@pytest.mark.parametrize("how", ["module", "function"])
def test_tied_weights_have_a_diagonal_and_layers_that_are_called_twice_have_factors(how):
    problem = problem_of(Tied(how), cross_entropy)
    batch = (torch.randint(5, (1,)), torch.randint(5, (1,)))
    exact, _ = matrix_of(br.GaussNewton(predict, cross_entropy, problem.hyper), problem, batch)
    factored, detail = matrix_of(br.KFAC(predict, cross_entropy, problem.hyper), problem, batch)
    assert detail == "KFAC by its diagonal: table.weight"
    assert torch.allclose(factored[:20, :20], torch.diag(exact.diag()[:20]), atol=1e-12)
    assert float(factored[20:, 20:].tril(-1).abs().max()) > 1e-6
    check_curvature(br.KFAC(predict, cross_entropy, problem.hyper), problem, batch, factored)


def test_random_columns_are_right_in_the_mean():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))
    problem = problem_of(model, cross_entropy)
    batch = (torch.randn(6, 3), torch.randint(3, (6,)))
    whole, _ = matrix_of(br.KFAC(predict, cross_entropy, problem.hyper), problem, batch)
    exact, _ = matrix_of(br.GaussNewton(predict, cross_entropy, problem.hyper), problem, batch)
    for loss in (cross_entropy, br.losses.CrossEntropy(lambda b: b[1])):
        curvature = br.KFAC(predict, loss, problem.hyper, samples=1000)
        sampled, _ = matrix_of(curvature, problem, batch)
        factors = torch.ones(39, dtype=bool)
        factors[16:24] = False
        size = float(whole[factors][:, factors].norm())
        assert float((sampled - whole)[factors][:, factors].norm()) < 0.1 * size
        # The weights without factors: the diagonal of Gauss-Newton itself.
        assert torch.allclose(sampled.diag()[16:24], exact.diag()[16:24], rtol=0.25)


def test_the_closed_form_root_gives_the_same_factors():
    problem, batch, _ = cases.network()
    closed = br.KFAC(predict, br.losses.CrossEntropy(lambda b: b[1], label_smoothing=0.1), problem.hyper)
    smoothed = lambda z, b: F.cross_entropy(z, b[1], label_smoothing=0.1)  # noqa: E731
    by_blocks = br.KFAC(predict, smoothed, problem.hyper)
    train_loss = problem.train_loss
    problem.train_loss = lambda m, h, b: smoothed(m(b[0]), b) + h(m)
    one, _ = matrix_of(closed, problem, batch)
    other, _ = matrix_of(by_blocks, problem, batch)
    assert torch.allclose(one, other, atol=1e-12)
    problem.train_loss = train_loss


def test_several_outputs_and_hyperparameters_among_them():
    model = nn.Linear(4, 3)
    hyper = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(0.7))})
    x, y = torch.randn(1, 4), torch.randn(1, 3)

    def outputs(model, hyper, batch):
        z = model(batch[0])
        return {
            "first": z[:, :1],
            "others": z[:, 1:].view(1, 2, 1),
            "scale": hyper["scale"].exp(),
            "mask": None,
        }

    def loss(out, batch):
        z = torch.cat([out["first"], out["others"].flatten(1)], 1)
        return out["scale"] * (z - batch[1]).square().sum(1).mean()

    problem = br.Problem(
        model, hyper, lambda m, h, b: loss(outputs(m, h, b), b), lambda m, h, b: m(b[0]).sum()
    )
    zero = lambda m, h, b: torch.zeros(())  # noqa: E731
    exact, _ = matrix_of(br.GaussNewton(outputs, loss, zero), problem, (x, y))
    check_curvature(br.KFAC(outputs, loss, zero), problem, (x, y), exact, 1e-12)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda z, b: (z.mean(0) - b[1].mean(0)).square().sum(), "couples"),
        (lambda z, b: z.sin().sum(1).mean(), "convex in the outputs"),
    ],
)
def test_losses_that_have_no_factors_are_refused(loss, words):
    problem = problem_of(nn.Linear(4, 3), loss)
    batch = (torch.randn(6, 4), torch.randn(6, 3))
    with pytest.raises(br.Error, match=words):
        matrix_of(br.KFAC(predict, loss, problem.hyper), problem, batch)


def test_too_many_outputs_are_refused_and_large_layers_have_a_diagonal():
    model = nn.Linear(2, 9000)
    problem = problem_of(model, cross_entropy)
    batch = (torch.randn(2, 2), torch.tensor([0, 1]))
    with pytest.raises(br.Error, match="samples=1"):
        matrix_of(br.KFAC(predict, cross_entropy, problem.hyper), problem, batch)
    loss = br.losses.CrossEntropy(lambda b: b[1])
    curvature = br.KFAC(predict, loss, problem.hyper, samples=1)
    h = br.hypergradient(problem, batch, batch, br.Implicit(br.ConjugateGradient(2, damping=1.0), curvature))
    assert h.norm > 0
    assert h.solve.detail == "KFAC by its diagonal: weight, bias"


@pytest.mark.parametrize("samples", [0, 1.5])
def test_bad_arguments(samples):
    with pytest.raises(br.Error, match="KFAC.samples"):
        br.KFAC(predict, cross_entropy, samples=samples)
    with pytest.raises(br.Error, match="KFAC.predict must be a function"):
        br.KFAC(None, cross_entropy)


@pytest.mark.parametrize("hidden", [nn.Identity, lambda: nn.Dropout(0.4), lambda: nn.BatchNorm1d(4)])
@pytest.mark.parametrize("rest", ["module", "function", "none"])
def test_it_leaves_no_trace_and_takes_every_rest(rest, hidden):
    problem, train, val = cases.network(hidden())
    given = {"module": problem.hyper, "function": lambda m, h, b: h(m), "none": None}[rest]
    curvature = br.KFAC(predict, cross_entropy, given)
    check_method(br.Implicit(br.ConjugateGradient(3, damping=0.1), curvature), problem, train, val)
    assert not any(m._forward_hooks for m in problem.model.modules())
    torch.manual_seed(5)
    with_module, _ = matrix_of(br.KFAC(predict, cross_entropy, problem.hyper), problem, train)
    torch.manual_seed(5)
    other, detail = matrix_of(curvature, problem, train)
    assert torch.allclose(with_module, other, atol=1e-10)
    assert ("rest by difference" in detail) == (rest == "none")


@pytest.mark.parametrize("damping", [0.01, 1.0])
@pytest.mark.parametrize(("decay", "steady"), [(0.0, 0.1), (0.05, 0.1), (0.05, 0.0), (0.0, 2.0)])
def test_the_inverse_is_that_of_the_products(decay, steady, damping):
    """With one decay for all, the mean over a layer is the decay itself."""
    model = nn.Sequential(nn.Conv2d(1, 2, 2, groups=1), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3))
    problem = problem_of(model, cross_entropy, initial=decay or 1e-30, per="global", minimum=1e-30)
    batch = (torch.randn(5, 1, 3, 3), torch.randint(3, (5,)))
    curvature = br.KFAC(predict, cross_entropy, problem.hyper, steady=steady)
    matrix, _ = matrix_of(curvature, problem, batch)
    like = {n: w.detach() for n, w in problem.weights.items()}
    r = {n: torch.randn_like(w) for n, w in like.items()}
    with problem.undisturbed() as passes:
        inverse = curvature.make_preconditioner(passes, batch)
    z = _tree.flatten(inverse.at(damping)(r))
    # A share of the largest eigenvalue of the blocks with factors is added.
    factored = (matrix - torch.diag(decays(problem)))[torch.tensor([*range(10), *range(26, 53)])][
        :, [*range(10), *range(26, 53)]
    ]
    more = steady * float(torch.linalg.eigvalsh(factored)[-1])
    shifted = matrix + (damping + more) * torch.eye(len(matrix))
    assert torch.allclose(z, torch.linalg.solve(shifted, _tree.flatten(r)), rtol=1e-8, atol=1e-10)
    whole = dense(inverse.at(damping), like)
    assert torch.allclose(whole, whole.T, atol=1e-10)
    assert float(torch.linalg.eigvalsh(whole).min()) > 0


def test_a_system_with_kfac_as_curvature_is_solved_by_its_own_inverse():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    problem = problem_of(model, cross_entropy, initial=1e-3, per="global")
    batch = (torch.randn(40, 6), torch.randint(3, (40,)))
    val = (torch.randn(40, 6), torch.randint(3, (40,)))
    found = {}
    for steady in (0.1, 0.0):
        inverse = br.KFAC(predict, cross_entropy, problem.hyper, steady=steady)
        solver = br.ConjugateGradient(200, tolerance=1e-6, preconditioner=inverse)
        method = br.Implicit(solver, br.KFAC(predict, cross_entropy, problem.hyper))
        found[steady] = br.hypergradient(problem, batch, val, method)
    assert found[0.0].solve.products <= 3 < found[0.1].solve.products
    for name, x in found[0.0].total.items():
        torch.testing.assert_close(x, found[0.1].total[name], rtol=1e-4, atol=1e-9)
    for wrong in (-0.1, math.nan, "x"):
        with pytest.raises(br.Error, match="KFAC.steady"):
            br.KFAC(predict, cross_entropy, steady=wrong)


def test_an_inverse_without_damping_or_decay_is_positive_definite():
    problem = problem_of(nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 2)), cross_entropy)
    batch = (torch.tensor([1, 1, 2]), torch.randint(2, (3,)))
    curvature = br.KFAC(predict, cross_entropy, lambda m, h, b: h(m))
    with problem.undisturbed() as passes:
        inverse = dense(
            curvature.make_preconditioner(passes, batch).at(0.0),
            {n: w.detach() for n, w in problem.weights.items()},
        )
    assert float(torch.linalg.eigvalsh(inverse).min()) > 0
    assert math.isfinite(float(inverse.abs().max()))


def test_several_batches_have_the_mean_of_the_factors():
    problem, batch, val = cases.network()
    pieces = [(batch[0][:4], batch[1][:4]), (batch[0][4:], batch[1][4:])]
    batches = br.Batches(pieces, weights=[4, 8])
    curvature = br.KFAC(predict, cross_entropy, problem.hyper)
    like = {n: w.detach() for n, w in problem.weights.items()}
    with problem.undisturbed() as passes:
        one = dense(curvature.make_preconditioner(passes, batch).at(0.1), like)
        several = dense(curvature.make_preconditioner(passes, batches).at(0.1), like)
    assert torch.allclose(one, several, atol=1e-10)
    method = br.Implicit(br.ConjugateGradient(40, tolerance=1e-10, preconditioner=curvature),
                         br.GaussNewton(predict, cross_entropy, problem.hyper))  # fmt: skip
    exact = br.Implicit(br.Exact(), br.GaussNewton(predict, cross_entropy, problem.hyper))
    found = br.hypergradient(problem, batches, val, method)
    wanted = br.hypergradient(problem, batches, val, exact)
    assert torch.allclose(_tree.flatten(found.total), _tree.flatten(wanted.total), rtol=1e-6, atol=1e-10)


@pytest.mark.slow
def test_preconditioned_conjugate_gradient_needs_fewer_products():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 4),
    )
    problem = problem_of(model, cross_entropy, initial=1e-3, per="weight")
    batch = (torch.randn(400, 1, 10, 10), torch.randint(4, (400,)))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        problem.train_loss(model, problem.hyper, batch).backward(inputs=list(model.parameters()))
        optimizer.step()
    curvature = br.GaussNewton(predict, cross_entropy, problem.hyper)
    kfac = br.KFAC(predict, cross_entropy, problem.hyper)
    products, found = {}, {}
    for name, more in {"plain": {}, "KFAC": {"preconditioner": kfac}, "diagonal": {"diagonal": True}}.items():
        solver = br.ConjugateGradient(400, tolerance=1e-3, **more)
        h = br.hypergradient(problem, batch, (batch[0].flip(0), batch[1]), br.Implicit(solver, curvature))
        assert h.solve.status is br.Status.CONVERGED
        products[name], found[name] = h.solve.products, _tree.flatten(h.total)
    assert products["KFAC"] < 0.9 * min(products["plain"], products["diagonal"]), products
    assert float((found["KFAC"] - found["plain"]).norm() / found["plain"].norm()) < 0.01


def test_a_preconditioner_of_ones_own():
    system = torch.diag(torch.tensor([1.0, 10.0, 100.0, 1000.0, 1e4, 1e5]))
    b = {"x": torch.ones(6)}
    product = lambda v: {"x": system @ v["x"]}  # noqa: E731
    solver = br.ConjugateGradient(preconditioner=lambda r: {"x": r["x"] / system.diag()})
    report = solver.solve(product, b).report
    assert (report.steps, report.products) == (1, 2)  # one product more, for the residual
    for bad, words in (
        (lambda r: {"x": -r["x"]}, "positive definite"),
        (lambda r: {"y": r["x"]}, "a tensor for each of r's"),
    ):
        with pytest.raises(br.Error, match=words):
            br.ConjugateGradient(preconditioner=bad).solve(product, b)
    with pytest.raises(br.Error, match="needs a problem and a batch"):
        br.ConjugateGradient(preconditioner=br.KFAC(predict, squared)).solve(product, b)
    for arguments in ({"preconditioner": 3.0}, {"preconditioner": br.KFAC}):
        with pytest.raises(br.Error, match="preconditioner must be"):
            br.ConjugateGradient(**arguments)
    with pytest.raises(br.Error, match="got both"):
        br.ConjugateGradient(preconditioner=lambda r: r, diagonal=True)


def test_recycled_pairs_on_top_of_factors():
    problem, batch, val = cases.network()
    curvature = br.GaussNewton(predict, cross_entropy, problem.hyper)
    solver = br.ConjugateGradient(
        30, 1e-10, damping=0.01, recycle=5, preconditioner=br.KFAC(predict, cross_entropy, problem.hyper)
    )
    method = br.Implicit(solver, curvature, warm_start=True)
    exact = br.hypergradient(problem, batch, val, br.Implicit(br.Exact(0.01), curvature))
    for _ in range(3):
        h = br.hypergradient(problem, batch, val, method)
        assert torch.allclose(_tree.flatten(h.total), _tree.flatten(exact.total), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("make", [br.ConjugateGradient, br.MINRES, br.solvers.GMRES])
def test_a_tolerance_may_shrink_from_solve_to_solve(make):
    problem, batch, val = cases.network()
    curvature = br.GaussNewton(predict, cross_entropy, problem.hyper)
    method = br.Implicit(make(60, tolerance=lambda k: 0.1 ** (k + 1)), curvature)
    reports = [br.hypergradient(problem, batch, val, method).solve for _ in range(5)]
    for k, report in enumerate(reports):
        assert report.status is br.Status.CONVERGED
        assert report.residual <= 0.1 ** (k + 1)
    steps = [report.steps for report in reports]
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]
    assert problem.state(method).memory["solves"] == 5
    with pytest.raises(br.Error, match="tolerance, a function .* must return a number ≥ 0; got -1.0"):
        br.hypergradient(problem, batch, val, br.Implicit(make(5, tolerance=lambda k: -1.0), curvature))


# --- odd models ---------------------------------------------------------------------------------------


class Odd(nn.Module):
    """One linear layer, used in a way that hides what goes in or comes out."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(3, 2), how
        if how == "hook":
            self.layer.register_forward_hook(lambda m, a, o: 3 * o)
        elif how == "pre-hook":
            self.layer.register_forward_pre_hook(lambda m, a: (2 * a[0],))
        elif how == "forward of its own":
            plain = self.layer.forward
            self.layer.forward = lambda x: 3 * plain(x)
        elif how == "auxiliary":
            self.other = nn.Linear(3, 2)
        elif how == "random":
            nn.utils.parametrize.register_parametrization(self.layer, "weight", Half())

    def forward(self, x):
        if self.how == "others in their place":
            other = {n: 2 * p for n, p in self.layer.named_parameters()}
            return torch.func.functional_call(self.layer, other, (x,))
        if self.how == "a call that does not count":
            return self.layer(x) - self.layer(5 * x.flip(0) + 1).detach()
        if self.how == "auxiliary":
            self.other(x)
        if self.how == "no rows":
            return self.layer(x) + self.layer(x[:0]).sum()
        if self.how == "unbatched":
            return torch.stack([self.layer(row) for row in x])
        if self.how == "keyword":
            return self.layer(input=x)
        return self.layer(x)


class Half(nn.Module):
    def forward(self, w):
        return F.dropout(w, 0.5)


@pytest.mark.parametrize(
    ("how", "factored"),
    [
        ("hook", True),
        ("pre-hook", True),
        ("forward of its own", False),
        ("others in their place", False),
        ("a call that does not count", True),
        ("auxiliary", True),
        ("no rows", True),
        ("unbatched", True),
        ("keyword", True),
        ("random", False),
    ],
)
@pytest.mark.filterwarnings("ignore:train_loss does not reach")
def test_odd_uses_of_a_layer(how, factored):
    model = Odd(how)
    decay = br.hyperparameters.WeightDecay(
        model, initial=0.05, per="tensor", exclude=["other.*"] if how == "auxiliary" else []
    )
    problem = br.Problem(
        model,
        decay,
        lambda m, h, b: squared(predict(m, h, b), b) + h(m),
        lambda m, h, b: squared(predict(m, h, b), b),
    )
    batch = (torch.randn(6, 3), torch.randn(6, 2))
    torch.manual_seed(3)
    exact, _ = matrix_of(br.GaussNewton(predict, squared, decay), problem, batch)
    torch.manual_seed(3)
    found, detail = matrix_of(
        br.KFAC(predict, squared, decay, samples=None if factored else 1000), problem, batch
    )
    if factored:
        assert torch.allclose(found, exact, atol=1e-10)
        assert not detail
    else:
        assert torch.allclose(found.diag(), exact.diag(), rtol=0.2, atol=1e-6)
        assert "by its diagonal" in detail
    solver = br.ConjugateGradient(5, preconditioner=br.KFAC(predict, squared, decay))
    method = br.Implicit(solver, br.GaussNewton(predict, squared, decay))
    assert br.hypergradient(problem, batch, batch, method).norm > 0


class Halves(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), how
        if how == "tied":
            self.b.weight = self.a.weight

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x).float()
            if self.how == "tied":
                return self.b(torch.tanh(h))
            if self.how == "in place":
                h += self.b(h)
                return h
            return h + self.b(h)


def test_autocast():
    torch.set_default_dtype(torch.float32)
    loss = br.losses.CrossEntropy(lambda b: b[1])
    batch = (torch.randn(6, 3), torch.randint(3, (6,)))
    tied, detail = matrix_of(br.KFAC(predict, loss, (p := problem_of(Halves("tied"), loss)).hyper), p, batch)
    assert detail == "KFAC by its diagonal: a.weight"
    assert not bool((tied - torch.diag(tied.diag())).any())
    model = Halves("in place")
    problem = problem_of(model, loss)
    _, detail = matrix_of(br.KFAC(predict, loss, problem.hyper), problem, batch)
    assert detail == "KFAC by its diagonal: b.weight"
    model.how = "apart"
    exact, _ = matrix_of(br.KFAC(predict, loss, problem.hyper), problem, batch)
    # A loss without a root of its own, on outputs in half precision, whose eigenvalues torch does not have.
    half = lambda z, b: F.cross_entropy(z.float(), b[1])  # noqa: E731
    model.how = "tied"
    lower = problem_of(model, half)
    found, _ = matrix_of(br.KFAC(predict, half, lower.hyper), lower, batch)
    assert bool(torch.isfinite(found).all())
    assert bool(torch.isfinite(exact).all())


class Switched(nn.Module):
    """Which layers run depends on the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(torch.tanh((self.a if len(x) > 4 else self.b)(x)))


def test_batches_that_run_other_layers():
    problem = problem_of(Switched(), cross_entropy)
    batches = br.Batches([(torch.randn(n, 3), torch.randint(2, (n,))) for n in (6, 3)], weights=[6, 3])
    curvature = br.GaussNewton(predict, cross_entropy, problem.hyper)
    kfac = br.KFAC(predict, cross_entropy, problem.hyper)
    method = br.Implicit(br.ConjugateGradient(60, 1e-10, preconditioner=kfac), curvature)
    found = br.hypergradient(problem, batches, batches, method)
    exact = br.hypergradient(problem, batches, batches, br.Implicit(br.Exact(), curvature))
    assert torch.allclose(_tree.flatten(found.total), _tree.flatten(exact.total), rtol=1e-6, atol=1e-9)


def test_the_report_names_them_with_batches_one_at_a_time_too():
    problem, batch, val = cases.network(nn.LayerNorm(4))
    batches = br.Batches([batch, batch], recompute=True)
    curvature = br.KFAC(predict, cross_entropy, problem.hyper)
    h = br.hypergradient(problem, batches, val, br.Implicit(br.ConjugateGradient(2, damping=1.0), curvature))
    assert "1.weight" in h.solve.detail
    preconditioned = br.Implicit(br.ConjugateGradient(2, damping=1.0, preconditioner=curvature))
    h = br.hypergradient(problem, batch, val, preconditioned)
    assert h.solve.detail == "KFAC by its diagonal: 1.weight, 1.bias"


def test_one_example_without_a_batch():
    problem = problem_of(nn.Linear(3, 4), loss := br.losses.CrossEntropy(lambda b: b[1]))
    batch = (torch.randn(3), torch.tensor(1))
    exact, _ = matrix_of(br.GaussNewton(predict, loss, problem.hyper), problem, batch)
    found, _ = matrix_of(br.KFAC(predict, loss, problem.hyper), problem, batch)
    assert torch.allclose(found, exact, atol=1e-12)


@pytest.mark.parametrize("count", [16, 3000])
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda z, b: -(z - b[1]).square().mean(), "convex"),
        (lambda z, b: squared(z, b) + 0.1 * z.mean(1).var(), "couples"),
    ],
)
def test_refusals_in_float32_at_any_size(loss, words, count):
    torch.set_default_dtype(torch.float32)
    problem = problem_of(nn.Linear(3, 4), loss)
    batch = (torch.randn(count, 3), torch.randn(count, 4))
    with pytest.raises(br.Error, match=words):
        matrix_of(br.KFAC(predict, loss, problem.hyper), problem, batch)


def test_saturated_outputs_are_no_coupling():
    model = nn.Linear(3, 4)
    with torch.no_grad():
        model.weight.mul_(1e4)
    problem = problem_of(model, cross_entropy)
    x = torch.randn(8, 3)
    batch = (x, model(x).argmax(1))
    matrix, _ = matrix_of(br.KFAC(predict, cross_entropy, problem.hyper), problem, batch)
    assert bool(torch.isfinite(matrix).all())


def test_detached_outputs_and_tensors_as_preconditioners_are_told():
    problem, batch, val = cases.network()
    detached = br.KFAC(lambda m, h, b: m(b[0]).detach(), cross_entropy)
    for method in (
        br.Implicit(curvature=detached),
        br.Implicit(br.ConjugateGradient(3, preconditioner=detached)),
    ):
        with pytest.raises(br.Error, match=r"the outputs of KFAC\.predict must depend"):
            br.hypergradient(problem, batch, val, method)
    with pytest.raises(br.Error, match="preconditioner must be"):
        br.ConjugateGradient(preconditioner=torch.eye(3))


def test_an_exact_preconditioner_ends_in_one_step():
    d = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    solver = br.ConjugateGradient(preconditioner=lambda r: {"w": r["w"] / d})
    solution = solver.solve(lambda v: {"w": d * v["w"]}, {"w": torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])})
    assert solution.report.status is br.Status.CONVERGED
    assert (solution.report.steps, solution.report.products) == (1, 2)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_entries_have_no_factors_and_change_nothing():
    class Empty(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.none = layer, nn.Parameter(torch.zeros(0))
            self.into, self.out = nn.Linear(3, 0), nn.Linear(0, 2, bias=False)

        def forward(self, x):
            return self.layer(x) + self.out(self.into(x)) + self.none.sum()

    _, train, val = cases.network()
    layer, found = nn.Linear(3, 2), []
    for model in (layer, Empty(layer)):
        problem = problem_of(model, cross_entropy, per="global")
        curvature = br.KFAC(predict, cross_entropy, problem.hyper)
        solver = br.ConjugateGradient(50, tolerance=1e-12, preconditioner=curvature)
        for method in (br.Implicit(br.Exact(), curvature), br.Implicit(solver)):
            found.append(br.hypergradient(problem, train, val, method).total["log_decay"])
    torch.testing.assert_close(found[2:], found[:2], rtol=1e-9, atol=0)
