"""A function mode that replaces torch's functions by forms with right and cheap second derivatives.

A mode sees all calls of torch in its own thread, by modules or not, and changes no class and no switch of torch. It
does not see calls in compiled and scripted code.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from .attention import attend
from .batch_norm import batch_norm, instance_norm, native_batch_norm, torch_batch_norm, torch_instance_norm
from .convolution import convolution, convolve
from .cross_entropy import cross_entropy
from .gelu import gelu
from .layer_norm import layer_norm, native_layer_norm
from .linear import linear
from .recurrent import gru_step, lstm_step, recurrent, rnn_step
from .tensors import computes_as_tensor
from .unread import may_hook

Form = Callable[..., Any]


@contextmanager
def second_derivatives() -> Iterator[None]:
    """Run torch's functions by their forms in this thread, if they have one."""
    with _below_others(_TWICE):
        yield


@contextmanager
def first_derivatives() -> Iterator[None]:
    """Run recurrent functions by their forms where torch's own have no first derivative."""
    with _below_others(_ONCE):
        yield


@contextmanager
def paused() -> Iterator[Callable[[Form], Form]]:
    """Run without forms; returns a wrapper that runs a function with them again.

    For work that does not need forms, such as a solver's, since a mode makes each call of torch a little slower.
    """
    modes = _modes()

    def resumed(function: Form) -> Form:
        def run(*arguments: Any) -> Any:
            with _only(modes):
                return function(*arguments)

        return run

    with _only([mode for mode in modes if not isinstance(mode, _Forms)]):
        yield resumed


@contextmanager
def _below_others(forms: Mapping[Any, Form]) -> Iterator[None]:
    """Run a call by these forms after all other modes, which therefore see the same calls as without forms."""
    before = _modes()
    if any(isinstance(mode, _Forms) and mode.forms is forms for mode in before):
        yield
        return
    mode = _Forms(forms)
    devices = [each for each in before if isinstance(each, DeviceContext)]  # which must stay the lowest
    _set_modes([*devices, mode, *(each for each in before if each not in devices)])
    try:
        yield
    finally:
        _set_modes([each for each in _modes() if each is not mode])


@contextmanager
def _only(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    before = _modes()
    _set_modes(modes)
    try:
        yield
    finally:
        _set_modes(before)


def _modes() -> list[TorchFunctionMode]:
    """The modes of this thread, the outermost first."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _set_modes(modes: Sequence[TorchFunctionMode]) -> None:
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


class _Forms(TorchFunctionMode):
    def __init__(self, forms: Mapping[Any, Form]) -> None:
        super().__init__()
        self.forms = forms

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        form = None if torch.compiler.is_compiling() else self.forms.get(function)
        if form is None:
            return function(*args, **named)
        if form not in (_inside, _backward):
            return form(partial(function, *args, **named), *args, **named)
        if not all(map(computes_as_tensor, types)):
            return function(*args, **named)
        if form is _inside:
            with self:
                return _with_globals(function, _PAST_MODES)(*args, **named)
        run = function.__globals__["_engine_run_backward"]

        def run_inside(*arguments: Any, **settings: Any) -> Any:
            with self:
                return run(*arguments, **settings)

        return _with_globals(function, {**_PAST_MODES, "_engine_run_backward": run_inside})(*args, **named)


def _inside() -> None:
    """Mark a function that runs others inside, which the mode must see."""


def _backward() -> None:
    """Mark a function whose backward pass runs others: those of checkpoints."""


# A function that dispatches itself to modes hides its inner calls from them.
_PAST_MODES = dict.fromkeys(
    ["has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"], lambda *_: False
)


def _with_globals(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """The same function with other values for some global names."""
    changed = FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


def _by_function(**forms: Form) -> dict[Any, Form]:
    """By function, in torch and in torch.ops.aten, from forms by their names."""
    found: dict[Any, Form] = {}
    for name, form in forms.items():
        packet = getattr(torch.ops.aten, name)
        variants = [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]
        found |= dict.fromkeys([packet, *variants, getattr(torch, name, packet)], form)
    return found


_INSIDE: dict[Any, Form] = {
    torch.autograd.grad: _backward,
    torch.autograd.backward: _backward,
    torch.Tensor.backward: _inside,
    F.multi_head_attention_forward: _inside,
}
_STEPS = {
    "lstm": lstm_step,
    "gru": gru_step,
    "rnn_tanh": rnn_step(torch.tanh),
    "rnn_relu": rnn_step(torch.relu),
}
# cuDNN has first derivatives in training mode only. On a CPU all but the LSTM run by plain operations anyway.
_ONCE = _INSIDE | _by_function(
    **{name: recurrent(step, lambda x, train: x.is_cuda and not train) for name, step in _STEPS.items()}
)
_OFF_CPU = {name: recurrent(step, lambda x, train: x.device.type != "cpu") for name, step in _STEPS.items()}
_TWICE = _INSIDE | _by_function(
    conv1d=convolve,
    conv2d=convolve,
    conv3d=convolve,
    convolution=convolution,
    layer_norm=layer_norm,
    native_layer_norm=native_layer_norm,
    batch_norm=torch_batch_norm,
    native_batch_norm=native_batch_norm,
    instance_norm=torch_instance_norm,
    scaled_dot_product_attention=attend,
    **_OFF_CPU | {"lstm": recurrent(lstm_step, lambda x, train: True)},
)
_TWICE |= {
    F.layer_norm: layer_norm,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.scaled_dot_product_attention: attend,
    F.cross_entropy: cross_entropy,
    F.gelu: gelu,
    F.linear: linear,
    torch.Tensor.register_hook: may_hook,
    torch.Tensor.grad_fn.__get__: may_hook,  # type: ignore[union-attr]
}
