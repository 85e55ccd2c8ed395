"""A data set has one ledger, made once, which knows it again through edits, growth, copies and
other columns.
"""

import shutil

import numpy as np
import pytest
from ledgers import ask, make, refused, table

from silodp.core.errors import BadInput
from silodp.core.events import Event
from silodp.core.sampling import FullBatch
from silodp.silo.ledger.durable import DurableLedger, Identity

# --- creation and identity -----------------------------------------------------------------------


def test_nothing_is_ever_overwritten(folder):
    for name in ("a.ledger", "a.ledger.anchor", "a.ledger-journal", "a.ledger-wal"):
        (folder / name).write_text("mine")
        with pytest.raises(BadInput, match="exists already"):
            make(folder)
        assert (folder / name).read_text() == "mine"
        (folder / name).unlink()
    make(folder)


def test_a_ledger_that_cannot_be_made_leaves_nothing_behind(folder, tmp_path):
    with pytest.raises(BadInput, match="cannot be written: No such file"):
        make(folder / "missing")
    (folder / "in the way").mkdir()
    with pytest.raises(BadInput, match="cannot be written"):
        make(folder, anchor=folder / "in the way" / "nowhere" / "anchor")
    make(folder)


def test_an_anchor_elsewhere_is_remembered(folder, tmp_path):
    ledger = make(folder, anchor=tmp_path / "elsewhere")
    ask(ledger)
    assert not (folder / "a.ledger.anchor").exists()
    assert DurableLedger.open(ledger.path).head() == ledger.head()
    (tmp_path / "elsewhere").rename(tmp_path / "moved")
    refused(ledger.path, "elsewhere is missing")
    DurableLedger.open(ledger.path, anchor=tmp_path / "moved")


def test_a_changed_data_set_keeps_its_ledger_and_what_it_spent(folder):
    ledger, (x, y) = make(folder), table()
    ask(ledger, event=Event(FullBatch(), 5.0))
    used_up, count = ledger.used(), ledger.head()[0]

    def continues(x, y, known):
        again = DurableLedger.open(ledger.path)
        assert again.recognise(x, y)[0] == pytest.approx(known)
        assert (again.used(), again.records) == (used_up, len(y))
        again.verify()
        return again.head()[0]

    assert continues(x, y, 1.0) == count
    order = np.random.default_rng(1).permutation(40)
    assert continues(x[order], y[order], 1.0) == count + 1
    assert continues(x[:, ::-1], y, 1.0) == count + 2
    edited = x.copy()
    edited[:10] += 1
    assert continues(edited, y, 0.75) == count + 3
    more, labels = table(160, seed=5)
    assert continues(np.concatenate([x, more]), np.concatenate([y, labels]), 0.2) == count + 4
    assert continues(np.concatenate([x, more]), np.concatenate([y, labels]), 1.0) == count + 4
    assert continues(x[:5], y[:5], 1.0) == count + 5


def test_added_columns_and_other_labels_are_recognised_by_the_columns_that_stayed(folder):
    ledger, (x, y) = make(folder), table()
    wider = np.column_stack([x, np.arange(40.0)])
    assert ledger.recognise(wider, y)[0] == 0.0
    assert ledger.recognise(x, 1 - y)[0] == 0.0
    with pytest.raises(BadInput, match="some columns of about 100% of its records in common"):
        make(folder, "b.ledger", data=(np.column_stack([x, np.full(40, 7.0)]), y))


def test_another_data_set_is_refused(folder):
    ledger = make(folder)
    before = ledger.head()
    with pytest.raises(BadInput, match="which has 0% of them"):
        ledger.recognise(*table(seed=1))
    assert ledger.head() == before


def test_no_change_of_the_data_gives_a_fresh_budget(folder, tmp_path):
    make(folder)
    x, y = table()
    order = np.random.default_rng(1).permutation(40)
    other, labels = table(200, seed=3)
    for data in (
        (x, y),
        (x.astype("f4"), y.astype(float)),
        (x[order], y[order]),
        (x[:, ::-1], y),
        (np.column_stack([y, x[:, 1:]]), x[:, 0]),  # label and feature swapped
        (x[:3], y[:3]),
        (np.concatenate([other, x]), np.concatenate([labels, y])),
        (np.concatenate([x[:36] + 1, x[36:]]), y),
    ):
        with pytest.raises(BadInput, match=r"in common with the one whose ledger is .*a\.ledger;"):
            make(folder, "b.ledger", data=data)
    (folder / "a.ledger").rename(folder / "hidden")
    with pytest.raises(BadInput, match="which is missing and must be restored"):
        make(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["a.ledger.anchor", "hidden"]
    make(folder, "b.ledger", data=(other, labels))


def test_records_that_were_once_in_the_data_set_stay_known(folder):
    ledger, (x, y) = make(folder), table()
    more, labels = table(seed=5)
    ledger.recognise(np.concatenate([x, more]), np.concatenate([y, labels]))
    ledger.recognise(more, labels)
    with pytest.raises(BadInput, match="100% of its records"):
        make(folder, "b.ledger", data=(x, y))


def test_records_of_another_ledger_cannot_be_asked_through_this_one(folder):
    ledger, other = table(), table(seed=1)
    first = make(folder, data=ledger)
    make(folder, "b.ledger", data=other)
    with pytest.raises(BadInput, match=r"whose ledger is .*b\.ledger"):
        first.recognise(
            np.concatenate([ledger[0][:20], other[0]]), np.concatenate([ledger[1][:20], other[1]])
        )


def test_a_copy_of_a_ledger_is_refused_but_a_moved_one_goes_on(folder):
    ledger = make(folder)
    (folder / "copy").mkdir()
    for name in ("a.ledger", "a.ledger.anchor"):
        shutil.copy(folder / name, folder / "copy" / name)
    copy = DurableLedger.open(folder / "copy" / "a.ledger")
    with pytest.raises(BadInput, match="is a copy of the ledger"):
        copy.recognise(*table())
    ledger.path.unlink()
    copy.recognise(*table())
    with pytest.raises(BadInput, match=r"whose ledger is .*copy/a\.ledger;"):
        make(folder, "b.ledger")


def test_no_value_of_a_record_is_in_any_file(folder, tmp_path):
    x, y = table()
    ledger = make(folder)
    ledger.recognise(x[::-1], y[::-1])
    files = [p for place in (folder, tmp_path / "state") for p in place.rglob("*") if p.is_file()]
    content = b"".join(p.read_bytes() for p in files)
    assert len(files) == 4
    assert not any(value.tobytes() in content for value in x.astype("<f4").ravel())
    unkeyed = Identity.of(x, y)
    assert not any(digest[:12] in content for digest in (*unkeyed.rows, unkeyed.layout))
    codes = [code for profile in unkeyed.profiles for code in profile.marks]
    assert len(codes) > 100
    assert not any(
        code.tobytes() in content or code.byteswap().tobytes() in content for code in codes
    )
    assert {p.stat().st_mode & 0o777 for p in files} == {0o600}


def test_a_large_data_set_is_recognised_by_a_sample(monkeypatch):
    from silodp.silo.ledger import identity

    monkeypatch.setattr(identity, "KEPT", 200)
    x, y = table(3000)
    sketch = Identity.of(x, y).sketch(b"k" * 32)
    assert len(sketch.rows) == 200 * 16
    assert sketch.compare(Identity.of(x[::-1], y[::-1])).known == 1
    half = np.concatenate([x[:1500], table(1500, seed=1)[0]])
    assert (
        0.35 < sketch.compare(Identity.of(half, y)).known < 0.65
    )  # 4.2 standard errors of a sample of 200 (the key is fixed)
    assert not sketch.compare(Identity.of(*table(3000, seed=2))).same


def test_a_damaged_registry_stops_new_ledgers(folder, tmp_path):
    make(folder)
    file = next((tmp_path / "state" / "ledgers").glob("*.json"))
    file.write_text(file.read_text()[:100])
    with pytest.raises(
        BadInput, match="cannot be read, so it is not known which records already have"
    ):
        make(folder, "b.ledger", data=table(seed=1))
