"""Every page of the site, of `silodp ui` and of `silodp report`, as a browser shows it at the width
of a desk and of a phone, in light and dark: nothing scrolls sideways, nothing complains, text
stands out by axe-core, every control is reached by keyboard, and print leaves no page half empty.

The list is made from what is served and built, so that a new page is among them. Of the site two
typical pages are looked at each time, and all with SILODP_LONG=1.
"""

import functools
import http.server
import os
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from looking import PATIENCE, TOKEN, ask, served
from starlette.routing import Route

from silodp import stats
from silodp.cli.recorded import Recorder
from silodp.pages import app, report, runs, survival
from silodp.silo.service.page import GatePage

pytestmark = pytest.mark.xdist_group("browser")
LONG = bool(os.environ.get("SILODP_LONG"))
TYPICAL = ("/quickstart.html", "/algorithms/mb-sgd.html")
"""Pages of the site that have what it is made of: text, terminal, source, formulas, tables, a
figure. All of them take minutes: SILODP_LONG=1.
"""
AA = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
"""axe-core's rules of WCAG up to AA, contrast among them."""
WIDTHS = {"desk": (1280, 900), "phone": (390, 844)}
SEEN = """() => {
  const wide = document.documentElement.scrollWidth, far = [...document.querySelectorAll("body *")].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width && box.right > innerWidth + 1 && !e.closest(".unseen, .skip, [hidden], .scroll, .md-typeset__scrollwrap, pre, .md-sidebar, .md-nav, .md-search, .md-path, .highlight, .formula, .drawing");
  }).slice(0, 3).map(e => `${e.tagName}.${e.className} ${e.textContent.slice(0, 40)}`);
  const broken = [...document.images].filter(e => e.complete && !e.naturalWidth).map(e => e.src);
  return {wide, far, broken};
}"""  # noqa: E501
CONTROLS = """() => {
  const shown = e => e.checkVisibility({visibilityProperty: true}) && e.getClientRects().length && !e.closest("[inert]");
  const faded = e => e.tabIndex < 0 && !e.checkVisibility({opacityProperty: true});
  const all = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")].filter(e => shown(e) && !faded(e));
  const one = s => [s.outlineStyle, s.outlineWidth, s.boxShadow, s.backgroundColor, s.borderColor, s.color, s.textDecorationLine].join();
  const look = e => [e, e.nextElementSibling].map(x => x ? one(getComputedStyle(x)) : "").join();
  const wrong = [];
  for (const e of all) {
    if (e.type === "hidden" || e.disabled) continue;
    e.blur();
    const before = look(e);
    e.focus({focusVisible: true});
    if (document.activeElement !== e || e.tabIndex < 0) wrong.push(`not reached: ${e.outerHTML.slice(0, 90)}`);
    else if (look(e) === before && e.type !== "text") wrong.push(`focus is not seen: ${e.outerHTML.slice(0, 90)}`);
  }
  document.activeElement.blur();
  return wrong;
}"""  # noqa: E501
"""A field of text shows where one is by its caret, the theme's switch of colours by what stands
beside it.
"""
TABBED = """() => {
  const one = e => e.type === "radio" ? document.querySelector(`[name=${e.name}]`) : e;  // Tab comes to one of a group
  const shown = e => e.checkVisibility({visibilityProperty: true}) && e.getClientRects().length && !e.closest("[inert]");
  window.expected = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")].filter(e =>
    shown(e) && e.tabIndex >= 0 && !e.disabled && e.type !== "hidden" && one(e) === e);
  window.reached = [];
  const mark = tabIndex => Object.assign(document.createElement("i"), {tabIndex, style: "position: fixed"});
  [window.before, window.after] = [mark(1), mark(0)];  // 1 comes first, even where the page has an order of its own
  document.body.prepend(before);
  document.body.append(after);
  before.focus();
  addEventListener("focusin", event => {
    const e = one(event.target), box = e.getBoundingClientRect();
    reached.push(e);
    e.unseen = !event.target.matches(":focus-visible") || box.bottom < 0 || box.top > innerHeight || box.right < 0 || box.left > innerWidth;
  }, true);
  return expected.length;
}"""  # noqa: E501
"""The walk goes from a mark before the whole page to a mark after it, and never further. Tab on the
last control gives the focus to the browser's own window. Some time later the window may give it
back, and then the first control has it again.
"""
REACHED = """() => {
  before.remove();
  after.remove();
  const name = e => e.outerHTML.slice(0, 90), order = expected.map(e => reached.indexOf(e)), wrong = [];
  expected.forEach((e, i) => {
    if (order[i] < 0) wrong.push(`Tab does not reach ${name(e)}`);
    else if (e.unseen) wrong.push(`nobody sees where the focus is at ${name(e)}`);
    else if (i && order[i] < order[i - 1]) wrong.push(`Tab reaches ${name(e)} before what stands above it`);
  });
  return wrong;
}"""  # noqa: E501


# --- which pages there are -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def ui(more, gated):
    with served(more, gated.policy, TOKEN) as port:
        yield port


@pytest.fixture(scope="module")
def screens(ui, more, gated) -> list[str]:
    """The address of every whole page of the UI: each of its routes, with every run in the place of
    a name.
    """
    known = [
        *app.application(more, port=ui, routes=GatePage(gated.policy, TOKEN, ()).routes()).routes
    ]
    names, found = list(runs.found_in(more)), []
    kinds = {runs.read(more / name).kind for name in names}
    # The list of runs has trainings and comparisons. Answers to `silodp stats` have a report alone.
    assert kinds == set(report.KINDS) - {"statistics"}, "a run of each kind"
    for route in known:
        if isinstance(route, Route) and "GET" in (route.methods or ()):
            found += (
                [route.path.replace("{name:path}", name) for name in names]
                if "{name:path}" in route.path
                else [route.path]
            )
    found += [f"/compare?{'&'.join(f'run={name}' for name in names[:4])}"]
    return [
        f"http://127.0.0.1:{ui}{path}"
        for path in found
        if ask(ui, path.replace(" ", "%20"))[1].startswith("<!doctype html>")
    ]


def record_answers(folder: Path) -> None:
    """Record an answer to each command of `silodp stats`, by two made-up silos."""
    random = np.random.default_rng(0)
    frames = {}
    for name, n in (("north", 400), ("south", 300)):
        months = random.exponential(30, n)
        frames[name] = pd.DataFrame(
            {
                "age": random.normal(60, 12, n),
                "treated": random.choice(["yes", "no"], n),
                "months": months.clip(0.1, 48),
                "died": np.where(months < 48, "yes", "no"),
            }
        )
    columns = {"age": {"type": "number", "range": [0, 110]}, "treated": {"type": "boolean"}}
    label = {"task": "survival", "time": "months", "event": "died", "edges": [6, 12, 24, 36]}
    about = {"schema": {"columns": columns, "label": label}, "epsilon": 5.0, "seed": 1}
    asked = {
        "profile": stats.profile(frames, **about),
        "table1": stats.table1(frames, by="treated", **about),
        "quantiles": stats.quantiles(frames, **about),
        "survival": stats.survival(frames, **about),
        "estimate": stats.cox(frames, **about),
        "logrank": stats.logrank(frames, by="treated", **about),
        "synthesise": stats.synthesise(frames, rows=50, **about),
    }
    for command, answer in asked.items():
        Recorder.into(folder, command).write(answer.details, quiet=True)


@pytest.fixture(scope="module")
def papers(more, tmp_path_factory) -> list[str]:
    """Every page that a command writes to a disk."""
    folder = tmp_path_factory.mktemp("papers")
    for name in runs.found_in(more):
        (folder / f"{name}.html").write_text(report.report(runs.read(more / name)))
    answers = tmp_path_factory.mktemp("answers")
    record_answers(answers)
    (folder / "statistics.html").write_text(report.report(runs.read(answers)))
    curve = [
        {"time": t, "survival": s, "low": s - 0.1, "high": min(1.0, s + 0.1)}
        for t, s in ((6.0, 0.9), (12.0, 0.75), (24.0, 0.6))
    ]
    silos = [{"name": "north", "epsilon": 1.0, "delta": 1e-6}]
    (folder / "survival.html").write_text(
        survival.page_of(
            {
                "curve": [*curve, {"time": 36.0, "survival": None}],
                "time": "months",
                "records": 2000,
                "silos": silos,
            }
        )
    )
    return [path.as_uri() for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def pages_of_site(site) -> list[str]:
    """Every page of the site that was just built."""
    handler = functools.partial(_Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield [
        f"http://127.0.0.1:{server.server_port}/{page.relative_to(site)}"
        for page in sorted(site.rglob("*.html"))
    ]
    server.shutdown()
    thread.join(PATIENCE)
    server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


# --- what is asked of each -----------------------------------------------------------------------


class Walk:
    """One tab that goes from page to page, in light or dark, and notes what is wrong."""

    def __init__(self, browser, scheme: str = "light") -> None:
        axe = pytest.importorskip(
            "axe_playwright_python", reason="axe-playwright-python is not installed (silodp[dev])"
        )
        self._axe, self._scheme, self.wrong = (
            (Path(axe.__file__).parent / "axe.min.js").read_text(),
            scheme,
            [],
        )
        self._context = browser.new_context(
            color_scheme=scheme, reduced_motion="reduce", bypass_csp=True
        )
        self._context.set_default_timeout(PATIENCE * 1000)
        self.page = self._context.new_page()
        self.page.on(
            "console",
            lambda m: self._note(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self._note(str(error)))

    def _note(self, words: object) -> None:
        self.wrong.append(
            f"{self.page.url.partition('://')[2].partition('/')[2]} {self._scheme}: {words}"
        )

    def look(self, address: str, *, axe: bool = True, keys: bool = True) -> None:
        self.page.goto(address)
        for device, (width, height) in WIDTHS.items():
            self.page.set_viewport_size({"width": width, "height": height})
            seen = self.page.evaluate(SEEN)
            if seen["wide"] > width or seen["far"] or seen["broken"]:
                self._note(f"{device}: {seen}")
            for words in self.page.evaluate(CONTROLS):
                self._note(f"{device}: {words}")
            if axe:
                self._ask_axe(device)
            if keys and device == "desk":
                self._tab_through()
                self._press()

    def _tab_through(self) -> None:
        """With Tab alone: everything that can be used comes, in the order of the page, in sight,
        and after the last the page is left.
        """
        count = self.page.evaluate(TABBED)
        for _ in range(2 * count + 20):
            self.page.keyboard.press("Tab")
            if self.page.evaluate("() => document.activeElement === after"):
                break
        else:
            self._note("Tab does not leave the page")
        for words in self.page.evaluate(REACHED):
            self._note(words)

    def _press(self) -> None:
        """Enter opens what is folded, and the space bar closes it again; on the site's switch Enter
        turns a page dark, and light again.
        """
        if switch := self.page.query_selector("[name=__palette]"):
            switch.focus()
            schemes = [
                self.page.keyboard.press("Enter")
                or self.page.evaluate("document.body.dataset.mdColorScheme")
                for _ in range(2)
            ]
            if sorted(schemes) != ["default", "slate"]:
                self._note(f"Enter on the switch of colours leads to {schemes}")
        for place in self.page.locator("main details > summary:visible").all():
            place.focus()
            for key, there in (("Enter", True), ("Space", False)):
                self.page.keyboard.press(key)
                if place.evaluate("e => e.parentElement.open") is not there:
                    self._note(
                        f"{key} does not {'open' if there else 'close'} {place.inner_text()}"
                    )

    def _ask_axe(self, device: str) -> None:
        if not self.page.evaluate("() => !!window.axe"):
            self.page.evaluate(self._axe)
        for found in self.page.evaluate(
            (
                "kinds => axe.run({runOnly: kinds, resultTypes: ['violations']}).then(r => "
                "r.violations)"
            ),
            AA,
        ):
            for node in found["nodes"][:3]:
                self._note(
                    f"{device}: {found['id']}: {node['html'][:120]} {node['failureSummary'][:200]}"
                )

    def end(self) -> None:
        self._context.close()
        assert not self.wrong, "\n".join(self.wrong)


@pytest.mark.parametrize("scheme", ["light", "dark"] if LONG else ["light"])
def test_pages_about_runs_and_the_gate_hold_at_both_widths(browser, screens, papers, scheme):
    walk = Walk(browser, scheme)
    for address in (*screens, *papers):
        walk.look(address, keys=LONG or address not in papers[1:])  # reports are among the screens
    walk.end()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "<a href=#a>a</a><a href=#b onkeydown='event.preventDefault()'>b</a><a href=#c>c</a>",
            "does not leave the page",
        ),
        (
            "<a href=#a>a</a><a href=#b>b</a><a href=#c tabindex=2>c</a>",
            "before what stands above it",
        ),
        (
            "<a href=#a>a</a><a href=#b style='position:absolute;left:-99rem'>b</a>",
            "nobody sees where the focus is",
        ),
        (
            (
                "<a href=#a>a</a><main><details><summary onclick='return "
                "false'>b</summary>c</details></main>"
            ),
            "Enter does not open b",
        ),
    ],
    ids=["a trap", "another order", "out of sight", "what stays shut"],
)
def test_the_walk_by_keyboard_sees_what_is_wrong(browser, content, said):
    walk = Walk(browser)
    walk.page.set_content(content)
    walk._tab_through()
    walk._press()
    assert said in " ".join(walk.wrong)
    walk._context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_of_the_site_hold_at_both_widths(browser, pages_of_site, scheme):
    walk = Walk(browser, scheme)
    for address in pages_of_site:
        if LONG or address.endswith(TYPICAL):
            walk.look(address, keys=scheme == "light")
    walk.end()


def test_words_in_drawings_can_be_read_on_a_phone(browser, pages_of_site):
    """A picture is as wide as its words need, in a box that scrolls by itself, or one that was made
    for a phone.
    """
    page, wrong, seen = browser.new_page(viewport={"width": 390, "height": 844}), [], 0
    for address in pages_of_site:
        if LONG or address.endswith(("/privacy.html", "/seeing.html", "/algorithms/mb-sgd.html")):
            page.goto(address)
            shown = (
                "all => all.map(e => [e.currentSrc, e.getBoundingClientRect().width, "
                "!!e.closest('.drawing')])"
            )
            for source, width, boxed in page.eval_on_selector_all(
                "article :not(.gallery a) > img", shown
            ):
                seen += 1
                if not ((boxed and width >= 480) or source.endswith("-phone.png")):
                    wrong.append(f"{address}: {source} is {width:.0f} pixels wide")
            if (whole := page.evaluate("document.documentElement.scrollWidth")) > 390:
                wrong.append(f"{address}: the page is {whole} pixels wide")
    page.close()
    assert not wrong, "\n".join(wrong)
    assert seen >= 9


def test_what_is_printed_leaves_no_page_half_empty(browser, screens, papers):
    pdfium = pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed (silodp[dev])")
    page, wrong = browser.new_page(), []
    page.set_default_timeout(PATIENCE * 1000)
    for address in (*papers, *screens):
        page.goto(address)
        with pdfium.PdfDocument(page.pdf(prefer_css_page_size=True)) as document:
            shares = [_inked(sheet) for sheet in document]
        if any(share < 0.5 for share in shares[:-1]):
            wrong.append(f"{address}: {[f'{share:.0%}' for share in shares]}")
    page.close()
    assert not wrong, "\n".join(wrong)


def _inked(sheet) -> float:
    """How far down the page something is printed, as a share of its height."""
    seen = np.asarray(sheet.render(scale=0.25, grayscale=True).to_numpy())
    rows = seen.reshape(len(seen), -1).min(axis=1)
    return (np.flatnonzero(rows < 200).max(initial=0) + 1) / len(rows)
