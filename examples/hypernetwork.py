"""Learn the weights as a function of the weight decay, and read off what other decays would give.

A hypernetwork is trained around the present decay while the decay is tuned. Then the weights for any decay nearby are
there without training them again.

    python examples/hypernetwork.py
"""

import torch
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, Tensor]


def val_loss(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0])[:, 0] - batch[1]).square().mean()


def train_loss(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    return val_loss(model, decay, batch) + decay(model)


def main() -> None:
    torch.manual_seed(0)
    truth, x = torch.randn(20), torch.randn(330, 20)
    y = x @ truth + 4.0 * torch.randn(330)
    train, val = (x[:30], y[:30]), (x[30:], y[30:])

    model = nn.Linear(20, 1, bias=False)
    decay = br.hyperparameters.WeightDecay(model, per="global", initial=0.01)
    network = br.hypernetworks.LinearHypernetwork(br.Problem(model, decay, train_loss, val_loss), scale=0.3)
    tuner = br.Tuner(
        network.problem,
        torch.optim.Adam(network.parameters(), 0.01),
        torch.optim.Adam(decay.parameters(), 0.1),
        br.Direct(),
        weight_steps=10,
        warmup_steps=500,
        callbacks=[network.recentre],
    )
    history = tuner.fit([train], [val], hyper_steps=100)
    print(f"validation loss {history[0]['val_loss']:.3f} → {history[-1]['val_loss']:.3f}")

    tuned = decay.log_decay.detach()
    for factor in (0.7, 1.0, 1.4):
        weight = network.weights({"log_decay": tuned + torch.tensor(factor).log()})["weight"][0]
        loss = (val[0] @ weight - val[1]).square().mean()
        print(f"decay {factor * float(tuned.exp()):.3f}: validation loss {float(loss):.3f}")
    network.write_()  # copy the weights for the tuned decay into the model


if __name__ == "__main__":
    main()
