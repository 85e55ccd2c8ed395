"""Alone, together and personal in a simulation: marked, in a file of its own, and nowhere else."""

import json
import os
import stat

import numpy as np
import pandas as pd
import pytest

import silodp
from silodp.cli.app import app
from silodp.core.errors import BadInput
from silodp.core.local_figures import ALL, RAW
from silodp.pages import runs
from silodp.pages.report import report
from silodp.simulation import comparing

NAMED = {"algorithm": "mb-sgd", "model": "logistic", "rounds": 3, "epsilon": 2, "seed": 0}
RANGES = {"a": (-1, 1), "b": (-1, 1)}


def frame(n, seed):
    random = np.random.default_rng(seed)
    x = random.uniform(-1, 1, (n, 2))
    y = (random.random(n) < 1 / (1 + np.exp(-3 * x[:, 0]))).astype(int)
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "label": y})


FRAMES = {"north": frame(150, 0), "south": frame(90, 1), "tiny": frame(20, 2)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SILODP_STATE", str(folder.parent / "state"))
        return silodp.train(FRAMES, ranges=RANGES, held_out=0.2, out=folder, **NAMED)


def test_each_silo_has_a_row_for_each_model_and_too_small_ones_are_named(trained):
    table = trained.compared
    assert list(table.index.unique("silo")) == ["north", "south", ALL]
    assert list(table.index.unique("model")) == ["alone", "together", "personal"]
    assert {"log loss", "auc", "calibration slope", "mean predicted"} <= set(table.columns)
    losses = table.loc[ALL, "log loss"]
    assert losses["personal"] < losses["together"]
    found = json.loads((trained.folder / "personal.json").read_text())
    assert found["too_few_records"] == ["tiny"]
    assert [silo["held_out"] for silo in found["silos"]] == [30, 18]


def test_the_figures_are_in_one_file_for_its_owner_which_says_what_they_are(trained):
    path = trained.folder / "personal.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = json.loads(path.read_text())
    assert found["private"] is False
    assert found["note"] == RAW
    loss = str(found["all"]["alone"]["log loss"])
    for other in trained.folder.iterdir():
        if other != path:
            assert loss.encode() not in other.read_bytes()
            assert b"alone" not in other.read_bytes()


def test_only_the_analysts_own_report_shows_them_and_no_archive(trained):
    run = runs.read(trained.folder)
    assert RAW.partition("'")[0] in report(run, raw=True)
    assert "Alone, together, personal" in report(run, raw=True)
    assert "Alone, together" not in report(run)


def test_no_hash_in_an_archive_or_a_page_follows_from_them(trained):
    """A reader who knows all records but one could otherwise try the rest out."""
    path = trained.folder / "personal.json"
    before = path.read_bytes()
    fingerprint = runs.fingerprint(trained.folder)
    try:
        path.write_bytes(before.replace(b"0", b"1"))
        assert runs.fingerprint(trained.folder) == fingerprint
    finally:
        path.write_bytes(before)
    (trained.folder / "summary.json.txt").write_text("another file")
    assert runs.fingerprint(trained.folder) != fingerprint
    (trained.folder / "summary.json.txt").unlink()


def test_a_report_that_shows_them_is_for_its_owner_alone(trained, tmp_path):
    umask = os.umask(0o022)
    try:
        for page in (tmp_path / "page.html", trained.folder / "report.html"):
            app(["report", str(trained.folder), "--out", str(page)], standalone_mode=False)
            assert stat.S_IMODE(page.stat().st_mode) == 0o600
            page.unlink()
    finally:
        os.umask(umask)


def test_without_records_held_out_there_is_nothing_to_compare(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    made = silodp.train(FRAMES, ranges=RANGES, out=tmp_path / "run", **NAMED)
    assert not (tmp_path / "run/personal.json").exists()
    with pytest.raises(BadInput, match="train with held_out"):
        _ = made.compared


def test_a_silos_figures_do_not_depend_on_other_silos_raw_records(trained, tmp_path, monkeypatch):
    """Alone is alone: with other records elsewhere a silo's own model is the same."""
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    changed = FRAMES | {"south": frame(90, 7)}
    other = silodp.train(changed, ranges=RANGES, held_out=0.2, **NAMED)
    place = ("north", "alone")
    own = trained.compared.loc[place]
    pd.testing.assert_series_equal(other.compared.loc[place], own, rtol=1e-4)
    place = ("south", "alone")
    assert other.compared.loc[place, "log loss"] != trained.compared.loc[place, "log loss"]


def test_a_model_that_would_take_hours_is_not_compared(tmp_path, monkeypatch, silodp):
    monkeypatch.setattr(comparing, "MOST_WORK", 3 * 150)
    for name in ("north", "south"):
        FRAMES[name].to_csv(tmp_path / f"{name}.csv", index=False)
    words = ["--held-out", "0.2", "--algorithm", "mb-sgd", "--model", "logistic", "--seed", "0"]
    silos = ["--silo", "north.csv", "--silo", "south.csv"]
    code, out, _ = silodp("train", *words, *silos, "--rounds", "3", "--out", "run")
    assert code == 0
    assert "too many for a personal model of each silo here" in " ".join(out.split())
    found = json.loads((tmp_path / "run" / "personal.json").read_text())
    assert found["too_large"]
    assert not found["silos"]
    code, _, _ = silodp("report", "run", "--out", "report.html")
    assert code == 0


def test_the_estimator_has_the_table_after_a_fit(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    model = silodp.Classifier(2, algorithm="mb-sgd", rounds=3, ranges=RANGES, held_out=0.2)
    model.set_params(random_state=0).fit(FRAMES)
    assert model.compared_.loc[(ALL, "personal"), "log loss"] < 0.7


def test_the_command_prints_the_table_and_what_it_is(tmp_path, monkeypatch, silodp):
    for name, one in FRAMES.items():
        one.to_csv(tmp_path / f"{name}.csv", index=False)
    words = ["train", "--held-out", "0.2", "--algorithm", "mb-sgd", "--rounds", "3", "--seed", "0"]
    for name in FRAMES:
        words += ["--silo", f"{name}.csv"]
    code, out, _ = silodp(*words, "--out", "run")
    assert code == 0
    for word in ("alone", "together", "personal", "tiny has fewer than 20 records"):
        assert word in out
    assert " ".join(RAW.split()) in " ".join(out.split())
