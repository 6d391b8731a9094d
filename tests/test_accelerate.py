"""Tuning in loops of Hugging Face's accelerate."""

import pytest
import torch

import bestresponse as br
import loops
from bestresponse.integrations import Tuning

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


class Loop:
    """A loop of accelerate with tuning."""

    def __init__(self, accumulated=1, clip=None, shuffle=False, method=None):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(gradient_accumulation_steps=accumulated, cpu=True)
        self.clip = clip
        train, val = loops.data()
        one = loops.problem(loops.network())
        weights = torch.optim.SGD(one.weights.values(), 0.1)
        loader = torch.utils.data.DataLoader(train, loops.BATCH)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(one.model, weights, loader)
        hyper = torch.optim.Adam(one.hyperparameters.values(), 0.05)
        tuner = br.Tuner(one, weights, hyper, method or br.Implicit(br.Neumann(3, 0.1)), weight_steps=2)
        self.tuning = Tuning(tuner, torch.utils.data.DataLoader(val, loops.BATCH, shuffle=shuffle))
        self.accelerator.register_for_checkpointing(self.tuning)

    def run(self, epochs):
        one, tuning = self.tuning.tuner.problem, self.tuning
        with tuning:
            for _ in range(epochs):
                for batch in self.loader:
                    with self.accelerator.accumulate(self.model):
                        loss = one.train_loss(self.model, one.hyper, batch)
                        self.accelerator.backward(loss)
                        if self.clip and self.accelerator.sync_gradients:
                            both = [*self.model.parameters(), *one.hyper.parameters()]
                            self.accelerator.clip_grad_norm_(both, self.clip)
                        self.optimizer.step()
                        self.optimizer.zero_grad()
                    tuning.after_batch(batch, loss, stepped=self.accelerator.sync_gradients)
        return one.hyperparameters


@pytest.mark.parametrize(("accumulated", "clip"), [(1, None), (2, 0.3)])
def test_it_agrees_with_a_loop_by_hand(accumulated, clip):
    loop = Loop(accumulated, clip)
    found = loop.run(accumulated)
    expected = loops.by_hand(loops.problem(loops.network()), 8, 2, accumulated, clip)
    for name, rate in found.items():
        torch.testing.assert_close(rate.detach(), expected[name], rtol=1e-5, atol=1e-6)


def test_training_resumes_from_accelerates_checkpoint(tmp_path):
    torch.manual_seed(0)
    whole = Loop(shuffle=True, method=br.Implicit()).run(3)
    torch.manual_seed(0)
    half = Loop(shuffle=True, method=br.Implicit())
    half.run(1)
    half.accelerator.save_state(str(tmp_path))
    again = Loop(shuffle=True, method=br.Implicit())
    again.accelerator.load_state(str(tmp_path))
    found = again.run(2)
    assert len(again.tuning.tuner.history) == 12
    for name, rate in whole.items():
        assert torch.equal(rate, found[name])


def test_a_prepared_loader_of_validation_batches_is_refused():
    loop = Loop()
    with pytest.raises(br.Error, match="must not be prepared by accelerate"):
        Tuning(loop.tuning.tuner, loop.loader)


def test_a_tuner_saves_with_a_prepared_loader(tmp_path):
    loop = Loop()
    loop.tuning.tuner.fit(loop.loader, loop.loader, 2)
    loop.tuning.tuner.save(tmp_path / "run.pt")
    loop.tuning.tuner.load(tmp_path / "run.pt")
    assert len(loop.tuning.tuner.fit(loop.loader, loop.loader, 1)) == 3
