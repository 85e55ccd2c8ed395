"""A ledger knows persons: whoever comes back with other rows has the budget that is left, not a new
one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.silo.ledger.columns import PERSON, unpacked
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.ledger.identity import Identity


def visits(ids, seed: int):
    """Rows of these persons, one to three each, that nobody has seen before."""
    random = np.random.default_rng(seed)
    who = np.repeat(np.arange(len(ids)), random.integers(1, 4, len(ids)))
    return random.normal(size=(len(who), 4)), random.normal(size=len(who)), b"", list(ids)


def names(*numbers) -> list[str]:
    return [f"p{number}" for number in range(*numbers)]


def made(folder, known, name: str = "a.ledger") -> DurableLedger:
    about = {"rule": GDP(), "budget": Budget(3.0, 1e-5), "registry": folder / "registry"}
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    return DurableLedger.create(
        folder / name, records=len(known[3] or known[1]), identity=Identity.of(*known), **about
    )


def test_n_is_the_number_of_persons_and_their_rows_are_nowhere(tmp_path):
    ledger = made(tmp_path, visits(names(60), 1))
    assert ledger.records == 60
    ledger.recognise(*visits(names(60), 2), registry=tmp_path / "registry")
    assert ledger.records == 60
    stored = unpacked(Identity.of(*visits(names(60), 1)).sketch(b"k" * 32).profiles)
    (kept,) = [profile for profile in stored if profile.kind == PERSON]
    assert kept.counts.tolist() == [1] * 60


def test_new_visits_of_known_persons_get_no_new_budget(tmp_path):
    ledger = made(tmp_path, visits(names(60), 1))
    with pytest.raises(
        BadInput, match="100% of its persons, by their ids, in common with the one whose ledger is"
    ):
        made(tmp_path, visits(names(60), 2), "b.ledger")
    with pytest.raises(BadInput, match="of its persons"):
        made(
            tmp_path, visits([*names(500, 590), *names(5)], 3), "b.ledger"
        )  # five of them are known, which is one in twenty
    ledger.recognise(
        *visits(names(30, 90), 4), registry=tmp_path / "registry"
    )  # half are known: the data set has grown and shrunk
    with pytest.raises(BadInput, match="of its persons"):
        made(tmp_path, visits(names(60, 90), 5), "b.ledger")  # once there, for ever known


def test_one_known_person_alone_is_known(tmp_path):
    made(tmp_path, visits(names(60), 1))
    with pytest.raises(BadInput, match="100% of its persons"):
        made(tmp_path, visits(names(7, 8), 2), "b.ledger")


def test_other_persons_have_a_ledger_of_their_own(tmp_path):
    made(tmp_path, visits(names(60), 1))
    assert made(tmp_path, visits(names(100, 160), 2), "b.ledger").records == 60


def test_copied_rows_under_new_names_are_known_all_the_same(tmp_path):
    x, y, exact, _ = visits(names(60), 1)
    made(tmp_path, (x, y, exact, names(60)))
    with pytest.raises(BadInput, match="in common with"):
        made(tmp_path, (x, y, exact, names(100, 160)), "b.ledger")


def test_silos_of_one_federation_may_both_count_their_patients_from_one(tmp_path):
    (tmp_path / "federation").mkdir()
    made(tmp_path, visits(names(60), 1), "federation/silos/north/ledger.db")
    with pytest.raises(BadInput, match="of its persons"):  # no federation made this folder
        made(tmp_path, visits(names(60), 2), "federation/silos/south/ledger.db")
    (tmp_path / "federation/asker.key").touch()
    made(tmp_path, visits(names(60), 2), "federation/silos/south/ledger.db")
    with pytest.raises(BadInput, match="of its persons"):
        made(tmp_path, visits(names(60), 3), "elsewhere/silos/south/ledger.db")


def test_a_ledger_of_persons_is_never_one_of_rows_nor_the_other_way_round_once_something_is_spent(
    tmp_path,
):
    x, y, exact, ids = visits(names(60), 1)
    ledger = made(tmp_path, (x, y, exact, ids))
    with pytest.raises(
        BadInput, match="keeps a budget of persons, but the schema now protects rows"
    ):
        ledger.recognise(x, y, exact, registry=tmp_path / "registry")
    known = visits(names(60), 7)
    rows = made(tmp_path / "other", (*known[:3], None))
    rows.recognise(*known, registry=tmp_path / "other/registry")  # nothing was spent yet
    assert (
        rows.records == 60
    )  # the same cells, but other records: n and every stored partition are new


def test_a_ledger_of_rows_that_has_spent_something_is_none_of_persons(tmp_path):
    known = visits(names(60), 7)
    rows = made(tmp_path, (*known[:3], None))
    _, now = rows.recognise(*known[:3], registry=tmp_path / "registry")
    paid = rows.for_query(query_id="q", digest=b"d", kind="k", asker="a", run="r", generation=now)
    paid.charge(Query(Grad(torch.zeros(1, 3)), Gaussian("k", 1.0, 4.0)).event(), [0])
    with pytest.raises(
        BadInput, match="keeps a budget of rows, but the schema now protects persons"
    ):
        rows.recognise(*known, registry=tmp_path / "registry")


def test_a_ledger_of_persons_that_has_spent_something_takes_no_other_column_for_the_person(
    tmp_path,
):
    """Else visits could be named as persons, and each would be protected as a row is."""
    x, y, exact, ids = visits(names(60), 1)
    ledger = made(tmp_path, (x, y, exact, ids))
    ledger.recognise(
        x, y, exact, names(100, 100 + len(y)), registry=tmp_path / "registry"
    )  # nothing was spent yet
    ledger = made(tmp_path / "other", (x, y, exact, ids))
    _, now = ledger.recognise(x, y, exact, ids, registry=tmp_path / "other/registry")
    ledger.for_query(
        query_id="q", digest=b"d", kind="k", asker="a", run="r", generation=now
    ).charge(Query(Grad(torch.zeros(1, 3)), Gaussian("k", 1.0, 4.0)).event(), [0])
    with pytest.raises(BadInput, match="but their persons have other ids"):
        ledger.recognise(
            x, y, exact, names(100, 100 + len(y)), registry=tmp_path / "other/registry"
        )


def test_another_column_is_no_person_of_a_ledger_even_if_its_ids_are_the_same(tmp_path):
    """Patients and visits that both count from 1 have their ids in common."""
    x, y, exact, ids = visits(names(60), 1)
    ledger = made(tmp_path, (x, y, exact, ids, "patient"))
    ledger.recognise(x, y, exact, ids, "patient", registry=tmp_path / "registry")
    with pytest.raises(
        BadInput,
        match="budget of persons by the column 'patient', and the schema now names 'visit'",
    ):
        ledger.recognise(x, y, exact, names(len(y)), "visit", registry=tmp_path / "registry")
    DurableLedger.open(ledger.path).recognise(
        x, y, exact, ids, "patient", registry=tmp_path / "registry"
    )
