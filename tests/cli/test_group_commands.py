"""`silodp evaluate --by COLUMN` and `silodp federation evaluate --by COLUMN`: how good a model is
for each group, and what that costs.
"""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from doors import ASKER, Doors, write_federation
from silodp.cli import score as module
from silodp.cli.app import app, main
from silodp.cli.federation import _statistics
from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget, gdp_epsilon, gdp_mu
from silodp.pages import runs
from silodp.pages.card import card
from silodp.pages.report import report
from silodp.pages.statements import nist
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service.daemon import open_door
from silodp.silo.service.masking import Masking
from silodp.silo.service.policy import DaemonSettings, Policy
from silodp.silo.service.provision import provision
from silodp.wire.socket import Unreached

SCHEMA = """
[columns.x]
type = "number"
range = [-2, 2]

[columns.sex]
type = "category"
categories = ["female", "male", "other"]
missing = "own"

[columns.smoker]
type = "boolean"
missing = false
indicator = true

[label]
column = "ill"
task = "binary"
classes = ["no", "yes"]
"""
N, HELD = 1200, 600


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two silos in which x says who is ill, but among men in four of five cases alone; half of them
    smoke, and of a tenth it is not known.
    """
    folder = tmp_path_factory.mktemp("groups")
    (folder / "schema.toml").write_text(SCHEMA)
    for seed, name in enumerate("ab"):
        random = np.random.default_rng(seed)
        x, sex = (
            random.uniform(-2, 2, N),
            random.choice(["female", "male", ""], N, p=[0.5, 0.4, 0.1]),
        )
        ill = (x > 0) ^ ((sex == "male") & (random.random(N) < 0.2))
        smoker = np.where(random.random(N) < 0.1, "", np.where(random.random(N) < 0.5, "yes", "no"))
        lines = [
            f"{a:.3f},{b},{c},{'yes' if d else 'no'}"
            for a, b, c, d in zip(x, sex, smoker, ill, strict=True)
        ]
        (folder / f"{name}.csv").write_text("x,sex,smoker,ill\n" + "\n".join(lines) + "\n")
        (folder / f"{name}.csv").chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SILODP_STATE", str(folder / "state"))
        order = (
            "--model",
            "logistic",
            "--algorithm",
            "mb-sgd",
            "--rounds",
            8,
            "--step",
            2,
            "--epsilon",
            20,
            "--seed",
            1,
        )
        silodp("train", *files(folder), *order, "--held-out", 0.5, "--out", folder / "run")
        yield folder


def files(folder):
    return (
        "--schema",
        folder / "schema.toml",
        "--silo",
        folder / "a.csv",
        "--silo",
        folder / "b.csv",
    )


def silodp(*words):
    result = CliRunner().invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def said(*words):
    return CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False).stdout


def test_groups_and_all_records_together_cost_the_price_of_one_evaluation(trained, tmp_path):
    run = shutil.copytree(trained / "run", tmp_path / "run")
    alone, both = (
        silodp("evaluate", run, "--epsilon", 4, "--seed", 1, *by) for by in ((), ("--by", "sex"))
    )
    for answer in (alone, both):
        assert [s["spent_epsilon"] for s in answer["silos"]] == pytest.approx([4.0, 4.0])
    noise = [answer["scores"][0]["figures"]["accuracy"]["noise"] for answer in (alone, both)]
    assert noise[1] == pytest.approx(np.sqrt(2) * noise[0])
    spent = json.loads((run / "summary.json").read_text())["silos"][0]
    mu = [
        gdp_mu(Budget(e, spent["delta"]))
        for e in (spent["spent_epsilon"], 4.0, spent["in_all"]["epsilon"])
    ]
    assert mu[2] ** 2 == pytest.approx(mu[0] ** 2 + 2 * mu[1] ** 2, rel=1e-4)
    kept = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert "groups" not in kept[0]
    assert kept[1]["groups"] == both["groups"]


def test_men_are_seen_to_be_worse_off_and_report_and_card_say_so(trained, tmp_path):
    run = shutil.copytree(trained / "run", tmp_path / "run")
    groups = silodp("evaluate", run, "--epsilon", 8, "--seed", 1, "--by", "sex")["groups"]
    female, male, other = groups["rows"]
    assert (groups["by"], groups["held_out"]) == ("sex", 2 * HELD)
    assert female["records"] == pytest.approx(0.5 * 2 * HELD, abs=60)
    assert male["records"] == pytest.approx(0.4 * 2 * HELD, abs=60)
    assert female["figures"]["accuracy"]["value"] > male["figures"]["accuracy"]["value"] + 0.1
    assert other["figures"]["accuracy"]["too_noisy"], "nobody is in it, and a tenth is in none"
    smokers = said("evaluate", run, "--epsilon", 8, "--seed", 1, "--by", "smoker")
    assert "No difference by smoker is visible at this price" in smokers
    assert "Records in which smoker is missing are in no group." in smokers
    assert "The price below is for both questions" in smokers
    silodp(
        "evaluate", run, "--epsilon", 2, "--seed", 1
    )  # what was found of groups before still stands
    for page in (report(runs.read(run)), card(runs.read(run)), nist(runs.read(run), False)):
        assert "The model is clearly less accurate where sex is male, 0." in page
        assert "No difference by smoker is visible at this price" in page


def test_a_groups_name_that_would_be_two_cells_of_the_cards_table_is_one(trained, tmp_path):
    run = shutil.copytree(trained / "run", tmp_path / "run")
    silodp("evaluate", run, "--epsilon", 8, "--seed", 1, "--by", "sex")
    kept = (run / "evaluations.jsonl").read_text()
    (run / "evaluations.jsonl").write_text(
        kept.replace('"name": "male"', '"name": "male | 0.99 (0.99-0.99)\\n"')
    )
    (line,) = (line for line in card(runs.read(run)).splitlines() if line.startswith("| male"))
    assert line.count("|") == 5


def test_at_a_small_price_groups_are_too_noisy(trained, tmp_path):
    run = shutil.copytree(trained / "run", tmp_path / "run")
    words = said("evaluate", run, "--epsilon", 0.02, "--seed", 1, "--by", "sex")
    assert "The noise hides all differences by sex" in words
    assert "too noisy" in words


@pytest.mark.parametrize(
    ("by", "sentence"),
    [
        ("x", "column of the schema: sex, smoker$"),
        ("", "sex, smoker"),
        ("ill", "sex, smoker"),
        ("Sex", "sex, smoker"),
    ],
)
def test_a_column_without_groups_is_said_before_anything_is_asked_or_paid(trained, by, sentence):
    before = (trained / "run/summary.json").read_bytes()
    with pytest.raises(BadInput, match=sentence):
        silodp("evaluate", trained / "run", "--epsilon", 1, "--by", by)
    assert (trained / "run/summary.json").read_bytes() == before
    assert not (trained / "run/evaluations.jsonl").exists()


def test_a_run_in_totals_has_groups_and_one_without_a_schema_has_none(trained, tmp_path):
    order = ("--model", "logistic", "--algorithm", "mb-sgd", "--rounds", 1, "--held-out", 0.5)
    silodp("train", *files(trained), *order, "--trust", "masks", "--out", tmp_path / "masked")
    answer = silodp("evaluate", tmp_path / "masked", "--epsilon", 8, "--by", "sex")
    assert [row["name"] for row in answer["groups"]["rows"]] == [
        "female",
        "male",
        "other",
    ]
    assert [row["name"] for row in answer["scores"]] == ["all"]
    (tmp_path / "plain.csv").write_text(
        "x,label\n" + "".join(f"{k % 9 / 9},{k % 2}\n" for k in range(60))
    )
    silodp("train", "--silo", tmp_path / "plain.csv", *order, "--out", tmp_path / "plain")
    with pytest.raises(BadInput, match="no schema"):
        silodp("evaluate", tmp_path / "plain", "--epsilon", 1, "--by", "sex")
    assert not (tmp_path / "plain/evaluations.jsonl").exists()


def test_where_a_person_is_the_record_groups_count_persons(tmp_path, monkeypatch):
    """Of three rows each, two say smoker for every other person: a third of all, by weight, is in
    that group.
    """
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    columns = '[columns.x]\ntype = "number"\nrange = [-2, 2]\n[columns.smoker]\ntype = "boolean"\n'
    (tmp_path / "schema.toml").write_text(
        f'person = "id"\nrows_per_person = 3\n{columns}{SCHEMA[SCHEMA.index("[label]") :]}'
    )
    rows = [
        f"p{k},{(k % 7 - 3) / 2},{'yes' if (k + r) % 3 and k % 2 else 'no'},{'yes' if k % 7 > 3 else 'no'}"  # noqa: E501
        for k in range(300)
        for r in range(3)
    ]
    (tmp_path / "a.csv").write_text("id,x,smoker,ill\n" + "\n".join(rows) + "\n")
    about = (
        "--schema",
        tmp_path / "schema.toml",
        "--silo",
        tmp_path / "a.csv",
        "--model",
        "logistic",
        "--algorithm",
        "mb-sgd",
        "--rounds",
        2,
    )
    silodp("train", *about, "--held-out", 0.5, "--seed", 1, "--out", tmp_path / "run")
    groups = silodp("evaluate", tmp_path / "run", "--epsilon", 200, "--seed", 1, "--by", "smoker")[
        "groups"
    ]
    assert groups["held_out"] == 150
    no, yes = (row["records"] for row in groups["rows"])
    assert no + yes == pytest.approx(150, abs=1)
    assert yes == pytest.approx(150 / 2 * 2 / 3, abs=15)


# --- over a gate ---------------------------------------------------------------------------------


def deployed(trained, folder, name, file, **more):
    """A silo with half of its records held out: where its policy is, what that says, its ledger,
    and its door under other rules.
    """
    asker = ASKER.public_key().public_bytes_raw().hex()
    about = {
        "label": "ill",
        "name": name,
        "epsilon": 20.0,
        "model": "logistic",
        "askers": [asker],
        "held_out": 0.5,
    } | more
    made = provision(
        folder / name,
        data=trained / file,
        schema=trained / "schema.toml",
        registry=folder / "registry",
        **about,
    )
    policy, place = Policy.load(made.policy), DaemonSettings.load(made.policy)
    ledger = DurableLedger.open(Path(place.ledger))

    def door(**rules):
        return open_door(
            replace(policy, **rules), place, None, ledger, registry=folder / "registry"
        )[0]

    return made.policy, policy, ledger, door


def federate(trained, folder, **policies):
    write_federation(folder, policies)
    shutil.copytree(trained / "run", folder / "runs/1")


@pytest.fixture
def gate(trained, tmp_path, monkeypatch):
    """A federation of one deployed silo, and the door of its gate."""
    path, policy, ledger, own = deployed(trained, tmp_path, "clinic", "a.csv")
    federate(trained, tmp_path, clinic=path)

    def door(**rules):
        return Doors(clinic=own(**rules))

    carrier = [door()]
    monkeypatch.setattr(module, "carrier_of", lambda *_: carrier[0])
    return tmp_path, ledger, policy, carrier, door


def less(policy, name):
    return tuple(each for each in policy.statistics if each != name)


def charges(ledger):
    return [entry.amount for entry in ledger.entries() if entry.act == "charge"]


def test_a_gate_is_asked_twice_within_one_price_and_once_for_all(gate):
    folder, ledger, policy, *_ = gate
    assert {"Score", "GroupScore"} < set(policy.statistics)
    asked = ("federation", "evaluate", "--folder", folder, "--epsilon", 8, "--by", "sex")
    first, again = (silodp(*asked) for _ in range(2))
    assert first == again
    female, male, _ = first["groups"]["rows"]
    assert first["groups"]["held_out"] == HELD
    assert female["figures"]["accuracy"]["value"] > male["figures"]["accuracy"]["value"]
    delta = first["silos"][0]["delta"]
    assert charges(ledger) == pytest.approx([gdp_mu(Budget(8.0, delta)) ** 2 / 2] * 2)
    assert ledger.spent() == pytest.approx(8.0, rel=1e-3)
    assert len((folder / "runs/1/evaluations.jsonl").read_text().splitlines()) == 1
    words = said(*asked)
    assert "Held-out records by sex" in words
    assert "at most epsilon 8 at delta" in words


def test_a_gate_that_does_not_allow_it_is_paid_for_nothing(gate):
    folder, ledger, policy, carrier, door = gate
    carrier[0] = door(statistics=less(policy, "GroupScore"))
    with pytest.raises(BadInput, match="their policies must allow GroupScore"):
        silodp("federation", "evaluate", "--folder", folder, "--epsilon", 1, "--by", "sex")
    for by, more, sentence in (("x", (), "sex, smoker"), ("sex", ("--cap", "nan"), "cap")):
        with pytest.raises(BadInput, match=sentence):
            silodp("federation", "evaluate", "--folder", folder, "--epsilon", 1, "--by", by, *more)
    assert not charges(ledger)
    assert silodp("federation", "evaluate", "--folder", folder, "--epsilon", 1)["scores"], (
        "without groups it is asked as before"
    )


@pytest.mark.parametrize(("command", "asked"), [("evaluate", "Score"), ("profile", "MissingRates")])
def test_a_question_that_every_gate_refuses_ends_in_a_sentence_that_says_who_refused_and_why(
    gate, command, asked, monkeypatch, capsys
):
    folder, ledger, _, carrier, door = gate
    carrier[0] = door(statistics=("Grad",))
    words = ["silodp", "federation", command, "--folder", str(folder), "--epsilon", "1"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert (
        f"{asked} (clinic statistic). (statistic): The policy does not allow this statistic"
        in sentence
    )
    assert not charges(ledger)


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ({"minimum_noise_multiplier": 0.01}, "budget"),
        ({"clip": (0.1, 0.9)}, "clip"),
        ({"statistics": "Score"}, "statistic"),
    ],
)
def test_where_the_score_is_refused_the_groups_that_were_paid_for_are_shown_and_kept(
    gate, rules, code, monkeypatch, capsys
):
    folder, ledger, policy, carrier, door = gate
    carrier[0] = door(**(rules if code != "statistic" else {"statistics": less(policy, "Score")}))
    epsilon = 4
    if code == "budget":  # of what is left half is enough for one question and not for both
        epsilon = 15
        silodp("federation", "evaluate", "--folder", folder, "--epsilon", epsilon)
        (folder / "runs/1/evaluations.jsonl").unlink()
    before, spent = len(charges(ledger)), ledger.spent()
    words = [
        "silodp",
        "federation",
        "evaluate",
        "--folder",
        str(folder),
        "--epsilon",
        str(epsilon),
        "--bins",
        "8",
        "--by",
        "sex",
    ]
    for more in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", [*words, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        told, (sentence,) = (lambda said: (said.out, said.err.splitlines()))(capsys.readouterr())
        assert (
            "there is no score of all records: no silo has answered what was asked, Score "
            f"(clinic {code})"
        ) in sentence
        assert "the figures of groups were paid for, and are in" in sentence
        if not more:
            assert "The model is clearly less accurate where sex is male" in told
            assert "Too noisy to say: " in told, "of the group in which nobody is"
            assert "The price below is for the groups alone" in told
    answer = json.loads(told)
    (half,) = charges(ledger)[before:]
    assert half == pytest.approx(gdp_mu(Budget(epsilon, answer["silos"][0]["delta"])) ** 2 / 2)
    assert 0.6 * epsilon < answer["silos"][0]["epsilon"] < 0.75 * epsilon
    if not spent:
        assert ledger.spent() == pytest.approx(answer["silos"][0]["epsilon"], rel=1e-6)
    (kept,) = (
        json.loads(line) for line in (folder / "runs/1/evaluations.jsonl").read_text().splitlines()
    )
    assert kept == answer
    assert answer["groups"]["held_out"] == HELD
    run = runs.read(folder / "runs/1")
    for page in (report(run), card(run)):
        assert "The model is clearly less accurate where sex is male, 0." in page
        assert (
            "There is no score of all records: no silo has answered what was asked, Score "
            f"(clinic {code})"
        ) in page


def test_questions_of_an_evaluation_are_runs_of_their_own_and_columns_share_the_score(gate):
    folder, ledger, _, carrier, door = gate
    carrier[0] = door(queries_per_run=1)
    asked = ("federation", "evaluate", "--folder", folder, "--epsilon", 4, "--by")
    first, second = (silodp(*asked, column) for column in ("sex", "smoker"))
    assert first["scores"] == second["scores"]
    assert len(charges(ledger)) == 3, "of the second column the groups alone are paid for"


def test_a_silo_that_refuses_groups_is_in_the_score_and_both_say_who_is_not_in_them(
    trained, tmp_path, monkeypatch
):
    (a, _, first, open_a), (b, policy, second, open_b) = (
        deployed(trained, tmp_path, name, f"{name}.csv") for name in "ab"
    )
    federate(trained, tmp_path, a=a, b=b)
    asked = ("federation", "evaluate", "--folder", tmp_path, "--epsilon", 6, "--by", "sex")
    doors = Doors(a=open_a(), b=open_b(statistics=less(policy, "GroupScore")))
    monkeypatch.setattr(module, "carrier_of", lambda *_: doors)
    got, words = silodp(*asked), said(*asked)
    assert [row["name"] for row in got["scores"]] == ["all", "a", "b"]
    assert got["scores"][0]["held_out"] == 2 * HELD
    assert got["groups"]["held_out"] == HELD
    assert (got["groups"]["without"], got.get("without")) == ({"b": "statistic"}, None)
    assert (
        "Not in the figures of groups: b statistic. (statistic): The policy does not allow "
        "this statistic."
    ) in words
    assert [len(charges(ledger)) for ledger in (first, second)] == [2, 1]
    prices = [silo["epsilon"] for silo in got["silos"]]
    assert prices == pytest.approx([6.0, second.spent()], rel=1e-3)
    assert prices[1] < 4.5
    doors.doors["b"] = open_b(statistics=("Grad",))
    got, words = silodp(*asked, "--bins", 8), said(*asked, "--bins", 8)
    assert (got["without"], got["groups"]["without"]) == ({"b": "statistic"},) * 2
    assert [silo["epsilon"] for silo in got["silos"]] == [6.0, 0.0]
    assert "Not in the figures of all records: b statistic" in words
    assert "b: nothing more was charged." in words
    silodp("federation", "evaluate", "--folder", tmp_path, "--epsilon", 3)
    assert len(charges(second)) == 1


def test_an_evaluation_asked_again_after_the_silos_changed_costs_those_who_stay_nothing(
    trained, tmp_path, monkeypatch
):
    (a, _, first, open_a), (b, _, second, open_b) = (
        deployed(trained, tmp_path, name, f"{name}.csv") for name in "ab"
    )
    doors = Doors(a=open_a(), b=open_b())
    monkeypatch.setattr(module, "carrier_of", lambda *_: doors)
    federate(trained, tmp_path, a=a, b=b)
    asked = ("federation", "evaluate", "--folder", tmp_path, "--epsilon", 6, "--by", "sex")
    both = silodp(*asked)
    shutil.rmtree(tmp_path / "runs")
    federate(trained, tmp_path, b=b)
    alone = silodp(*asked)
    assert alone["scores"][1] == both["scores"][2]
    shutil.rmtree(tmp_path / "runs")
    federate(trained, tmp_path, b=b, a=a)
    assert silodp(*asked)["scores"][0]["held_out"] == both["scores"][0]["held_out"]
    assert [len(charges(ledger)) for ledger in (first, second)] == [2, 2]


def test_no_two_evaluations_have_one_run_whatever_words_they_hold(gate, monkeypatch):
    folder, *_ = gate
    cards, _ = module._cards(folder, 1.0)
    monkeypatch.setattr(module, "carrier_of", lambda *_: None)
    asked = (
        ["evaluate", "1", "a b"],
        ["evaluate", "1 a", "b"],
        ["evaluate", "1", "a", "b"],
        ["evaluate", 1, "a b"],
    )
    runs_of = [module._channel(folder, cards, words, 1.0, "isrl")._run for words in asked]
    assert len(set(runs_of)) == len(asked)


class Dead(Doors):
    """An engine that is gone."""

    def exchange(self, frames, timeout):
        raise Unreached("refused")


@pytest.mark.parametrize("more", [(), ("--by", "sex")])
def test_an_engine_that_is_gone_is_said_without_a_word_of_policies_and_asks_for_the_evaluation_again(  # noqa: E501
    gate, more
):
    folder, ledger, _, carrier, _ = gate
    carrier[0] = Dead(**carrier[0].doors)
    with pytest.raises(BadInput) as ended:
        silodp("federation", "evaluate", "--folder", folder, "--epsilon", 1, "--deadline", 1, *more)
    assert (
        "the engine cannot be reached (refused); start it again and run `silodp federation "
        "evaluate` again"
    ) in str(ended.value)
    assert not any(word in str(ended.value) for word in ("policies", "logs", "resume"))
    assert not charges(ledger)


class Late(Doors):
    """The first reply to a question is lost on its way, and what comes then is a refusal that
    lasts.
    """

    def __init__(self, silo, strict, **doors):
        super().__init__(**doors)
        self.silo, self.strict, self.lost = silo, strict, set()

    def exchange(self, frames, timeout):
        found = super().exchange(frames, timeout)
        if (frame := frames.get(self.silo)) and frame not in self.lost:
            self.lost.add(frame)
            del found[self.silo]
        elif frame:
            found[self.silo] = self.strict.handle(frame)
        return found


@pytest.mark.parametrize("command", ["evaluate", "profile"])
def test_whoever_was_silent_and_then_refuses_may_have_paid_and_whoever_refuses_at_once_has_not(
    trained, tmp_path, monkeypatch, command
):
    (a, _, _, open_a), (b, policy, ledger, open_b) = (
        deployed(trained, tmp_path, name, f"{name}.csv") for name in "ab"
    )
    federate(trained, tmp_path, a=a, b=b)
    columns = ("Histogram", "MissingRates", "Moments", "ClassCounts", "Marginals")
    allowed = (*policy.statistics, *columns)
    strict = open_b(statistics=("Grad",))
    doors = Doors(a=open_a(statistics=allowed), b=strict)
    monkeypatch.setattr(module, "carrier_of", lambda *_: doors)
    asked = ("federation", command, "--folder", tmp_path, "--epsilon", 6)
    assert [silo["epsilon"] for silo in silodp(*asked)["silos"]] == [6.0, 0.0]
    assert "b: nothing more was charged." in said(*asked)
    doors = Late("b", strict, a=open_a(statistics=allowed), b=open_b(statistics=allowed))
    (a, b), paid = silodp(*asked)["silos"], charges(ledger)
    assert len(paid) == 1, "it was charged when its reply was lost"
    assert b["epsilon"] >= ledger.spent() * (1 - 1e-9) > 0
    assert (a["epsilon"], b["epsilon"] < 6.0) == (6.0, command == "profile")


def test_a_total_that_took_two_attempts_is_priced_as_two(trained, tmp_path):
    path, *_ = deployed(trained, tmp_path, "m", "a.csv", masking=Masking((), 0, 2))
    federate(trained, tmp_path, m=path)
    cards, budgets = module._cards(tmp_path, 2.0)
    assert cards[0].trust == "masks"
    price = {
        times: module._charged(cards, budgets, [SimpleNamespace(charges=Counter(m=times))])[0][
            "epsilon"
        ]
        for times in (0, 1, 2)
    }
    twice = gdp_epsilon(gdp_mu(budgets[0]) * 2**0.5, budgets[0].delta)
    assert (price[0], price[1], price[2]) == (0, 2.0, twice)
    assert price[2] > 2.5


def test_a_silo_of_totals_allows_all_but_local_steps(trained, tmp_path):
    _, policy, _, _ = deployed(trained, tmp_path, "m", "a.csv", masking=Masking((), 0, 2))
    learning = {"Grad", "ScaledGrad", "Outcomes", "Moments", "GradDiff", "RiskCells"}
    assert set(policy.statistics) == learning | {"Score", "GroupScore"}
    for trust in ("masks", "shuffle"):
        assert set(_statistics(0.2, True, trust)) == set(_statistics(0.2, True, "isrl")) - {
            "LocalSteps",
            "SteeredSteps",
        }


def test_why_something_is_too_noisy_is_said_where_only_a_groups_figure_is(trained, tmp_path):
    run = shutil.copytree(trained / "run", tmp_path / "run")
    words = said("evaluate", run, "--epsilon", 8, "--seed", 1, "--by", "sex")
    kept = json.loads((run / "evaluations.jsonl").read_text())
    assert not any(
        figure["too_noisy"] for row in kept["scores"] for figure in row["figures"].values()
    )
    assert words.count("Too noisy to say: ") == 1
    for page in (report(runs.read(run)), card(runs.read(run))):
        assert page.count("Too noisy to say: ") == 1
