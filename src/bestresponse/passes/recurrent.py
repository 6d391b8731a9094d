"""Recurrent layers by plain operations: cuDNN's have no second derivative, and oneDNN's is slow."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .tensors import Own, eager

State = tuple[Tensor, ...]


class _Weights(NamedTuple):
    """Those that a state meets in one layer and direction."""

    of_state: Tensor  # transposed
    bias: Tensor | None  # of a GRU alone; others have it in what the input adds
    projection: Tensor | None


# The state after one more step; the tensor is what the input adds to the gates.
Step = Callable[[Tensor, State, _Weights], State]


def lstm_step(gates: Tensor, state: State, weights: _Weights) -> State:
    """The state (h, c), with h or its projection as hidden state."""
    i, f, g, o = torch.addmm(gates, state[0], weights.of_state).unsafe_chunk(4, 1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h if weights.projection is None else F.linear(h, weights.projection), c


def gru_step(gates: Tensor, state: State, weights: _Weights) -> State:
    """H alone."""
    of_state = state[0] @ weights.of_state
    of_state = of_state if weights.bias is None else of_state + weights.bias
    (r, z, n), (of_r, of_z, of_n) = gates.unsafe_chunk(3, 1), of_state.unsafe_chunk(3, 1)
    n = (n + (r + of_r).sigmoid() * of_n).tanh()
    return (n + (z + of_z).sigmoid() * (state[0] - n),)


def rnn_step(activation: Callable[[Tensor], Tensor]) -> Step:
    """H alone."""

    def step(gates: Tensor, state: State, weights: _Weights) -> State:
        return (activation(torch.addmm(gates, state[0], weights.of_state)),)

    return step


def recurrent(step: Step, wanted: Callable[[Tensor, bool], bool]) -> Callable[..., Any]:
    """The form of a function such as ``torch.lstm``, where it is ``wanted`` for this input in training mode or not."""

    def form(own: Own, *arguments: Any, **named: Any) -> Any:
        call = _Call(arguments, named)
        x, params = call.input, call["params"]
        if not eager([x, *params]) or not wanted(x, call["train"]):
            return own()
        return call.run(step)

    return form


_SHARED = ("hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_FULL, _PACKED = ("input", *_SHARED, "batch_first"), ("data", "batch_sizes", *_SHARED)


class _Call(dict[str, Any]):
    """The arguments of a recurrent function, which takes sequences as one tensor or packed."""

    def __init__(self, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        full = "batch_first" in named or (len(arguments) > 3 and isinstance(arguments[3], bool))
        super().__init__(zip(_FULL if full else _PACKED, arguments, strict=False), **named)
        self.input: Tensor = self["input"] if full else self["data"]
        self.sizes = None if full else self["batch_sizes"].tolist()

    def run(self, step: Step) -> tuple[Tensor, ...]:
        """The outputs, and the last states of all layers."""
        transposed = self.get("batch_first", False)
        x = self.input.transpose(0, 1) if transposed else self.input
        starts: State = (self["hx"],) if isinstance(self["hx"], Tensor) else tuple(self["hx"])
        directions = 1 + self["bidirectional"]
        ends: list[State] = []
        for layer in range(self["num_layers"]):
            outputs = []
            for backwards in range(directions):
                gates, weights = self._gates(x, len(ends), step is gru_step)
                parts = gates.unbind() if self.sizes is None else torch.split(gates, self.sizes)
                found, end = _scan(step, parts, tuple(s[len(ends)] for s in starts), weights, bool(backwards))
                outputs.append(torch.stack(found) if self.sizes is None else torch.cat(found))
                ends.append(end)
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if self["dropout"] and self["train"] and layer + 1 < self["num_layers"]:
                x = F.dropout(x, self["dropout"])
        x = x.transpose(0, 1) if transposed else x
        return x, *(torch.stack(states) for states in zip(*ends, strict=True))

    def _gates(self, x: Tensor, number: int, apart: bool) -> tuple[Tensor, _Weights]:
        """What the inputs add to the gates of a layer, with both biases or with their own apart from the state's."""
        params = self["params"]
        each = len(params) // (self["num_layers"] * (1 + self["bidirectional"]))
        of_input, of_state, *more = params[number * each : (number + 1) * each]
        projection = more.pop() if each % 2 else None
        bias, of_states = more or (None, None)
        if bias is not None and not apart:
            bias, of_states = bias + of_states, None
        return F.linear(x, of_input, bias), _Weights(of_state.t(), of_states, projection)


def _scan(
    step: Step, gates: Sequence[Tensor], start: State, weights: _Weights, backwards: bool
) -> tuple[list[Tensor], State]:
    """The outputs of all steps and the last state; with packed sequences, later steps have fewer sequences."""
    outputs, ended = [], []
    state = tuple(s[: len(gates[-1])] for s in start) if backwards else start
    for part in reversed(gates) if backwards else gates:
        size, before = part.shape[0], state[0].shape[0]
        if size > before:
            state = tuple(torch.cat([s, new[before:size]]) for s, new in zip(state, start, strict=True))
        elif size < before:
            ended.append(tuple(s[size:] for s in state))
            state = tuple(s[:size] for s in state)
        state = step(part, state, weights)
        outputs.append(state[0])
    for rest in reversed(ended):
        state = tuple(torch.cat(pair) for pair in zip(state, rest, strict=True))
    return outputs[::-1] if backwards else outputs, state
