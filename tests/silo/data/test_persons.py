"""Rows of one person are one record: what a file becomes, and what every statistic and loss makes
of it.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from silodp.audit.answers import EXAMPLES
from silodp.core.errors import BadInput
from silodp.core.lattice import lattice_step
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.build import Words, build
from silodp.core.problem.losses import logistic, squared_error
from silodp.core.problem.person import Person, present
from silodp.core.problem.problem import Problem
from silodp.core.problem.schema import Schema
from silodp.core.query import Query
from silodp.core.statistics import STATISTICS
from silodp.engine.clipping import ENGINES, clipped_sum
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.integers import levelled
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.heldout import split_records
from silodp.silo.data.persons import alike, grouped, ids_of
from silodp.silo.data.records import Records
from silodp.silo.data.tables import load_by_schema, read_table
from silodp.silo.gate import Gate

TABLE = {
    "person": "patient",
    "rows_per_person": 3,
    "columns": {
        "age": {"type": "number", "range": [0, 100], "missing": 50},
        "smoker": {"type": "boolean"},
    },
    "label": {"column": "ill", "task": "binary", "classes": ["no", "yes"]},
}
SCHEMA = Schema.of(TABLE)
FILE = """patient,age,smoker,ill
b,10,yes,no
a,20,no,yes
B,30,yes,yes
,40,no,no
b ,50,no,no
a,,yes,no
b,70,yes,yes
NA,80,no,yes
"""


def file(folder: Path, text: str = FILE, name: str = "clinic.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


def persons(
    n: int = 20, places: int = 4, features: int = 3, seed: int = 0, *, floating: bool = False
) -> Records:
    """Made-up persons with 1 to `places` rows."""
    random = np.random.default_rng(seed)
    x, rows = (
        random.normal(size=(n, places, features)).astype(np.float32),
        random.integers(1, places + 1, n),
    )
    y = (
        random.normal(size=(n, places)).astype(np.float32)
        if floating
        else random.integers(0, 2, (n, places))
    )
    gone = np.arange(places) >= rows[:, None]
    x[gone] = np.broadcast_to(x[:, :1], x.shape)[gone]
    y[gone] = math.nan if floating else -1
    return Records.of([(x, y)])


def flat(records: Records) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each person the rows that are there."""
    return [(x[present(y)], y[present(y)]) for x, y in zip(records.x[0], records.y[0], strict=True)]


# --- a file --------------------------------------------------------------------------------------


def test_rows_of_one_person_are_one_record_and_a_missing_id_is_a_person_of_its_own(tmp_path):
    table = read_table(file(tmp_path), SCHEMA)
    assert table.x.shape == (4, 3, 2)
    assert table.y.shape == (4, 3)
    assert table.missing is not None
    assert table.y.tolist() == [
        [0, 1, 0],
        [1, 0, -1],
        [0, -1, -1],
        [1, -1, -1],
    ]  # b's fourth row is beyond the cap
    assert table.x[0, :, 0].tolist() == pytest.approx([-0.8, -0.4, 0.0])
    assert (
        table.x[2].tolist() == [table.x[2, 0].tolist()] * 3
    )  # where there is no row, the first one's features
    assert table.missing[1, :, 0].tolist() == [False, True, False]
    assert table.raw[3] == ["b", "a", "", ""]
    assert "patient" not in SCHEMA.features


def test_which_rows_of_a_person_are_used_follows_from_that_persons_rows_alone():
    mine = np.array(["p", "q", "p", "p", "q", "p"], object)
    others = np.array(["z", "z", "p", "z", "p", "p", "z", "p"], object)
    unit = Person("patient", 2)
    assert grouped(mine, unit).places[0].tolist() == [0, 2]
    assert grouped(others, unit).places[1].tolist() == [2, 4]


def test_one_spelling_for_each_person():
    assert ids_of(np.array(["7", " 7", "7.0", "A1", "a1 ", "", "n/a"], object)) == [
        "7",
        "7",
        "7",
        "a1",
        "a1",
        "",
        "",
    ]
    assert ids_of(np.array([7.0, math.nan])) == ["7", ""]


def test_a_test_file_is_read_row_by_row_with_and_without_the_column(tmp_path):
    without = "\n".join(line.partition(",")[2] for line in FILE.splitlines()) + "\n"
    for text in (FILE, without):
        assert read_table(file(tmp_path, text), SCHEMA.by_row).x.shape == (8, 2)
    with pytest.raises(BadInput, match="lacks 'patient'"):
        read_table(file(tmp_path, without), SCHEMA)


def test_the_unit_is_part_of_what_server_and_silo_must_agree_on():
    texts = {
        Schema.of(TABLE | more).hash
        for more in ({}, {"rows_per_person": 4}, {"combine": "sum"}, {"person": "family"})
    }
    plain = {
        name: value for name, value in TABLE.items() if name not in ("person", "rows_per_person")
    }
    assert len(texts | {Schema.of(plain).hash}) == 5
    assert Schema.parse(SCHEMA.text, "it") == SCHEMA
    assert SCHEMA.person == Person("patient", 3)
    words = Words("logistic", SCHEMA)
    assert (
        build(words, 2, load=lambda text: None).definition()
        != build(Words("logistic", Schema.of(plain)), 2, load=lambda text: None).definition()
    )


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"person": "age"}, "names 'age' twice"),
        ({"person": 3}, "person is 3; it must be the name of a column"),
        ({"rows_per_person": 0}, "rows_per_person is 0; it must be an integer from 1 to 1000"),
        ({"combine": "max"}, "combine is 'max'; it must be one of mean, sum"),
    ],
)
def test_a_senseless_unit_is_refused_in_a_sentence(more, sentence):
    with pytest.raises(BadInput, match=sentence):
        Schema.of(TABLE | more)


def test_a_cap_without_a_person_and_a_person_of_images_are_refused():
    plain = {name: value for name, value in TABLE.items() if name != "person"}
    with pytest.raises(BadInput, match="no column identifies people"):
        Schema.of(plain)
    images = {"person": "p", "images": {"height": 4, "width": 4, "channels": 1, "resize": True}}
    with pytest.raises(BadInput, match="images have no columns"):
        Schema.of(images | {"label": {"task": "binary", "classes": ["a", "b"]}})


# --- the loss, and its gradient ------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("floating", [False, True])
def test_a_persons_gradient_is_that_of_its_rows_combined_and_clipped_as_one(combine, floating):
    records, loss = persons(floating=floating), squared_error if floating else logistic
    problem = Problem(nn.Linear(3, 1), loss, person=Person("p", 4, combine))
    w, clip = problem.initial([1, 2]), 0.3
    found = clipped_sum(problem, w, records.x, records.y, torch.ones(1, 20), clip, engines=ENGINES)
    for run in range(2):
        total = torch.zeros(problem.dim)
        for x, y in flat(records):
            point = w[run : run + 1].clone().requires_grad_()
            each = problem.by_row.losses(point, x, y)[0]
            (gradient,) = torch.autograd.grad(
                each.mean() if combine == "mean" else each.sum(), point
            )
            total += gradient[0] * min(1.0, clip / float(gradient.norm()))
        assert torch.allclose(found[run, 0], total, atol=1e-5)
    assert torch.allclose(
        problem.losses(w, records.x[0], records.y[0])[0, 3],
        problem.loss_of(w[0], {}, records.x[0, 3], records.y[0, 3]),
    )


def test_nothing_at_a_place_without_a_row_counts_be_it_what_it_may():
    records = persons()
    other = dataclasses.replace(
        records, x=torch.where(present(records.y)[..., None], records.x, 77.0)
    )
    problem = Problem(nn.Linear(3, 1), logistic, person=Person("p", 4))
    w = problem.initial([1])
    one, two = (clipped_sum(problem, w, r.x, r.y, torch.ones(1, 20), 0.3) for r in (records, other))
    assert torch.equal(one, two)


# --- every statistic, in simulation and deployed -------------------------------------------------


@pytest.mark.parametrize("name", sorted(STATISTICS))
def test_every_statistic_of_a_person_is_the_average_over_its_rows_within_a_rows_bound(name):
    statistic = EXAMPLES[STATISTICS[name]](3)
    problem = Problem(nn.Linear(3, 1, bias=False), logistic, person=Person("p", 4))
    rows = statistic.vectors(problem, 0)
    if rows is None:
        return  # gradients, which are the problem's
    records = persons(n=30)
    source = torch.isnan(records.x) if statistic.view == "missing" else records.x
    found = rows(source[0].double() if statistic.view != "missing" else source[0], records.y[0])
    for person, (x, y) in zip(found, flat(records), strict=True):
        given = torch.isnan(x) if statistic.view == "missing" else x.double()
        each = statistic.rows(problem.by_row, 0)(given, y)
        assert torch.allclose(person, each.double().mean(0))
        assert float(person.norm()) <= 2 * statistic.norm + 1e-9
        if statistic.numbers is not None:
            gamma = lattice_step(statistic.norm, len(person))
            whole = levelled(person[None], statistic.numbers, gamma, statistic.blocks)
            cells = whole[0, statistic.numbers :]
            assert bool((whole >= 0).all())
            for block in cells.split(list(statistic.blocks)):
                assert int(block.sum()) <= int(1 / gamma)
            assert torch.allclose(
                whole[0].double() * gamma, person, atol=2 * gamma
            )  # none was thrown away


@pytest.mark.parametrize(
    "name", sorted(STATISTICS.keys() - {"ScoreTotal"})
)  # which is asked in totals alone
def test_a_deployed_gate_answers_about_persons_what_the_simulation_says(name):
    statistic = EXAMPLES[STATISTICS[name]](3)
    problem = Problem(nn.Linear(3, 1, bias=False), logistic, person=Person("p", 4))
    records = persons(n=40)
    clip = getattr(statistic, "norm", 0.5)
    secret = np.random.default_rng(9).permutation(40)
    share = 0.25 if statistic.on_held_out else 0.0
    exact = Exact(problem, records, partition=lambda name, batches: secret, held_out_share=share)
    exact.verify()
    query = Query(statistic, Gaussian("q", clip, 1e-4))
    exact.check(query)

    class Free:
        def charge(self, event, silos):
            pass

    found = Gate(exact, Free(), dim=3, counts=[40]).answer(query, [0]).value[0, 0]
    if statistic.on_held_out:
        return  # which of them, only the ledger knows
    wanted = (
        Simulated(problem, records, [0])
        .answer(Query(statistic, Gaussian("q", clip, 0.0)), [0])[0, 0]
        .double()
    )
    assert torch.allclose(found, wanted, atol=1e-3)


def test_records_of_rows_do_not_pass_for_persons():
    problem = Problem(nn.Linear(3, 1), logistic, person=Person("p", 5))
    for records in (persons(), Records.of([(np.ones((4, 3)), np.ones(4, int))])):
        with pytest.raises(BadInput, match="persons with 5 rows each"):
            Simulated(problem, records, [0])


# --- places --------------------------------------------------------------------------------------


def test_a_gate_gives_persons_the_places_of_the_ledgers_secret_permutation():
    """The first 10 of 40 places by `held_out` are held out: who stands there is for the permutation
    to say, and for nobody's rows.
    """
    problem, records, asked = (
        Problem(nn.Linear(3, 1, bias=False), logistic, person=Person("p", 4)),
        persons(n=40),
        [],
    )

    def stored(name, batches):
        asked.append((name, batches))
        return np.arange(40)[::-1]

    exact = Exact(problem, records, partition=stored, held_out_share=0.25)
    assert asked == [("places of persons", 0)]
    assert torch.equal(exact._x, records.x[0].flip(0))
    assert torch.equal(exact._y, records.y[0].flip(0))
    assert exact.features == 3


def test_a_split_of_persons_in_simulation_is_by_a_secret_and_the_same_again():
    records = persons(n=40)
    parts = [split_records(records, 0.25, key)[1] for key in ("one", "one", "two")]
    assert torch.equal(parts[0].x, parts[1].x)
    assert not torch.equal(parts[0].x, parts[2].x)
    assert parts[0].counts == (10,)
    assert parts[0].y.shape == (1, 10, 4)


def test_no_shape_follows_how_many_rows_anybody_has(tmp_path):
    many = FILE + "".join(f"a,{age},yes,no\n" for age in range(30))
    one, two = (
        load_by_schema([file(tmp_path, text)], SCHEMA).records_raw[0] for text in (FILE, many)
    )
    assert one[0].shape == two[0].shape
    assert one[1].shape == two[1].shape
    problem = build(Words("logistic", SCHEMA), 2, load=lambda text: None)
    exacts = [
        Exact(problem, Records.of([pair]), partition=lambda name, batches: np.arange(4))
        for pair in (one, two)
    ]
    assert exacts[0]._sizes(3) == exacts[1]._sizes(3)
    assert exacts[0].features == exacts[1].features == 2


def test_a_gate_without_places_says_so():
    problem = Problem(nn.Linear(3, 1), logistic, person=Person("p", 4))
    with pytest.raises(BadInput, match="no places for these persons"):
        Exact(problem, persons(n=5), partition=lambda name, batches: np.arange(4))


# --- who looks like one person -------------------------------------------------------------------


def test_rows_that_look_like_the_same_persons_are_counted():
    cells = {
        "patient_id": np.array(["1", "2", "1", "3", "1"], object),
        "age": np.array([1, 2, 3, 4, 5]),
        "ill": np.array([0, 1, 0, 1, 0]),
    }
    assert alike(cells, ("ill",)) == (3, "the column 'patient_id'")
    assert alike({"age": cells["age"], "ill": cells["ill"]}, ("ill",)) == (0, "")
    same = {f"c{j}": np.array([1, 2, 1, 3]) for j in range(6)} | {"ill": np.array([0, 1, 1, 0])}
    assert alike(same, ("ill",)) == (2, "all columns but the label's")
    wards = {"ward_id": np.arange(400) % 3, "age": np.arange(400)}
    assert alike(wards) == (0, "")
