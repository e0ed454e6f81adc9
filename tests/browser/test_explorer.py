"""The explorer in a real browser, in JupyterLab and as a voila page: sliders moved, picture and sentence change, no errors.

Screenshots are kept in `tests/browser/artefacts` (or in $M3CP_ARTEFACTS) for people to look at.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path

import pytest
import yaml
from playwright import sync_api
from served import CHROMIUM, FLAGS, ROOT, Console, served

from m3cp import notebook
from m3cp.explore import State

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package `chromium`), found none")]

ARTEFACTS = Path(os.environ.get("M3CP_ARTEFACTS", Path(__file__).parent / "artefacts"))
PICTURE, VERDICT = "img.m3cp-picture", ".m3cp-words .m3cp-verdict"
CONTEXT, BATCH, EXCHANGE, BANDWIDTH = range(4)  # of the sliders, in their order
REDRAW_S = 0.8


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


class Explorer:
    """The explorer on a page."""

    def __init__(self, page):
        self.page = page

    def seen(self):
        """(the picture's address, the verdict, the state)."""
        return self.page.locator(PICTURE).get_attribute("src"), self.page.locator(VERDICT).inner_text(), self.page.locator(".widget-textarea textarea").first.input_value()

    def after(self, act):
        """Seconds from an act until the browser has drawn a new picture, and what is seen then."""
        before = self.seen()[0]
        start = time.perf_counter()
        act()
        self.page.wait_for_function(
            "([css, src]) => { const i = document.querySelector(css); return i.src !== src && i.complete && i.naturalWidth > 0 }",
            arg=[PICTURE, before], timeout=60_000, polling="raf",
        )  # fmt: skip
        seconds = time.perf_counter() - start
        self.page.wait_for_timeout(150)  # the answer and the state follow the picture
        return seconds, self.seen()

    def key(self, slider, key="ArrowRight"):
        handle = self.page.locator(".noUi-handle").nth(slider)
        return self.after(lambda: (handle.focus(), self.page.keyboard.press(key)))

    def choose(self, which, label):
        return self.after(lambda: self.page.locator(".widget-dropdown select").nth(which).select_option(label=label))


def walk(page, console, name):
    """Move what there is to move; picture, sentence and state must follow, nothing may jump, and no error be said."""
    explorer = Explorer(page)
    page.wait_for_selector(PICTURE, timeout=180_000)
    page.wait_for_selector(VERDICT, timeout=60_000)
    page.locator(PICTURE).scroll_into_view_if_needed()
    page.wait_for_function("css => document.querySelector(css)?.innerText", arg=VERDICT, timeout=60_000)  # Lab draws what is in view
    first = explorer.seen()
    assert "measured" in first[1] and "TP / CP" in first[1]
    box = page.locator(PICTURE).bounding_box()
    words = page.locator(".m3cp-words").bounding_box()
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(ARTEFACTS / f"{name}.png"), full_page=name == "voila")

    explorer.key(BATCH), explorer.key(BATCH, "ArrowLeft")  # the first redraw renders the background
    seconds, seen = [], first
    for slider, key in ((BATCH, "ArrowRight"), (CONTEXT, "ArrowRight"), (CONTEXT, "ArrowLeft"), (BATCH, "ArrowLeft"), (EXCHANGE, "ArrowRight"), (BANDWIDTH, "ArrowRight"), (CONTEXT, "ArrowRight")):  # fmt: skip
        took, now = explorer.key(slider, key)
        assert now[0] != seen[0] and now[1] != seen[1] and now[2] != seen[2], (slider, key)
        seconds.append(took)
        seen = now
        for css, before in ((PICTURE, box), (".m3cp-words", words)):  # nothing moves: no flicker
            after = page.locator(css).bounding_box()
            assert (after["width"], after["height"]) == (before["width"], before["height"]) and after["x"] == before["x"]
    state = State.of(yaml.safe_load(seen[2])["state"])
    assert state.asks and "what-if" in seen[1]
    print(f"{name}: redraws {', '.join(f'{s:.2f}' for s in seconds)} s")
    assert statistics.median(seconds) < REDRAW_S * slowness(), seconds

    _, seen = explorer.choose(3, "fp16 – not measured here")
    assert "Not measured here" in seen[1] and "TP / CP" not in seen[1]
    _, seen = explorer.choose(0, "published: 4x MI355X")
    assert "P = 4" in seen[1] and "sglang/collective" in seen[2]
    page.screenshot(path=str(ARTEFACTS / f"{name}_published.png"), full_page=name == "voila")
    assert console.errors == []


def on_the_recorded_node(book: Path) -> Path:
    """The same notebook with its `run` set, whatever this clone has measured itself."""
    text, empty = book.read_text(), r'run: str = \"\"\n'
    assert text.count(empty) == 1
    book.write_text(text.replace(empty, f'run: str = \\"{ROOT / "data" / "measured" / "h200x2"}\\"\\n'))
    return book


def slowness():
    """How much slower than a free core this machine is now: redraws are timed with the machine to itself in mind."""
    wall, cpu = time.perf_counter(), time.process_time()
    while time.process_time() - cpu < 0.3:
        sum(range(1000))
    share = 0.3 / (time.perf_counter() - wall)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(1.0, 1 / share, load)


def test_voila(browser, tmp_path):
    page_of = on_the_recorded_node(notebook.page("20_crossover", tmp_path / "page"))
    with served(["voila", str(page_of), "--no-browser", "--Voila.ip=127.0.0.1", "--port={port}", "--token={token}"], tmp_path, "/") as address:
        refused = browser.new_page().goto(address.split("?")[0])
        assert refused.status in (401, 403) or "login" in refused.url  # no token, no page
        page = browser.new_page(viewport={"width": 1920, "height": 1080})
        console = Console(page)
        page.goto(address, timeout=180_000)
        walk(page, console, "voila")
        assert page.locator("text=import").count() == 0  # code is hidden


def test_lab(browser, tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    on_the_recorded_node(Path(shutil.copy(ROOT / "notebooks" / "20_crossover.ipynb", folder)))
    arguments = ["jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port={port}", "--IdentityProvider.token={token}", "--allow-root", f"--notebook-dir={folder}", "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]  # fmt: skip
    with served(arguments, tmp_path, "/api/status") as address:
        page = browser.new_page(viewport={"width": 1920, "height": 1080})
        console = Console(page)
        base, token = address.split("?")
        page.goto(f"{base}/lab/tree/20_crossover.ipynb?{token}", timeout=180_000)
        page.wait_for_selector("text=| Idle", timeout=180_000)
        for _ in range(10):  # a menu that is clicked too early does nothing
            page.click("text=Run >> nth=0")
            page.click("text=Run All Cells >> nth=0")
            page.wait_for_timeout(4000)
            if any(mark in page.inner_text(".jp-Notebook") for mark in ("[*]", "[1]", "[2]")):
                break
        page.wait_for_selector(PICTURE, timeout=180_000, state="attached")
        page.wait_for_selector("text=| Idle", timeout=300_000)
        walk(page, console, "lab")
