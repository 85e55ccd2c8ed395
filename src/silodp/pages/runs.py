"""Run folders as data for pages: what `silodp train`, `silodp federation run` and studies write,
also while they write.

Every file is read again for each page, and nothing is locked for longer than an instant. So a run
may be killed and resumed while someone reads. A folder may come from elsewhere: only plain files
are opened, and unknown content is refused in a sentence.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from silodp.core.errors import BadInput
from silodp.core.figures import UNCHANGED
from silodp.core.privacy.accounting import Budget, added, gdp_epsilon, gdp_mu
from silodp.core.problem.person import BY_ROW, unit
from silodp.core.problem.schema import Schema
from silodp.host.plain_files import json_in, lines_in, opened
from silodp.runs import Kind, RunFolder, State, answer_folders, run_folders

DRAWN = (".png", ".svg", ".html", ".part", ".new")
FORMER_BY_ROW = (
    "Each row is protected, not each person: whoever has several rows is protected less. A "
    "schema with person = COLUMN protects people."
)
"""The sentence for rows in the run folders of earlier versions."""


@dataclass(frozen=True)
class Evaluated:
    """The evaluations after the training: their number, their own (epsilon, delta), and (epsilon,
    delta) of training and evaluations together.
    """

    count: int
    epsilon: float
    delta: float
    together: tuple[float, float]


@dataclass(frozen=True)
class Silo:
    """A silo's budget for the run, and the share used after each question that it may have been
    charged for.
    """

    name: str
    records: int | None
    epsilon: float
    delta: float
    spent: float
    """Epsilon of the training, at the budget's delta. Through a shuffler: against the server."""
    used: float
    charges: tuple[tuple[int, str, float], ...] = ()
    """(question, kind, share of the budget) in order."""
    dropped: dict[str, int] = field(default_factory=dict)
    ledger: dict[str, Any] | None = None
    evaluated: Evaluated | None = None
    """Evaluations are priced in addition to the run's budget, not out of it."""
    local: float | None = None
    """Of a finished run through a shuffler: epsilon against an observer of the silo's own counts.
    Infinite means no bound.
    """
    gaussian: bool = False
    """Whether `together` covers only Gaussian releases. A whole trade-off curve follows then."""

    @property
    def together(self) -> tuple[float, float]:
        """Return (epsilon, delta) of the training and of its evaluations."""
        if self.evaluated:
            return self.evaluated.together
        return (self.spent, self.delta)


@dataclass(frozen=True)
class Run:
    """The data of one folder. `rows` is for a comparison. `rounds` and `silos` are for a run that
    trains one model.
    """

    folder: Path
    kind: str
    state: State
    sentence: str
    about: dict[str, Any]
    done: int = 0
    total: int = 0
    silos: tuple[Silo, ...] = ()
    rounds: tuple[dict[str, Any], ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    evaluations: tuple[dict[str, Any], ...] = ()
    """The results of `silodp evaluate`, in order."""
    statistics: tuple[dict[str, Any], ...] = ()
    """The answers to `silodp stats`, in order, with their questions and prices."""

    @property
    def scored(self) -> tuple[dict[str, Any], ...]:
        """Return the evaluations with a score of all records. Where gates refused that score, there
        are only groups.
        """
        return tuple(evaluation for evaluation in self.evaluations if evaluation.get("scores"))

    @property
    def questions(self) -> int:
        """Return the number of questions. Each question goes to several silos at once."""
        return len(self.rounds) or int(self.summary.get("questions", 0))

    @property
    def answers(self) -> int:
        """Return the number of answers. Each silo that answers a question adds one."""
        return sum(len(r["answered"]) for r in self.rounds) or int(self.summary.get("answers", 0))

    @property
    def algorithm(self) -> str:
        return str(self.about.get("algorithm") or "comparison")

    @property
    def rule(self) -> str:
        return str(self.about.get("rule", "gdp"))

    @property
    def totals(self) -> bool:
        """Return whether the server saw totals alone."""
        return self.about.get("trust") in ("masks", "shuffle")

    @property
    def unit(self) -> str:
        """Return one sentence that states whether rows or persons are protected."""
        recorded = str(self.about.get("unit") or BY_ROW)
        if recorded == FORMER_BY_ROW:
            return BY_ROW
        return recorded

    @property
    def of_persons(self) -> bool:
        return self.unit != BY_ROW

    @property
    def provided(self) -> str:
        """Return the condition under which the spends are true, to be printed after them."""
        if self.about.get("partitioned"):
            return f", {UNCHANGED}"
        return ""

    @property
    def gaussian(self) -> bool:
        """Return whether each curve of a comparison uses only Gaussian releases on full or disjoint
        batches.
        """
        whole = str(self.about.get("sampling", "full")).split(":")[0] in ("full", "disjoint")
        return whole and not any(
            str(m).endswith(("-shuffle", "-central")) for m in self.about.get("methods", ())
        )

    @property
    def noise_shares(self) -> list[tuple[int, float]]:
        """Return (question, expected share of noise in the squared length of the averaged
        release).
        """
        return [(r["question"], noise_share(r)) for r in self.rounds if r.get("norm")]


def noise_share(question: dict[str, Any]) -> float:
    """Return the expected share of noise in the squared length of an answer, at most 1."""
    return min(1.0, (question["noise"] / question["norm"]) ** 2)


def found_in(root: Path, depth: int = 4) -> dict[str, Path]:
    """Find every run folder under `root`. Return the folders by their path from `root`. Links are
    not followed.
    """
    return _named(root, run_folders(root, depth))


def recorded_in(root: Path, depth: int = 4) -> dict[str, Path]:
    """Find every folder with recorded answers under `root`, as `found_in` does with runs."""
    return _named(root, answer_folders(root, depth))


def _named(root: Path, folders: Iterable[Path]) -> dict[str, Path]:
    """Return the folders by their path from `root`."""
    found = {}
    for path in sorted(folders):
        name = str(path.relative_to(root))
        if path == root:
            name = root.resolve().name
        found[name] = path
    return found


def read(folder: Path) -> Run:
    """Read the run in a folder. Raise BadInput if there is none, or none that can be read."""
    with readable(folder):
        found = _read(folder)
        return replace(
            found, about={name: _without_folders(value) for name, value in found.about.items()}
        )


def _without_folders(value: Any) -> Any:
    """Return FILE.py:NAME without its folders, which name a machine's paths. Pages are signed and
    passed on.
    """
    if isinstance(value, str):
        return re.sub(r"[^\s,]*/(?=[^/\s,]+\.py\b)", "", value)
    return value


@contextlib.contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Read or draw a run inside this context. Raise BadInput for any content that silodp does not
    write.
    """
    try:
        yield
    except BadInput:
        raise
    except Exception as error:  # the folder may contain anything
        raise BadInput(
            f"the run in {folder} cannot be read ({type(error).__name__}); its files are "
            "not as silodp writes them"
        ) from None


def _read(folder: Path) -> Run:
    files = RunFolder(folder)
    kind = files.kind()
    about = json_in(files.description)
    if kind is Kind.COMPARISON:
        return _compared(files)
    if kind is Kind.TUNING:
        raise BadInput(
            f"{folder} contains a tuning, which has no report; read its cost and its "
            "choice in tune.json"
        )
    if kind is Kind.STATISTICS:
        lines = lines_in(files.statistics)
        sentence = f"It has {len(lines)} answers."
        return Run(folder, "statistics", files.state(), sentence, {}, statistics=lines)
    if kind is Kind.FEDERATION and about:
        return _federated(files, about)
    if kind is Kind.TRAINING and (about or files.result.exists()):
        return _trained(files, about)
    raise BadInput(
        f"{folder} contains no run; give a folder of `silodp train`, a study or `federation run`"
    )


def fingerprint(folder: Path) -> str:
    """Return SHA-256 over the sorted lines "SHA-256 of the content, two spaces, name" of the run's
    files.

    Drawings are left out. So are figures on raw records: a hash of them would confirm a guess about
    a record to every reader of an archive.
    """
    lines = []
    raw = RunFolder(folder).comparison
    for path in sorted(folder.iterdir()):
        drawn = path.suffix in DRAWN
        if path.is_file() and not path.is_symlink() and not drawn and path != raw:
            with opened(path) as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def audits(path: Path) -> list[dict[str, Any]]:
    """Read the rows of an audit: from audit.json in a folder of `silodp audit`, or from a file with
    the output of `silodp audit --json`. Raise BadInput if the file contains no audit.
    """
    if path.is_dir():
        file = path / "audit.json"
    else:
        file = path
    rows = json_in(file).get("rows")
    needed = {"algorithm", "claimed_epsilon", "empirical_epsilon", "lower_bound", "alarm"}
    if (
        not isinstance(rows, list)
        or not rows
        or not all(isinstance(row, dict) and needed <= row.keys() for row in rows)
    ):
        raise BadInput(
            f"{file} contains no audit; give the folder, or the JSON output, of `silodp audit`"
        )
    return rows


def audits_beside(folder: Path, given: Path | None) -> list[dict[str, Any]]:
    """Return the rows of the given audit, else of audit.json in the run's folder, else none."""
    if given:
        return audits(given)
    if (folder / "audit.json").exists():
        return audits(folder)
    return []


def statistics_in(folder: Path | None) -> tuple[dict[str, Any], ...]:
    """Return the answers that `silodp stats --record` has written into a folder, if one is given.
    Raise BadInput for another folder.
    """
    if folder is None:
        return ()
    if RunFolder(folder).kind() is not Kind.STATISTICS:
        raise BadInput(
            f"{folder} contains no answers of `silodp stats`; give a folder of --record, or "
            "FEDERATION/statistics"
        )
    return read(folder).statistics


def check_trained(run: Run, what: str) -> None:
    """Raise BadInput unless the run has finished training. `what` names the document to be made
    from it.
    """
    if run.kind not in ("train", "federation") or run.state != "finished":
        raise BadInput(
            f"{run.folder} contains no finished training; {what} needs a finished "
            "`silodp train` or `silodp federation run`"
        )


# --- one kind each -------------------------------------------------------------------------------


def _trained(files: RunFolder, about: dict[str, Any]) -> Run:
    folder = files.path
    state = files.state()
    summary = json_in(files.result)
    rounds = files.rounds()
    described = {"algorithm": summary.get("algorithm", "")}
    for name, value in about.pop("order", {}).items():
        if name not in ("epsilon", "delta"):
            described[name] = value
    if data := about.pop("source", {}).get("data"):
        described["data"] = data
    about = described | about
    spent = {s["name"]: s for s in summary.get("silos", ())}
    rule = str(about.get("rule") or summary.get("rule") or "")
    silos = tuple(
        _silo(s, rounds, rule, (end := spent.get(s["name"], {})) | _local(end))
        for s in about.get("silos") or spent.values()
    )
    sentence = {
        State.RUNNING: "It is training.",
        State.FINISHED: "It is finished.",
    }.get(state, "It was stopped before its end.")
    if state is State.INTERRUPTED:
        place = folder
        if folder.is_absolute():
            place = folder.name
        sentence += f" `silodp train --resume --out {place}` resumes it."
    environment = {}
    evaluations = ()
    if summary:
        environment = json_in(files.environment)
        evaluations = lines_in(files.evaluations)
    total = int(about.get("rounds") or len(rounds))
    done = 0
    if rounds:
        done = rounds[-1]["round"]
    if state is State.FINISHED and done:
        total = min(total, done)  # an algorithm may ask less often than once in a round
    return Run(
        folder,
        "train",
        state,
        sentence,
        about,
        min(done, total),
        total,
        silos,
        rounds,
        (),
        summary,
        environment,
        evaluations,
    )


def _federated(files: RunFolder, found: dict[str, Any]) -> Run:
    order = found["order"]
    cards = found["cards"]
    state = files.state()
    summary = json_in(files.result)
    rounds = files.rounds()
    # While the run trains, and after it was resumed, the result is that of an earlier stop.
    if state is State.RUNNING:
        current = {}
    else:
        current = files.current_result()
    sentence = "It was stopped before its end. `silodp federation run --resume` resumes it."
    if state is State.RUNNING:
        sentence = "It is training."
    elif state is State.FINISHED:
        sentence = "It is finished."
    elif current:
        sentence = f"It ended early: {current['ended']}."
    ends = {s["name"]: s for s in current.get("silos", ())}
    charged = (*rounds, *files.ahead())
    silos = []
    rule = str(cards[0].get("rule", "gdp")) if cards else "gdp"
    budgets = {silo["name"]: silo for silo in found.get("silos", ())}
    evaluations = lines_in(files.evaluations)
    for card in cards:
        budget = budgets.get(card["name"]) or {
            name: card[name] for name in ("name", "records", "epsilon", "delta")
        }
        end = ends.get(card["name"], {})
        spent = {"spent_epsilon": end.get("spent_epsilon_at_most")} | _local(end)
        silo = _silo(budget, charged, rule, spent, end.get("ledger"))
        silos.append(_with_evaluations(silo, evaluations))
    about = {
        **{name: value for name, value in order.items() if name not in ("epsilon", "delta")},
        "run": found["run"],
        "rule": rule,
        "model": cards[0]["model"],
        "prox": cards[0]["prox"],
        "definition": cards[0]["definition"],
        "features": len(cards[0]["features"]),
        "classes": len(cards[0]["classes"]),
        "parameters": cards[0]["parameters"],
        "study": str(found.get("study") or ""),
        "schema_text": cards[0].get("schema", ""),
        "partitioned": found.get("partitioned", "disjoint" in str(order.get("sampling"))),
    }
    if schema := cards[0].get("schema"):
        about["unit"] = unit(Schema.parse(schema, "the card").person)
    done = 0
    if rounds:
        done = min(rounds[-1]["round"], order["rounds"])
    return Run(
        files.path,
        "federation",
        state,
        sentence,
        about,
        done,
        order["rounds"],
        tuple(silos),
        rounds,
        (),
        summary,
        {},
        evaluations,
    )


def _compared(files: RunFolder) -> Run:
    folder = files.path
    config = json_in(files.configuration)
    data = json_in(files.data_facts)
    units = set()
    for path in sorted(folder.glob("results*.csv")):
        with io.TextIOWrapper(opened(path), "utf-8", newline="") as file:
            units |= {
                (row["unit"], row["trial"])
                for row in csv.DictReader(file)
                if row.get("curve") == "done" and row.get("spent_epsilon")
            }
    rows = files.rows()
    if rows:
        sentence = "It is finished."
    else:
        sentence = "It is not finished. The same command resumes it."
    environment = json_in(files.environment)
    total = int(data.get("units", 0)) or len(units)
    return Run(
        folder,
        "compare",
        files.state(),
        sentence,
        config | data,
        len(units),
        total,
        (),
        (),
        rows,
        {},
        environment,
    )


def _silo(
    about: dict[str, Any],
    rounds: tuple[dict[str, Any], ...],
    rule: str,
    end: dict[str, Any],
    ledger: dict[str, Any] | None = None,
) -> Silo:
    """Return a silo's spends from the lines of progress.

    `end` was counted when the run was over. For later evaluations it contains their own sum, and
    the sum with the training in `in_all`.
    """
    name = about["name"]
    before = 0.0
    charges = []
    dropped = {}
    for r in rounds:
        after = float(r["used"].get(name, before))
        if after > before:
            charges.append((r["question"], str(r["kind"]), after - before))
        before = max(
            before,
            after,
            # A question that a silo once received may be charged, even if it was repeated later.
        )
        if code := r["dropped"].get(name):
            dropped[code] = dropped.get(code, 0) + 1
    epsilon = float(about["epsilon"])
    delta = float(about["delta"])
    spent = end.get("spent_epsilon")
    if spent is None:
        spent = _so_far(rounds, name, Budget(epsilon, delta), before, rule)
    evaluated = None
    if in_all := end.get("in_all"):
        # 1: a folder without progress.jsonl
        before = before or 1.0
        together = (float(in_all["epsilon"]), float(in_all["delta"]))
        own = end.get("evaluations") or {
            "count": 0,
            "epsilon": math.nan,
            "delta": math.nan,
        }  # 0: of a folder of an earlier version
        evaluated = Evaluated(
            int(own["count"]), float(own["epsilon"]), float(own["delta"]), together
        )
    gaussian = rule == "gdp" and (evaluated is None or evaluated.together[1] == delta)
    return Silo(
        name,
        about.get("records"),
        epsilon,
        delta,
        float(spent),
        before,
        tuple(charges),
        dropped,
        ledger,
        evaluated,
        end.get("local"),
        gaussian,
    )


def _with_evaluations(silo: Silo, evaluations: tuple[dict[str, Any], ...]) -> Silo:
    """Add what a federation's evaluations may have cost the silo. An epsilon of 0 means no
    charge.
    """
    asked = [
        (e.get("trust", "isrl"), s)
        for e in evaluations
        for s in e.get("silos", ())
        if s["name"] == silo.name and s.get("epsilon")
    ]
    if not asked:
        return silo
    gaussian = silo.gaussian
    parts = [(float(s["epsilon"]), float(s["delta"])) for _, s in asked]
    together = added([(silo.spent, silo.delta), *parts], gaussian=gaussian)
    evaluated = Evaluated(len(parts), *added(parts, gaussian=gaussian), together)
    return replace(silo, evaluated=evaluated, gaussian=gaussian and together[1] == silo.delta)


def _local(end: dict[str, Any]) -> dict[str, float]:
    if "local_epsilon_at_most" not in end:
        return {}
    if end["local_epsilon_at_most"] is None:
        return {"local": math.inf}
    return {"local": float(end["local_epsilon_at_most"])}


def _so_far(
    rounds: tuple[dict[str, Any], ...], name: str, budget: Budget, used: float, rule: str
) -> float:
    """Return the epsilon of an unfinished run.

    It is the ledger's own figure if known. Under the gdp rule it follows from the share of mu^2.
    Else it is the whole budget.
    """
    if used <= 0:
        return 0.0
    if name in rounds[-1].get("epsilon", {}):
        return max(float(r.get("epsilon", {}).get(name, 0.0)) for r in rounds)
    if rule == "gdp":
        return gdp_epsilon(gdp_mu(budget) * used**0.5, budget.delta)
    return budget.epsilon
