"""Every page in a real browser: numbers on the screen are those of the folder, no error, no request
to anybody else; and a live page follows a real training process through kill -9 and --resume.

Needs Debian's chromium and Playwright for Python. SILODP_SCREENSHOTS=docs/screenshots keeps what is
seen.
"""

import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from looking import PATIENCE, TOKEN, run_command, served, started, until

from silodp.core.figures import left_of, rounded_up
from silodp.host.log import tally
from silodp.pages import runs
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service.pause import paused, set_paused

KEPT = Path(kept).resolve() if (kept := os.environ.get("SILODP_SCREENSHOTS")) else None
pytestmark = pytest.mark.xdist_group("browser")
ROUNDS = 40
WIDE, PHONE = (1280, 900), (390, 844)


@pytest.fixture
def look(browser, base):
    """Opens pages, and says at the end whether any of them complained or asked anybody else for
    anything.
    """
    opened, trouble = [], []

    def at(path: str, size=WIDE, **options):
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, reduced_motion="reduce", **options
        )
        context.set_default_timeout(PATIENCE * 1000)
        page = context.new_page()
        opened.append(context)
        page.on(
            "console",
            lambda message: (
                trouble.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith((base, "file:")) else trouble.append(request.url)
            ),
        )
        page.goto(path if "://" in path else base + path)
        return page

    yield at
    for context in opened:
        context.close()
    assert not trouble


def figure(page, name: str) -> str:
    """The big number over these words."""
    return page.locator(".figures div", has_text=name).locator("dd").inner_text()


def test_the_list_leads_to_every_run_and_the_chosen_are_compared(look, base, root):
    page = look("/")
    names = list(runs.found_in(root))
    assert page.locator("tbody tr").count() == len(names) == 3
    for name in names:
        page.get_by_role("link", name=name, exact=True).click()
        page.wait_for_load_state()  # a busy machine shows the top of a page before its end
        run = runs.read(root / name)
        assert page.get_by_role("heading", level=1).inner_text()
        assert page.locator("body").inner_text().count("finished") >= 1
        if run.silos:
            assert figure(page, "ε spent") == rounded_up(max(s.spent for s in run.silos), 4)
            assert figure(page, "rounds") == f"{run.done} of {run.total}"
        page.get_by_role("link", name="The report, to print and sign").click()
        page.wait_for_load_state()
        assert runs.fingerprint(root / name) in page.locator("body").inner_text()
        page.goto(page.url.rpartition("/report/")[0] + "/")
    for name in ("train", "clinic"):
        page.get_by_label(f"Compare {name}").check()
    page.wait_for_timeout(1200)  # a look at the folders in between forgets no choice
    page.get_by_role("button", name="Compare the chosen").click()
    spent = json.loads((root / "train/summary.json").read_text())
    error = page.get_by_role("row", name="test error, not private").inner_text()
    assert f"{spent['test_error']:.2%}" in error
    differ = page.get_by_role("table", name="Settings that differ").inner_text()
    assert "model" in differ
    page.locator("#equal-summary").click()
    page.goto(f"{base}/?sort=epsilon")
    listed = page.locator("tbody th a").all_inner_texts()
    spends = {name: max(s.together[0] for s in runs.read(root / name).silos) for name in listed[:2]}
    assert list(spends.values()) == sorted(spends.values())
    page.goto(f"{base}/compare?run=train&run=clinic")
    assert page.locator("svg.wide path.curve").count() == 4


def test_the_report_on_a_disk_shows_the_folders_numbers_and_asks_for_nothing(look, root, tmp_path):
    for name in runs.found_in(root):
        run_command("report", root / name, "--out", tmp_path / f"{name}.html")
        page, run = look(f"file://{tmp_path}/{name}.html"), runs.read(root / name)
        for details in page.locator("summary").all():
            details.click()
        text = page.locator("body").inner_text()
        for silo in run.silos:
            assert f"ε {rounded_up(silo.spent, 4)} of {silo.epsilon:g} spent" in text
        for line in run.rounds:
            assert f"{line['norm']:.4g}" in text
        for row in run.rows:
            assert f"{row['test_error']:.2%}" in text
        bars = page.locator("#budgets svg.wide:has(rect)").all()
        assert len(bars) == len(run.silos)
        for bar, silo in zip(
            bars, run.silos, strict=True
        ):  # as long as what is used, in as many pieces as there were charges
            pieces = bar.locator("rect").evaluate_all("all => all.map(e => e.width.baseVal.value)")
            assert len(pieces) == 1 + len(silo.charges)
            assert sum(pieces[1:]) / pieces[0] == pytest.approx(silo.used, abs=0.005)
        pdf = page.pdf(prefer_css_page_size=True)
        assert pdf.startswith(b"%PDF")


def test_the_gates_page_shows_the_ledgers_numbers_and_pauses_with_the_token_alone(look, gated):
    ledger = DurableLedger.open(gated.policy.parent / "ledger.db")
    page = look("/silo")
    assert figure(page, "of the budget left") == left_of(ledger.used())
    assert figure(page, "questions charged") == str(
        sum(e.act == "charge" for e in ledger.entries())
    )
    assert ledger.head()[1] in page.locator("body").inner_text()
    try:
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Pause the gate").click()
        page.get_by_text("The gate is paused.").wait_for()
        assert paused(gated.policy)
        assert page.locator(".state.paused").count() == 1
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Resume the gate").click()
        page.get_by_text("The gate answers again.").wait_for()
        assert not paused(gated.policy)
    finally:
        set_paused(gated.policy, False)


def test_a_wrong_token_is_said_and_changes_nothing(browser, base, gated):
    page = browser.new_page()
    page.goto(f"{base}/silo")
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Pause the gate").click()
    assert "not the token" in page.get_by_role("alert").inner_text()
    assert not paused(gated.policy)
    page.close()


def test_a_live_page_follows_a_run_through_kill_9_and_resume(look, gated, root):
    out = root / "live"
    words = (
        "federation",
        "run",
        "--folder",
        gated.folder,
        "--out",
        out,
        "--json",
        "--deadline",
        30,
        "--patience",
        PATIENCE,
        "--retry",
        1,
    )

    def asked() -> int:
        return len(runs.read(out).rounds) if (out / "progress.jsonl").exists() else 0

    set_paused(gated.policy, True)  # the run waits at its first question until somebody looks
    first = started(
        *words,
        "--rounds",
        ROUNDS,
        "--phase",
        5,
        "--epsilon",
        1,
        log=gated.folder / "live.log",
        **gated.environment,
    )
    try:
        until(lambda: (out / "progress.jsonl").exists(), "the run did not start")
        page = look("/run/live")
        page.locator(".state.running").wait_for()
        set_paused(gated.policy, False)
        until(lambda: asked() >= 3, "the run did not go on")
        set_paused(gated.policy, True)
        refused = tally(str(gated.policy.parent / "gate.log"))["paused"]
        until(
            lambda: tally(str(gated.policy.parent / "gate.log"))["paused"] > refused,
            "the run was over before it could be watched",
        )
        assert asked() < ROUNDS, "the run was over before it could be watched"
        page.get_by_text(f"{runs.read(out).done} of {ROUNDS}", exact=True).wait_for()
        # The journal may grow by the line of the waiting question. The page follows a moment later.
        until(
            lambda: figure(page, "ε spent") == rounded_up(runs.read(out).silos[0].spent, 4),
            "the page did not show what the run has spent",
        )
        page.locator("#questions-summary").click()
        os.kill(first.pid, signal.SIGKILL)
        first.join(PATIENCE)
        page.locator(".state.interrupted").wait_for()
        assert page.locator("#questions-details").get_attribute("open") is not None, (
            "what was unfolded stays so"
        )
        assert page.locator("#news").inner_text().strip().endswith("resumes it.")
    finally:
        set_paused(gated.policy, False)
        first.kill()
    second = started(*words, "--resume", log=gated.folder / "live.log", **gated.environment)
    page.locator("[data-state] .state.finished").wait_for()
    second.join(PATIENCE)
    assert second.exitcode == 0
    page.get_by_text(f"{ROUNDS} of {ROUNDS}", exact=True).wait_for()
    spent = json.loads((out / "summary.json").read_text())["silos"][0]["spent_epsilon_at_most"]
    assert figure(page, "ε spent") == rounded_up(spent, 4)
    assert page.locator("#questions tbody tr, #questions-details tbody tr").count() == ROUNDS
    shutil.rmtree(out)


def test_a_page_whose_server_is_gone_says_so_and_goes_on_when_it_is_back(browser, root):
    with served(root) as port:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/run/train")
        page.locator("#news", has_text="It is finished").wait_for(state="attached")
    page.locator("#news", has_text="does not answer; trying again").wait_for(state="attached")
    with served(root, port=port):
        page.locator("#news", has_text="It is finished").wait_for(state="attached")
        page.close()


def test_pages_are_usable_by_keyboard_and_screen_reader(look):
    for path in (
        "/",
        "/silo",
        "/run/train",
        "/run/compare-wbcd",
        "/compare?run=train&run=clinic",
        "/report/train",
    ):
        page = look(path)
        assert page.locator("h1").count() == page.locator("main").count() == 1
        assert page.title()
        assert page.locator("html").get_attribute("lang") == "en"
        assert page.locator("table").count() == page.locator("table > caption").count()
        assert not page.locator("svg:not([aria-hidden]):not([role=img][aria-label])").count()
        levels = [
            int(name[1])
            for name in page.eval_on_selector_all("h1,h2,h3", "all => all.map(e => e.tagName)")
        ]
        assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
        unnamed = (
            "all => all.filter(e => !(e.labels && e.labels.length) && !e.ariaLabel && "
            "!e.textContent.trim()).length"
        )
        assert not page.eval_on_selector_all("input, button, a, summary", unnamed)
        ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
        assert len(ids) == len(set(ids))
    page = look("/silo")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the content"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    reached = [
        page.keyboard.press("Tab") or page.evaluate("document.activeElement.id") for _ in range(4)
    ]
    assert "token" in reached, "the pause is near for whoever has no mouse"


def tab_to(page, found: str) -> None:
    """With Tab alone to what this selector finds."""
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("found => document.activeElement.matches(found)", found):
            return
    pytest.fail(f"Tab does not reach {found}")


def test_a_gate_is_paused_and_runs_are_chosen_by_keyboard_alone(look, gated):
    page = look("/silo")
    try:
        for key, said, halted in (
            ("Enter", "The gate is paused.", True),
            ("Space", "The gate answers again.", False),
        ):
            tab_to(page, "#token")
            page.keyboard.type(TOKEN)
            tab_to(page, "#do")
            page.keyboard.press(key)
            page.get_by_text(said).wait_for()
            assert paused(gated.policy) is halted
    finally:
        set_paused(gated.policy, False)
    page = look("/")
    for name in ("clinic", "train"):
        tab_to(page, f"[id='box {name}']")
        page.keyboard.press("Space")
    tab_to(page, "button")
    page.keyboard.press("Enter")
    page.wait_for_url("**/compare?run=clinic&run=train")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("runs", "/"),
        ("run", "/run/train"),
        ("gate", "/silo"),
        ("compare", "/compare?run=train&run=clinic"),
        ("report", "/report/clinic"),
        ("report-compare", "/report/compare-wbcd"),
    ],
)
@pytest.mark.parametrize(
    ("size", "device"), [(WIDE, "desktop"), (PHONE, "phone")], ids=["desktop", "phone"]
)
def test_nothing_is_cut_off_at_any_width(look, tmp_path, name, path, size, device):
    page = look(path, size)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    sizes = page.eval_on_selector_all(
        "button, nav a, summary", "all => all.map(e => e.getBoundingClientRect().height)"
    )
    assert all(height >= 24 for height in sizes), "room for a finger"
    letters = page.eval_on_selector_all(
        "svg text", "all => all.map(e => e.getBoundingClientRect().height).filter(h => h)"
    )
    assert all(height >= 9 for height in letters), "text in charts can be read"
    if KEPT:
        page.screenshot(path=tmp_path / "seen.png", full_page=True)
        keep(tmp_path / "seen.png", KEPT / f"{name}-{device}.png")


def keep(seen: Path, path: Path) -> None:
    """The top of a page in few colours."""
    from PIL import Image

    picture = Image.open(seen).convert("RGB")
    top = picture.crop(
        (0, 0, picture.width, min(picture.height, 1600 if picture.width > 600 else 1950))
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    top.quantize(160, dither=Image.Dither.NONE).save(path, optimize=True)
