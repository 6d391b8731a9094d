"""The site in headless Chromium: no error, no request elsewhere, both themes, and a phone's width. It needs the extras
``docs`` and ``browser`` and the system's Chromium."""

import functools
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import chromium

pytest.importorskip("mkdocstrings_handlers.python")
pytest.importorskip("material")

pytestmark = chromium.MARKS

WIDTHS, browser = chromium.WIDTHS, chromium.browser
# The elements of a page that reach over its right edge and do not scroll inside another element.
CUT = """[...document.querySelectorAll('.md-content *')].filter(e => {
    const box = e.getBoundingClientRect();
    if (!box.width || box.right <= innerWidth + 1) return false;
    for (let p = e; p; p = p.parentElement)
        if (['auto', 'scroll'].includes(getComputedStyle(p).overflowX)) return false;
    return true }).map(e => e.outerHTML.slice(0, 80))"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, and the paths of its pages."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, check=True, cwd=Path(__file__).parent.parent, timeout=120)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pages = sorted(page.parent.relative_to(folder).as_posix() for page in folder.rglob("index.html"))
    yield f"http://127.0.0.1:{server.server_port}/", pages
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("theme", "width"), [("light", "desktop"), ("dark", "phone")])
def test_every_page(browser, site, theme, width):
    address, pages = site
    assert {".", "notation", "troubleshooting", "api/solvers", "files/examples/own_solver.py"} <= set(pages)
    page = browser.new_page(viewport={"width": WIDTHS[width], "height": 800}, color_scheme=theme)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    for name in pages:
        page.goto(f"{address}{name}/")
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width], name
        assert page.evaluate(CUT) == [], name
        ground = page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
        )
        assert (ground > 200) if theme == "light" else (ground < 60)
    assert said == []
    assert [url for url in asked if not url.startswith((address, "data:"))] == []
    page.close()
