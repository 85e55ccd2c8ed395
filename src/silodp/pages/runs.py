"""Run folders as data for pages: what `silodp train`, `silodp federation run` and studies have
written, also while they write.

Everything is read anew each time and nothing is locked but for an instant, so a run may be killed
and resumed under a reader's eyes. A folder may come from elsewhere: only plain files are opened,
and what is in none of our forms is refused in a sentence.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from silodp.core.errors import BadInput
from silodp.core.figures import UNCHANGED
from silodp.core.privacy.accounting import Budget, added, gdp_epsilon, gdp_mu
from silodp.core.problem.person import BY_ROW, unit
from silodp.core.problem.schema import Schema
from silodp.host.plain_files import json_in, lines_in, opened
from silodp.runs import Kind, RunFolder, State, run_folders

DRAWN = (".png", ".svg", ".html", ".part", ".new")


@dataclass(frozen=True)
class Evaluated:
    """What evaluations came to after the training: how many, their own (epsilon, delta), and that
    of everything together.
    """

    count: int
    epsilon: float
    delta: float
    together: tuple[float, float]


@dataclass(frozen=True)
class Silo:
    """A silo's budget for the run, and the share of it that was used up after each question that it
    may have been charged for.
    """

    name: str
    records: int | None
    epsilon: float
    delta: float
    spent: float
    """Epsilon of the training, at the budget's delta; through a shuffler against the server."""
    used: float
    charges: tuple[tuple[int, str, float], ...] = ()
    """(question, kind, share of the budget) in order."""
    dropped: dict[str, int] = field(default_factory=dict)
    ledger: dict[str, Any] | None = None
    evaluated: Evaluated | None = None
    """Evaluations are priced beside the run's budget, not out of it."""
    local: float | None = None
    """Of a run through a shuffler, once it is over: epsilon against whoever sees the silo's own
    counts; infinite for no bound.
    """
    gaussian: bool = False
    """Whether `together` is of Gaussian releases alone, so that a whole trade-off curve follows
    from it.
    """

    @property
    def together(self) -> tuple[float, float]:
        """(epsilon, delta) of the training and of its evaluations."""
        if self.evaluated:
            return self.evaluated.together
        return (self.spent, self.delta)


@dataclass(frozen=True)
class Run:
    """What there is to show of one folder. `rows` is for a comparison; `rounds` and `silos` are for
    a run that trains one model.
    """

    folder: Path
    kind: str
    state: State
    said: str
    about: dict[str, Any]
    done: int = 0
    total: int = 0
    silos: tuple[Silo, ...] = ()
    rounds: tuple[dict[str, Any], ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    evaluations: tuple[dict[str, Any], ...] = ()
    """What `silodp evaluate` has answered, in order."""

    @property
    def scored(self) -> tuple[dict[str, Any], ...]:
        """Those of them that have a score of all records: where gates refused it, there are groups
        alone.
        """
        return tuple(evaluation for evaluation in self.evaluations if evaluation.get("scores"))

    @property
    def questions(self) -> int:
        """What the server asked; each is asked of several silos at once."""
        return len(self.rounds) or int(self.summary.get("questions", 0))

    @property
    def answers(self) -> int:
        """What the silos said: one answer of each that was asked and answered."""
        return sum(len(r["answered"]) for r in self.rounds) or int(self.summary.get("answers", 0))

    @property
    def algorithm(self) -> str:
        return str(self.about.get("algorithm") or "comparison")

    @property
    def rule(self) -> str:
        return str(self.about.get("rule", "gdp"))

    @property
    def totals(self) -> bool:
        """Whether the server saw totals alone."""
        return self.about.get("trust") in ("masks", "shuffle")

    @property
    def unit(self) -> str:
        """One sentence: whether rows are protected or people."""
        return str(self.about.get("unit") or BY_ROW)

    @property
    def of_persons(self) -> bool:
        return self.unit != BY_ROW

    @property
    def provided(self) -> str:
        """What its spends hold under, to be said after them."""
        if self.about.get("partitioned"):
            return f", {UNCHANGED}"
        return ""

    @property
    def gaussian(self) -> bool:
        """Of a comparison: whether each of its curves is made of Gaussian releases on full or
        disjoint batches.
        """
        whole = str(self.about.get("sampling", "full")).split(":")[0] in ("full", "disjoint")
        return whole and not any(
            str(m).endswith(("-shuffle", "-central")) for m in self.about.get("methods", ())
        )

    @property
    def noise_shares(self) -> list[tuple[int, float]]:
        """(question, share of the squared length of the averaged release that its noise is expected
        to have).
        """
        return [(r["question"], noise_share(r)) for r in self.rounds if r.get("norm")]


def noise_share(question: dict[str, Any]) -> float:
    """Of a question with an answer: the share of its squared length that noise is expected to
    have.
    """
    return min(1.0, (question["noise"] / question["norm"]) ** 2)


def found_in(root: Path, depth: int = 4) -> dict[str, Path]:
    """Every run folder under `root`, by its path from there; links are not followed."""
    return {
        str(path.relative_to(root)) if path != root else root.resolve().name: path
        for path in sorted(run_folders(root, depth))
    }


def read(folder: Path) -> Run:
    """The run in a folder; BadInput if it holds none, or none that can be read."""
    with readable(folder):
        found = _read(folder)
        return replace(
            found, about={name: _without_folders(value) for name, value in found.about.items()}
        )


def _without_folders(value: Any) -> Any:
    """FILE.py:NAME without the folders of whoever's machine it was on: pages are signed and handed
    on.
    """
    if isinstance(value, str):
        return re.sub(r"[^\s,]*/(?=[^/\s,]+\.py\b)", "", value)
    return value


@contextlib.contextmanager
def readable(folder: Path) -> Iterator[None]:
    """To read or draw a run: what is not as we write it is said in a sentence, wherever it is
    met.
    """
    try:
        yield
    except BadInput:
        raise
    except Exception as error:  # whatever somebody has put there
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
            f"{folder} holds no comparison; of a tuning there is no report: what it "
            "cost and chose is in its tune.json"
        )
    if kind is Kind.FEDERATION and about:
        return _federated(files, about)
    if kind is Kind.TRAINING and (about or files.result.exists()):
        return _trained(files, about)
    raise BadInput(
        f"{folder} holds no run; give a folder of `silodp train`, a study or `federation run`"
    )


def fingerprint(folder: Path) -> str:
    """SHA-256 over the sorted lines "SHA-256 of the content, two spaces, name" of the run's files,
    drawings left out.
    """
    lines = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.is_symlink() and path.suffix not in DRAWN:
            with opened(path) as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def audits(path: Path) -> list[dict[str, Any]]:
    """The rows of an audit: audit.json in a folder of `silodp audit`, or what `silodp audit --json`
    has printed.
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
            f"{file} holds no audit; give the folder, or the JSON output, of `silodp audit`"
        )
    return rows


def audits_beside(folder: Path, given: Path | None) -> list[dict[str, Any]]:
    """The rows of the audit that was given, or else of the one in the run's folder; none where
    there is none.
    """
    if given:
        return audits(given)
    if (folder / "audit.json").exists():
        return audits(folder)
    return []


def check_trained(run: Run, what: str) -> None:
    """BadInput unless the run has trained a model to its end: `what` is made of nothing else."""
    if run.kind not in ("train", "federation") or run.state != "finished":
        raise BadInput(
            f"{run.folder} holds no finished training; {what} is of `silodp train` or "
            "`silodp federation run`"
        )


# --- one kind each -------------------------------------------------------------------------------


def _trained(files: RunFolder, about: dict[str, Any]) -> Run:
    folder = files.path
    state = files.state()
    summary = json_in(files.result)
    rounds = files.rounds()
    told = {
        name: value
        for name, value in about.pop("order", {}).items()
        if name not in ("epsilon", "delta")
    }
    data = about.pop("source", {}).get("data")
    about = (
        {"algorithm": summary.get("algorithm", "")}
        | told
        | ({"data": data} if data else {})
        | about
    )
    spent = {s["name"]: s for s in summary.get("silos", ())}
    rule = str(about.get("rule") or summary.get("rule") or "")
    silos = tuple(
        _silo(s, rounds, rule, (end := spent.get(s["name"], {})) | _local(end))
        for s in about.get("silos") or spent.values()
    )
    said = {
        State.RUNNING: "It is training.",
        State.FINISHED: "It is finished.",
    }.get(state, "It was stopped before its end.")
    if state is State.INTERRUPTED:
        said += (
            f" `silodp train --resume --out {folder.name if folder.is_absolute() else folder}` "
            "goes on with it."
        )
    environment = json_in(files.environment) if summary else {}
    total = int(about.get("rounds") or len(rounds))
    done = rounds[-1]["round"] if rounds else 0
    if summary:
        evaluations = lines_in(files.evaluations)
    else:
        evaluations = ()
    return Run(
        folder,
        "train",
        state,
        said,
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
    # While it runs, and after it has gone on, the result is that of an earlier stop.
    if state is State.RUNNING:
        current = {}
    else:
        current = files.current_result()
    said = "It was stopped before its end; `silodp federation run --resume` goes on with it."
    if state is State.RUNNING:
        said = "It is training."
    elif state is State.FINISHED:
        said = "It is finished."
    elif current:
        said = f"It ended early: {current['ended']}."
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
        told = {"spent_epsilon": end.get("spent_epsilon_at_most")} | _local(end)
        silos.append(
            _with_evaluations(_silo(budget, charged, rule, told, end.get("ledger")), evaluations)
        )
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
        "partitioned": found.get("partitioned", "disjoint" in str(order.get("sampling"))),
    }
    if schema := cards[0].get("schema"):
        about["unit"] = unit(Schema.parse(schema, "the card").person)
    done = min(rounds[-1]["round"] if rounds else 0, order["rounds"])
    return Run(
        files.path,
        "federation",
        state,
        said,
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
        said = "It is finished."
    else:
        said = "It is not finished; the same command goes on with it."
    environment = json_in(files.environment)
    total = int(data.get("units", 0)) or len(units)
    return Run(
        folder,
        "compare",
        files.state(),
        said,
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
    """`end` is what was counted once the run was over: of evaluations that came later, their own
    sum and, in `in_all`, that of everything.
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
            # what was told once may be charged, whatever became of the question when it was asked
            # again
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
    """With what a federation's evaluations may have cost it beside the training; epsilon 0 says
    that nothing was charged.
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
    local = end["local_epsilon_at_most"]
    return {"local": math.inf if local is None else float(local)}


def _so_far(
    rounds: tuple[dict[str, Any], ...], name: str, budget: Budget, used: float, rule: str
) -> float:
    """Epsilon of a run that has not ended: the ledger's own, or what a share of mu^2 amounts to
    under the gdp rule, else the whole budget.
    """
    if used <= 0:
        return 0.0
    if name in rounds[-1].get("epsilon", {}):
        return max(float(r.get("epsilon", {}).get(name, 0.0)) for r in rounds)
    if rule == "gdp":
        return gdp_epsilon(gdp_mu(budget) * used**0.5, budget.delta)
    return budget.epsilon
