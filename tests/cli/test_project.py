"""From an empty folder to a model: `silodp init`, `silodp train --project`, and gates that read by
the schema; mistakes get a sentence.
"""

import json
import socket
import stat
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from silodp.cli import project
from silodp.cli.federation_files import problem_of
from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.schema import Schema
from silodp.core.query import Query
from silodp.core.statistics import Histogram, MissingRates, Moments
from silodp.host.cards import read_card
from silodp.host.schema import load_schema
from silodp.server.order import Order
from silodp.server.run import agree
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data import demo
from silodp.silo.data.reading import find_schema, read_records
from silodp.silo.data.tables import read_table
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service import daemon
from silodp.silo.service.daemon import approved_problem
from silodp.silo.service.door import Door
from silodp.silo.service.policy import DaemonSettings, Policy
from silodp.silo.service.provision import provision


@pytest.fixture
def silodp(silodp, monkeypatch, tmp_path):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "trial"))
    return silodp


@pytest.fixture
def trial(silodp, tmp_path) -> Path:
    assert silodp("init", "trial", "--demo")[0] == 0
    return tmp_path / "trial"


# --- init ----------------------------------------------------------------------------------------


SETTLED = ("--algorithm", "mb-sgd", "--model", "mlp:8", "--rounds", 40, "--step", 2)


def test_the_demo_trains_on_unequal_silos_and_beats_the_majority_class(silodp, trial):
    schema = load_schema(trial / "schema.toml")
    shares = {name: read_table(trial / "data" / f"{name}.csv", schema).y for name in demo.HOSPITALS}
    assert max(map(len, shares.values())) == 20 * min(map(len, shares.values()))
    assert {name: round(float(y.mean()), 2) for name, y in shares.items()} == {
        "north": 0.12,
        "south": 0.15,
        "east": 0.14,
        "west": 0.2,
    }
    code, out, _ = silodp("train", "--project", "trial", "--seed", 0, *SETTLED, "--json")
    summary = json.loads(out)
    assert code == 0
    assert [s["name"] for s in summary["silos"]] == list(demo.HOSPITALS)
    assert all(
        s["epsilon"] == 3.0 and s["spent_epsilon"] == pytest.approx(3.0, abs=1e-3)
        for s in summary["silos"]
    )
    assert summary["balanced_accuracy"] > 0.65  # always answering "no" has 0.5
    with safe_open(summary["model"], "pt") as file:
        assert file.metadata()["schema"] == schema.text


def test_without_the_public_weights_the_rare_class_is_lost(silodp, trial):
    """The same run, so that the test above would fail if the weights were not used."""
    text = (trial / "schema.toml").read_text()
    (trial / "schema.toml").write_text(
        "".join(line for line in text.splitlines(keepends=True) if not line.startswith("weights"))
    )
    assert (
        json.loads(silodp("train", "--project", "trial", "--seed", 0, *SETTLED, "--json")[1])[
            "balanced_accuracy"
        ]
        < 0.65
    )


def test_a_project_gives_defaults_and_the_command_line_wins(silodp, trial):
    words = (
        "--rounds",
        2,
        "--model",
        "logistic",
        "--epsilon",
        1,
        "--silo",
        "trial/data/west.csv",
        "--json",
    )
    summary = json.loads(silodp("train", "--project", "trial", *words)[1])
    assert (
        summary["questions"],
        summary["parameters"],
        [s["epsilon"] for s in summary["silos"]],
    ) == (4, 14, [1.0]), "one about the outcome, one about the columns, two rounds"


def test_what_is_written_is_for_the_owner_alone_and_never_written_over(silodp, trial):
    for path in trial.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    before = {path: path.read_bytes() for path in trial.rglob("*.*")}
    (trial / "README.md").unlink()
    assert silodp("init", "trial", "--demo")[0] == 2
    assert not (trial / "README.md").exists(), "nothing is left of an init that was refused"
    assert all(path.read_bytes() == before[path] for path in trial.rglob("*.*"))


def test_made_up_people_depend_on_the_seed_alone():
    assert demo.csv_text("west", 3) == demo.csv_text("west", 3) != demo.csv_text("west", 4)


def test_a_first_line_that_may_be_a_record_goes_nowhere(silodp, tmp_path):
    """A file of texts alone, without a header."""
    (tmp_path / "clinic.csv").write_text(
        "jane roe,female,hiv positive,died\njohn doe,male,healthy,alive\n"
    )
    for words in ((), ("--label", "outcome"), ("--type", "sex=category"), ("--label", "died")):
        code, out, err = silodp("init", "study", "--from", "clinic.csv", *words)
        assert code == (0 if "died" in words else 2)
        written = "".join(path.read_text() for path in (tmp_path / "study").glob("*"))
        assert not any(cell in out + err + written for cell in ("jane", "female", "hiv"))


def test_a_draft_has_the_names_of_the_header_and_nothing_of_a_record(silodp, tmp_path):
    (tmp_path / "clinic.csv").write_text(
        "age,blood group,id,died\n4711,canary-a,0815,secret\n4712,canary-b,0816,secret\n"
    )
    words = (
        "--from",
        "clinic.csv",
        "--type",
        "age=number",
        "--type",
        "id=ignore",
        "--columns",
        "blood group",
        "--label",
        "died",
    )
    code, out, _ = silodp("init", "study", *words)
    assert code == 0
    assert "public knowledge" in out
    text = (tmp_path / "study" / "schema.toml").read_text()
    assert not any(value in text for value in ("4711", "4712", "canary", "0815", "0816", "secret"))
    table = tomllib.loads(text)
    assert list(table["columns"]) == ["age", "blood group"]
    assert (table["columns"]["age"]["type"], table["ignore"], table["label"]["column"]) == (
        "number",
        ["id"],
        "died",
    )
    for old, new, sentence in (  # as a user would fill it in, one refusal after the other
        ('["fill in", "fill in"]', "[0, 110]", "column 'age': range is ['fill in', 'fill in']"),
        (
            'type = "fill in"',
            'type = "category"\ncategories = ["A", "B", "AB", "0"]',
            "column 'blood group': type is 'fill in'",
        ),
        ('task = "fill in"', 'task = "binary"\nclasses = ["no", "yes"]', "task is 'fill in'"),
    ):
        with pytest.raises(BadInput) as caught:
            Schema.of(tomllib.loads(text))
        assert sentence in str(caught.value)
        text = text.replace(old, new)
    assert len(Schema.of(tomllib.loads(text)).features) == 5


def test_a_draft_without_a_file_and_models_by_name(silodp, tmp_path):
    for model, word in ((None, None), ("own", "model.py:build"), ("mlp", "mlp:16"), ("cnn", "cnn")):
        folder = f"p{model}"
        assert silodp("init", folder, *(("--model", model) if model else ()))[0] == 0
        assert tomllib.loads((tmp_path / folder / "silodp.toml").read_text()).get("model") == word
        assert (tmp_path / folder / "model.py").exists() == (model == "own")
        assert "NAME" in tomllib.loads((tmp_path / folder / "schema.toml").read_text())["columns"]


MISTAKES = [
    (("init", "p", "--demo", "--from", "a.csv"), "--demo has its own schema"),
    (("init", "p", "--model", "forest"), "model 'forest' is unknown"),
    (("init", "p", "--from", "absent.csv"), "absent.csv does not exist"),
    (("init", "p", "--from", "bare.csv"), "seems to have no header"),
    (
        ("init", "p", "--from", "a.csv", "--type", "age=float"),
        "it must be COLUMN=number, COLUMN=category",
    ),
    (
        ("init", "p", "--from", "a.csv", "--type", "size=number"),
        "a.csv has no column 'size' in its first line",
    ),
    (
        ("init", "p", "--from", "a.csv", "--label", "size"),
        "a.csv has no column 'size' in its first line",
    ),
    (("init", "p", "--type", "age=number"), "give that file with --from FILE"),
    (("init", "p", "--label", "age"), "give that file with --from FILE"),
    (("init", "p", "--columns", "age"), "give that file with --from FILE"),
    (("init", "p", "--demo", "--seed", "-1"), "seed is -1"),
    (("train", "--project", "absent"), "absent has no readable silodp.toml"),
    (("train", "--project", "broken"), "is not TOML"),
    (("train", "--project", "odd"), "the setting 'rouds' is unknown"),
    (("train", "--project", "listed"), "model is ['mlp:8']; it must be a text"),
    (("train", "--schema", "s.toml"), "give one --silo FILE for each silo"),
    (("train", "--schema", "s.toml", "--data", "wbcd"), "--schema is for silos' own files"),
    (
        ("train", "--schema", "absent.toml", "--silo", "a.csv"),
        "the schema absent.toml cannot be read",
    ),
    (
        ("train", "--schema", "s.toml", "--silo", "a.csv", "--label", "ill"),
        "leave out --label, --classes and --scale",
    ),
    (
        ("train", "--schema", "s.toml", "--silo", "a.csv", "--classes", "0,1"),
        "leave out --label, --classes and --scale",
    ),
    (
        ("train", "--schema", "s.toml", "--silo", "a.csv", "--scale", "r.toml"),
        "leave out --label, --classes and --scale",
    ),
    (
        ("train", "--schema", "s.toml", "--silo", "a.csv", "--model", "linear"),
        "model linear does not fit the label",
    ),
    (
        ("train", "--schema", "s.toml", "--silo", "a.csv", "--model", "cnn"),
        "model cnn needs images",
    ),
    (("train", "--schema", "s.toml", "--silo", "a.csv", "--silo", "a.csv"), "is given twice"),
    (("train", "--schema", "s.toml", "--silo", "bare.csv"), "is the first line a header"),
    (("train", "--silo", "a.csv", "--label", "ill", "--test", "a.csv"), "--test needs --schema"),
    (("train", "--silo", "odd"), "a folder of images needs a schema"),
    (
        (
            "silo",
            "init",
            "g",
            "--data",
            "a.csv",
            "--epsilon",
            1,
            "--schema",
            "s.toml",
            "--label",
            "ill",
        ),
        "leave out --label and --classes",
    ),
    (
        ("silo", "init", "g", "--data", "bare.csv", "--epsilon", 1, "--schema", "s.toml"),
        "is the first line a header",
    ),
    (
        ("federation", "up", "--silo", "a.csv", "--schema", "s.toml", "--classes", "0,1"),
        "leave out --data, --label and --classes",
    ),
]


@pytest.mark.parametrize(
    ("words", "sentence"), MISTAKES, ids=[sentence[:40] for _, sentence in MISTAKES]
)
def test_a_mistake_gets_one_sentence(silodp, tmp_path, words, sentence):
    (tmp_path / "a.csv").write_text("age,ill\n50,yes\n60,no\n")
    (tmp_path / "bare.csv").write_text("50,yes\n60,no\n")
    schema = (
        '[columns.age]\ntype = "number"\nrange = [0, 110]\n[label]\ncolumn = "ill"\ntask = '
        '"binary"\nclasses = ["no", "yes"]\n'
    )
    (tmp_path / "s.toml").write_text(schema)
    for name, text in (
        ("broken", "rounds ="),
        ("odd", "rouds = 3"),
        ("listed", 'model = ["mlp:8"]'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "silodp.toml").write_text(text)
    code, _, err = silodp(*words)
    assert code == 2, err
    assert sentence in err
    assert err.startswith("silodp: ")
    assert err.count("\n") == 1


# --- other tasks, in simulation ------------------------------------------------------------------


def trained(silodp, folder: Path, label: str, rows: list[str], header: str, **options) -> dict:
    (folder / "s.toml").write_text(
        f'[columns.x]\ntype = "number"\nrange = [-1, 1]\n[label]\n{label}\n'
    )
    (folder / "a.csv").write_text("\n".join([header, *rows]))
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    base = (
        "--schema",
        "s.toml",
        "--silo",
        "a.csv",
        "--test",
        "a.csv",
        "--algorithm",
        "mb-sgd",
        "--seed",
        0,
        "--epsilon",
        20,
        "--json",
    )
    code, out, err = silodp("train", *base, *words)
    assert code == 0, err
    return json.loads(out)


def test_survival_and_regression_are_learnt(silodp, tmp_path):
    draw = np.random.default_rng(0)
    x = draw.uniform(-1, 1, 800)
    months = draw.exponential(12 * np.exp(-2 * x))
    rows = [
        f"{a!r},{min(t, 20)!r},{'yes' if t < 20 else 'no'}"
        for a, t in zip(x.tolist(), months.tolist(), strict=True)
    ]
    label = 'task = "survival"\ntime = "t"\nevent = "died"\nedges = [3, 6, 12, 24]'
    losses = [
        trained(
            silodp, tmp_path, label, rows, "x,t,died", model="logistic", step=1, clip=3, rounds=r
        )["test_loss"]
        for r in (1, 30)
    ]
    assert losses[1] < 0.9 * losses[0]
    label = 'task = "regression"\ncolumn = "y"\nrange = [0, 10]\nhuber = 2'
    rows = [
        f"{a!r},{5 + 4 * a + e!r}"
        for a, e in zip(x.tolist(), draw.normal(0, 0.3, 800).tolist(), strict=True)
    ]
    assert (
        trained(silodp, tmp_path, label, rows, "x,y", model="linear", step=1, clip=1, rounds=30)[
            "test_loss"
        ]
        < 0.01
    )


def test_a_project_with_a_model_of_its_own_is_evaluated_at_the_tasks_own_loss(silodp, trial):
    (trial / "model.py").write_text(project.MODEL)
    own = (
        "--model",
        f"{trial / 'model.py'}:build",
        "--algorithm",
        "mb-sgd",
        "--rounds",
        3,
        "--step",
        2,
    )
    code, out, err = silodp(
        "train", "--project", trial, "--held-out", 0.2, *own, "--seed", 1, "--json"
    )
    assert code == 0, err
    code, out, err = silodp("evaluate", trial / "runs/train", "--epsilon", 3, "--seed", 1, "--json")
    assert code == 0, err
    all_, north, *_ = json.loads(out)["scores"]
    assert (all_["held_out"], north["held_out"]) == (950, 600)
    loss = all_["figures"][
        "loss"
    ]  # weighted by 0.15 and 1 on one patient in seven; unweighted it would be about 0.7
    assert loss["value"] < 0.35


def test_a_cnn_learns_from_folders_of_images(silodp, tmp_path):
    draw = np.random.default_rng(0)
    for silo, n in (("north", 40), ("south", 20)):
        for k, name in enumerate(("left", "right")):
            (tmp_path / silo / name).mkdir(parents=True)
            for i in range(n):
                picture = draw.integers(0, 60, (8, 8)).astype(np.uint8)
                picture[:, 4 * k : 4 * k + 4] += 150
                Image.fromarray(picture).save(tmp_path / silo / name / f"{2 * i + k}.png")
    (tmp_path / "s.toml").write_text(
        "[images]\nheight = 8\nwidth = 8\nchannels = 1\nresize = false\n[label]\ntask = "
        '"binary"\nclasses = ["left", "right"]\n'
    )
    words = (
        "--silo",
        "north",
        "--silo",
        "south",
        "--test",
        "south",
        "--model",
        "cnn",
        "--algorithm",
        "mb-sgd",
        "--rounds",
        10,
    )
    code, out, err = silodp(
        "train", "--schema", "s.toml", *words, "--epsilon", 10, "--step", 1, "--seed", 0, "--json"
    )
    assert code == 0, err
    assert json.loads(out)["test_error"] < 0.1


# --- gates ---------------------------------------------------------------------------------------


def gate(trial: Path, hospital: str, **changes):
    settings = {
        "data": trial / "data" / f"{hospital}.csv",
        "name": hospital,
        "schema": trial / "schema.toml",
        "model": "mlp:4",
        "label": "label",
        "epsilon": 3.0,
    }
    settings |= {"askers": ["0" * 64], "registry": trial / "ledgers"}
    settings |= changes
    return provision(trial / f"gate-{settings['name']}", **settings)


def door(policy: str, registry: Path) -> Door:
    place = DaemonSettings.load(policy)
    schema = find_schema(place)
    held = read_records(place, schema)
    problem, ledger = (
        approved_problem(place, held.x.shape[1], schema),
        DurableLedger.open(Path(place.ledger)),
    )
    return Door(
        Policy.load(policy),
        problem,
        held.records(),
        ledger,
        known_by=held.known_by,
        registry=registry,
    )


def test_a_gate_tells_missing_rates_though_the_schema_fills_values_in(trial, monkeypatch):
    """And means are of the values that there are; a feature that says what is missing is itself
    never missing.
    """
    (trial / "s.toml").write_text(
        '[columns.a]\ntype = "number"\nrange = [0, 8]\nmissing = 8\nindicator = '
        'true\n[columns.b]\ntype = "category"\ncategories = ["u", "v"]\n'
        'missing = "own"\n[columns.c]\ntype = "boolean"\n[label]\ncolumn = "label"\ntask = '
        '"binary"\nclasses = ["0", "1"]\n'
    )
    (trial / "holes.csv").write_text(
        "a,b,c,label\n"
        + "".join(f"{'' if i % 4 else 2},{'' if i % 2 else 'u'},1,{i % 2}\n" for i in range(40))
    )
    place = DaemonSettings.load(
        gate(trial, "west", name="holes", data=trial / "holes.csv", schema=trial / "s.toml").policy
    )
    schema = find_schema(place)
    held = read_records(place, schema)
    problem = approved_problem(place, held.x.shape[1], schema)
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))

    class Quiet(Simulated):
        def _noisy(self, mean, mechanism, silos):
            return mean

    for answerer in (
        Exact(problem, held.records(), partition=lambda *_: np.arange(40)),
        Quiet(problem, held.records(), [0]),
    ):
        rates, moments, bins = (
            answerer.answer(Query(statistic, Gaussian("a", 4.0, 1.0)), [0])[0, 0].numpy()
            for statistic in (
                MissingRates(6),
                Moments(-torch.ones(6), torch.ones(6)),
                Histogram(torch.tensor([0.5]), 6),
            )
        )
        np.testing.assert_allclose(rates, [0.75, 0, 0.5, 0.5, 0, 0], atol=1e-5)
        np.testing.assert_allclose(moments[[0, 1, 2]], [0.25 * -0.5, 0.75, 0.5], atol=1e-4)
        np.testing.assert_allclose(bins.reshape(6, 2).sum(1), [0.25, 1, 0.5, 0.5, 1, 1], atol=1e-4)


def test_silos_and_server_approve_one_schema(trial):
    made = [gate(trial, name) for name in ("east", "west")]
    schema, cards = (
        load_schema(trial / "schema.toml"),
        [read_card(Path(silo.policy).parent / "silo.json") for silo in made],
    )
    assert {card.schema for card in cards} == {schema.text}
    assert cards[0].features == schema.features
    agree(cards, problem_of(cards[0], Order(), trial / "schema.toml"))
    assert "Weighted" in problem_of(cards[0], Order()).definition()
    for silo in made:
        door(silo.policy, trial / "ledgers")
    other = trial / "other.toml"
    other.write_text((trial / "schema.toml").read_text().replace("[18, 100]", "[18, 90]"))
    with pytest.raises(BadInput, match="differs from the schema of silo east"):
        problem_of(cards[0], Order(), other)
    changed = replace(cards[1], schema=load_schema(other).text)
    with pytest.raises(BadInput, match="silo west has another schema than silo east"):
        agree([cards[0], changed], problem_of(cards[0], Order()))
    with pytest.raises(BadInput, match="by its definition"):
        agree([changed], problem_of(changed, Order()))


@pytest.mark.parametrize(
    ("old", "new"),
    [("[18, 100]", "[18, 90]"), ('"female", "male"', '"male", "female"'), ("0.15", "0.2")],
)
def test_a_schema_that_was_changed_is_not_the_one_approved(trial, old, new):
    made, path = gate(trial, "west"), trial / "schema.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(BadInput, match="by its definition"):
        door(made.policy, trial / "ledgers")


def test_the_classes_of_policy_and_schema_must_agree(trial):
    made, path = gate(trial, "west"), trial / "schema.toml"
    path.write_text(path.read_text().replace('["no", "yes"]', '["yes", "no"]'))
    with pytest.raises(BadInput, match="label and classes are not those of the schema"):
        door(made.policy, trial / "ledgers")


def test_another_schema_gives_the_same_people_no_second_budget(trial):
    """Every number rescaled and every category recoded: the file is the same, and so is its
    ledger.
    """
    gate(trial, "west")
    text = (trial / "schema.toml").read_text()
    for old, new in (
        ("[18, 100]", "[0, 120]"),
        ("[80, 220]", "[50, 250]"),
        ('"medicine", "surgery"', '"surgery", "medicine"'),
    ):
        text = text.replace(old, new)
    (trial / "other.toml").write_text(text)
    with pytest.raises(BadInput, match="in common with the one whose ledger"):
        gate(trial, "west", name="again", schema=trial / "other.toml")


def test_the_daemon_serves_by_a_schema_that_only_its_owner_may_change(trial):
    made, heard = gate(trial, "west", socket=str(trial / "s")), []
    stop, tell = socket.socketpair()

    def ready(policy: Policy, place: DaemonSettings) -> None:
        heard.append(place.schema)
        tell.sendall(b"!")

    with stop, tell:
        daemon.serve(made.policy, stop, ready)
        assert heard == [str(trial / "schema.toml")]
        (trial / "schema.toml").chmod(0o666)
        with pytest.raises(BadInput, match=r"schema.toml has mode 0666"):
            daemon.serve(made.policy, stop, ready)


def test_the_operator_is_told_of_a_range_in_other_units(trial):
    (trial / "other.toml").write_text(
        (trial / "schema.toml").read_text().replace("[80, 220]", "[10, 130]")
    )
    assert not any("units" in sentence for sentence in gate(trial, "east").findings)
    assert any(
        "Columns: systolic." in sentence
        for sentence in gate(trial, "west", schema=trial / "other.toml").findings
    )


def test_a_policy_and_a_card_from_before_schemas_are_still_read(trial):
    (trial / "plain.csv").write_text("a,label\n" + "".join(f"{i / 7},{i % 2}\n" for i in range(30)))
    made = gate(trial, "west", name="plain", data=trial / "plain.csv", schema=None)
    policy, card = Path(made.policy), Path(made.policy).parent / "silo.json"
    policy.write_text(
        "".join(
            line
            for line in policy.read_text().splitlines(keepends=True)
            if not line.startswith("schema")
        )
    )
    card.write_text(
        json.dumps({k: v for k, v in json.loads(card.read_text()).items() if k != "schema"})
    )
    door(made.policy, trial / "ledgers")
    agree([read_card(card)], problem_of(read_card(card), Order()))


# --- what the advisor chooses --------------------------------------------------------------------


def test_a_new_project_leaves_the_choice_to_the_advisor_who_tells_it_and_keeps_it(
    silodp, trial, tmp_path
):
    assert (
        not {"model", "algorithm", "rounds", "step", "clip", "weights"}
        & tomllib.loads((trial / "silodp.toml").read_text()).keys()
    )
    code, out, err = silodp("train", "--project", trial, "--rounds", 4, "--seed", 0, "--epsilon", 1)
    assert code == 0, err
    said = " ".join(out.split())
    assert "Chosen from sizes, columns and budgets alone, which costs no privacy: model " in said
    assert "4 rounds" in said
    assert "Expected on simulated data of this shape" in said
    kept = json.loads((trial / "runs/train/run.json").read_text())
    assert kept["advice"]["order"] == kept["order"]
    assert (kept["order"]["algorithm"], kept["order"]["rounds"], kept["order"]["weights"]) != (
        "auto",
        4,
        "equal",
    )
    assert kept["order"]["weights"] == "records"
    assert kept["advice"]["expected"]["error"] < kept["advice"]["expected"]["guessing"]


def test_a_settings_file_is_taken_whole_and_the_command_line_wins(silodp, trial, tmp_path):
    (tmp_path / "s.toml").write_text(
        'algorithm = "momentum"\nmodel = "logistic"\nrounds = 3\nclip = 0.5\nweights = '
        '"records"\nepsilon = ["2"]\n'
    )
    code, _, err = silodp(
        "train",
        "--settings",
        tmp_path / "s.toml",
        "--project",
        trial,
        "--clip",
        0.25,
        "--seed",
        0,
        "--json",
    )
    assert code == 0, err
    order = json.loads((trial / "runs/train/run.json").read_text())["order"]
    assert [order[n] for n in ("algorithm", "model", "rounds", "clip", "weights", "epsilon")] == [
        "momentum",
        "logistic",
        3,
        0.25,
        "records",
        ["2"],
    ]
    (tmp_path / "s.toml").write_text("speed = 3\n")
    code, _, err = silodp("train", "--settings", tmp_path / "s.toml", "--project", trial)
    assert (code, err.count("\n")) == (2, 1)
    assert "the setting 'speed' is unknown" in err
