"""Reports in headless Chromium: no error, no request, both themes, and a phone's width. It needs the extra
``browser`` and the system's Chromium."""

import json
import math

import pytest

import chromium
from bestresponse import cli

pytest.importorskip("matplotlib")

pytestmark = chromium.MARKS

WIDTHS, browser = chromium.WIDTHS, chromium.browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A report and a comparison with every kind of chart, long names and wide tables."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        rows = [
            {
                "hyper_step": i,
                "train_loss": 1.0 / i,
                "val_loss": None if i == 20 else 2.0 / i,
                "watch_loss": 2.1 / i,
                "hypergradient_norm": math.exp(-0.1 * i),
                "agreement": math.cos(i),
                "products": 4,
                "residual": 0.1,
                "status": "steps used",
                "seconds": 0.1 * i,
                "a_measurement_with_a_very_long_name_that_has_no_space_at_all": 1e6 * i,
                "hyperparameters": {
                    "layers.12.attention.projection.weight.log_decay": {
                        "quantiles": [-3, -2, -1, 0, 1, 2, 3]
                    },
                    "rate": {"value": [0.1, 0.2, 0.3]},
                },
            }
            for i in range(1, 100)
        ]
        run = folder / name
        run.mkdir()
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        config = {"method": f"Implicit(solver={'x' * 200})", "name": name}
        (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
        table = [{f"column {i}": float(i) for i in range(20)}]
        (run / "result.json").write_text(json.dumps({"rows": table, "seconds": 3.0}), encoding="utf-8")
    assert cli.main(["report", str(folder / "a")]) == 0
    assert (
        cli.main(["compare", str(folder / "a"), str(folder / "b"), "--out", str(folder / "both.html")]) == 0
    )
    return {"report": folder / "a" / "report.html", "comparison": folder / "both.html"}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_a_page_in_a_browser(browser, pages, kind, theme, width):
    page = browser.new_page(viewport={"width": WIDTHS[width], "height": 800}, color_scheme=theme)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(pages[kind].as_uri())
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [pages[kind].as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width]
    outside = page.evaluate(
        """[...document.querySelectorAll('figure svg text, figure h3, figcaption, .legend, .tiles div')].filter(e => {
            const r = e.getBoundingClientRect(); return r.left < 0 || r.right > innerWidth }).length"""
    )
    assert outside == 0
    light, ink = page.evaluate(
        """['background-color', 'color'].map(name => getComputedStyle(document.body).getPropertyValue(name)
            .match(/\\d+/g).map(Number).reduce((a, b) => a + b) / 3)"""
    )
    assert (light > 200 and ink < 60) if theme == "light" else (light < 60 and ink > 200)
    fill = page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
    assert fill == page.evaluate("getComputedStyle(document.body).color")
    small = page.evaluate(
        """Math.min(...[...document.querySelectorAll('figure svg text')].map(e => e.getBoundingClientRect().height))"""
    )
    assert small > 8  # pixels
    page.close()
