"""Hugging Face's GPT-2 and Llama with their default attention: hypergradients are those of plain operations."""

import pytest
import torch
import torch.nn.functional as F

import bestresponse as br
from bestresponse.passes import attention, attention_blocks

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.slow


def gpt2():
    settings = transformers.GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(settings)


def llama():
    settings = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(settings)


def hypergradient(make, method, padded, checkpointed):
    torch.manual_seed(0)
    model = make().double()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert model.config._attn_implementation == "sdpa"
    words = torch.randint(40, (3, 12))
    mask = torch.ones_like(words)
    if padded:
        mask[0, 8:] = 0
        mask[1, :3] = 0
    labels = words.masked_fill(mask == 0, -100)
    decay = br.hyperparameters.WeightDecay(model, initial=0.1, per="tensor").double()

    def loss(m, h, b):
        return m(input_ids=b, attention_mask=mask, labels=labels).loss

    problem = br.Problem(model, decay, lambda m, h, b: loss(m, h, b) + h(m), loss)
    result = br.hypergradient(problem, words, words, method)
    return torch.cat([t.flatten() for t in result.total.values()]), result


@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_outputs_are_found_in_the_loss_of_the_model(make, verifying):
    torch.manual_seed(0)
    model, words = make().double(), torch.randint(40, (3, 12))
    decay = br.hyperparameters.WeightDecay(model, initial=0.1, per="tensor").double()

    def loss(m, h, b):
        return m(input_ids=b, labels=b).loss

    def of_logits(logits, b):  # which these models take to float32
        return F.cross_entropy(logits.float()[:, :-1].flatten(0, 1), b[:, 1:].flatten())

    problem = br.Problem(model, decay, lambda m, h, b: loss(m, h, b) + h(m), loss)
    given = br.GaussNewton(lambda m, h, b: m(input_ids=b).logits, of_logits, decay)
    solver = br.ConjugateGradient(3, damping=0.1)
    found, expected = (
        br.hypergradient(problem, words, words, br.Implicit(solver, curvature))
        for curvature in (br.GaussNewton(), given)
    )
    assert found.verification == "verified"
    for name, x in expected.total.items():
        torch.testing.assert_close(found.total[name], x, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("checkpointed", [False, True], ids=["whole", "checkpointed"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_hypergradients(make, padded, checkpointed, monkeypatch, verifying):
    method = br.Implicit(br.ConjugateGradient(3, damping=100.0))  # which the negative curvature needs
    expected, _ = hypergradient(make, method, padded, False)
    used = []
    run = attention_blocks.Attention.__call__
    monkeypatch.setattr(attention_blocks.Attention, "__call__", lambda *a: used.append(1) or run(*a))
    monkeypatch.setattr(attention, "_SMALL", 0)
    monkeypatch.setattr(attention_blocks, "_CPU", 64)
    monkeypatch.setattr(attention_blocks, "_FEWEST_ROWS", 4)
    found, result = hypergradient(make, method, padded, checkpointed)
    assert used
    assert result.verification == "verified"
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
