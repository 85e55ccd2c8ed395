"""Tables of binned columns: the cell of each record, the bound on one replaced record, and fields
that spell no table.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.errors import Refused
from silodp.core.problem.losses import cross_entropy, squared_error
from silodp.core.problem.person import Person
from silodp.core.problem.problem import Problem
from silodp.core.statistics import LABEL, Binned, Marginals
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.integers import levelled
from silodp.silo.answer.simulated import Simulated
from silodp.testing import check_statistic
from silodp.testing.statistic import hostile_records

PROBLEM = Problem(nn.Linear(4, 2), cross_entropy)
NUMBER = Binned(0, 1, (-0.5, 0.5))
CATEGORY = Binned(1, 3)
CLASS = Binned(LABEL, 2)
ASKED = Marginals.of([NUMBER, CATEGORY, CLASS], [(0,), (1, 0), (2, 1)])


def cells(statistic, x, y):
    """The place of each record's cell in each table."""
    vectors = statistic.rows(PROBLEM, 0)(torch.tensor(x), torch.tensor(y))
    assert set(vectors.unique().tolist()) <= {0.0, 1.0}
    return [[int(part.argmax()) for part in row.split(list(statistic.blocks))] for row in vectors]


def test_a_record_is_in_one_cell_of_each_table_row_by_row():
    x = [[-1.0, 1, 0, 0], [0.5, 0, 0, 1], [0.6, 0, 1, 0]]
    assert cells(ASKED, x, [0, 1, 1]) == [
        [0, 0 * 4 + 0, 0 * 4 + 0],
        [1, 2 * 4 + 1, 1 * 4 + 2],
        [2, 1 * 4 + 2, 1 * 4 + 1],
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_missing_or_not_finite_is_in_the_last_bin(bad):
    x = [[bad, 1, 0, 0], [0.0, bad, 1, 0], [0.0, 0, 0, 0]]
    assert cells(ASKED, x, [0, 7, -1]) == [
        [3, 0 * 4 + 3, 0 * 4 + 0],
        [1, 3 * 4 + 1, 2 * 4 + 3],
        [1, 3 * 4 + 1, 2 * 4 + 3],
    ]


def test_a_label_that_is_a_number_is_cut_at_edges_and_has_no_class():
    numbers = Marginals.of([Binned(LABEL, 1, (0.0,)), CLASS], [(0,), (1,)])
    assert cells(numbers, [[0.0] * 4] * 3, [-0.5, 0.5, math.nan]) == [[0, 2], [1, 2], [2, 2]]


def test_an_answer_is_split_into_its_tables():
    parts = ASKED.split(torch.arange(float(ASKED.cells)))
    assert [tuple(part.shape) for part in parts] == [(4,), (4, 4), (3, 4)]
    assert parts[1][2, 1] == 4 + 2 * 4 + 1


# --- the bound -----------------------------------------------------------------------------------


class Quiet(Simulated):
    """Without noise."""

    def gaussian(self, mechanism, mean, silos):
        return mean


class CellTwice(Marginals):
    """A mistake: a record counts in its cell and in the next."""

    def rows(self, problem, run, dtype=None):
        rows = super().rows(problem, run, dtype)
        return lambda x, y: rows(x, y) + rows(x, y).roll(1, 1)


def gate(records):
    """A gate's own arithmetic, without its noise."""
    return Exact(PROBLEM, records, partition=lambda *_: np.arange(5))


def of(values):
    """A record for each pair of a number and a category, missing and absurd values among them."""
    hot = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 1], [math.nan] * 3]
    for value, category, label in itertools.product(values, hot, (0, 1, 5, -3)):
        yield torch.tensor([value, *category], dtype=torch.float64), torch.tensor(label)


RECORDS = [*hostile_records(4), *of((-1.0, 0.0, 1.0, math.nan, 1e30, math.inf))]


@pytest.mark.parametrize("answerer", [lambda r: Quiet(PROBLEM, r, [0]), gate], ids=["seed", "gate"])
def test_one_replaced_record_changes_its_cell_in_every_table_and_no_more(monkeypatch, answerer):
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))
    assert 2 * ASKED.norm == pytest.approx(math.sqrt(2 * 3))
    check_statistic(ASKED, RECORDS, answerer, dim=PROBLEM.dim, reaches=0.999)


def test_a_record_in_two_cells_is_caught_in_simulation_and_counts_for_nothing_at_a_gate(
    monkeypatch,
):
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))
    mistake = CellTwice(ASKED.columns, ASKED.edges, ASKED.tables)
    with pytest.raises(AssertionError, match="one replaced record moves the sum by"):
        check_statistic(mistake, RECORDS, lambda r: Quiet(PROBLEM, r, [0]), dim=PROBLEM.dim)
    check_statistic(mistake, RECORDS, gate, dim=PROBLEM.dim)


def test_random_tables_of_random_records_never_pass_the_bound():
    random = np.random.default_rng(4)
    x = torch.from_numpy(random.choice([-1, 0, 0.5, 1, math.nan, 1e30], size=(40, 4)))
    y = torch.from_numpy(random.integers(-1, 4, 40))
    for _ in range(30):
        columns = [NUMBER, CATEGORY, CLASS, Binned(3, 1, (0.0,)), Binned(0, 4)]
        pairs = [tuple(random.permutation(5)[: random.integers(1, 3)]) for _ in range(4)]
        tables = [*pairs, *((k,) for k in range(5))]
        asked = Marginals.of(columns, tables)
        vectors = asked.rows(PROBLEM, 0)(x, y)
        farthest = float(torch.cdist(vectors, vectors).max())
        assert farthest <= math.sqrt(2 * len(tables)) + 1e-9 <= 2 * asked.norm + 2e-9


def test_a_person_shares_its_one_among_the_cells_of_its_rows_in_each_table():
    problem = Problem(nn.Linear(4, 1), squared_error, person=Person("p", 4))
    x = torch.tensor([[[-1.0, 1, 0, 0], [0.0, 0, 1, 0], [1.0, 0, 1, 0], [9.0, 9, 9, 9]]])
    row = ASKED.vectors(problem, 0)(x, torch.tensor([[0, 1, 1, -1]]))
    parts = ASKED.split(row[0])
    assert parts[0].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert parts[1].sum(1).tolist() == pytest.approx([1 / 3, 2 / 3, 0, 0])
    whole = levelled(row, 0, 2.0**-16, ASKED.blocks)
    assert torch.allclose(whole.double() * 2.0**-16, row, atol=2.0**-15)


def test_each_block_is_verified_by_itself():
    two = torch.tensor([[0.0, 1, 0, 1, 0], [0.6, 0.4, 0, 0.5, 0.6], [1, 0, 0, 0, -1]]).double()
    kept = levelled(two, 0, 2.0**-16, (3, 2))
    assert (kept.sum(1) / 2**16).tolist() == [2, 0, 0]
    # The sum over both blocks is no more than 2 here, but that of the first block is.
    two = torch.tensor([[2.0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0.6, 0.6, 0, 0.5, 0]]).double()
    assert not levelled(two, 0, 2.0**-16, (3, 2)).any()


# --- fields that spell no table ------------------------------------------------------------------

NAN = math.nan
BAD = {
    "no columns": ([], [], [0, -1]),
    "no tables": ([0, 3, 0], [], []),
    "half a column": ([0, 1], [], [0, -1]),
    "half a table": ([0, 3, 0], [], [0]),
    "a part of a feature": ([0.5, 3, 0], [], [0, -1]),
    "no feature": ([0, 0, 0], [], [0, -1]),
    "a place below the label": ([-2, 1, 0], [], [0, -1]),
    "edges of a category": ([0, 3, 1], [0.0], [0, -1]),
    "fewer edges than stated": ([0, 1, 2], [0.0], [0, -1]),
    "more edges than stated": ([0, 1, 1], [0.0, 1.0], [0, -1]),
    "fewer than no edges": ([0, 1, -1], [], [0, -1]),
    "edges that fall": ([0, 1, 2], [1.0, 0.0], [0, -1]),
    "an edge that is no number": ([0, 1, 1], [NAN], [0, -1]),
    "a column that is no number": ([NAN, 1, 0], [], [0, -1]),
    "a table of a column that is not there": ([0, 3, 0], [], [1, -1]),
    "a table by a column that is not there": ([0, 3, 0], [], [0, 1]),
    "a column by itself": ([0, 3, 0], [], [0, 0]),
    "a column in no table": ([0, 3, 0, 1, 3, 0], [], [0, -1]),
    "a million features": ([0, 2**21, 0], [], [0, -1]),
    "more cells than a silo allocates": ([0, 2000, 0, 1, 2000, 0], [], [0, 1]),
    "an infinite number of columns": ([math.inf, 1, 0], [], [0, -1]),
}


@pytest.mark.parametrize("name", BAD)
def test_fields_that_spell_no_table_are_refused_and_allocate_nothing(name):
    parts = [torch.tensor(part, dtype=torch.float64) for part in BAD[name]]
    for look in (lambda s: s.check(10, 1), lambda s: s.shape, lambda s: s.norm):
        with pytest.raises(Refused):
            look(Marginals(*parts))


def test_a_silo_with_fewer_features_refuses_before_the_charge():
    ASKED.check_silo(4, 0)
    with pytest.raises(Refused):
        ASKED.check_silo(3, 0)
