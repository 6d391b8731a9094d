"""`cross_validate` beside scikit-learn's estimators, and its parts: batches of folds, the inner and the outer steps."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import Lasso, LassoCV, LogisticRegression, LogisticRegressionCV, Ridge, RidgeCV
from sklearn.metrics import log_loss, mean_squared_error
from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold, TimeSeriesSplit
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import TensorDataset

import bestresponse as br
from bestresponse.cross_validation import BFGS, FoldBatches, Minimise, fold_batches, whole_batches


def linear(features, power, initial):
    """A linear model at zero, and a penalty of its weights without the intercept."""
    model = nn.Linear(features, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    decay = br.hyperparameters.WeightDecay(
        model, per="global", power=power, exclude=["bias"], initial=initial, minimum=1e-9, maximum=1e3
    )
    return model, decay


def squared_error(model, hyper, batch):
    return F.mse_loss(model(batch[0])[:, 0], batch[1])


def penalised_squares(model, hyper, batch):
    return squared_error(model, hyper, batch) / 2 + hyper(model)


def cross_entropy(model, hyper, batch):
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])


def penalised_cross_entropy(model, hyper, batch):
    return cross_entropy(model, hyper, batch) + hyper(model)


def rate_of(decay):
    return float(decay.log_decay.detach().exp())


def diabetes():
    x, y = load_diabetes(return_X_y=True)
    return x, y, (torch.tensor(x), torch.tensor(y))


def breast_cancer():
    x, y = load_breast_cancer(return_X_y=True)
    x = StandardScaler().fit_transform(x)
    return x, y, (torch.tensor(x), torch.tensor(y).double())


def losses_of(estimator_of, loss, x, y, splits):
    """The validation loss of each fold by scikit-learn; the estimator depends on the number of training rows."""
    return [loss(estimator_of(len(a)).fit(x[a], y[a]), x[b], y[b]) for a, b in splits]


@pytest.mark.parametrize("initial", [1e-2, 1e-4])
def test_ridge_agrees_with_scikit_learn(initial):
    x, y, data = diabetes()
    theirs = RidgeCV(np.logspace(-4, 2, 100), cv=5, scoring="neg_mean_squared_error").fit(x, y)
    model, decay = linear(10, 2, initial)
    found = br.cross_validate(model, decay, penalised_squares, squared_error, data)
    assert found.loss <= -theirs.best_score_ * 1.005
    assert rate_of(decay) * len(x) * 0.8 == pytest.approx(theirs.alpha_, rel=0.2)
    expected = losses_of(
        lambda n: Ridge(rate_of(decay) * n),
        lambda fit, a, b: mean_squared_error(b, fit.predict(a)),
        x,
        y,
        KFold(5).split(x),
    )
    assert found.losses == pytest.approx(expected, rel=1e-6)
    whole = Ridge(rate_of(decay) * len(x)).fit(x, y)
    assert model.weight.detach().numpy()[0] == pytest.approx(whole.coef_, rel=1e-5)


@pytest.mark.parametrize("initial", [1.0, 1e-3])
def test_the_lasso_agrees_with_scikit_learn(initial):
    x, y, data = diabetes()
    theirs = LassoCV(alphas=100, cv=5).fit(x, y)
    model, decay = linear(10, 1, initial)
    found = br.cross_validate(model, decay, penalised_squares, squared_error, data)
    assert found.loss <= theirs.mse_path_.mean(1).min() * 1.005
    expected = losses_of(
        lambda n: Lasso(rate_of(decay), tol=1e-10, max_iter=100_000),
        lambda fit, a, b: mean_squared_error(b, fit.predict(a)),
        x,
        y,
        KFold(5).split(x),
    )
    assert found.losses == pytest.approx(expected, rel=1e-6)
    whole = Lasso(rate_of(decay), tol=1e-10, max_iter=100_000).fit(x, y)
    assert ((model.weight == 0).numpy()[0] == (whole.coef_ == 0)).all()


def test_logistic_regression_agrees_with_scikit_learn():
    x, y, data = breast_cancer()
    folds = StratifiedKFold(5)
    theirs = LogisticRegressionCV(
        Cs=np.logspace(-3, 3, 100),
        cv=folds,
        scoring="neg_log_loss",
        max_iter=1_000,
        l1_ratios=(0,),
        use_legacy_attributes=False,
    ).fit(x, y)
    model, decay = linear(30, 2, 1e-2)
    found = br.cross_validate(
        model, decay, penalised_cross_entropy, cross_entropy, data, folds, targets=data[1]
    )
    splits = list(folds.split(x, y))

    def losses(penalty):
        return losses_of(
            lambda n: LogisticRegression(C=1 / penalty(n), tol=1e-8, max_iter=10_000),
            lambda fit, a, b: log_loss(b, fit.predict_proba(a)),
            x,
            y,
            splits,
        )

    assert found.losses == pytest.approx(losses(lambda n: rate_of(decay) * n), rel=1e-4)
    assert found.loss <= np.mean(losses(lambda n: 1 / theirs.C_)) * 1.005
    assert 1 / (rate_of(decay) * len(x) * 0.8) == pytest.approx(theirs.C_, rel=0.2)


def test_several_penalties_reach_a_stationary_point():
    _, _, data = diabetes()
    model = nn.Linear(10, 1)
    decay = br.hyperparameters.WeightDecay(model, per="weight", exclude=["bias"], initial=1e-4)
    found = br.cross_validate(model, decay, penalised_squares, squared_error, data, tolerance=0.05)
    one = br.cross_validate(*linear(10, 2, 1e-4), penalised_squares, squared_error, data)
    assert found.loss < one.loss
    assert found.history[-1]["hypergradient_norm"] < 1e-3 * found.loss


def test_a_lasso_that_starts_where_nothing_responds_warns():
    _, _, data = diabetes()
    with pytest.warns(br.BestResponseWarning, match="start from a smaller penalty"):
        br.cross_validate(*linear(10, 1, 100.0), penalised_squares, squared_error, data)


def test_networks_train_with_torch_optimisers_in_mini_batches():
    """Weights and dropout of a classifier of three clouds, in shuffled batches, and a final training on all data."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    y = torch.arange(120) % 3
    x = centres[y] + torch.randn(120, 2, generator=generator)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=1e-2)

    def fit(model, hyper, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    found = br.cross_validate(
        model,
        decay,
        lambda model, hyper, batch: fit(model, hyper, batch) + hyper(model),
        fit,
        TensorDataset(x, y),
        StratifiedKFold(4),
        targets=y,
        batch_size=24,
        weight_optimizer=lambda weights: torch.optim.Adam(weights, 0.02),
        hyper_optimizer=lambda parameters: torch.optim.Adam(parameters, 0.1),
        weight_steps=4,
        warmup_steps=40,
        hyper_steps=10,
    )
    assert found.tuner.problem.batched
    assert len(found.history) == 10
    assert found.loss < 0.6
    assert found.loss == pytest.approx(np.mean(found.losses))
    model.eval()
    assert float((model(x).argmax(1) == y).double().mean()) > 0.75
    assert not any(torch.equal(model[0].weight, f.model[0].weight) for f in found.tuner.problem.folds)


def test_minimising_needs_all_rows():
    with pytest.raises(br.Error, match="batch_size"):
        br.cross_validate(*linear(10, 2, 1.0), penalised_squares, squared_error, diabetes()[2], batch_size=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"weight_optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)},
            "weight_optimizer .* got SGD",
        ),
        ({"weight_optimizer": Minimise}, "create an instance"),
        (
            {"hyper_optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)},
            "hyper_optimizer .* got SGD",
        ),
        ({"hyper_optimizer": torch.optim.LBFGS}, "without a closure; got LBFGS"),
        ({"seed": "one"}, "seed must be an integer"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(br.Error, match=message):
        br.cross_validate(*linear(10, 2, 1.0), penalised_squares, squared_error, diabetes()[2], **settings)


def test_minimising_refuses_a_loss_with_dropout():
    torch.manual_seed(0)
    data = (torch.randn(12, 3), torch.randn(12))
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
    problem = br.Problem(model, br.hyperparameters.WeightDecay(model), penalised_squares, squared_error)
    before = model[1].weight.clone()
    with pytest.raises(br.Error, match="the same at each evaluation"):
        Minimise()(problem, data)
    assert torch.equal(model[1].weight, before)
    model.eval()
    Minimise()(problem, data)
    assert not torch.equal(model[1].weight, before)


@pytest.mark.parametrize("newton_limit", [0, 300])
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("rate", [1.0, 0.01])
def test_minimise_reaches_the_minimum(newton_limit, power, rate):
    x, y, data = diabetes()
    model, decay = linear(10, power, rate)
    problem = br.Problem(model, decay, penalised_squares, squared_error)
    Minimise(newton_limit=newton_limit, tolerance=1e-14)(problem, data)
    estimator = Lasso(rate, tol=1e-12, max_iter=1_000_000) if power == 1 else Ridge(rate * len(x))
    estimator.fit(x, y)
    assert model.weight.detach().numpy()[0] == pytest.approx(estimator.coef_, rel=1e-4, abs=1e-4)


def test_minimise_takes_several_batches_and_nonconvex_losses():
    x = torch.linspace(-2, 2, 40)[:, None]
    y = torch.sin(2 * x[:, 0])
    model = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))
    decay = br.hyperparameters.WeightDecay(model, per="global", initial=1e-3)
    problem = br.Problem(model, decay, penalised_squares, squared_error)
    for batch in ((x, y), br.Batches([(x[::2], y[::2]), (x[1::2], y[1::2])])):
        Minimise()(problem, batch)
        gradient = torch.autograd.grad(penalised_squares(model, decay, (x, y)), list(model.parameters()))
        assert max(float(g.abs().max()) for g in gradient) < 1e-5


@pytest.mark.parametrize("shape", [(1,), (4,)])
def test_bfgs_finds_the_minimum_from_a_plateau(shape):
    """f(θ) = −Σ log(1 + exp(−(θ − c)²)), which is flat and concave far from c."""
    centre = torch.linspace(-1, 2, 4)[: shape[0]]
    theta = nn.Parameter(torch.full(shape, 5.0))
    optimizer = BFGS([theta])
    for _ in range(40):
        optimizer.zero_grad()
        (-torch.log1p(torch.exp(-0.3 * (theta - centre) ** 2))).sum().backward()
        before = theta.detach().clone()
        optimizer.step()
        assert float((theta.detach() - before).abs().max()) <= 2.5 + 1e-12
    torch.testing.assert_close(theta.detach(), centre, atol=1e-4, rtol=0)


def test_bfgs_continues_exactly_from_a_saved_state_in_float32():
    def step(theta, optimizer):
        theta.grad = torch.tensor([1.0, 5.0]).to(theta) * theta.detach() ** 3
        optimizer.step()

    theta = nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float32))
    optimizer = BFGS([theta])
    for _ in range(4):
        step(theta, optimizer)
    copied = nn.Parameter(theta.detach().clone())
    again = BFGS([copied])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        step(theta, optimizer)
        step(copied, again)
        assert torch.equal(theta, copied)


def rows_of(batches):
    """The rows of each fold, of data that are their own numbers."""
    return [set(torch.cat([batch[k] for batch in batches]).tolist()) for k in range(len(batches.rows))]


@pytest.mark.parametrize(
    ("folds", "splitter"),
    [
        (5, KFold(5)),
        (KFold(3, shuffle=True, random_state=1), KFold(3, shuffle=True, random_state=1)),
        (StratifiedKFold(4), StratifiedKFold(4)),
        (GroupKFold(3), GroupKFold(3)),
        (TimeSeriesSplit(4), TimeSeriesSplit(4)),
        (list(KFold(4).split(np.zeros(23))), KFold(4)),
    ],
)
def test_folds_are_those_of_scikit_learn(folds, splitter):
    numbers, targets, groups = torch.arange(23), torch.arange(23) % 2, np.arange(23) // 3
    settings = {"groups": groups} if isinstance(splitter, GroupKFold) else {}
    train, val = fold_batches(numbers, folds, targets=targets, **settings)
    given = (targets, groups) if isinstance(splitter, GroupKFold) else (targets,)
    expected = list(splitter.split(np.zeros((23, 1)), *given))
    assert rows_of(train) == [set(a.tolist()) for a, _ in expected]
    assert rows_of(val) == [set(b.tolist()) for _, b in expected]


def test_mini_batches_of_folds_have_one_size_and_stay_in_their_fold():
    numbers = torch.arange(50)
    train, val = fold_batches((numbers, -numbers), 4, batch_size=5, seed=3)
    assert len(train) == 7
    seen = list(train)
    assert len(seen) == 7
    assert all(len(batch) == 4 and len(x) == 5 and torch.equal(x, -y) for batch in seen for x, y in batch)
    for k, rows in enumerate(train.rows):
        used = torch.cat([batch[k][0] for batch in seen]).tolist()
        assert len(set(used)) == 35
        assert set(used) <= set(rows.tolist())
    assert [b[0][0].tolist() for b in train] != [b[0][0].tolist() for b in seen]
    complete = val.of_fold(0)
    assert sum(w * len(x) for (x, _), w in zip(complete, complete.weights, strict=True)) == pytest.approx(
        59 / 13
    )
    assert sorted(torch.cat(list(whole_batches(numbers, 10))).tolist()) == list(range(50))


def test_data_sets_are_collated():
    data = TensorDataset(torch.arange(12.0), torch.arange(12))
    (batch,) = fold_batches(data, 3)[1]
    assert [x.tolist() for x in batch[1]] == [[4.0, 5.0, 6.0, 7.0], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("data", "folds", "settings", "message"),
    [
        (torch.zeros(5), 6, {}, "folds must be at most the number of examples, 5; got 6"),
        (torch.zeros(5), "five", {}, "folds must be a number of folds"),
        (torch.zeros(5), [([0, 1], [])], {}, "folds must be at least two"),
        (torch.zeros(5), [(torch.arange(5) > 1, torch.arange(5) < 2)] * 2, {}, "lists of whole numbers; got"),
        (torch.zeros(5), [([0.0, 1.0], [2])] * 2, {}, "lists of whole numbers; got"),
        (torch.zeros(5), [([[0, 1]], [2])] * 2, {}, "lists of whole numbers; got"),
        (torch.zeros(5), [1, 2], {}, "lists of whole numbers; got 1"),
        (torch.zeros(5), [([0, 1], [5])] * 2, {}, r"from 0 to 4, .* got \[5\] outside"),
        (torch.zeros(5), [([0, 1], [-1])] * 2, {}, r"got \[-1\] outside"),
        (torch.zeros(5), [([0, 1], [1, 2])] * 2, {}, r"got \[1\] in both"),
        ({"x": torch.zeros(5)}, 2, {}, "data must be a tensor.* got dict"),
        (torch.tensor(1.0), 2, {}, "data must be a tensor"),
        ((torch.zeros(5), torch.zeros(4)), 2, {}, r"one length; got \[5, 4\]"),
        (5, 2, {}, "data must be a tensor"),
        (torch.zeros(9), 3, {"batch_size": 7}, "smallest fold, 6; got 7"),
    ],
)
def test_wrong_data_are_named(data, folds, settings, message):
    with pytest.raises(br.Error, match=message):
        fold_batches(data, folds, **settings)


def test_a_batch_of_all_rows_is_made_once():
    batches = FoldBatches(torch.arange(6), [torch.tensor([0, 1]), torch.tensor([2, 3])])
    assert next(iter(batches))[0] is next(iter(batches))[0]


# --- what a minimum leaves behind -------------------------------------------------------------------------


def shifted(n=20):
    generator = torch.Generator().manual_seed(11)
    x = 4.0 + torch.randn(n, 2, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -1.0], dtype=torch.float64)
    return x, y + 0.2 * torch.randn(n, generator=generator, dtype=torch.float64)


def normed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 1)).double()
    decay = br.hyperparameters.WeightDecay(model, per="global", exclude=["*bias"], initial=0.1)
    return model, decay.double()


@pytest.mark.parametrize("pieces", [1, 2])
def test_running_statistics_are_those_of_the_batches_at_the_minimum(pieces):
    (x, y), (model, decay) = shifted(), normed()
    problem = br.Problem(model, decay, penalised_squares, squared_error)
    batch = (x, y) if pieces == 1 else br.Batches([(x[:10], y[:10]), (x[10:], y[10:])])
    Minimise()(problem, batch)
    parts = [x] if pieces == 1 else [x[:10], x[10:]]
    means, variances = ([f(part) for part in parts] for f in (lambda a: a.mean(0), lambda a: a.var(0)))
    assert torch.allclose(model[0].running_mean, sum(means) / pieces)
    assert torch.allclose(model[0].running_var, sum(variances) / pieces)
    assert model[0].momentum == 0.1
    first = {n: b.clone() for n, b in model.named_buffers()}
    Minimise()(problem, batch)  # no step is left; another call moves nothing
    assert all(torch.allclose(b, first[n]) for n, b in model.named_buffers())


def test_a_fold_with_batch_norm_has_the_loss_of_ridge_on_normalised_rows():
    (x, y), (model, decay) = shifted(), normed()
    found = br.cross_validate(model, decay, penalised_squares, squared_error, (x, y), 4, hyper_steps=1)
    losses = []
    for train, val in KFold(4).split(x):
        mean, biased, unbiased = x[train].mean(0), x[train].var(0, correction=0), x[train].var(0)
        z = (x[train] - mean) / (biased + 1e-5).sqrt()
        ridge = Ridge(alpha=0.1 * len(train)).fit(z, y[train])
        predicted = ridge.predict((x[val] - mean) / (unbiased + 1e-5).sqrt())
        losses.append(mean_squared_error(y[val], predicted))
    assert found.history[0]["val_loss"] == pytest.approx(np.mean(losses), rel=1e-8)
    z = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
    ridge = Ridge(alpha=rate_of(decay) * len(x)).fit(z, y)
    assert torch.allclose(model[1].weight[0], torch.from_numpy(ridge.coef_), atol=1e-6)
    assert torch.allclose(model[0].running_mean, x.mean(0))


@pytest.mark.parametrize(
    "loss", [F.l1_loss, lambda a, b: F.relu(1.0 - a * b.sign()).mean()], ids=["l1", "hinge"]
)
def test_an_end_at_a_kink_is_told(loss):
    (x, y), (model, decay) = shifted(), linear(2, 2, 0.01)

    def kinked(model, hyper, batch):
        return loss(model(batch[0])[:, 0], batch[1]) + hyper(model)

    problem = br.Problem(model.double(), decay.double(), kinked, squared_error)
    with pytest.warns(
        br.BestResponseWarning, match="1 of 1 ended where the next step still promised to lower it"
    ):
        Minimise()(problem, (x, y))


def test_an_end_after_too_few_steps_is_told():
    torch.manual_seed(0)
    x, y = shifted()
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    decay = br.hyperparameters.WeightDecay(model, per="global", initial=1e-2)
    problem = br.Problem(model, decay, penalised_squares, squared_error)
    with pytest.warns(br.BestResponseWarning, match="raise max_steps"):
        Minimise(max_steps=3)(problem, (x, y))


def test_steps_within_the_tolerance_are_told():
    (x, y), (model, decay) = shifted(), linear(2, 2, 0.3)
    data, before = (x, y), rate_of(decay)
    with pytest.warns(br.BestResponseWarning, match="moved no hyperparameter by more than tolerance=0.01"):
        found = br.cross_validate(
            model.double(),
            decay,
            penalised_squares,
            squared_error,
            data,
            4,
            hyper_optimizer=lambda p: torch.optim.Adam(p, 0.01),
        )
    assert len(found.history) == 1
    assert rate_of(found.hyper) == before
