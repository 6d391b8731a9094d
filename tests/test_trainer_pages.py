"""The code of the page on trainers, as it stands."""

import re
from pathlib import Path

import pytest
import torch

from pages import python_of

PAGE = Path(__file__).parent.parent / "docs" / "trainers.md"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.parametrize(
        ("section", "packages"),
        [
            ("Lightning", ["lightning"]),
            ("Hugging Face's Trainer", ["transformers", "accelerate"]),
            ("accelerate, and loops of your own", ["accelerate"]),
        ],
    ),
]


def test_the_code_of_a_section_runs_and_tunes(section, packages, tmp_path, monkeypatch, capsys):
    for package in packages:
        pytest.importorskip(package, reason=f"needs {package}")
    if "accelerate" in packages:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    text = PAGE.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    blocks = python_of(text)
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    shown = capsys.readouterr().out
    before, after = re.search(r"validation loss ([\d.]+) → ([\d.]+)", shown).groups()
    assert float(after) < 0.8 * float(before)
