"""`silodp ui`: a small web app over the run folders of one directory. It only reads files, and
reads them again for each request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route

from silodp.core import quality
from silodp.core.errors import BadInput
from silodp.core.figures import rounded_up, shown
from silodp.pages import runs, statistics
from silodp.pages.charts import Series, chart
from silodp.pages.checked import Check, Checked, archive_in, checks_of
from silodp.pages.guard import Guard
from silodp.pages.judged import ranked, row_of
from silodp.pages.markup import Markup, folded, join, table, tag
from silodp.pages.report import TAKEN, batches, body, head, lead, report, title
from silodp.pages.screen import Tabs, alive, follow, screen
from silodp.pages.style import SCRIPT

MOST = 6
"""Runs that are compared at once: as many as there are colours that can be told apart."""


def application(
    root: Path | None,
    *,
    port: int,
    tabs: Tabs = (),
    routes: Sequence[Route] = (),
    check: Check | None = None,
    password: str | None = None,
) -> Starlette:
    """Return the app for this port, with the pages of the runs under `root` and the caller's own
    pages.

    `check` verifies what pages must not import. With a `password` every page asks for it.
    """
    if root is not None:
        pages = Runs(root, [("Runs", "/"), *tabs], check)
    else:
        pages = None
    if pages is None:
        own = [Route("/", lambda request: RedirectResponse(tabs[0][1]))]
    else:
        own = [
            Route("/", pages.all),
            Route("/live", pages.all_live),
            Route("/compare", pages.compare),
            Route("/report/{name:path}", pages.report),
            Route("/run-live/{name:path}", pages.one_live),
            Route("/run/{name:path}", pages.one),
            Route("/evidence/{name:path}", pages.evidence),
            Route("/answer/{number:int}/{name:path}", pages.answer),
        ]
    script = Route("/live.js", lambda request: Response(SCRIPT, media_type="text/javascript"))
    icon = Route("/favicon.ico", lambda request: Response(status_code=204))
    return Starlette(
        routes=[*own, *routes, script, icon],
        middleware=[Middleware(Guard, port=port, password=password)],
        exception_handlers={BadInput: _sentence},
    )


def _sentence(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", 404)


class Runs:
    """The pages of the runs under one directory."""

    def __init__(self, root: Path, tabs: Tabs, check: Check | None = None) -> None:
        self._root = root
        self._tabs = tabs
        self._check = check
        self._checked: dict[tuple[Path, str], list[Checked]] = {}

    def all(self, request: Request) -> Response:
        where = tag(
            "p", "Every run folder under ", tag("code", str(self._root)), ".", class_="soft"
        )
        order = _order_in(request)
        content = tag("h1", "Runs"), where, alive(f"/live?sort={order}", self._lists(order))
        return HTMLResponse(screen("Runs", self._tabs, "/", *content, live=True))

    async def all_live(self, request: Request) -> Response:
        order = _order_in(request)
        return await follow(request, lambda: self._lists(order))

    def one(self, request: Request) -> Response:
        name, run = self._named(request.path_params["name"])
        where = tag("p", tag("a", "All runs", href="/"), " / ", name, class_="soft small")
        followed = alive(f"/run-live/{quote(name)}", self._followed(name, run, recheck=True))
        return HTMLResponse(screen(title(run), self._tabs, "", where, followed, live=True))

    async def one_live(self, request: Request) -> Response:
        return await follow(
            request, lambda: self._followed(*self._named(request.path_params["name"]))
        )

    def report(self, request: Request) -> Response:
        _, run = self._named(request.path_params["name"])
        return HTMLResponse(
            report(run, runs.audits_beside(run.folder, None), checks=checks_of(run, self._check))
        )

    def evidence(self, request: Request) -> Response:
        """Send the evidence archive that is beside the run. Raise BadInput if there is none."""
        name, run = self._named(request.path_params["name"])
        if (path := archive_in(checks_of(run))) is None:
            raise BadInput(
                f"there is no evidence archive of {name} as it is now; `silodp export "
                "evidence` writes one"
            )
        return FileResponse(path, media_type="application/zip", filename=path.name)

    def answer(self, request: Request) -> Response:
        """Show one recorded answer of `silodp stats`."""
        name = request.path_params["name"]
        number = request.path_params["number"]
        folder = runs.recorded_in(self._root).get(name)
        if folder is None:
            raise HTTPException(404, "there is no such folder of answers")
        lines = runs.read(folder).statistics
        if not 1 <= number <= len(lines):
            raise HTTPException(404, "there is no such answer")
        with runs.readable(folder):
            line = lines[number - 1]
            heading = statistics.question(line)
            back = tag("p", tag("a", "All runs", href="/"), " / ", name, class_="soft small")
            content = (back, tag("h1", heading), *statistics.parts(line, number))
            return HTMLResponse(screen(heading, self._tabs, "", *content))

    def compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(names) <= MOST:
            content = (
                tag("h1", "Compare runs"),
                tag("p", f"Choose two to {MOST} runs in the ", tag("a", "list", href="/"), "."),
            )
            return HTMLResponse(screen("Compare", self._tabs, "", *content))
        named = [self._named(name) for name in names]
        with runs.readable(self._root):
            return HTMLResponse(screen("Compare", self._tabs, "", *compared(named)))

    def _named(self, name: str) -> tuple[str, runs.Run]:
        """Return the name and the run of that name. A name is never used as a path. Raise
        HTTPException(404) if no run has it.
        """
        folder = runs.found_in(self._root).get(name)
        if folder is None:
            raise HTTPException(404, "there is no such run")
        return name, runs.read(folder)

    def _followed(self, name: str, run: runs.Run, *, recheck: bool = False) -> Markup:
        """Return the part of a run's page that changes while the run trains.

        With `recheck` the run is checked again. A page is checked when it is opened, not every
        second.
        """
        known = run.folder, run.state
        if recheck or known not in self._checked:
            self._checked[known] = checks_of(run, self._check)
        with runs.readable(run.folder):
            news = f"{title(run)}: {run.sentence}"
            state = tag("p", _state(run), ". ", run.sentence, data_state=news)
            return join(
                [
                    head(run, self._checked[known]),
                    state,
                    _exports(name, run, self._checked[known]),
                    *body(run),
                ]
            )

    def _lists(self, order: str) -> Markup:
        """Return the list of runs, and below it that of recorded answers."""
        return join([self._list(order), self._answers()])

    def _answers(self) -> Markup | str:
        """Return the recorded answers of `silodp stats`, the latest first."""
        listed: list[tuple[str, tuple[object, ...]]] = []
        for name, folder in runs.recorded_in(self._root).items():
            try:
                lines = runs.read(folder).statistics
                rows = [_answered(name, number, line) for number, line in enumerate(lines, 1)]
            except Exception:  # one damaged folder must not hide the others
                rows = [("", (name, "-", "-", tag("span", "cannot be read", class_="state")))]
            listed += rows
        if not listed:
            return ""
        listed.sort(key=lambda one: one[0], reverse=True)
        head = ("question", "trust", "ε spent", "when")
        cells = [cells for _, cells in listed]
        return table("Recorded answers", head, cells, numbers=(2,), hide=True)

    def _list(self, order: str) -> Markup:
        listed = []
        for name, folder in runs.found_in(self._root).items():
            try:
                listed.append(_listed(name, runs.read(folder)))
            except Exception:  # one damaged folder must not hide the others
                state = tag("span", "cannot be read", class_="state")
                listed.append(Listed(name, (name, "-", "-", "-", "-", state, "")))
        if not listed:
            return tag(
                "p",
                "There is no run yet. ",
                tag("code", "silodp train --data wbcd --epsilon 3"),
                " makes one.",
            )
        listed.sort(key=lambda one: ORDERS[order](one))
        columns = ("run", "model", "trust", "quality", "ε spent", "state", "compare")
        rows = [one.cells for one in listed]
        return tag(
            "form",
            _orders(order),
            table("Runs", columns, rows, numbers=(3, 4, 6), hide=True),
            tag("button", "Compare the chosen", type="submit"),
            action="/compare",
            method="get",
        )


@dataclass(frozen=True)
class Listed:
    """One row of the list of runs, and what it can be sorted by."""

    name: str
    cells: tuple[object, ...]
    title: str = ""
    model: str = ""
    trust: str = ""
    quality: float = -math.inf
    epsilon: float = math.inf


FIRST = "name"
ORDERS: dict[str, Callable[[Listed], Any]] = {
    FIRST: lambda one: one.name,
    "prediction": lambda one: (one.title, one.name),
    "model": lambda one: (one.model, one.name),
    "trust": lambda one: (one.trust, one.name),
    "quality": lambda one: (-one.quality, one.name),
    "epsilon": lambda one: (one.epsilon, one.name),
}
"""The orders of the list: the best quality and the smallest epsilon come first."""
TRUST = {
    "isrl": "nobody",
    "shuffle": "a shuffler",
    "masks": "other silos",
    "central": "the server",
}
"""Who is trusted, in words."""


def _answered(name: str, number: int, line: Mapping[str, Any]) -> tuple[str, tuple[object, ...]]:
    """Return when a question was answered, and the row of the list about it."""
    heading = statistics.question(line)
    link = tag("a", heading, href=f"/answer/{number}/{quote(name)}", id=f"answer {number} {name}")
    when = str(line["time"])
    cells = (
        join([link, tag("span", name, class_="small soft")]),
        TRUST.get(str(line["answer"]["trust"]), "-"),
        shown(statistics.epsilon(line)),
        when,
    )
    return when, cells


def _order_in(request: Request) -> str:
    """Return the order that a request asks for, or the usual one."""
    order = request.query_params.get("sort", FIRST)
    if order in ORDERS:
        return order
    return FIRST


def _orders(current: str) -> Markup:
    """Show the links that sort the list."""
    links = []
    for order in ORDERS:
        here = None
        if order == current:
            here = "true"
        name = order.replace("epsilon", "ε spent")
        links.append(tag("a", name, href=f"/?sort={order}", id=f"sort {order}", aria_current=here))
    return tag("p", "Sort by ", join(links, " · "), class_="sort small")


def _listed(name: str, run: runs.Run) -> Listed:
    box = tag(
        "input",
        type="checkbox",
        name="run",
        value=name,
        id=f"box {name}",
        aria_label=f"Compare {name}",
    )
    most = max((s.together[0] for s in run.silos), default=math.inf)
    link = tag("a", name, href=f"/run/{quote(name)}", id=f"link {name}")
    heading = title(run)
    if study := run.about.get("study"):
        heading = f"{study}: {heading}"
    model = str(run.about.get("model") or "-")
    trust = "-"
    if run.kind != "compare":
        trust = TRUST.get(str(run.about.get("trust") or "isrl"), "-")
    done = f"{run.done} of {run.total}"
    by = ""
    if run.kind != "compare":
        by = f"by {run.algorithm}"
    cells = (
        join([link, tag("span", heading, class_="small soft")]),
        _two(model, by),
        trust,
        _quality(run),
        _price(run),
        _two(_state(run), done),
        box,
    )
    return Listed(name, cells, heading, model, trust, _rank(run), most)


def _rank(run: runs.Run) -> float:
    """Return the figure by which the run's quality is sorted. Unknown figures come last."""
    found = row_of(run)
    if not found or not (name := quality.measure(found[1])):
        return -math.inf
    figure = quality.clear_figure(found[1], name)
    if figure is None:
        return -math.inf
    return figure["value"]


def _price(run: runs.Run) -> Markup | str:
    """Show the largest epsilon spent, and its parts if there were evaluations."""
    most = max(run.silos, key=lambda s: s.spent, default=None)
    if most is None:
        return "-"
    trained = f"{shown(most.spent)} of {rounded_up(most.epsilon, 6)}"
    if not most.evaluated:
        return trained
    together = f"{shown(max(s.together[0] for s in run.silos))} with evaluations"
    return _two(trained, together)


def _quality(run: runs.Run) -> Markup:
    """Show the main figure of a model's quality, and the records it was measured on."""
    found = row_of(run)
    if not found or not (name := quality.measure(found[1])):
        words = "-"
        if run.kind != "compare" and not found:
            words = "not evaluated"
        return tag("span", words)
    if found[0] == "held-out":
        where = "held-out"
    else:
        where = "test, not private"
    return _two(quality.short(found[1], name), f"{quality.NAMES[name]}, {where}")


def _two(first: object, second: str) -> Markup:
    """Return a cell of two lines, the second in small letters."""
    return tag("div", first, tag("span", second, class_="small soft"))


def _state(run: runs.Run) -> Markup:
    return tag("span", run.state, class_=f"state {run.state}")


def _exports(name: str, run: runs.Run, found: Sequence[Checked]) -> Markup:
    """Show the links to what a reader can save. Report and evidence each stand alone."""
    path = quote(name)
    bare = run.folder.resolve().name
    folder = run.folder
    if run.folder.is_absolute():
        folder = bare
    links = [
        tag("a", "The report, to print and sign", href=f"/report/{path}", id="to-report"),
        tag(
            "a",
            "Save the report",
            href=f"/report/{path}",
            download=f"{bare}-report.html",
            id="save-report",
        ),
    ]
    if archive_in(found):
        links.append(
            tag(
                "a",
                "Save the evidence",
                href=f"/evidence/{path}",
                download=f"{bare}-evidence.zip",
                id="save-evidence",
            )
        )
    elif run.kind != "compare" and run.state == "finished":
        links.append(join(["Signed evidence: ", tag("code", f"silodp export evidence {folder}")]))
    return tag("p", join(links, " · "), class_="screen")


def _settings(run: runs.Run) -> dict[str, str]:
    """Return what was decided for a run, in words."""
    about = run.about
    silos = ", ".join(f"{s.name} {s.records or '?'}" for s in run.silos)
    epsilons = dict.fromkeys(rounded_up(s.epsilon, 6) for s in run.silos)
    values = {
        "prediction": title(run),
        "silos and records": silos,
        "study": about.get("study"),
        "model": about.get("model"),
        "parameters": about.get("parameters"),
        "algorithm": run.algorithm,
        "trust": TRUST.get(str(about.get("trust") or "isrl")),
        "ε of the run": ", ".join(epsilons),
        "rounds": run.total,
        "batches": batches(run),
        **{
            name.replace("_", " "): about.get(name) or "none"
            for name in SETTINGS
            if name in about and run.algorithm in TAKEN.get(name, (run.algorithm,))
        },
    }
    return {name: str(value) for name, value in values.items() if value not in (None, "")}


SETTINGS = (
    "step",
    "clip",
    "weights",
    "participation",
    "prox",
    "rule",
    "recalibration",
    "output",
    "phase",
    "local_steps",
    "momentum",
    "seed",
)
"""Settings of an order that are compared."""


def _results(run: runs.Run) -> dict[str, object]:
    """Return what came of a run, in words."""
    shares = [share for _, share in run.noise_shares]
    error = run.summary.get(
        "test_error", min((r["test_error"] for r in run.rows if r["epsilon"]), default=None)
    )
    results: dict[str, object] = {
        "state": _state(run),
        "quality": _quality(run),
        "ε spent": "-",
        "rounds done": f"{run.done} of {run.total}",
    }
    if run.silos:
        results["ε spent"] = shown(max(s.together[0] for s in run.silos))
    if error is not None:
        results["test error, not private"] = f"{error:.2%}"
    if shares:
        results["noise in an answer (median)"] = f"{median(shares):.1%}"
    return results


def _beside(named: Sequence[tuple[str, runs.Run]]) -> list[Markup]:
    """Show the results of runs and the settings that differ. Settings that are equal are folded."""
    results = [_results(run) for _, run in named]
    settings = [_settings(run) for _, run in named]
    heads = ("", *(name for name, _ in named))
    numbers = range(1, len(heads))
    rows = [
        (name, *(one.get(name, "-") for one in results))
        for name in dict.fromkeys(key for one in results for key in one)
    ]
    parts = [table("Results", heads, rows, numbers=numbers)]
    differ = []
    equal = []
    for name in dict.fromkeys(key for one in settings for key in one):
        values = [one.get(name, "-") for one in settings]
        if len(set(values)) > 1:
            differ.append((name, *values))
        else:
            equal.append((name, values[0]))
    if differ:
        parts.append(table("Settings that differ", heads, differ, numbers=numbers))
    else:
        parts.append(tag("p", "All settings are equal."))
    if equal:
        same = table("Equal settings", ("setting", "value"), equal, numbers=(1,), hide=True)
        parts.append(folded("equal", f"{len(equal)} settings are equal in all", same))
    return parts


def compared(named: Sequence[tuple[str, runs.Run]]) -> list[Markup]:
    """Show runs side by side: results, what differs, and curves in one figure."""
    parts = [tag("h1", "Compare runs"), *ranked(named), *_beside(named)]
    studies = [(name, run) for name, run in named if run.rows]
    if studies:
        lines = []
        for i, (name, run) in enumerate(studies):
            best: dict[float, float] = {}
            for r in run.rows:
                if r["epsilon"] and not r["curve"].endswith("-paper"):
                    best[r["epsilon"]] = min(r["test_error"], best.get(r["epsilon"], 1.0))
            lines.append(Series(name, sorted(best.items()), i, dots=True))
        ticks = sorted({x for line in lines for x, _ in line.points})
        description = "The lowest test error at each epsilon, with exact accounting."
        about = {"across": "ε", "up": "test error", "log": True, "percent": True, "ticks": ticks}
        parts.append(chart("Lowest private test error", description, lines, **about))
    parts += [tag("p", tag("b", name), ": ", lead(run), class_="small soft") for name, run in named]
    trained = [(name, run) for name, run in named if run.noise_shares]
    if trained:
        norms = [
            Series(name, [(r["question"] + 1, r["norm"]) for r in run.rounds if r.get("norm")], i)
            for i, (name, run) in enumerate(trained)
        ]
        shares = [
            Series(name, [(q + 1, s) for q, s in run.noise_shares], i)
            for i, (name, run) in enumerate(trained)
        ]
        parts.append(
            chart(
                "Length of the averaged release",
                "The length of what the server receives in each question.",
                norms,
                across="question",
                up="norm",
            )
        )
        description = "The part of each averaged release that is noise, by squared length."
        parts.append(
            chart(
                "The noise's share",
                description,
                shares,
                across="question",
                up="share",
                percent=True,
                top=1.0,
            )
        )
    return parts
