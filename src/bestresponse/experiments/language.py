"""An LSTM language model with dropout in all its places, whose rates are hyperparameters: the paper's section 5.5."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestresponse as br

from ..hyperparameters import ConcreteDropout, DropConnect

Batch = tuple[Tensor, Tensor]
Pair = tuple[Tensor, Tensor]
State = list[Pair]

_PATIENCE = 5


class Regulariser(nn.Module):
    """The dropout rates of a `LanguageModel`, and the weights of its activation penalties.

    Args:
        units: of the model.
        many: one rate for each unit and each hidden-to-hidden weight, and one for the words (1,691,951 with 650 units),
            in place of one rate for each place and the two penalties (7).
        initial: of the rates.
    """

    def __init__(self, units: int, many: bool = False, initial: float = 0.5) -> None:
        super().__init__()
        shape = (units,) if many else ()
        self.places = nn.ModuleDict(
            {name: ConcreteDropout(shape, initial, shared=(0,)) for name in ("input", "hidden", "output")}
        )
        self.words = ConcreteDropout((), initial, shared=(1,))
        # One layer's, and the same for each.
        self.recurrent = DropConnect((4 * units, units) if many else (), initial)
        penalties = {name: torch.tensor(0.0) for name in ("activation", "temporal")}
        self.log_penalties = None if many else nn.ParameterDict(penalties)

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Where to search the penalties; the rates declare their own."""
        names = [] if self.log_penalties is None else list(self.log_penalties)
        return {f"log_penalties.{name}": (-5.0, 1.0) for name in names}

    def penalty(self, dropped: Tensor, outputs: Tensor) -> Tensor:
        """α mean(dropped²) + β mean((h_{t+1} − h_t)²), of the last layer's outputs after and before dropout."""
        if self.log_penalties is None:
            return dropped.new_zeros(())
        change = outputs[1:] - outputs[:-1]
        activation, temporal = (self.log_penalties[name].exp() for name in ("activation", "temporal"))
        smooth = change.square().mean() if len(change) else change.sum()
        total: Tensor = activation * dropped.square().mean() + temporal * smooth
        return total


class Layer(nn.Module):
    """One LSTM layer in plain operations, which have second derivatives everywhere.

    The inputs of all time steps meet their weights in one product; each step is one more, and three pointwise
    operations. The four gates are in the order input, forget, output, candidate.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(units)
        self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh = (
            nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
            for shape in ((4 * units, inputs), (4 * units, units), (4 * units,), (4 * units,))
        )

    def forward(self, x: Tensor, state: Pair, weight_hh: Tensor) -> tuple[Tensor, Pair]:
        """Outputs [T, B, units] and the last state, from inputs [T, B, inputs] and the state before."""
        h, c = state
        outputs, turned = [], weight_hh.t()
        for z in F.linear(x, self.weight_ih, self.bias_ih + self.bias_hh).unbind(0):
            gates, candidate = torch.split(torch.addmm(z, h, turned), [3 * h.shape[1], h.shape[1]], dim=1)
            i, f, o = gates.sigmoid().chunk(3, dim=1)
            c = f * c + i * candidate.tanh()
            h = o * c.tanh()
            outputs.append(h)
        return torch.stack(outputs), (h, c)


class LanguageModel(nn.Module):
    """Words to logits of the words that follow: embeddings, LSTM layers, and the embeddings again as the decoder.

    13,280,400 weights with 10,000 words, 650 units and two layers. In training mode the hidden state is
    carried from batch to batch, in a buffer; in eval mode each batch starts from zeros, or from a state that is given.

    Args:
        words: of the vocabulary.
        units: of each layer, and of the embeddings.
        batch: sequences in a training batch, whose state is carried; batches of any other size start from zeros.
        layers: how many.
        rates: None makes a `Regulariser` with one rate for each place.

    Reference: Merity, Keskar and Socher (2018); tied embeddings, Press and Wolf (2017).
    """

    carried: Tensor

    def __init__(
        self, words: int, units: int, batch: int = 0, layers: int = 2, rates: Regulariser | None = None
    ) -> None:
        super().__init__()
        self.rates = rates or Regulariser(units)
        self.units = units
        self.embedding = nn.Parameter(torch.empty(words, units).uniform_(-0.1, 0.1))
        self.bias = nn.Parameter(torch.zeros(words))
        self.layers = nn.ModuleList(Layer(units, units) for _ in range(layers))
        self.register_buffer("carried", torch.zeros(layers, 2, batch, units))

    def forward(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State, Tensor, Tensor]:
        """Logits [T, B, words], the last state, and the last layer's outputs after and before dropout.

        Without a state to start from, words [T, B] follow what was carried, or zeros.
        """
        carries = self.training and self.carried.shape[2] == words.shape[1]
        if state is None:
            zeros = self.embedding.new_zeros(words.shape[1], self.units)
            state = [(h, c) for h, c in self.carried] if carries else [(zeros, zeros)] * len(self.layers)
        x = self.rates.places["input"](F.embedding(words, self.rates.words(self.embedding)))
        last: State = []
        for number, layer in enumerate(self.layers):
            outputs, kept = layer(x, state[number], self.rates.recurrent(layer.weight_hh))
            last.append(kept)
            place = "output" if number == len(self.layers) - 1 else "hidden"
            x = self.rates.places[place](outputs)
        if carries:
            self.carried = torch.stack([torch.stack(pair) for pair in last]).detach()
        logits = F.linear(x, self.embedding, self.bias)
        return logits, last, x, outputs


def train_loss(model: LanguageModel, rates: Regulariser, batch: Batch) -> Tensor:
    """Cross-entropy of the following words, and the activation penalties."""
    logits, _, dropped, outputs = model(batch[0])
    fit = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
    return fit + rates.penalty(dropped, outputs)


def val_loss(model: LanguageModel, rates: Any, batch: Batch) -> Tensor:
    """Cross-entropy."""
    return F.cross_entropy(model(batch[0])[0].flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def perplexity(model: LanguageModel, batches: list[Batch]) -> float:
    """Exp of the mean cross-entropy over a stream's batches in order, with the state carried from one to the next."""
    was, state, total, count = model.training, None, 0.0, 0
    model.eval()
    for words, following in batches:
        logits, state, _, _ = model(words, state)
        total += float(F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum"))
        count += following.numel()
    model.train(was)
    return math.exp(min(total / count, 700.0))


class Falling:
    """A quarter of the learning rate where validation is worse than the best of all but the last five measurements."""

    def __init__(self) -> None:
        self._seen: list[float] = []

    def __call__(self, tuner: br.Tuner) -> None:
        value = tuner.history[-1].get("val_perplexity")
        if value is None:
            return
        if len(self._seen) > _PATIENCE and value > min(self._seen[:-_PATIENCE]):
            assert isinstance(tuner.weight_optimizer, torch.optim.Optimizer)
            for group in tuner.weight_optimizer.param_groups:
                group["lr"] /= 4.0
            self._seen = []
        self._seen.append(value)

    def state_dict(self) -> dict[str, Any]:
        """The measurements since the rate fell."""
        return {"seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict`."""
        self._seen = list(state["seen"])
