"""Hyperparameters as files that are read without the library."""

import json
import math
import random
import subprocess
import sys

import pytest
import torch
from torch import nn

import bestresponse as br
from bestresponse import hyperparameters

safetensors = pytest.importorskip("safetensors.torch")


def model():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def several():
    torch.manual_seed(0)
    hyper = nn.ModuleDict(
        {
            "decay": hyperparameters.WeightDecay(model(), per="tensor", initial=0.01),
            "drop": hyperparameters.ConcreteDropout(4, initial=0.25),
            "weights": hyperparameters.Weights(5, initial=2.0),
            "inner": nn.ParameterDict({"log_rate": nn.Parameter(torch.tensor(-3.0))}),
        }
    )
    hyper.register_buffer("count", torch.tensor(7))
    return hyper


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_saved_is_loaded(tmp_path, dtype):
    hyper, path = several().to(dtype), tmp_path / "hyper.safetensors"
    with torch.no_grad():
        for p in hyper.parameters():
            p.add_(torch.rand_like(p))
    text = hyperparameters.save(hyper, path)
    assert text == tmp_path / "hyper.safetensors.json"
    other = several().to(dtype)
    hyperparameters.load(other, str(path))
    for name, x in hyper.state_dict().items():
        assert torch.equal(other.state_dict()[name], x)


def test_the_values_are_those_in_use(tmp_path):
    hyper = several()
    text = json.loads(hyperparameters.save(hyper, tmp_path / "a.safetensors").read_text())
    values = text["values"]
    assert values["decay.0.weight"] == pytest.approx(0.01)
    assert values["drop.values"] == pytest.approx([0.25] * 4)
    assert values["weights.values"] == pytest.approx([2.0] * 5)
    assert values["inner.log_rate"] == pytest.approx(-3.0)
    assert not any("log_decay" in name or "logit" in name for name in values)
    stored = safetensors.load_file(tmp_path / "a.safetensors")
    assert float(stored["values.decay.0.weight"]) == pytest.approx(0.01)
    assert stored["stored.decay.log_decay.0.weight"].tolist() == pytest.approx(math.log(0.01))


def test_large_tensors_are_short_in_the_text(tmp_path):
    hyper = hyperparameters.Weights(2_000)
    with torch.no_grad():
        hyper.table[0] = math.nan
    values = json.loads(hyperparameters.save(hyper, tmp_path / "a.safetensors").read_text())["values"][
        "values"
    ]
    assert values["shape"] == [2_000]
    assert values["tensor"] == "values.values"
    assert values["mean"] is None


def test_a_training_without_this_library(tmp_path):
    """The file is enough for the same penalty elsewhere."""
    torch.manual_seed(3)
    net = model()
    decay = hyperparameters.WeightDecay(net, per="weight", initial=0.02)
    hyperparameters.save(decay, tmp_path / "decay.safetensors")
    torch.save(net.state_dict(), tmp_path / "net.pt")
    code = """
import sys, torch
from torch import nn
from safetensors.torch import load_file
torch.set_default_dtype(torch.float64)
net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
net.load_state_dict(torch.load("net.pt"))
decays = {n.removeprefix("values."): x for n, x in load_file("decay.safetensors").items() if n.startswith("values.")}
print(float(0.5 * sum((decays[n] * w.square()).sum() for n, w in net.named_parameters() if n in decays)))
assert "bestresponse" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == pytest.approx(float(decay(net).detach()))


def test_other_modules_and_damaged_files_are_refused_and_nothing_changes(tmp_path):
    path = tmp_path / "a.safetensors"
    hyperparameters.save(several(), path)
    other = several()
    other["decay"] = hyperparameters.WeightDecay(model(), per="weight")
    before = {n: x.clone() for n, x in other.state_dict().items()}
    with pytest.raises(br.Error, match="a module with the saved tensors; it differs in"):
        hyperparameters.load(other, path)
    assert all(torch.equal(x, before[n]) for n, x in other.state_dict().items())
    raw, rng, loaded = path.read_bytes(), random.Random(0), 0
    for place in rng.sample(range(len(raw)), 60):
        broken = bytearray(raw)
        broken[place] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        one = several()
        try:
            hyperparameters.load(one, path)
        except br.Error:
            continue
        loaded += 1
        assert all(torch.equal(x, one.state_dict()[n]) for n, x in several().state_dict().items())
    assert loaded < 10
    for content in (b"", raw[:50], raw[:-3], b"hello" * 9):
        path.write_bytes(content)
        with pytest.raises(br.Error, match="which cannot be read"):
            hyperparameters.load(several(), path)
    path.write_bytes(safetensors.save({"a": torch.ones(2)}))
    with pytest.raises(br.Error, match="which is something else"):
        hyperparameters.load(several(), path)
    for bad in (tmp_path / "none", tmp_path):
        with pytest.raises(br.Error, match="cannot be read"):
            hyperparameters.load(several(), bad)
    with pytest.raises(br.Error, match="takes a module"):
        hyperparameters.save({"a": 1}, path)
    with pytest.raises(br.Error, match="must be a path"):
        hyperparameters.save(several(), 3)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(br.Error, match=r"bestresponse\[export\]"):
        hyperparameters.save(several(), tmp_path / "a")
