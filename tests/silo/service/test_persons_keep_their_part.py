"""A person stays held out, or in training, while rows are edited, added and removed."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.errors import Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.problem.losses import logistic
from silodp.core.problem.problem import Problem
from silodp.core.problem.schema import Schema
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson
from silodp.core.statistics import Grad, Score
from silodp.silo.answer.exact import Exact
from silodp.silo.data.heldout import held_out, held_out_persons
from silodp.silo.data.records import Records
from silodp.silo.data.tables import read_table
from silodp.silo.ledger.durable import DurableLedger, Identity
from silodp.silo.service.door import Door, definition_hash
from silodp.silo.service.policy import Policy

PEOPLE, SHARE, PLACES = 200, 0.2, 3
SCHEMA = Schema.of(
    {
        "person": "patient",
        "rows_per_person": PLACES,
        "ignore": ["note"],
        "columns": {
            "number": {"type": "number", "range": [0, 4000]},
            "age": {"type": "number", "range": [0, 100]},
        },
        "label": {"column": "ill", "task": "binary", "classes": ["no", "yes"]},
    }
)
PROBLEM = Problem(nn.Linear(2, 1, bias=False), logistic, person=SCHEMA.person)
Row = tuple[str, int, int, str, str]
"""Of one row: patient, number (the same in all rows of a person), age, note, ill."""


def rows(people: int = PEOPLE) -> list[Row]:
    """Three rows of each person; every tenth person has no id, and one row."""
    found: list[Row] = []
    for k in range(people):
        name = "" if k % 10 == 9 else f"p{k}"
        for row in range(1 if not name else PLACES):
            found.append((name, k, (7 * k + 31 * row) % 97, "", "yes" if k % 3 else "no"))
    return found


class DaemonSettings:
    """A silo's folder: a file, and the ledger that was made for its first content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        table = self.table(rows())
        DurableLedger.create(
            folder / "ledger.sqlite",
            rule=GDP(),
            budget=Budget(6.0, 1e-5),
            records=len(table.y),
            identity=Identity.of(*table.raw),
            registry=folder / "registry",
        )

    def table(self, content: list[Row]):
        lines = ["patient,number,age,note,ill"]
        lines += [",".join(str(cell) for cell in row) for row in content]
        path = self.folder / "clinic.csv"
        path.write_text("\n".join(lines) + "\n")
        return read_table(path, SCHEMA)

    def exact(self, content: list[Row]) -> Exact:
        """The arithmetic of a gate that starts with this file."""
        table = self.table(content)
        policy = Policy(
            silo="silo",
            epsilon=6.0,
            delta=1e-5,
            definition=definition_hash(PROBLEM),
            statistics=("Grad",),
            samplings=("FullBatch",),
            clip=(1e-6, 1e6),
            minimum_noise_multiplier=1e-9,
            minimum_batch=1,
            maximum_local_steps=1,
            queries_per_run=10,
            queries_per_hour=10,
            expires=date(9999, 1, 1),
            askers=("0" * 64,),
        )
        door = Door(
            policy,
            PROBLEM,
            Records.of([(table.x, table.y)]),
            DurableLedger.open(self.folder / "ledger.sqlite"),
            held_out=SHARE,
            known_by=table.raw,
            registry=self.folder / "registry",
        )
        return door._exact

    def held(self, content: list[Row]) -> set[int]:
        """The numbers of the persons that are held out."""
        exact = self.exact(content)
        return numbers_of(exact._x[torch.from_numpy(exact._held)])


def numbers_of(x: torch.Tensor) -> set[int]:
    return {round(float(value)) for value in (x[:, 0, 0].double() + 1) * 2000}


def test_a_person_keeps_its_part_when_a_cell_of_any_row_is_edited(tmp_path):
    place, content = DaemonSettings(tmp_path), rows()
    before = place.held(content)
    assert len(before) == int(SHARE * PEOPLE)
    edits = {0: (31, "seen", "no"), 100: (50, "", "yes"), 333: (9, "x", "no")}
    for at, (age, note, ill) in edits.items():
        content[at] = (*content[at][:2], age, note, ill)
        assert place.held(content) == before


def test_a_person_keeps_its_part_when_rows_are_added_removed_and_moved(tmp_path):
    place, content = DaemonSettings(tmp_path), rows()
    before = place.held(content)
    assert place.held(content[:2] + content[3:]) == before  # one of three rows is gone
    assert place.held([*content, ("p7", 7, 12, "", "yes")]) == before
    assert place.held(content[::-1]) == before


def test_each_person_that_comes_or_goes_moves_one_other_person_at_most(tmp_path):
    """How many are held out is public and follows from n, so somebody has to make room."""
    place, content = DaemonSettings(tmp_path), rows()
    held = place.held(content)
    everybody = set(range(PEOPLE))
    for k in range(6):
        if k % 2:
            gone = k * 20
            content = [row for row in content if row[1] != gone]
            everybody.discard(gone)
            stay = everybody
        else:
            content = [*content, (f"new{k}", 1000 + k, 40, "", "yes")]
            stay = set(everybody)
            everybody.add(1000 + k)
        after = place.held(content)
        assert len(after) == int(SHARE * len(everybody))
        assert len((held & stay) ^ (after & stay)) <= 1
        held = after


def test_a_person_without_an_id_keeps_its_part_while_its_row_stays(tmp_path):
    place, content = DaemonSettings(tmp_path), rows()
    nameless = {row[1] for row in content if not row[0]}
    before = place.held(content) & nameless
    assert place.held([*content[5:], *content[:5]]) & nameless == before


def test_where_in_its_part_a_person_stands_is_drawn_again_for_other_records(tmp_path):
    """The part is kept, and nothing else: a batch of a partition follows from the place."""
    place, content = DaemonSettings(tmp_path), rows()
    one = place.exact(content)._x
    assert torch.equal(place.exact(content)._x, one)
    content[0] = (*content[0][:2], 99, *content[0][3:])
    other = place.exact(content)._x
    assert not torch.equal(one[:, 0, 0], other[:, 0, 0])


def test_one_person_that_is_exchanged_changes_one_record_of_each_part_at_most():
    """So every question, which is about one part, is of neighbours, whatever the marks are."""
    random, n = np.random.default_rng(0), 40
    held = held_out(n, 0.25)
    for _ in range(300):
        marks = [random.bytes(16) for _ in range(n)]
        order = random.permutation(n)
        other = list(marks)
        other[int(random.integers(n))] = random.bytes(16)
        people, others = (
            [given[k] for k in held_out_persons(order, held, given)] for given in (marks, other)
        )
        for part in (held, ~held):
            mine = {mark for mark, inside in zip(people, part, strict=True) if inside}
            theirs = {mark for mark, inside in zip(others, part, strict=True) if inside}
            assert len(mine - theirs) <= 1


def test_in_its_part_every_person_stands_at_each_place_alike():
    held = held_out(6, 0.5)
    marks = [bytes([k]) for k in (3, 1, 5, 0, 4, 2)]
    random, stands = np.random.default_rng(1), np.zeros((6, 6))
    for _ in range(3000):
        at = held_out_persons(random.permutation(6), held, marks)
        stands[np.arange(6), at] += 1
    assert set(np.flatnonzero(stands[held].sum(0))) == {1, 3, 5}  # the three smallest marks
    inside = stands[stands > 0]
    assert len(inside) == 18
    assert abs(inside - 1000).max() < 130  # five standard deviations of 26


def test_equal_marks_favour_no_place_inside_a_part():
    """Of two persons with equal marks one is held out. The other stands anywhere in its part."""
    marks, held = [b"0", b"0", b"1", b"2"], np.array([True, False, False, False])
    random, places = np.random.default_rng(0), []
    for _ in range(3000):
        at = list(held_out_persons(random.permutation(4), held, marks))
        tied = 0 if at[0] == 1 else 1
        places.append(at.index(tied))
    shares = np.bincount(places, minlength=4)[1:] / len(places)
    assert np.abs(shares - 1 / 3).max() < 0.05


def test_held_out_persons_are_not_asked_about_in_batches_of_a_partition():
    """An exchanged person may change a record of each part, at places of two batches; only one of
    the two would be paid for.
    """
    x = np.zeros((40, PLACES, 2), np.float32)
    records = Records.of([(x, np.zeros((40, PLACES), np.int64))])
    exact = Exact(
        PROBLEM,
        records,
        partition=lambda name, batches: np.arange(40),
        held_out_share=0.25,
        marks=[bytes([k]) for k in range(40)],
    )
    score = Query(Score(torch.zeros(1, 2), 4, 8.0), Gaussian("q", 8.0, 1.0))
    for sampling in (FullBatch(), Poisson(0.5)):
        exact.check(replace(score, mechanism=replace(score.mechanism, sampling=sampling)))
    batches = DisjointBatches(2, 0)
    exact.check(Query(Grad(torch.zeros(1, 2)), Gaussian("q", 1.0, 1.0, batches)))
    with pytest.raises(Refused, match="sampling"):
        exact.check(replace(score, mechanism=replace(score.mechanism, sampling=batches)))
