"""One run, one spend: plan, run, ledger, report and ui write the same figure for the same
statement, and none is below what was spent.
"""

import html
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from looking import ask, served

from silodp.cli.federation_run import _show_spent
from silodp.cli.status import _run_words, _runs
from silodp.core.events import Event
from silodp.core.figures import EARLY, HOLDS, TOO_NOISY, UNCHANGED, rounded_up
from silodp.core.privacy.accounting import Budget, composed_epsilon, gdp_epsilon, gdp_mu
from silodp.core.sampling import Poisson
from silodp.pages import budgets, runs
from silodp.pages.app import compared
from silodp.pages.card import card, facts
from silodp.pages.markup import join
from silodp.pages.report import report
from silodp.pages.statements import covered
from silodp.silo.ledger.durable import DurableLedger

pytest.importorskip("starlette", reason="starlette is not installed (silodp[ui])")
pytest.importorskip("uvicorn", reason="uvicorn is not installed (silodp[ui])")
EPSILON = 2.00012  # 2 to the nearest, as four digits; 2.001 rounded up
RECORDS = {"silo-1": 152, "silo-2": 151, "silo-3": 151}


def plain(text: str) -> str:
    """What a reader sees, on one line."""
    return " ".join(
        re.sub(r"<[^>]*>", " ", re.sub(r"<(style|title)>.*?</\1>", "", text, flags=re.S)).split()
    )


def figures(pattern: str, text: str) -> list[str]:
    found = [
        match if isinstance(match, str) else " ".join(match)
        for match in re.findall(pattern, plain(text))
    ]
    assert found, f"{pattern} is not in: {plain(text)[:2000]}"
    return found


@pytest.mark.parametrize("trust", ["isrl", "shuffle"])
def test_plan_run_ledger_report_and_ui_show_one_spend_for_a_federations_run(silodp, trust):
    home = Path(tempfile.mkdtemp(prefix="silodp-"))
    folder, setting = home / "f", ("--algorithm", "mb-sgd", "--rounds", 3, "--epsilon", EPSILON)
    up = (
        "up",
        "--folder",
        str(folder),
        "--engine",
        "direct",
        "--data",
        "wbcd",
        "--model",
        "logistic",
        "--trust",
        trust,
        "--epsilon",
        "10",
    )
    held = ("--held-out", "0.3") if trust == "shuffle" else ()
    subprocess.run(
        [sys.executable, "-m", "silodp.cli", "federation", *up, *held],
        capture_output=True,
        check=True,
    )
    try:
        code, told, err = silodp("federation", "run", "--folder", folder, *setting)
        assert (code, err) == (0, "")
        ledgers = {
            name: DurableLedger.open(folder / "silos" / name / "ledger.db") for name in RECORDS
        }
        spent = {name: rounded_up(ledger.spent(), 4) for name, ledger in ledgers.items()}
        local = {}
        if trust == "shuffle":
            local = {name: rounded_up(ledger.local(), 4) for name, ledger in ledgers.items()}
        delta = {name: rounded_up(ledger.settings.budget.delta) for name, ledger in ledgers.items()}
        assert all(float(spent[name]) >= ledgers[name].spent() * (1 - 1e-9) for name in RECORDS)
        if trust == "isrl":
            assert set(spent.values()) == {"2.001"}
        sizes = [word for n in RECORDS.values() for word in ("--records", n)]
        planned = silodp(
            "plan",
            *setting,
            *sizes,
            "--trust",
            trust,
            *(("--dimension", 31) if trust == "shuffle" else ()),
        )[1]
        if trust == "isrl":
            assert figures(r"Spends epsilon (\S+) in all", planned) == list(spent.values())
            assert figures(r"delta (\S+) ", planned) == list(delta.values())
        else:
            (server, at, shuffler), *rest = re.findall(
                r"epsilon (\S+) at delta (\S+) against the server, and (\S+) against",
                plain(planned),
            )
            assert ({server}, {at}, shuffler, rest) == (
                set(spent.values()),
                set(delta.values()),
                local["silo-2"],
                [],
            )
        to_whom = " against the server" if trust == "shuffle" else ""
        with served(folder / "runs", folder / "silos/silo-1/policy.toml") as port:
            page, listed, gate = (plain(ask(port, path)[1]) for path in ("/run/1", "/", "/silo"))
        read = runs.read(folder / "runs/1")
        for shown in (page, plain(report(read))):
            assert (
                "differentially private for each of its "
                f"records{' against the server' if to_whom else ''}"
            ) in shown
            assert f"silo is ({max(spent.values())}, " in shown.replace("in this training run ", "")
            for name in RECORDS:
                assert (
                    f"{name} ε {spent[name]} of {EPSILON} spent{to_whom} in training at δ "
                    f"{delta[name]}"
                ) in shown
            assert (
                figures(r"own noise alone, [^:]*: ε (\S+)\.(?: |$)", shown) == list(local.values())
                if to_whom
                else "own noise" not in shown
            )
            assert figures(r"Questions (\d+) Answers of silos (\d+) ", shown) == ["3 9"]
        assert f"{max(spent.values())} of {EPSILON}" in listed
        assert f"ε spent, of 10 {spent['silo-1']}" in gate
        assert "questions charged 3" in gate
        for name, ledger in ledgers.items():
            run_said = (
                f"{name}: answered 3 of 3 questions, spent at most epsilon {spent[name]} of "
                f"{EPSILON} at delta {delta[name]}"
            )
            assert run_said + (
                f" against the server, {local[name]} against the shuffler itself."
                if to_whom
                else "."
            ) in plain(told)
            text = plain(silodp("ledger", "show", ledger.path)[1])
            assert f"of the budget is used: epsilon {spent[name]} of 10{to_whom}" in text
            assert f"delta {delta[name]}," in text
            assert (
                f"the server together): epsilon {local[name]}." in text
                if to_whom
                else "own counts" not in text
            )
            assert "3 questions" in text
            assert HOLDS in text
        if trust == "shuffle":
            _scored_through_the_shuffler(silodp, folder, ledgers)
    finally:
        assert silodp("federation", "down", "--folder", folder)[0] == 0
    shutil.rmtree(home)


def _scored_through_the_shuffler(silodp, folder, ledgers):
    """One total of all held-out records; asked again it is the same total, at no further price."""
    before = [ledger.spent() for ledger in ledgers.values()]
    first, again = (
        json.loads(
            silodp("federation", "evaluate", "--folder", folder, "--epsilon", 4, "--json")[1]
        )
        for _ in range(2)
    )
    assert first == again
    assert first["trust"] == "shuffle"
    assert [(row["name"], row["held_out"]) for row in first["scores"]] == [("all", 135)]
    # In the mean of three separate answers it would be sqrt(3) times as large: 0.058.
    assert first["scores"][0]["figures"]["accuracy"]["noise"] < 0.035
    assert first["scores"][0]["figures"]["accuracy"]["value"] > 0.6
    for ledger, spent in zip(ledgers.values(), before, strict=True):
        charges = [json.loads(entry.event) for entry in ledger.entries() if entry.act == "charge"]
        assert len(charges) == 4
        assert charges[-1]["counted"] == len(RECORDS)
        assert 4 * 0.9 < ledger.spent() < spent + 4
    page = plain(report(runs.read(folder / "runs/1")))
    assert "135 held-out records, by private releases" in page
    assert len((folder / "runs/1/evaluations.jsonl").read_text().splitlines()) == 1


def test_plan_run_ledger_report_and_ui_show_one_spend_for_a_run_on_poisson_batches(
    silodp, tmp_path, monkeypatch
):
    """No gate's ledger has a price for such a run over a network yet: its ledger here is one of the
    committed rule, charged by hand.
    """
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    (tmp_path / "a.csv").write_text(
        "x,label\n" + "".join(f"{k % 9 / 9},{k % 2}\n" for k in range(120))
    )
    setting = (
        "--algorithm",
        "mb-sgd",
        "--rounds",
        6,
        "--sampling",
        "poisson:0.2",
        "--epsilon",
        1.00012,
    )
    planned = json.loads(silodp("plan", *setting, "--records", 120, "--json")[1])
    assert (planned["mu"], planned["rule"]) == (None, "committed")
    assert planned["converted"]["zcdp_rho"] is None
    words = plain(silodp("plan", *setting, "--records", 120)[1])
    assert "no mu is known" in words
    (spent,) = figures(r"Spends epsilon (\S+) in all", words)
    (multiplier,) = [r["noise_multiplier"] for r in planned["releases"]]
    least = composed_epsilon(((Poisson(0.2), multiplier, 6),), planned["delta"])
    assert least * (1 - 1e-9) <= float(spent) < least * 1.001
    told = silodp(
        "train",
        "--silo",
        "a.csv",
        "--model",
        "logistic",
        "--scale",
        "none",
        *setting,
        "--out",
        "r/one",
    )[1]
    assert figures(r"│ a │ \S+ │ (\S+) │ (\S+) │", told) == [
        f"{rounded_up(planned['delta'])} {spent}"
    ]
    assert "6 questions, 6 answers" in told
    for page in _pages(tmp_path / "r"):
        assert (
            f"a ε {spent} of 1.00012 spent in training at δ {rounded_up(planned['delta'])}" in page
        )
    release = f"poisson:0.2:{multiplier!r}:6"
    made = silodp(
        "ledger",
        "create",
        "l.db",
        "--data",
        "a.csv",
        "--epsilon",
        1.00012,
        "--rule",
        "committed",
        "--schedule",
        release,
    )
    assert made[0] == 0, made
    ledger = DurableLedger.open(tmp_path / "l.db")
    for i in range(6):
        ledger.for_query(
            query_id=f"q{i}", digest=b"", kind="minibatch", asker="s", run="r", generation=0
        ).charge(Event(Poisson(0.2), multiplier), [0])
    text = plain(silodp("ledger", "show", "l.db")[1])
    assert (
        f"used: epsilon {spent} of 1.00012 (delta {rounded_up(planned['delta'])}, committed rule"
        in text
    )


def test_what_training_evaluations_and_both_together_cost_are_three_figures_and_drowned_scores_are_not_shown(  # noqa: E501
    silodp, tmp_path
):
    (tmp_path / "a.csv").write_text(
        "x,label\n" + "".join(f"{k % 9 / 9},{k % 2}\n" for k in range(200))
    )
    setting = (
        "--algorithm",
        "mb-sgd",
        "--model",
        "logistic",
        "--rounds",
        2,
        "--epsilon",
        3,
        "--held-out",
        0.2,
        "--out",
        "r/one",
    )
    assert silodp("train", "--silo", "a.csv", *setting)[0] == 0
    for epsilon, answer in ((1, "1"), (1, "1")):
        text = plain(silodp("evaluate", "r/one", "--epsilon", epsilon)[1])
        assert f"a: epsilon {answer} for this evaluation;" in text
    (silo,) = json.loads((tmp_path / "r/one/summary.json").read_text())["silos"]
    both, own = (rounded_up(silo[name]["epsilon"], 4) for name in ("in_all", "evaluations"))
    delta = rounded_up(silo["delta"])
    assert (
        f"epsilon {own} for 2 in all; training spent 3; together {both} at delta {delta}." in text
    )
    assert 1.4 < silo["evaluations"]["epsilon"] < 1.6
    for page in _pages(tmp_path / "r"):
        assert f"a ε 3 of 3 spent in training at δ {delta}, 100.0 % of the budget used, " in page
        assert (
            f"In addition, 2 evaluations: ε {own} at δ {delta}. Together ε {both} at δ {delta}."
            in page
        )
        assert f"in training and its evaluations is ({both}, {delta})" in page
    last = json.loads((tmp_path / "r/one/evaluations.jsonl").read_text().splitlines()[-1])["scores"]
    assert last[0]["figures"]["auc"]["too_noisy"] is True
    assert {"value", "low", "high"} < set(last[0]["figures"]["auc"])
    for shown in (text, *_pages(tmp_path / "r")):
        assert re.search(f"AUC[ │]+{TOO_NOISY}", shown)
        assert "95 % interval wider than half" in shown
    silodp("evaluate", "r/one", "--epsilon", 1000)
    assert not re.search(f"AUC[ │]+{TOO_NOISY}", _pages(tmp_path / "r")[0])


def test_what_evaluations_of_a_federations_run_cost_is_in_every_figure_that_is_not_of_training_alone(  # noqa: E501
    gated, tmp_path
):
    list(gated.conduct(tmp_path / "r/one"))
    training, delta = runs.read(tmp_path / "r/one").silos[0].together

    def evaluated(**changes) -> runs.Run:
        told = {"scores": [], "bins": 10, "run": "one", "trust": "isrl"} | changes
        prices = [(2.0, 4), (2.0, 5), (2.0, 6), (0, 7)]  # nothing was charged for the last
        lines = [
            told | {"cap": cap, "silos": [{"name": "clinic", "epsilon": epsilon, "delta": delta}]}
            for epsilon, cap in prices
        ]
        (tmp_path / "r/one/evaluations.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
        return runs.read(tmp_path / "r/one")

    masked = evaluated(trust="masks").silos[0].together
    run = evaluated()
    assert masked == run.silos[0].together, "totals add up as other answers do"
    least = gdp_epsilon(
        math.hypot(gdp_mu(Budget(training, delta)), 3**0.5 * gdp_mu(Budget(2.0, delta))), delta
    )
    assert least <= run.silos[0].together[0] <= least * 1.001
    both, at = rounded_up(run.silos[0].together[0], 4), rounded_up(delta)
    (listed,) = _runs(tmp_path / "r")
    assert f"epsilon {both} at most" in _run_words(listed)
    assert (
        facts(run)["silos"][0]["epsilon"]
        == run.silos[0].together[0]
        > facts(run)["silos"][0]["training_epsilon"]
        == training
    )
    assert covered(run).startswith(
        "training and evaluations together; each silo's ledger adds profiles"
    )
    assert f" ε spent {both} rounds done 4 of 4 " in plain(str(join(compared([("one", run)]))))
    alone = replace(run.silos[0], local=2.5)
    assert " and without the evaluations: ε 2.5." in budgets.spent(run, alone)
    assert "without the evaluations" not in budgets.spent(run, replace(alone, evaluated=None))
    for page in _pages(tmp_path / "r"):
        assert f"in this training run and its evaluations is ({both}, {at})" in page
        assert "In addition, 3 evaluations" in page
        assert f"Together ε {both} at δ {at}." in page
        assert f"ε spent in training, of 0.5 {rounded_up(training, 4)}" in page


def test_what_disjoint_batches_cost_is_said_to_hold_if_no_silos_records_changed(
    gated, tmp_path, capsys
):
    """A ledger counts the partition of changed records beside the one before, and tells the server
    nothing of it.
    """
    for sampling, kept in (("disjoint", True), ("full", False)):
        run = gated.conduct(
            tmp_path / sampling / "one", algorithm="mb-sgd", rounds=3, sampling=sampling
        )
        list(run)
        _show_spent(run.summary)
        (listed,) = _runs(tmp_path / sampling)
        read = runs.read(tmp_path / sampling / "one")
        said = [
            plain(capsys.readouterr().out),
            _run_words(listed),
            covered(read),
            card(read),
            *_pages(tmp_path / sampling),
        ]
        assert [UNCHANGED in html.unescape(text) for text in said] == [kept] * 6


def test_a_run_that_was_stopped_says_when_its_spend_so_far_holds(silodp, tmp_path):
    (tmp_path / "a.csv").write_text(
        "x,label\n" + "".join(f"{k % 9 / 9},{k % 2}\n" for k in range(60))
    )
    words = ("--algorithm", "mb-sgd", "--model", "logistic", "--rounds", 3, "--out", "r/one")
    assert silodp("train", "--silo", "a.csv", *words)[0] == 0
    assert all(EARLY not in page for page in _pages(tmp_path / "r"))
    (tmp_path / "r/one/summary.json").unlink()
    assert all(EARLY in page for page in _pages(tmp_path / "r"))


def _pages(root: Path) -> list[str]:
    """What the ui and the report show of the run called one."""
    with served(root) as port:
        return [plain(ask(port, "/run/one")[1]), plain(report(runs.read(root / "one")))]
