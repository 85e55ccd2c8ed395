"""Run the trials of the leaderboard: one row of results for each contestant, table, epsilon, seed.

Rows are appended to `trials.csv` as soon as they are known. A run that was interrupted continues:
what the file has is not computed again.
"""

from __future__ import annotations

import csv
import io
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pandas as pd
import torch

from research.board import of_silodp, without_privacy
from research.board.contestant import TASKS, TRUSTS, Contestant
from research.board.peers import PEERS
from research.board.scores import SIZES, score
from research.board.tables import TABLES, split
from silodp.core.errors import BadInput
from silodp.host.extension import load

EPSILONS = (3.0, 1.0, 8.0, 0.5)
"""In the order of PLAN.md."""
SEEDS = 20
FEWER_SEEDS = {"dialysis": 5, "school": 5}
DELTA = 1e-5
TOLERANCE = 1e-3
"""A contestant that spends more than this share above its budget gets no score."""
KEY = ("table", "epsilon", "seed", "contestant")
METRICS = ("loss", "rank", "slope", "mean", "observed", *(f"loss_{name}" for name in SIZES))
COLUMNS = (*KEY, "trust", "spent", "seconds", *METRICS, "note")
FILE = "trials.csv"


@dataclass(frozen=True)
class Work:
    """The contestants that one case still needs."""

    table: str
    epsilon: float
    """Infinite for contestants without privacy, to which it makes no difference."""
    seed: int
    contestants: tuple[str, ...]


@dataclass(frozen=True)
class Places:
    """The folders that a run reads and writes."""

    data: Path
    """The tables that are files."""
    out: Path
    entries: tuple[str, ...] = ()
    """Further contestants, as FILE.py:NAME."""

    @property
    def trials(self) -> Path:
        """Return the file of results."""
        return self.out / FILE

    @property
    def advice(self) -> Path:
        """Return the folder of the advisor's choices."""
        return self.out / "advice"


def all_contestants(places: Places) -> dict[str, Contestant]:
    """Return every contestant by its name. Raise BadInput for an entry that is none."""
    entries: list[Contestant] = [load(text) for text in places.entries]
    for one, text in zip(entries, places.entries, strict=True):
        if isinstance(one, type) or not all(
            hasattr(one, name) for name in ("name", "trust", "tasks", "predict")
        ):
            raise BadInput(f"{text} is no contestant; see research/board/contestant.py")
        if one.trust not in TRUSTS or not one.tasks <= set(TASKS):
            raise BadInput(f"{text} has the trust {one.trust!r} and the tasks {sorted(one.tasks)}")
    ours = of_silodp.contestants(places.advice)
    listed = (*ours, *without_privacy.CONTESTANTS, *PEERS, *entries)
    return {one.name: one for one in listed}


def finished(path: Path) -> pd.DataFrame:
    """Return the results in the file. A last line that was cut off is removed from the file."""
    if not path.exists():
        return pd.DataFrame(columns=list(COLUMNS))
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(complete))
    if not complete:
        return pd.DataFrame(columns=list(COLUMNS))
    rows = pd.read_csv(io.BytesIO(complete), keep_default_na=True)
    if list(rows.columns) != list(COLUMNS):
        raise BadInput(f"{path} has other columns than this version writes; give another --out")
    return rows.drop_duplicates(list(KEY), keep="last")


def to_do(
    done: pd.DataFrame,
    contestants: dict[str, Contestant],
    tables: Sequence[str],
    epsilons: Sequence[float],
    seeds: int,
) -> Iterator[Work]:
    """Yield what is missing, in the order of PLAN.md: everything of seed 0, then of seed 1, ..."""
    known = set(done[list(KEY)].itertuples(index=False, name=None))
    for seed in range(seeds):
        for epsilon in (math.inf, *epsilons):
            for table in tables:
                if seed >= FEWER_SEEDS.get(table, seeds):
                    continue
                task = task_of(table)
                missing = tuple(
                    name
                    for name, one in contestants.items()
                    if task in one.tasks
                    and (one.trust == "none") == math.isinf(epsilon)
                    and (table, epsilon, seed, name) not in known
                )
                if missing:
                    yield Work(table, epsilon, seed, missing)


def task_of(table: str) -> str:
    """Return the task of a table, as contestants call it."""
    task = TABLES[table].schema["label"]["task"]
    return "number" if task == "regression" else task


def carry_out(work: Work, places: Places) -> list[dict[str, object]]:
    """Return a row for each contestant of this work."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    contestants = _contestants(places)
    schema = TABLES[work.table].parsed
    case, test = split(
        work.table,
        schema,
        _frames(work.table, places.data),
        epsilon=work.epsilon,
        delta=DELTA,
        seed=work.seed,
    )
    sizes = {silo: len(frame) for silo, frame in case.train.items()}
    rows = []
    for name in work.contestants:
        row: dict[str, object] = {
            "table": work.table,
            "epsilon": work.epsilon,
            "seed": work.seed,
            "contestant": name,
            "trust": contestants[name].trust,
        }
        start = time.process_time()
        try:
            answer = contestants[name].predict(case)
            row["spent"] = answer.spent
            if answer.spent > work.epsilon * (1 + TOLERANCE):
                raise BadInput(f"spent {answer.spent:g} of {work.epsilon:g}")
            row |= score(schema, answer.predictions, test, sizes)
            row["note"] = answer.note
        except BadInput as error:
            row["note"] = f"refused: {error}"
        row["seconds"] = time.process_time() - start
        rows.append(row)
    return rows


def append(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Append rows to the file, with a header if it is new. Every write ends with a line's end."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if not path.exists() or not path.stat().st_size:
        writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(row.get(name)) for name in COLUMNS})
    with path.open("ab") as file:
        file.write(text.getvalue().encode())
        file.flush()
        os.fsync(file.fileno())


def run(
    places: Places,
    works: Sequence[Work],
    workers: int,
    show: Callable[[str], None],
) -> None:
    """Carry out the work, and append each case's rows when they are known."""
    places.out.mkdir(parents=True, exist_ok=True)
    total = len(works)
    if workers == 1:
        results = ((work, carry_out(work, places)) for work in works)
        _collect(results, places.trials, total, show)
        return
    with ProcessPoolExecutor(workers) as pool:
        futures = {pool.submit(carry_out, work, places): work for work in works}
        try:
            results = ((futures[one], one.result()) for one in as_completed(futures))
            _collect(results, places.trials, total, show)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _collect(
    results: Iterator[tuple[Work, list[dict[str, object]]]],
    path: Path,
    total: int,
    show: Callable[[str], None],
) -> None:
    for number, (work, rows) in enumerate(results, 1):
        append(path, rows)
        show(
            f"{number} of {total}: {work.table}, epsilon {work.epsilon:g}, seed {work.seed}, "
            f"{len(rows)} contestants"
        )


@lru_cache(maxsize=4)
def _contestants(places: Places) -> dict[str, Contestant]:
    return all_contestants(places)


@lru_cache(maxsize=len(TABLES))
def _frames(table: str, data: Path) -> dict[str, pd.DataFrame]:
    return TABLES[table].frames(data)


def _cell(value: object) -> object:
    """Return a value as the file has it: numbers short, notes on one line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return " ".join(value.split())[:200]
    return value
