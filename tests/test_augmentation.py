import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
from bestresponse.hyperparameters import Augmenter, ExampleWeights
from bestresponse.testing import check_curvature, check_method


def awake(augmenter, scale=0.3):
    """One that changes images: its last layer begins at zero."""
    with torch.no_grad():
        for p in augmenter.last.parameters():
            p += scale * torch.randn_like(p)
    return augmenter


def test_it_has_the_papers_size_and_begins_as_the_identity():
    augmenter, x = Augmenter(), torch.randn(2, 3, 8, 8)
    assert sum(p.numel() for p in augmenter.parameters()) == 6659
    assert torch.equal(augmenter(x), x)
    noisy = Augmenter(initial=0.1)
    assert 0.01 < float((noisy(x) - noisy(x)).detach().std()) < 1.0


@pytest.mark.parametrize("initial", [0.0, 0.1])
def test_noise_has_a_derivative_where_there_is_some(initial):
    """At the identity a loss that only noise moves, the variance of a change, is stationary."""
    augmenter, x = Augmenter(1, initial=initial), torch.zeros(64, 1, 8, 8)
    (augmenter(x) - augmenter(x)).square().mean().backward()
    assert (float(augmenter.last.weight.grad.norm()) > 1e-3) == (initial > 0)


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (5, 5), (1, 3)])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_any_size(channels, depth, size):
    augmenter, x = awake(Augmenter(channels, depth, 4)), torch.randn(2, channels, *size)
    one, other = augmenter(x), augmenter(x)
    assert one.shape == x.shape
    assert not torch.equal(one, x)
    assert not torch.equal(one, other)  # the noise


def test_changes_keep_their_bound():
    augmenter, x = awake(Augmenter(bound=0.25), 50.0), torch.randn(2, 3, 8, 8)
    change = (augmenter(x) - x).detach().abs()
    assert 0.2 < float(change.max()) <= 0.25 + 1e-12
    free = awake(Augmenter(), 50.0)
    assert float((free(x) - x).detach().abs().max()) > 1.0


def augmented_problem(depth=2, smooth=False):
    """``smooth``: without kinks, which differences of a thousandth step over."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2))
    augmenter = awake(Augmenter(1, depth, 2))
    for layer in augmenter.modules() if smooth else ():
        if isinstance(layer, nn.Sequential):
            layer[1] = layer[3] = nn.Tanh()

    def val_loss(model, augmenter, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def train_loss(model, augmenter, batch):
        decay = 0.05 * sum(w.square().sum() for w in model.parameters())
        return val_loss(model, augmenter, (augmenter(batch[0]), batch[1])) + decay

    batches = [(torch.randn(n, 1, 4, 4), torch.randint(2, (n,))) for n in (6, 5)]
    return br.Problem(model, augmenter, train_loss, val_loss), *batches


def test_its_parameters_are_hyperparameters():
    problem, train, _ = augmented_problem(depth=1, smooth=True)
    check_curvature(br.Hessian(), problem, train)
    problem, train, val = augmented_problem()
    method = br.Unrolled(3, 0.2)
    check_method(method, problem, train, val)
    h = br.hypergradient(problem, train, val, method, seed=2)
    parameter = problem.hyperparameters["last.weight"].detach().view(-1)
    values = []
    for shift in (1e-5, -2e-5):
        parameter[0] += shift
        values.append(br.hypergradient(problem, train, val, method, seed=2).val_loss)
    parameter[0] += 1e-5
    difference = (values[0] - values[1]) / 2e-5
    assert float(h.total["last.weight"].view(-1)[0]) == pytest.approx(difference, rel=1e-5)


def test_weights_of_examples():
    network = nn.Linear(3, 1)
    hyper, x = ExampleWeights(network), torch.randn(7, 3)
    expected = F.softplus(network(x)[:, 0])
    assert torch.allclose(hyper(x), 7 * expected / expected.sum())
    assert float(hyper(x).mean().detach()) == pytest.approx(1.0)
    nn.init.zeros_(network.weight)
    assert torch.allclose(hyper(x), torch.ones(7))


def test_weights_of_examples_find_the_wrong_labels():
    """Labels are wrong where a third feature says so; the weights learn it."""
    x = torch.randn(200, 3)
    y = (x[:, 0] > 0).long()
    spoilt = x[:, 2] > 0.5
    y_train = torch.where(spoilt, 1 - y, y)
    model, hyper = nn.Linear(3, 2), ExampleWeights(nn.Linear(3, 1))

    def train_loss(model, hyper, batch):
        losses = F.cross_entropy(model(x), y_train, reduction="none")
        return (hyper(x) * losses).mean() + 0.01 * model.weight.square().sum()

    def val_loss(model, hyper, batch):
        return F.cross_entropy(model(x[:100]), y[:100])

    problem = br.Problem(model, hyper, train_loss, val_loss)
    weights = torch.optim.Adam(problem.weights.values(), 0.05)
    tuner = br.Tuner(problem, weights, torch.optim.Adam(hyper.parameters(), 0.05), weight_steps=3)
    tuner.fit([None], [None], 80)
    with torch.no_grad():
        found = hyper(x)
    assert float(found[spoilt].mean()) < 0.5 * float(found[~spoilt].mean())


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: Augmenter(channels=0), "Augmenter.channels"),
        (lambda: Augmenter(bound=0.0), "Augmenter.bound must be positive"),
        (lambda: Augmenter(initial=-1.0), "Augmenter.initial must be ≥ 0"),
        (lambda: Augmenter()(torch.randn(2, 1, 8, 8)), r"needs images \[N, 3, H, W\]; got \[2, 1, 8, 8\]"),
        (lambda: Augmenter()(torch.randn(3, 8, 8)), r"got \[3, 8, 8\]"),
        (lambda: ExampleWeights(nn.Linear(3, 2))(torch.randn(4, 3)), r"a score for each of 4 examples"),
    ],
)
def test_arguments(run, message):
    with pytest.raises(br.Error, match=message):
        run()
