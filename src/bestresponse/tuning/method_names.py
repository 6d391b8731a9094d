"""Methods by their text, as ``--method`` and `diagnostics.check` write them: ``Implicit(Neumann(20))``."""

import ast
import inspect
from typing import Any

from .. import curvatures, methods, solvers
from ..curvatures import Curvature
from ..errors import Error, nearest
from ..methods import Implicit, Method, rules
from ..solvers import Solver


def _classes() -> dict[str, type]:
    """The methods, solvers, curvatures and rules that a text may name."""
    kinds = (Method, Solver, Curvature, rules.Rule)
    found = {n: x for part in (methods, solvers, curvatures, rules) for n, x in vars(part).items()}
    return {
        name: x
        for name, x in found.items()
        if isinstance(x, type) and issubclass(x, kinds) and not inspect.isabstract(x)
    }


def method_of(text: str) -> Method:
    """The method that a text describes: a name, or a call with numbers, texts and further calls as arguments.

    A solver alone means `Implicit` with this solver; ``gmres`` means ``Implicit(solvers.GMRES())``.

    Raises:
        Error: the text is no such call, a name is unknown, or an argument does not fit.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise Error(_message(text)) from error
    value = _value(tree, text)
    if isinstance(value, Solver):
        return Implicit(value)
    if isinstance(value, Curvature):
        return Implicit(curvature=value)
    if not isinstance(value, Method):
        raise Error(_message(text))
    return value


def _value(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _made(name, [], {})
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=given, keywords=named):
            return _made(
                name, [_value(x, text) for x in given], {str(k.arg): _value(k.value, text) for k in named}
            )
    raise Error(_message(text))


def _made(name: str, given: list[Any], named: dict[str, Any]) -> Any:
    known = _classes()
    kind = {each.lower(): x for each, x in known.items()}.get(name.replace("_", "").lower())
    if kind is None:
        raise Error(
            f"--method knows no {name!r}.{nearest(name, known)} The names are {', '.join(sorted(known))}."
        )
    try:
        return kind(*given, **named)
    except TypeError as error:
        parameters = inspect.signature(kind).parameters.values()
        names = [p.name if p.default is p.empty else f"{p.name}=…" for p in parameters]
        raise Error(
            f"--method has the wrong arguments for {kind.__name__}({', '.join(names)}): {error}. A method that needs "
            "functions goes into Setup(method=...)."
        ) from error


def _message(text: str) -> str:
    return (
        f"--method must be a name or a call such as 'Implicit(Neumann(20))' or 'Unrolled(10, 0.1)'; got {text!r}. "
        "Quote it, since the shell reads brackets."
    )
