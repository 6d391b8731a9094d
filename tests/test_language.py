import lzma
import math

import pytest
import torch
from torch import nn

import bestresponse as br
from bestresponse.experiments import language, text
from bestresponse.experiments.language import LanguageModel, Layer, Regulariser, perplexity
from bestresponse.testing import check_curvature, check_method


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_it_has_the_papers_sizes():
    assert count(Regulariser(650)) == 7
    assert count(Regulariser(650, many=True, penalties=False)) == 1_691_951
    assert count(Regulariser(650, many=True, layers=2)) == 3_381_951 + 2
    model = LanguageModel(10_000, 650, 40)
    hyper = model.rates
    problem = br.Problem(model, hyper, language.train_loss, language.val_loss)
    assert sum(w.numel() for w in problem.weights.values()) == 13_280_400
    assert sum(p.numel() for p in problem.hyperparameters.values()) == 7


def test_a_layer_is_torchs_lstm():
    """With the gates in another order."""
    ours, theirs = Layer(3, 4), nn.LSTM(3, 4)
    order = [0, 1, 3, 2]  # input, forget, candidate, output
    with torch.no_grad():
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            blocks = getattr(ours, name).chunk(4)
            getattr(theirs, f"{name}_l0").copy_(torch.cat([blocks[i] for i in order]))
    x, state = torch.randn(5, 2, 3), (torch.randn(2, 4), torch.randn(2, 4))
    outputs, (h, c) = ours(x, state, ours.weight_hh)
    expected, (h_, c_) = theirs(x, (state[0][None], state[1][None]))
    for one, other in ((outputs, expected), (h, h_[0]), (c, c_[0])):
        assert torch.allclose(one, other, rtol=1e-10)


def small(many=False, words=7, units=3):
    model = LanguageModel(words, units, 2, rates=Regulariser(units, many, initial=0.3, layers=2))
    batches = [tuple(torch.randint(words, (4, 2)) for _ in range(2)) for _ in range(3)]
    return br.Problem(model, model.rates, language.train_loss, language.val_loss), batches


@pytest.mark.parametrize("many", [pytest.param(False, marks=pytest.mark.slow), True])
def test_second_derivatives(many):
    problem, batches = small(many, words=4, units=2)
    check_curvature(br.Hessian(), problem, batches[0])
    check_method(br.Implicit(br.ConjugateGradient(3, damping=10.0)), problem, *batches[:2])


def test_the_state_is_carried_and_a_hypergradient_leaves_it():
    problem, batches = small()
    model = problem.model
    torch.manual_seed(0)
    first, _, _, _ = model(batches[0][0])
    carried = model.carried.clone()
    assert carried.shape == (2, 2, 2, 3)
    assert not carried.requires_grad
    assert float(carried.abs().max()) > 0
    torch.manual_seed(0)
    again, _, _, _ = model(batches[0][0])
    assert not torch.equal(first, again)  # it began from another state
    kept = model.carried.clone()
    br.hypergradient(problem, batches[0], batches[1], br.Implicit(br.Identity()))
    assert torch.equal(model.carried, kept)
    model.eval()
    one, other = model(batches[0][0])[0], model(batches[0][0])[0]
    assert torch.equal(one, other)
    assert torch.equal(model.carried, kept)


def test_perplexity_is_that_of_the_whole_stream():
    problem, _ = small()
    model = problem.model
    stream = torch.randint(7, (50,))
    parts = [perplexity(model, text.sequences(stream, 2, length)) for length in (3, 7, 24)]
    assert parts == pytest.approx([parts[0]] * 3, rel=1e-10)
    model.eval()
    table = text.columns(stream, 2)
    loss = language.val_loss(model, None, (table[:-1], table[1:]))
    assert parts[0] == pytest.approx(math.exp(float(loss.detach())), rel=1e-10)
    assert model.training is False


def test_dropout_is_in_every_place():
    """With a rate near one in a place, what it drops is gone, and the same over time."""
    for place in ("input", "hidden", "output"):
        problem, batches = small(many=True)
        with torch.no_grad():
            for p in problem.hyper.parameters():
                p.fill_(-6.9)
            problem.hyper.places[place].logit[1] = 12.0
        seen = []
        handle = problem.hyper.places[place].register_forward_hook(lambda m, x, y, s=seen: s.append(y / x[0]))
        problem.model(batches[0][0])
        handle.remove()
        (ratio,) = seen
        assert torch.allclose(ratio, ratio[:1].expand_as(ratio))
        assert float(ratio[..., 0].mean().detach()) == pytest.approx(1.0, abs=0.2)
    problem, batches = small()
    with torch.no_grad():
        for p in problem.hyper.parameters():
            p.fill_(-6.9)
    calm = problem.model(batches[0][0])[0]
    with torch.no_grad():
        problem.hyper.recurrent[0].logit.fill_(0.0)
    assert float((problem.model(batches[0][0])[0] - calm).detach().abs().max()) > 1e-4


def test_penalties_are_their_formulas():
    rates = Regulariser(3)
    with torch.no_grad():
        rates.log_penalties["activation"].fill_(math.log(2.0))
        rates.log_penalties["temporal"].fill_(math.log(3.0))
    dropped, outputs = torch.randn(4, 2, 3), torch.randn(4, 2, 3)
    expected = 2 * dropped.square().mean() + 3 * (outputs[1:] - outputs[:-1]).square().mean()
    assert torch.allclose(rates.penalty(dropped, outputs), expected)
    assert float(Regulariser(3, penalties=False).penalty(dropped, outputs)) == 0.0
    assert bool(rates.penalty(dropped[:1], outputs[:1]).isfinite())


def write_ptb(folder, packed):
    texts = {
        "train": "the cat sat\nthe dog sat\n" * 4,
        "valid": "the cat ran\n" * 2,
        "test": "a dog sat\n" * 2,
    }
    for part, content in texts.items():
        if packed:
            with lzma.open(folder / f"ptb.{part}.txt.xz", "wt") as file:
                file.write(content)
        else:
            (folder / f"ptb.{part}.txt").write_text(content)


@pytest.mark.parametrize("packed", [True, False])
def test_the_penn_treebank(packed, tmp_path):
    write_ptb(tmp_path, packed)
    corpus = text.load("ptb", tmp_path)
    assert corpus.words == ("<eos>", "<unk>", "cat", "dog", "sat", "the")
    assert corpus.train[:4].tolist() == [5, 2, 4, 0]
    assert corpus.val[:4].tolist() == [5, 2, 1, 0]  # ran is not in the training text
    assert len(corpus.train) == 32
    few = text.load("ptb", tmp_path, words=3, train=16)
    assert few.words == ("<eos>", "<unk>", "sat", "the")
    assert (len(few.train), len(few.val), len(few.test)) == (16, 2, 2)
    (tmp_path / "ptb.test.txt.xz").unlink(missing_ok=True)
    (tmp_path / "ptb.test.txt").unlink(missing_ok=True)
    with pytest.raises(br.Error, match=r"Penn TreeBank needs the file ptb.test.txt"):
        text.load("ptb", tmp_path)
    (tmp_path / "ptb.test.txt.xz").write_bytes(b"no archive")
    with pytest.raises(br.Error, match="must be whole"):
        text.load("ptb", tmp_path)


def test_the_text_that_comes_with_python():
    corpus = text.load("python", words=500)
    assert len(corpus.words) == 501
    assert len(corpus.train) > 40_000
    assert min(len(corpus.val), len(corpus.test)) > 3_000
    assert int(corpus.train.max()) < 501


def test_sequences_follow_each_other():
    stream = torch.arange(23)
    pairs = text.sequences(stream, 2, 4)
    words = torch.cat([x for x, _ in pairs])
    following = torch.cat([y for _, y in pairs])
    assert torch.equal(words.T.reshape(-1), torch.cat([torch.arange(10), torch.arange(11, 21)]))
    assert torch.equal(following, words + 1)
    assert [len(x) for x, _ in pairs] == [4, 4, 2]
