"""Show the gate's page of `silodp ui`, at the silo and for the silo.

It shows the budget that is left, every query that was answered or refused and why, and the pause.
It reads policy, ledger and log, which contain no record, and never the data. With the token a user
may pause the gate. Everything else is for reading.
"""

from __future__ import annotations

import csv
import hmac
import io
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from silodp.core import quality
from silodp.core.errors import BadInput
from silodp.core.figures import ACCURACY, AUC, BALANCED, HOLDS, left_of, rounded_up, shown
from silodp.core.protocol.codec import Answer, decode_reply
from silodp.core.protocol.refusals import CODES
from silodp.host import log
from silodp.host.listener import LINE_CODES
from silodp.host.portable import running
from silodp.pages.charts import Series, chart, legend, spent_bar
from silodp.pages.markup import Markup, counts, facts, figure, folded, join, section, table, tag
from silodp.pages.screen import Tabs, alive, follow, screen
from silodp.silo.ledger.delayed import delayed
from silodp.silo.ledger.view import queries_of, said_of, summary_of
from silodp.silo.service import daemon
from silodp.silo.service.names import called, runs_of
from silodp.silo.service.pause import paused, set_paused
from silodp.silo.service.policy import DaemonSettings, Policy

SHOWN = 200
"""How many of the latest frames are listed."""
LONGEST_FORM = 4096
UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
READ = "This page was started without a token, so it is read-only."
PASSED = {
    "answered": "It was charged, computed, stored and sent.",
    "repeated": "The stored answer was sent again, at no cost.",
    "held": "The budget that a run needs was reserved. Nothing was charged.",
    "released": "The run has ended, and the rest of its reservation is free.",
    "started": "The gate began to listen.",
    "stopped": "The gate was stopped.",
    "late": "The previous reply took longer than answer_after.",
}
WHY = LINE_CODES | CODES | PASSED
LINE = re.compile(
    r"(?P<time>\S+) (?P<code>\S+) *(?P<statistic>\S+)? *(?P<id>\S+)?(?: +price "
    r"(?P<price>[\d.]+%))?(?: +left (?P<left>-?[\d.]+%))?$"
)


SCORED = 20
"""How many of the latest evaluations are listed."""
LONGEST_SCORE = 2**20
"""Most bytes of an answer to an evaluation."""
Judge = Callable[[np.ndarray, float], Mapping[str, Any] | None]
"""Returns the row of an evaluation for the means of a score at this noise multiplier. Returns None
for means of another kind.
"""


class GatePage:
    """The page of one silo's gate. `token` allows its owner to pause the gate."""

    def __init__(
        self,
        policy: Path,
        token: str | None,
        tabs: Tabs,
        judge: Judge | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = policy
        self._token = token
        self._tabs = tabs
        self._judge = judge
        self._place = DaemonSettings.load(policy)
        self._ledger = delayed(Path(self._place.ledger), self._slot, clock=clock)
        self._verified = ""

    def _slot(self) -> float:
        """Return the seconds after which a charge is shown, which is when its reply is sent."""
        return Policy.load(self._path).answer_after

    def routes(self) -> list[Route]:
        """Return the page's routes."""
        return [
            Route("/silo", self.show),
            Route("/silo-live", self.live),
            Route("/silo-charges.csv", self.charges),
            Route("/silo/pause", self.pause, methods=["POST"]),
        ]

    def show(self, request: Request, error: str = "", status: int = 200) -> Response:
        """Return the page, with a note about a failed or finished request."""
        done = {"paused": "The gate is paused.", "resumed": "The gate answers again."}.get(
            request.query_params.get("done", ""), ""
        )
        if error:
            note = tag("p", error, class_="note bad", role="alert")
        elif done:
            note = tag("p", done, class_="note", role="status")
        else:
            note = ""
        content = (
            tag("h1", f"The gate of {Policy.load(self._path).silo}"),
            note,
            alive("/silo-live", self._now()),
        )
        return HTMLResponse(screen("The gate", self._tabs, "/silo", *content, live=True), status)

    async def live(self, request: Request) -> Response:
        """Return the part of the page that changes, again and again."""
        return await follow(request, self._now)

    def charges(self, request: Request) -> Response:
        """Return every charge as a table for a spreadsheet."""
        columns = ("entry", "time", "asker", "run", "kind", "query_id", "cost", "left", "answer")
        out = io.StringIO()
        rows = csv.writer(out)
        rows.writerow(columns)
        rows.writerows([q[name] for name in columns] for q in queries_of(self._ledger))
        return Response(
            out.getvalue(),
            media_type="text/csv",
            headers={"content-disposition": 'attachment; filename="charges.csv"'},
        )

    async def pause(self, request: Request) -> Response:
        """Pause the gate, or let it answer again, if the form has the token."""
        raw = b""
        async for piece in request.stream():
            raw += piece
            if len(raw) > LONGEST_FORM:
                return await run_in_threadpool(self.show, request, "The form is too long.", 413)
        form = parse_qs(raw.decode("utf-8", "replace"), keep_blank_values=True)
        given = form.get("token", [""])[-1]
        wanted = form.get("do", [""])[-1]
        if not self._token or not hmac.compare_digest(given.encode(), self._token.encode()):
            if self._token:
                error = "This is not the token. The gate has not changed."
            else:
                error = READ
            return await run_in_threadpool(self.show, request, error, 403)
        if wanted not in ("pause", "resume"):
            return await run_in_threadpool(
                self.show, request, "The form has neither pause nor resume.", 400
            )
        await run_in_threadpool(set_paused, self._path, wanted == "pause")
        return RedirectResponse(f"/silo?done={wanted}d", 303)

    # --- what is shown ---------------------------------------------------------------------------

    def _now(self) -> Markup:
        """Return state, budget, pause, queries and limits."""
        try:
            rules = Policy.load(self._path)
            ledger = self._ledger
            runs = running(self._place.ledger)
            queries = queries_of(ledger)
            summary = summary_of(ledger)
            badge = self._badge()
        except BadInput as error:
            return tag("p", f"{error}.", class_="note bad", data_state=str(error))
        halted = paused(self._path)
        codes = {
            code: times for code, times in log.tally(self._place.log).items() if code not in PASSED
        }
        if runs:
            state = "running"
            words = "The gate runs and answers."
        else:
            state = "stopped"
            words = "The gate does not run."
        if halted:
            state = "paused"
            if runs:
                words = "Every query is refused."
            else:
                words = "The gate does not run. When it starts, it will refuse every query."
        numbers = (
            ("of the budget left", left_of(summary["used"])),
            (f"ε spent, of {rules.epsilon:g}", shown(summary["spent_epsilon"])),
            ("questions charged", len(queries)),
            ("refused, within the log", sum(codes.values())),
        )
        refused = [
            (tag("b", code, class_="refused"), n, WHY.get(code, ""))
            for code, n in sorted(codes.items())
        ]
        if refused:
            columns = ("code", "times", "why")
            why = table("Why queries were refused", columns, refused, numbers=(1,), hide=True)
        else:
            why = tag("p", "No query was refused.")
        entries = facts(
            [("Ledger entries", summary["count"]), ("Records (public)", ledger.records)]
        )
        save = tag(
            "p",
            tag(
                "a", "Save every charge as a table (CSV)", href="/silo-charges.csv", id="to-charges"
            ),
            class_="screen",
        )
        frames = folded("frames", f"The last {SHOWN} lines of the log", self._frames(queries))
        return join(
            [
                tag(
                    "p", tag("span", state, class_=f"state {state}"), f". {words}", data_state=words
                ),
                counts(numbers),
                tag("p", f"{said_of(summary).capitalize()} {HOLDS}", class_="soft small"),
                self._form(halted),
                section(
                    "spend",
                    "Spend over time",
                    *spend(rules.silo, queries, summary["used"]),
                ),
                section("runs", "Askers and studies", self._runs(queries), frames),
                *self._scores(queries),
                section("refused", "Refused", why),
                section("rules", "The policy", self._rules(rules)),
                section(
                    "ledger",
                    "The ledger",
                    badge,
                    entries,
                    tag(
                        "p",
                        "Head ",
                        tag("span", summary["head"], class_="hash"),
                        class_="soft small",
                    ),
                    save,
                ),
            ]
        )

    def _badge(self) -> Markup:
        """Return whether the chain is intact. It is verified again once the ledger has grown."""
        count, head = self._ledger.head()
        if self._verified != head:
            self._ledger.verify()
            self._verified = head
        return tag(
            "p",
            tag("span", "verified", class_="state finished"),
            f". The chain of {count} entries is valid, and so is every total in it.",
        )

    def _runs(self, queries: list[dict]) -> Markup:
        """Return one line for each run that was answered, the newest first."""
        times: dict[str, list[str]] = {}
        for q in queries:
            times.setdefault(q["run"], []).append(q["time"][:16].replace("T", " "))
        rows = [
            (
                join(
                    [
                        r["study"] or "no name",
                        tag("span", f"run {r['run'][:8]}", class_="small soft"),
                    ]
                ),
                r["asked_by"],
                r["questions"],
                tag("span", times[r["run"]][0], class_="when"),
                tag("span", times[r["run"]][-1], class_="when"),
                f"{rounded_up(100 * r['cost'], 3)} %",
            )
            for r in reversed(runs_of(self._ledger, queries))
        ]
        if not rows:
            return tag("p", "No query has been answered yet.")
        columns = (
            "study",
            "asker",
            "questions",
            "first (UTC)",
            "last (UTC)",
            "share of the budget",
        )
        return table("Every run that was answered, newest first", columns, rows, numbers=(2, 5))

    def _frames(self, queries: list[dict]) -> Markup:
        """Return the latest frames of the log, with the asker and the run of each answered one."""
        by_short_id = {daemon._short(q["query_id"]): q for q in queries}
        rows = []
        for line in reversed(deque(_lines(self._place.log), maxlen=SHOWN)):
            code = line["code"] or ""
            q = by_short_id.get(line["id"] or "", {})
            why = ""
            if code not in ("answered", "repeated"):
                why = tag("span", WHY.get(code, ""), class_="small soft why")
            class_ = "answered" if code in PASSED else "refused"
            asker = "-"
            if "asker" in q:
                asker = called(self._ledger.path, q["asker"])
            rows.append(
                (
                    tag("span", (line["time"] or "")[:19].replace("T", " "), class_="when"),
                    join([tag("b", code, class_=class_), " ", why]),
                    line["statistic"] or "-",
                    q.get("kind", "-"),
                    asker,
                    q.get("run", "-")[:8],
                    _percent(line["price"]),
                    _percent(line["left"]),
                )
            )
        columns = (
            "when (UTC)",
            "result",
            "statistic",
            "kind",
            "asker",
            "run",
            "price",
            "left after",
        )
        return table(
            f"The last {len(rows)} lines of the log, newest first", columns, rows, numbers=(6, 7)
        )

    def _scores(self, queries: list[dict]) -> list[Markup]:
        """Return the results of evaluations here, and the cost of each.

        They are computed from the answers that were sent, which are private already.
        """
        if self._judge is None:
            return []
        rows = []
        kept = [q for q in queries if q["kind"] == "score" and q["answer"] == "kept"]
        for q in kept[-SCORED:]:
            stored = self._ledger.stored(q["query_id"])
            if stored is None:  # purged since
                continue
            reply = decode_reply(stored, limit=LONGEST_SCORE)
            row = None
            if isinstance(reply, Answer):
                row = self._judge(reply.value[0].numpy(), reply.event.multiplier)
            if row:
                words = [quality.short(row, name) for name in (ACCURACY, BALANCED, AUC)]
            else:
                words = ["only in a total", "-", "-"]
            who = called(self._ledger.path, q["asker"])
            rows.append(
                (
                    q["time"][:16].replace("T", " "),
                    who,
                    *words,
                    f"{rounded_up(100 * q['cost'], 3)} %",
                )
            )
        if not rows:
            return []
        columns = ("when (UTC)", "asker", "accuracy", "balanced accuracy", "AUC", "price")
        evaluations = table(
            "Evaluations of a model on this silo's held-out records",
            columns,
            rows,
            numbers=(2, 3, 4, 5),
        )
        note = (
            "95 % confidence intervals, from the noise at the clip that silodp's "
            "server uses and from the number of records. Price: share of the budget."
        )
        return [
            section(
                "scores", "Results of evaluations", evaluations, tag("p", note, class_="soft small")
            )
        ]

    def _rules(self, rules: Policy) -> Markup:
        """Return the policy's limits."""
        return facts(
            [
                ("Last day", rules.expires.isoformat()),
                ("Statistics", ", ".join(rules.statistics)),
                ("Batches", ", ".join(rules.samplings)),
                ("Clip", f"{rules.clip[0]:g} to {rules.clip[1]:g}"),
                ("Noise multiplier, least", f"{rules.minimum_noise_multiplier:g}"),
                ("Fewest records in a batch", f"{rules.minimum_batch:g}"),
                ("Most queries in a run", rules.queries_per_run),
                ("Most queries in an hour", rules.queries_per_hour),
                ("Askers", len(rules.askers)),
                ("ε and δ", f"{rules.epsilon:g}, {rounded_up(rules.delta)}"),
            ]
        )

    def _form(self, halted: bool) -> Markup:
        """Return the form that pauses the gate."""
        if not self._token:
            words = f"{READ} ", tag("code", "silodp silo pause"), " pauses the gate."
            return section("pause", "Pause", tag("p", *words))
        box = tag(
            "input", type="password", name="token", id="token", autocomplete="off", required=True
        )
        field = tag("div", tag("label", "Token", for_="token"), box, class_="field")
        if halted:
            name = "Resume the gate"
            value = "resume"
        else:
            name = "Pause the gate"
            value = "pause"
        button = tag("button", name, type="submit", name="do", value=value, id="do")
        words = (
            "A paused gate refuses every query until it is resumed, also after a "
            "restart. It still sends an answer that it is computing."
        )
        return section(
            "pause",
            "Pause",
            tag("p", words),
            tag("form", field, button, action="/silo/pause", method="post"),
        )


def spend(name: str, queries: list[dict], used: float) -> list[Markup]:
    """Return the budget as a bar of its charges, and how it was used over time."""
    kinds = list(dict.fromkeys(q["kind"] for q in queries))
    bar = spent_bar(name, [(i, q["kind"], q["cost"]) for i, q in enumerate(queries)], used, kinds)
    drawn = [
        figure(
            "The budget",
            "Each piece is one charge, in order. The empty part is not spent.",
            bar,
            legend(kinds) if kinds else "",
        )
    ]
    if not queries:
        return drawn
    moments = [datetime.fromisoformat(q["time"]) for q in queries]
    length = (moments[-1] - moments[0]).total_seconds()
    # The longest unit of which the time has at least two.
    unit, seconds = next(
        ((unit, seconds) for unit, seconds in UNITS if length >= 2 * seconds), UNITS[-1]
    )
    points = [(0.0, 0.0)]
    for moment, q in zip(moments, queries, strict=True):
        across = (moment - moments[0]).total_seconds() / seconds
        points += [(across, points[-1][1]), (across, 1 - q["left"])]
    since = (
        f"Share of the budget used, from {moments[0]:%Y-%m-%d %H:%M} UTC on. A step is "
        "a charge. A flat part is a time without questions."
    )
    drawn.append(
        chart(
            "Spent over time",
            since,
            [Series("used", points, 0, area=True)],
            across=unit,
            up="used",
            percent=True,
            top=1.0,
        )
    )
    return drawn


def _percent(text: str | None) -> str:
    """Return the log's percentage with two digits."""
    if text:
        return f"{float(text.rstrip('%')):.2f} %"
    return "-"


def _lines(path: str) -> Iterator[dict[str, str | None]]:
    """Yield the log's lines in order, as far as they are kept, without those of another form."""
    for line in log.lines(path):
        words = line.split()
        if len(words) > 1 and words[1] in ("started", "stopped", "late"):
            yield {
                "time": words[0],
                "code": words[1],
                "statistic": None,
                "id": None,
                "price": None,
                "left": None,
            }
        elif found := LINE.match(line.rstrip()):
            yield found.groupdict()
