"""A hook of mkdocs: texts outside docs/ as pages, such as the README, and a page for each file that a page links to.

Links in the repository stay those of the repository; this hook translates them into links of the site.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that have their text outside docs/."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in files.documentation_pages():
        for link in LINK.findall(page.content_string):
            target = _linked(page.src_uri, link)
            name = _page_of(target)
            if name and name.startswith("files/") and name not in files.src_uris:
                content = _shown(target)
                files.append(
                    File.generated(config, name, content=content, inclusion=InclusionLevel.NOT_IN_NAV)
                )
    return files


def _shown(target: str) -> str:
    """A file of the repository as a page: its text as code, and a notebook with its pictures."""
    text = (ROOT / target).read_text(encoding="utf-8")
    if not target.endswith(".ipynb"):
        return f"# {target}\n\n````{Path(target).suffix[1:]}\n{text}````\n"
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"````python\n{source}\n````")
        for output in cell.get("outputs", ()):
            parts += [f"````text\n{''.join(output['text'])}````"] if "text" in output else []
            if picture := output.get("data", {}).get("image/png"):
                parts.append(f"![](data:image/png;base64,{picture.strip()})")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files of the repository by links to their pages."""
    here = page.file.src_uri

    def translated(link: re.Match[str]) -> str:
        name = _page_of(_linked(here, link[1]))
        return posixpath.relpath(name, posixpath.dirname(here) or ".") if name else link[1]

    return LINK.sub(translated, markdown)


def _linked(page: str, link: str) -> str:
    """The file of the repository that a link on a page of the site means."""
    source = next((s for s, name in PAGES.items() if name == page), f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _page_of(target: str) -> str | None:
    """The site's name for a file of the repository; None if there is no such file."""
    if not (ROOT / target).is_file():
        return None
    return PAGES.get(target) or (
        target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}.md"
    )
