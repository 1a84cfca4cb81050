"""The page as a reader sees it, in Chromium: `tox -e report`. A machine without one fails these tests, and says so."""

import os
import shutil

import pytest

from harness.report import page
from harness.report.plots import Trend, TrendPoint
from tests.report.hostile import PAYLOADS, poisoned
from tests.report.records import case, failing, invalid, passing, record

pytestmark = pytest.mark.browser

PHONE, DESKTOP = 390, 1280
POINTS = tuple(
    TrendPoint(f"2026-11-{day:02}", "0.28.0" if day < 11 else "0.32.0", 3.0 if day < 11 else 2.0, 1.9, 3.1)
    for day in range(1, 21)
)
TREND = Trend("accept length", "tokens per step", POINTS, 2.5)
EVIL = f" {PAYLOADS['tag end']}{PAYLOADS['long word']}"
HOSTILE_TREND = Trend(f"x{EVIL}", EVIL, tuple(TrendPoint(f"{n}{EVIL}", f"{n // 2}{EVIL}", 1.0) for n in range(4)))
RECORDS = {
    "pass": passing,
    "fail": failing,
    "invalid": invalid,
    "empty": record,
    "hostile": lambda: poisoned(failing(), EVIL),
    "ten": lambda: record(*(case(f"pair-{index}") for index in range(10))),
}

# What is wrong with the text of a page: too little contrast against what lies behind it (WCAG 2.2, 1.4.3).
CONTRAST = """() => {
  const parse = text => { const c = text.match(/[\\d.]+/g).map(Number); return c.length < 4 ? [...c, 1] : c; };
  const luminance = c => {
    const [r, g, b] = c.slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c[3] > 0) return c;
    }
    throw new Error('nothing behind');
  };
  const bad = [];
  let seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const aside = element.closest('title, desc, .in-phase, .query');
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || aside)
      continue;
    const style = getComputedStyle(element);
    const [a, b] = [parse(element.closest('svg') ? style.fill : style.color), behind(element)].map(luminance);
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    seen++;
    if (ratio < 4.5) bad.push([walker.currentNode.data.trim().slice(0, 40), ratio]);
  }
  return [seen, bad];
}"""

# What is wrong with the figures: empty, text outside or over other text, letters too small to read.
FIGURES = """() => {
  const bad = [];
  const plots = [...document.querySelectorAll('svg.plot')].filter(e => e.checkVisibility());
  for (const plot of plots) {
    const name = plot.querySelector('title').textContent.slice(0, 40);
    const box = plot.getBoundingClientRect();
    if (box.width < 200 || box.height < 20) bad.push([name, 'small', box.width, box.height]);
    const marks = [...plot.querySelectorAll('circle, rect')].map(e => e.getBoundingClientRect());
    if (!marks.some(m => m.width > 0 && m.height > 0)) bad.push([name, 'empty']);
    const texts = [...plot.querySelectorAll('text')].filter(e => !e.matches('.in-phase, .query'));
    const boxes = texts.map(e => [e.textContent, e.getBoundingClientRect()]);
    for (const [text, b] of boxes) {
      if (b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 || b.bottom > box.bottom + 1)
        bad.push([name, 'outside', text.slice(0, 40)]);
      if (b.height < 9) bad.push([name, 'too small', text.slice(0, 40), b.height]);
    }
    boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([two, b]) => {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 2 && high > 4) bad.push([name, 'over each other', one.slice(0, 40), two.slice(0, 40)]);
    }));
  }
  return [plots.length, bad];
}"""

OVERFLOW = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  return [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > width + 1)
    .map(e => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`).slice(0, 10);
}"""


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert path, "no Chromium on this machine: apt-get install chromium"
    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root.
        options = ["--no-sandbox"] if os.getuid() == 0 else []
        launched = playwright.chromium.launch(executable_path=path, args=options)
        yield launched
        launched.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open a page and unfold all of it; afterwards nothing was complained of, and nothing was asked of a network."""
    contexts, complaints, requests = [], [], []

    def open_page(text, width=DESKTOP, scheme="light", *, unfold=True):
        path = tmp_path / "report.html"
        path.write_text(text)
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        contexts.append(context)
        opened = context.new_page()
        opened.on("console", lambda message: complaints.append(message.text))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on("dialog", lambda dialog: complaints.append(dialog.message))
        opened.on("request", lambda request: requests.append(request.url))
        opened.goto(path.as_uri())
        if unfold:
            opened.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
        return opened

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints
    assert len(requests) == len(contexts)
    assert all(url.startswith("file:") for url in requests)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("made", RECORDS.values(), ids=RECORDS)
def test_it_can_be_read(show, made, width, scheme):
    opened = show(page.render(made(), (TREND, HOSTILE_TREND)), width, scheme)
    assert opened.evaluate(OVERFLOW) == []
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    texts, faint = opened.evaluate(CONTRAST)
    assert texts > 10
    assert faint == []
    plots, wrong = opened.evaluate(FIGURES)
    assert plots >= 1
    assert wrong == []


def test_dark_is_dark(show):
    ground = "getComputedStyle(document.body).backgroundColor"
    assert show(page.render(passing()), scheme="light").evaluate(ground) == "rgb(255, 255, 255)"
    assert show(page.render(passing()), scheme="dark").evaluate(ground) == "rgb(15, 20, 25)"


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_answer_is_seen_without_scrolling(show, width):
    opened = show(page.render(failing()), width, unfold=False)
    for selector in ("h1", ".lead", ".verdicts .fail"):
        box = opened.locator(selector).first.bounding_box()
        assert box["y"] + box["height"] <= 844, selector


def test_by_keyboard(show):
    opened = show(page.render(failing()), unfold=False)
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.className") == "skip"
    assert opened.locator(".skip").bounding_box()["x"] >= 0
    for _ in range(100):
        opened.keyboard.press("Tab")
        if opened.evaluate("document.activeElement.closest('details details') !== null"):
            break
    assert opened.evaluate("document.activeElement.tagName") == "SUMMARY"
    assert opened.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    before = opened.evaluate("document.activeElement.parentElement.open")
    opened.keyboard.press("Enter")
    assert opened.evaluate("document.activeElement.parentElement.open") is not before


def test_a_red_cell_takes_you_to_its_reason(show):
    opened = show(page.render(failing()), unfold=False)
    opened.locator("td.fail a").first.click()
    assert opened.evaluate("location.hash") == "#reason-0"
    assert opened.evaluate("document.querySelector(':target h3').textContent").startswith("2 of 5 keys")


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_table_is_a_table_to_assistive_technology(show, width):
    opened = show(page.render(failing()), width)
    table = opened.get_by_role("table").first
    assert table.get_by_role("row").count() >= 2
    assert table.get_by_role("rowheader").all_inner_texts() == ["small", "small"]
    assert table.get_by_role("cell", name="FAIL").count() == 2


# The checks themselves: each finds its fault.


def broken(text, rule):
    assert "</style>" in text
    return text.replace("</style>", f"{rule}</style>", 1)


@pytest.mark.parametrize(
    ("rule", "check"),
    [
        (".figure-table, figure { min-width: 60rem; }", OVERFLOW),
        (".muted { color: #999999 !important; }", CONTRAST),
        (".dot, .phase, rect { display: none; }", FIGURES),
        ("svg.plot text { font-size: 40px !important; }", FIGURES),
        ("svg.plot text { font-size: 6px !important; }", FIGURES),
    ],
)
def test_a_page_that_cannot_be_read_is_found(show, rule, check):
    found = show(broken(page.render(failing(), (TREND,)), rule), PHONE).evaluate(check)
    assert found[-1]


def test_a_script_would_not_run(show):
    opened = show(page.render(passing()))
    assert opened.evaluate("document.querySelector('meta[http-equiv]').content").startswith("default-src 'none'")
