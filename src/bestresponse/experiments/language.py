"""An LSTM language model with dropout everywhere, whose rates are hyperparameters: the paper's section 5.5."""

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
        units: units of the model's layers.
        many: whether to have a rate for each unit and each hidden-to-hidden weight, instead of one for each place.
            The words have one rate in either case.
        initial: initial value of all rates.
        layers: the number of layers that have rates of their own for hidden-to-hidden weights, with ``many``. 1 lets
            all layers share them. With 650 units there are 1,691,951 rates then, and 3,381,951 for two layers.
        penalties: whether the weights of the two activation penalties are hyperparameters too; otherwise the model has
            no such penalties.
    """

    def __init__(
        self, units: int, many: bool = False, initial: float = 0.5, layers: int = 1, penalties: bool = True
    ) -> None:
        super().__init__()
        shape = (units,) if many else ()
        self.places = nn.ModuleDict(
            {name: ConcreteDropout(shape, initial, shared=(0,)) for name in ("input", "hidden", "output")}
        )
        self.words = ConcreteDropout((), initial, shared=(1,))
        weights = (4 * units, units) if many else ()
        self.recurrent = nn.ModuleList(DropConnect(weights, initial) for _ in range(layers if many else 1))
        both = {name: torch.tensor(0.0) for name in ("activation", "temporal")}
        self.log_penalties = nn.ParameterDict(both) if penalties else None

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Search ranges of the penalties; the rates declare their own."""
        names = [] if self.log_penalties is None else list(self.log_penalties)
        return {f"log_penalties.{name}": (-5.0, 1.0) for name in names}

    def penalty(self, dropped: Tensor, outputs: Tensor) -> Tensor:
        """α mean(dropped²) + β mean((h_{t+1} − h_t)²), for the last layer's outputs after and before dropout."""
        if self.log_penalties is None:
            return dropped.new_zeros(())
        change = outputs[1:] - outputs[:-1]
        activation, temporal = (self.log_penalties[name].exp() for name in ("activation", "temporal"))
        smooth = change.square().mean() if len(change) else change.sum()
        total: Tensor = activation * dropped.square().mean() + temporal * smooth
        return total


class Layer(nn.Module):
    """An LSTM layer made of plain operations, all of which have second derivatives.

    One product handles the inputs of all time steps; each step adds one product and a few pointwise operations. The
    order of the gates is input, forget, output, candidate.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(units)
        self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh = (
            nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
            for shape in ((4 * units, inputs), (4 * units, units), (4 * units,), (4 * units,))
        )

    def forward(self, x: Tensor, state: Pair, weight_hh: Tensor) -> tuple[Tensor, Pair]:
        """Outputs [T, B, units] and the last state, from inputs [T, B, inputs] and the first state."""
        h, c = state
        outputs, transposed = [], weight_hh.t()
        for z in F.linear(x, self.weight_ih, self.bias_ih + self.bias_hh).unbind(0):
            gates, candidate = torch.split(torch.addmm(z, h, transposed), [3 * h.shape[1], h.shape[1]], dim=1)
            i, f, o = gates.sigmoid().chunk(3, dim=1)
            c = f * c + i * candidate.tanh()
            h = o * c.tanh()
            outputs.append(h)
        return torch.stack(outputs), (h, c)


class LanguageModel(nn.Module):
    """A map from words to logits of the following words: embeddings, LSTM layers, and the embeddings as decoder.

    It has 13,280,400 weights with 10,000 words, 650 units and two layers. In training mode a buffer carries the hidden
    state from batch to batch. In eval mode each batch starts from zeros, or from a given state.

    Args:
        words: size of the vocabulary.
        units: units of each layer, and size of the embeddings.
        batch: sequences in a training batch, whose state is carried; batches of any other size start from zeros.
        layers: number of layers.
        rates: dropout and penalties; None means a `Regulariser` with one rate for each place.

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

        Without a ``state``, the words [T, B] start from the carried state or from zeros.
        """
        carries = self.training and self.carried.shape[2] == words.shape[1]
        if state is None:
            zeros = self.embedding.new_zeros(words.shape[1], self.units)
            state = [(h, c) for h, c in self.carried] if carries else [(zeros, zeros)] * len(self.layers)
        x = self.rates.places["input"](F.embedding(words, self.rates.words(self.embedding)))
        last: State = []
        for number, layer in enumerate(self.layers):
            recurrent = self.rates.recurrent[number % len(self.rates.recurrent)]
            outputs, kept = layer(x, state[number], recurrent(layer.weight_hh))
            last.append(kept)
            place = "output" if number == len(self.layers) - 1 else "hidden"
            x = self.rates.places[place](outputs)
        if carries:
            self.carried = torch.stack([torch.stack(pair) for pair in last]).detach()
        logits = F.linear(x, self.embedding, self.bias)
        return logits, last, x, outputs


def train_loss(model: LanguageModel, rates: Regulariser, batch: Batch) -> Tensor:
    """Cross-entropy of the following words plus the activation penalties."""
    logits, _, dropped, outputs = model(batch[0])
    fit = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
    return fit + rates.penalty(dropped, outputs)


def val_loss(model: LanguageModel, rates: Any, batch: Batch) -> Tensor:
    """Cross-entropy of the following words."""
    return F.cross_entropy(model(batch[0])[0].flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def perplexity(model: LanguageModel, batches: list[Batch]) -> float:
    """Exp of the mean cross-entropy over the batches of a stream, with the state carried from each to the next."""
    was, state, total, count = model.training, None, 0.0, 0
    model.eval()
    for words, following in batches:
        logits, state, _, _ = model(words, state)
        total += float(F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum"))
        count += following.numel()
    model.train(was)
    return math.exp(min(total / count, 700.0))


class Falling:
    """A callback that divides the learning rate by four when validation stops improving.

    It does so when the perplexity is worse than the best of all but the last five measurements.
    """

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
        """The measurements since the last change of the rate."""
        return {"seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._seen = list(state["seen"])
