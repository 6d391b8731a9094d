"""The rules of the layout: imports point down, the core needs torch alone, public names are documented."""

import ast
import inspect
from pathlib import Path

import pytest

import bestresponse as br

SOURCE = Path(br.__file__).parent
# Each layer may import those above it in this list, and its own.
LAYERS = [
    ["_tree", "errors"],
    ["solvers", "batches", "losses"],
    ["passes", "distributed", "hyperparameters", "memory", "parameters"],
    ["problem"],
    ["curvatures", "hypernetworks", "runs", "search", "_optuna"],
    ["verification"],
    ["methods"],
    ["tuner", "diagnostics"],
    ["testing"],
    ["experiments"],
    ["cli"],
]
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}
FILES = sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")


def layer_of(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(path):
    """The first part, below the package, of each relative import that runs when the file is imported or later."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    checking = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    depth = len(path.relative_to(SOURCE).parts)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in checking:
            continue
        if node.level == depth:
            yield from ([node.module.split(".")[0]] if node.module else [a.name for a in node.names])
        elif node.level:
            yield layer_of(path)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path):
    assert layer_of(path) in LEVEL
    above = [name for name in imported(path) if LEVEL[name] > LEVEL[layer_of(path)]]
    assert not above, f"{path.name} imports {above}, which are above it"


def test_solvers_have_never_heard_of_problems():
    for path in (SOURCE / "solvers").glob("*.py"):
        assert set(imported(path)) <= {"_tree", "errors", "solvers"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_core_imports_torch_and_the_standard_library_only(path):
    if layer_of(path) == "experiments":
        return
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        for name in names:
            assert name.split(".")[0] in {"torch", "tqdm", *__import__("sys").stdlib_module_names}


def test_public_names_are_few_and_documented():
    assert len(br.__all__) <= 40
    for name in br.__all__:
        assert inspect.getdoc(getattr(br, name)), f"{name} has no docstring"


def test_files_are_short():
    for path in FILES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= 360, f"{path.name} has {lines} lines"
