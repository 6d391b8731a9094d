"""The site: a page for every document, and every public name in its API section."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

import bestresponse as br
from bestresponse import integrations, tuning
from pages import python_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ENTRIES = re.findall(
    r"^::: (\S+)", "\n".join(page.read_text("utf-8") for page in DOCS.glob("api/*.md")), re.M
)
# The full names of functions whose short name is that of a module.
FULL = {
    "bestresponse.hypergradient": "bestresponse.methods.base.hypergradient",
    "bestresponse.influence": "bestresponse.influence.influence",
    "bestresponse.search": "bestresponse.search.search",
}


def _missing(names):
    return [name for name in names if FULL.get(name, name) not in ENTRIES]


def test_each_public_name_has_its_place_in_the_api():
    public = {f"bestresponse.{name}": getattr(br, name) for name in br.__all__}
    modules = [value for value in public.values() if inspect.ismodule(value) and value is not br.callbacks]
    assert _missing(module.__name__ for module in [*modules, integrations]) == []
    shown = {
        name for module in modules for name in getattr(module, "__all__", ())
    }  # by the entry of their module
    others = [name for name, value in public.items() if not inspect.ismodule(value)]
    assert _missing(name for name in others if name.rpartition(".")[2] not in shown) == []


@pytest.mark.parametrize("module", [br.callbacks, tuning])
def test_each_class_of_a_module_without_a_list_has_its_place(module):
    """They import their classes from other files, so the site needs a line for each."""
    place = "bestresponse." + module.__name__.rpartition(".")[2]
    inside = module.__name__.rpartition(".")[0] if module is br.callbacks else module.__name__
    own = [name for name, x in vars(module).items() if inspect.isclass(x) and x.__module__.startswith(inside)]
    hidden = {"Run", "Recovering"}
    assert _missing(f"{place}.{name}" for name in own if name not in hidden) == []


def test_no_entry_names_a_thing_twice():
    assert len(ENTRIES) == len(set(ENTRIES))


def test_the_navigation_has_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("nav:")[2].partition("\nvalidation:")[0]
    listed = re.findall(r": (\S+\.md)$", navigation, re.M)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(listed) == pages | {
        "index.md",
        "examples.md",
        "contributing.md",
        "changelog.md",
        "security.md",
    }
    assert len(listed) == len(set(listed))


def test_troubleshooting_quotes_messages_that_exist():
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    quoted = re.findall(r"`([^`]*)`", " ".join(re.findall(r"^\| (.*?) \|", page, re.M)))
    messages = [text for text in quoted if len(text.split()) > 3]
    assert len(messages) > 15
    trees = (ast.parse(path.read_text("utf-8")) for path in (ROOT / "src").rglob("*.py"))
    texts = [n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    source = "\n".join(text for text in texts if isinstance(text, str))
    pieces = [piece.strip(" […]") for message in messages for piece in message.split("…")]
    assert [piece for piece in pieces if piece not in source] == []


@pytest.mark.parametrize(
    ("line", "said"), [pytest.param(0, "ok       losses: finite", marks=pytest.mark.slow), (1, "Solve: ")]
)
def test_the_python_of_troubleshooting_runs(line, said, capsys):
    torch.set_default_dtype(torch.float32)
    readme, page = (ROOT / "README.md").read_text("utf-8"), (DOCS / "troubleshooting.md").read_text("utf-8")
    (loop, *_), (block,) = (python_of(text) for text in (readme, page))
    names: dict = {}
    exec(compile(loop.partition("for step")[0], "README.md", "exec"), names)
    exec(compile(block.splitlines()[line], "troubleshooting.md", "exec"), names)
    assert said in capsys.readouterr().out
