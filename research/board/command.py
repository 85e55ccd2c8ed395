"""The command `board`: run the trials of the leaderboard, or write its page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from silodp.cli.console import say
from silodp.cli.interrupted import KEPT, interruptible
from silodp.cli.options import positive
from silodp.core.errors import BadInput


def board(
    data_dir: Annotated[
        Path, typer.Option(help="Folder of the tables that are files: school and tcga_brca.")
    ] = Path("hospitals"),
    out: Annotated[Path, typer.Option(help="Folder of results, advice included.")] = Path(
        "runs/board"
    ),
    tables: Annotated[
        list[str] | None, typer.Option(help="A table by name; may be repeated. All by default.")
    ] = None,
    contestants: Annotated[
        list[str] | None, typer.Option(help="A contestant by name; may be repeated.")
    ] = None,
    entry: Annotated[
        list[str] | None,
        typer.Option(help="Another contestant, FILE.py:NAME; research/board/entry.py is one."),
    ] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="Privacy levels; 3, 1, 8 and 0.5 by default.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Splits of the rows.")] = 20,
    workers: Annotated[int, typer.Option(help="Processes.")] = 1,
    pages: Annotated[
        Path | None,
        typer.Option(help="Write the tables of the pages in this folder from --out, and no more."),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Print the tables, their sources and licences.")
    ] = False,
) -> None:
    """Run the leaderboard of real hospitals, by research/board/PLAN.md. Interrupt it and run it
    again: it continues.

    Install first: `pip install -r research/board/requirements.txt`

    Examples: `python -m research board --list` · `python -m research board --data-dir hospitals
    --workers 2` · `python -m research board --tables exams --epsilon 3 --seeds 2`
    """
    from research.board import trials
    from research.board.tables import TABLES

    if listed:
        for name, table in TABLES.items():
            say(f"{name}: {table.title}. Silo: {table.silos}. Source: {table.source}.")
            say(f"  Licence: {table.licence}. Get it: {table.get}")
        return
    if pages:
        from research.board.page import read_trials, write_pages
        from research.board.picture import draw

        results = read_trials(out)
        for page in write_pages(results, sorted(pages.glob("*.md"))):
            say(f"Wrote {page}")
        draw(results, pages / "figures/hospitals.svg")
        return
    positive("--seeds", seeds)
    positive("--workers", workers)
    places = trials.Places(data_dir, out, tuple(entry or ()))
    everyone = trials.all_contestants(places)
    names = _chosen("table", tables, TABLES)
    who = _chosen("contestant", contestants, everyone)
    epsilons = [positive("--epsilon", one) for one in epsilon or trials.EPSILONS]
    # A table that is not there is reported before the first trial.
    for name in names:
        TABLES[name].load(data_dir)
    places.out.mkdir(parents=True, exist_ok=True)
    done = trials.finished(places.trials)
    works = list(trials.to_do(done, {name: everyone[name] for name in who}, names, epsilons, seeds))
    say(f"{len(done)} trials are finished, {len(works)} cases are left.")
    with interruptible(KEPT.format(places.trials)):
        trials.run(places, works, workers, say)
    say(f"Results: {places.trials}")


def _chosen(kind: str, given: list[str] | None, known: Iterable[str]) -> list[str]:
    """Return the names that were given, or all. Raise BadInput for an unknown one."""
    names = list(known)
    for name in given or ():
        if name not in names:
            raise BadInput(f"the {kind} {name!r} is unknown; choose from {', '.join(names)}")
    return given or names
