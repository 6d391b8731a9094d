"""An HTML page without a script and without other files: its style in both themes, and tables."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import _layout
from .recorded import is_number

_STYLE = """
:root { color-scheme: light dark; --paper: #f6f6f3; --card: #ffffff; --ink: #1d2022; --soft: #5b6167; --line: #dcdcd6;
  --mark: #fdf3dc; --s0: #1f6fa8; --s1: #c1442e; --s2: #3d8543; --s3: #b5720b; --s4: #7a5195; --s5: #64696e;
  --s6: #0f8b8d; --s7: #b0397f; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181a; --card: #1f2225; --ink: #e8e8e4; --soft: #a3a9af;
  --line: #3a3f44; --mark: #3a3118; --s0: #6db5e8; --s1: #f2866f; --s2: #84c98a; --s3: #eab354; --s4: #c3a0dc;
  --s5: #a3a9af; --s6: #5fc9cb; --s7: #ee8ec2; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.25rem 1rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; }
p { margin: .4rem 0; max-width: 46rem; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.note { background: var(--mark); border-radius: .4rem; padding: .5rem .8rem; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); }
.tiles { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); margin: 1rem 0; }
.tiles div, figure { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
.tiles div { padding: .6rem .8rem; }
.tiles strong { display: block; font-size: 1.3rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
figure { margin: 0; padding: .75rem .8rem; min-width: 0; }
figure h3 { font-size: 1rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure svg text { font-family: system-ui, sans-serif; }
figure img { display: block; width: 100%; height: auto; image-rendering: pixelated; border-radius: .25rem; }
.mosaic { display: grid; gap: .4rem; grid-template-columns: repeat(auto-fill, minmax(4.5rem, 1fr)); max-width: 62rem; }
figure.wide { grid-column: 1 / -1; }
figure.wide > img { width: auto; max-width: 100%; image-rendering: auto; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .25rem 0; padding: 0;
  font-size: .85rem; }
.legend li { overflow-wrap: anywhere; }
.legend i { display: inline-block; width: 1.4rem; border-top: 3px solid; vertical-align: middle; margin-right: .4rem; }
.legend i.dashed { border-top-style: dashed; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
tr > .number { text-align: right; white-space: nowrap; }
table.pairs { table-layout: fixed; width: 100%; }
table.pairs th { width: 38%; font-weight: 400; color: var(--soft); }
table.pairs td, table.pairs th { overflow-wrap: anywhere; }
summary { cursor: pointer; margin: .5rem 0; }
code { font-size: .9em; overflow-wrap: anywhere; }
"""


def page(title: str, *parts: str) -> str:
    """A whole page; the parts are HTML."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{text(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style>'
    )
    body = "\n".join([f"<h1>{text(title)}</h1>", *filter(None, parts)])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'
    )


def text(value: object) -> str:
    """Any value as text in HTML."""
    return html.escape(str(value))


def section(title: str, *parts: str) -> str:
    """A heading with what belongs to it; empty without parts."""
    inside = [part for part in parts if part]
    return "\n".join([f"<section><h2>{text(title)}</h2>", *inside, "</section>"]) if inside else ""


def paragraph(words: str, kind: str = "") -> str:
    """A paragraph of plain text; empty for none."""
    return f'<p class="{kind}">{text(words)}</p>' if words else ""


def grid(figures: Iterable[str]) -> str:
    """Figures beside each other where there is room; empty without figures."""
    inside = "\n".join(filter(None, figures))
    return f'<div class="grid">\n{inside}\n</div>' if inside else ""


def mosaic(images: Iterable[str]) -> str:
    """Small images beside each other."""
    return f'<div class="mosaic">{"".join(images)}</div>'


def figure(title: str, body: str, caption: str = "", wide: bool = False) -> str:
    """A picture with its title and a caption in plain text."""
    below = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f"<figure{' class=wide' if wide else ''}><h3>{text(title)}</h3>{body}{below}</figure>"


def legend(entries: Iterable[tuple[int, bool, str]]) -> str:
    """The lines of a chart: the number of the colour, whether it is dashed, and the label."""
    items = "".join(
        f'<li><i class="{"dashed" if dashed else ""}" style="color: var(--s{colour % 8})"></i>{text(label)}</li>'
        for colour, dashed, label in entries
    )
    return f'<ul class="legend">{items}</ul>'


def tiles(values: Mapping[str, str]) -> str:
    """A few large numbers with their names."""
    inside = "".join(
        f"<div><strong>{text(x)}</strong><span class=soft>{text(n)}</span></div>" for n, x in values.items()
    )
    return f'<div class="tiles">{inside}</div>' if values else ""


def pairs(values: Mapping[str, Any]) -> str:
    """A table of names and values; nested ones have names with a dot."""
    rows = "".join(
        f"<tr><th>{text(name)}</th><td>{text(shown(value))}</td></tr>" for name, value in flattened(values)
    )
    return f'<div class="scroll"><table class="pairs">{rows}</table></div>' if rows else ""


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with their keys as columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    numbers = {c for c in columns if any(is_number(row.get(c)) for row in rows)}
    head = "".join(f"<th{_of_number(c in numbers)}>{text(c)}</th>" for c in columns)
    body = "".join(
        f"<tr>{''.join(f'<td{_of_number(c in numbers)}>{text(shown(row.get(c)))}</td>' for c in columns)}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>' if rows else ""


def fold_out(title: str, body: str) -> str:
    """A part that a click opens; empty without a body."""
    return f"<details><summary>{text(title)}</summary>{body}</details>" if body else ""


def shown(value: Any) -> str:
    """A value as short text."""
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value)) or "none"
    return _layout.cell(value, digits=4)


def _of_number(number: bool) -> str:
    return " class=number" if number else ""


def flattened(values: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    """Names and values; nested names are joined by dots."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
