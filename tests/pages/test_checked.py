"""The badge beside a run's title claims what was checked on this machine and no more, and goes red
when ledger, run or evidence was altered.
"""

import contextlib
import json
import shutil
import sqlite3

import pytest
from looking import ask, served

from silodp.cli.checked import ledgers
from silodp.core.errors import BadInput
from silodp.pages import evidence, runs
from silodp.pages.checked import DIFFERS, NOT_HERE, PARTLY, VERIFIED, checks_of


@pytest.fixture(scope="module")
def place(gated):
    """A run that lies in its federation's folder, as `silodp federation run` leaves it; more was
    asked of the silo since.
    """
    folder = gated.folder / "runs/1"
    list(gated.conduct(folder, rounds=2, epsilon=("0.3",)))
    list(gated.conduct(gated.folder / "runs/2", rounds=2, epsilon=("0.3",)))
    return folder


@pytest.fixture
def copied(place, gated, tmp_path):
    """The run and its silo in another federation's folder, free to be altered."""
    shutil.copytree(place, tmp_path / "runs/1")
    shutil.copytree(
        gated.policy.parent, tmp_path / "silos/clinic", ignore=shutil.ignore_patterns("*.sock")
    )
    (tmp_path / "stopped.json").write_text(
        json.dumps({"silos": {"clinic": str(tmp_path / "silos/clinic/policy.toml")}})
    )
    return tmp_path / "runs/1"


def told(folder):
    return [(one.state, one.words) for one in checks_of(runs.read(folder), ledgers)]


def test_a_head_that_the_silos_ledger_holds_is_verified_though_the_ledger_went_on(place, copied):
    for folder in (place, copied):
        ((state, words),) = told(folder)
        assert state == VERIFIED
        assert words.startswith("Ledger heads of 1 of 1 silos match.")


def test_nothing_is_claimed_of_ledgers_that_are_not_here(place, copied, tmp_path):
    away = shutil.copytree(place, tmp_path / "far/away/runs/1")
    ((state, words),) = told(away)
    assert state == NOT_HERE
    assert "silodp ledger export" in words
    summary = json.loads((copied / "summary.json").read_text())
    summary["silos"].append(summary["silos"][0] | {"name": "other"})
    about = json.loads((copied / "run.json").read_text())
    about["cards"].append(about["cards"][0] | {"name": "other"})
    (copied / "summary.json").write_text(json.dumps(summary))
    (copied / "run.json").write_text(json.dumps(about))
    ((state, words),) = told(copied)
    assert state == PARTLY
    assert words.startswith("Ledger heads of 1 of 2 silos match.")


def test_another_head_or_an_altered_ledger_is_said(copied):
    summary = json.loads((copied / "summary.json").read_text())
    for change, said in (
        ({"head": "0" * 64}, "is not the one that the run received"),
        ({"count": 10**6}, "has no entry 1000000"),
    ):
        altered = json.loads(json.dumps(summary))
        altered["silos"][0]["ledger"] |= change
        (copied / "summary.json").write_text(json.dumps(altered))
        ((state, words),) = told(copied)
        assert (state, words[:36]) == (DIFFERS, "Ledger heads of 0 of 1 silos match. ")
        assert said in words
    (copied / "summary.json").write_text(json.dumps(summary))
    ledger = copied.parents[1] / "silos/clinic/ledger.db"
    with contextlib.closing(sqlite3.connect(ledger)) as file, file:
        file.execute(
            (
                "UPDATE entries SET amount = ? WHERE sequence = (SELECT max(sequence) FROM "
                "entries WHERE act = 'charge')"
            ),
            ((0.0).hex(),),
        )
    ((state, words),) = told(copied)
    assert state == DIFFERS
    assert "its ledger does not verify; `silodp ledger verify`" in words
    assert str(ledger.parent) not in words, "no path of this machine is on a page to be signed"


def test_evidence_is_verified_against_the_folder_as_it_is_now(copied, silodp, monkeypatch):
    monkeypatch.chdir(copied)
    archive = copied.parent / "1-evidence.zip"
    assert (
        silodp("export", "evidence", ".", "--out", archive, "--key", copied.parent / "our.key")[0]
        == 0
    )
    assert [state for state, _ in told(copied)] == [VERIFIED, VERIFIED]
    assert told(copied)[1][1].startswith(
        "The evidence 1-evidence.zip is unchanged since it was signed"
    )
    code, said, _ = silodp("report", copied, "--out", copied.parent / "page.html")
    assert (code, "Verified: The evidence" in said) == (0, True)
    assert (copied.parent / "page.html").read_text().count('class="state finished">verified<') == 2
    with served(copied.parents[1]) as port:
        assert 'download="1-evidence.zip"' in ask(port, "/run/runs/1")[1]
        assert ask(port, "/evidence/runs/2")[0] == 404
    raw = archive.read_bytes()
    archive.write_bytes(raw[:-1] + b"x")
    assert told(copied)[1][0] == DIFFERS
    archive.write_bytes(raw)
    with (copied / "progress.jsonl").open("a") as file:
        file.write("\n")
    assert told(copied)[1] == (DIFFERS, told(copied)[1][1])
    assert "is not of this folder as it is now" in told(copied)[1][1]
    with served(copied.parents[1]) as port:
        assert ask(port, "/evidence/runs/1")[0] == 404, "what is not verified is not handed on"
    monkeypatch.chdir(copied.parent.parent)
    shutil.move(archive, "1-evidence.zip")
    assert len(told(copied)) == 1, "one that lies elsewhere may be of another run of that name"


def test_the_archives_own_report_has_the_badge_of_what_was_checked_where_it_was_made(
    place, copied, tmp_path, silodp
):
    away = shutil.copytree(place, tmp_path / "far/away/runs/1")
    shutil.copytree(copied.parent.parent, tmp_path / "other", ignore=shutil.ignore_patterns("far"))
    other = tmp_path / "other/runs/1"
    (tmp_path / "other/stopped.json").write_text((tmp_path / "stopped.json").read_text())
    summary = json.loads((other / "summary.json").read_text())
    summary["silos"][0]["ledger"]["head"] = "0" * 64
    (other / "summary.json").write_text(json.dumps(summary))
    for folder, state in ((copied, VERIFIED), (other, DIFFERS), (away, None)):
        out = tmp_path / f"{state}.zip"
        code, said, wrong = silodp(
            "export", "evidence", folder, "--out", out, "--key", tmp_path / "our.key"
        )
        assert code == 0, wrong
        page = evidence.verify(out.read_bytes()).files["report.html"].decode()
        assert (
            ("Where this was made: Ledger heads of" in page)
            == ("Where this was made" in said)
            == (state is not None)
        )
        assert page.count('badge">') == (state is not None)
        assert state is None or f">{state}</span>" in page
        assert "this machine" not in page.split("</header>")[0]


def test_a_head_that_is_in_none_of_our_forms_is_said_in_a_sentence(copied):
    summary = json.loads((copied / "summary.json").read_text())
    del summary["silos"][0]["ledger"]["head"]
    (copied / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(BadInput, match="its files are not as silodp writes them"):
        told(copied)
