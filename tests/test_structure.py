"""The rules of the layout: imports point down, the core needs torch alone, public names are documented."""

import ast
import inspect
import sys
from pathlib import Path

import bestresponse as br

SOURCE = Path(br.__file__).parent
# Each layer may import those above it in this list, and its own.
LAYERS = [
    ["_tree", "_layout", "_files", "errors"],
    ["solvers", "batches", "losses", "reports"],
    [
        "passes",
        "distributed",
        "sharded",
        "parallel_models",
        "hyperparameters",
        "memory",
        "parameters",
        "parts",
    ],
    ["problem"],
    ["curvatures", "hypernetworks", "runs", "search", "_optuna"],
    ["verification"],
    ["methods"],
    ["tuner", "diagnostics", "influence"],
    ["testing", "cross_validation"],
    ["integrations"],
    ["experiments"],
    ["tuning"],
    ["commands"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}
FILES = sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")


def name_of(path):
    return str(path.relative_to(SOURCE))


def layer_of(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def import_nodes(path):
    """Each ``from ... import ...`` that runs when the file is imported or later."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    checking = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    return [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and id(n) not in checking]


def imported(path):
    """The first part, below the package, of each relative import that runs when the file is imported or later."""
    depth = len(path.relative_to(SOURCE).parts)
    for node in import_nodes(path):
        if node.level == depth:
            yield from ([node.module.split(".")[0]] if node.module else [a.name for a in node.names])
        elif node.level:
            yield layer_of(path)


def test_imports_point_down():
    unknown = sorted({layer_of(p) for p in FILES} - LEVEL.keys())
    assert not unknown, f"give {unknown} a place in LAYERS"
    upwards = [
        f"{name_of(path)} imports {name}"
        for path in FILES
        for name in imported(path)
        if LEVEL[name] > LEVEL[layer_of(path)]
    ]
    assert not upwards, "\n".join(["imports must point down:", *upwards])


def test_there_are_no_circles():
    below = {name: set() for name in LEVEL}
    for path in FILES:
        below[layer_of(path)] |= set(imported(path)) - {layer_of(path)}
    while free := [name for name, others in below.items() if not others]:
        below = {name: others - set(free) for name, others in below.items() if name not in free}
    assert not below, f"these import each other, or what does: {below}"


def files_imported(path):
    """The files of the package that a file imports; a folder's is its ``__init__.py``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import) and "bestresponse" in {alias.name for alias in node.names}:
            yield SOURCE / "__init__.py"
    for node in import_nodes(path):
        if not node.level:
            continue
        folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        if not folder.is_dir():
            yield folder.with_suffix(".py")
            continue
        for alias in node.names:
            file, inner = folder / f"{alias.name}.py", folder / alias.name / "__init__.py"
            yield next((place for place in (file, inner) if place.is_file()), folder / "__init__.py")


def test_no_modules_import_each_other_in_a_circle():
    """Imports within functions count; those for the type checker alone do not."""
    below = {path: set(files_imported(path)) for path in SOURCE.rglob("*.py")}
    assert not set().union(*below.values()) - below.keys()
    while free := [path for path, others in below.items() if not others]:
        below = {path: others - set(free) for path, others in below.items() if path not in free}
    left = {name_of(path): sorted(map(name_of, others)) for path, others in below.items()}
    assert not left, f"these import each other, or what does: {left}"


def test_solvers_have_never_heard_of_problems():
    foreign = {
        name_of(path): others
        for path in (SOURCE / "solvers").glob("*.py")
        if (others := set(imported(path)) - {"_tree", "errors", "solvers"})
    }
    assert not foreign, f"a solver may import _tree and errors alone: {foreign}"


def test_the_core_imports_torch_and_the_standard_library_only():
    allowed = {"torch", "tqdm", *sys.stdlib_module_names}
    late = {"integrations/lightning.py", "integrations/transformers.py"}  # imported when their names are used
    foreign = {
        name_of(path): others
        for path in FILES
        if layer_of(path) != "experiments"
        and name_of(path) not in late
        and (others := absolute(path) - allowed)
    }
    assert not foreign, f"import these where they are used: {foreign}"


def absolute(path):
    """The first part of each absolute import that runs when the file is imported."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_public_names_are_few_and_documented():
    assert len(br.__all__) <= 45
    bare = [name for name in br.__all__ if not inspect.getdoc(getattr(br, name))]
    assert not bare, f"these have no docstring: {bare}"


def test_files_are_short():
    lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    long = {name: count for name, count in lines.items() if count > 300}
    assert not long, f"a file has at most 300 lines; got {long}"
