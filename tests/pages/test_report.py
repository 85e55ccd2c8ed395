"""The report says what the run's folder says, asks for nothing, and cannot be made to say anything
else by a name in the folder.
"""

import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from silodp.cli import app as cli
from silodp.core.errors import BadInput
from silodp.core.figures import rounded_up
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget, composed_epsilon, gdp_delta, gdp_epsilon, gdp_mu
from silodp.core.problem.losses import squared_error
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import by_name
from silodp.core.query import Query
from silodp.core.sampling import Poisson
from silodp.core.statistics import Grad, LocalSteps
from silodp.pages import export, runs
from silodp.pages.markup import sentence
from silodp.pages.report import report
from silodp.pages.style import STYLE
from silodp.pages.trade_off import claims_of, misses
from silodp.server.progress import Progress, measured
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records


def command(*words) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["silodp", *map(str, words)])
        cli.main()


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SILODP_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    with pytest.raises(SystemExit) as stop:
        command(
            "train",
            "--data",
            "wbcd",
            "--epsilon",
            3,
            "--epsilon",
            "malignant=2",
            "--algorithm",
            "spider",
            "--rounds",
            8,
            "--seed",
            1,
            "--out",
            folder,
            "--json",
        )
    assert not stop.value.code
    return folder


def plain(page: str) -> str:
    """What a reader sees."""
    return re.sub(
        r"\s+",
        " ",
        re.sub(r"<[^>]*>", " ", re.sub(r"<(style|title)>.*?</\1>", "", page, flags=re.S)),
    )


def test_the_report_of_a_training_run_has_the_folders_numbers(trained):
    page, spent = (
        plain(report(runs.read(trained))),
        json.loads((trained / "summary.json").read_text()),
    )
    lines = [json.loads(line) for line in (trained / "progress.jsonl").read_text().splitlines()]
    assert len(lines) == spent["questions"] == 8
    for silo in spent["silos"]:
        assert f"ε {silo['epsilon']:g} of {silo['epsilon']:g} spent" in page, (
            "all of it, but for a part in a million"
        )
    for line in lines:
        assert f"{line['norm']:.4g}" in page
        assert f"{line['noise']:.4g}" in page
        assert f"{min(1, (line['noise'] / line['norm']) ** 2):.1%}" in page
    before = 0.0
    for line in lines:  # the history of the budget is what the ledger charged
        assert f"{rounded_up(100 * (line['used']['benign'] - before), 3, 'f')}%" in page
        before = line["used"]["benign"]
    assert before == pytest.approx(1.0, abs=1e-6)
    assert "285" in page
    assert "8 of 8" in page
    assert "266" in page  # parameters
    assert f"{spent['test_error']:.1%}" in page
    assert "The seed was fixed (1)" in page
    assert "Signature" in page
    assert runs.fingerprint(trained) in page


def test_the_headline_is_the_largest_spend_and_nothing_on_the_page_is_rounded_down(trained):
    run = runs.read(trained)
    small, large = (
        replace(run.silos[0], name=n, epsilon=e, spent=s, used=s / e)
        for n, e, s in (
            (
                "a",
                1.0,
                0.99944,
            ),
            ("b", 9.0, 5.12345),
        )
    )
    page = plain(report(replace(run, silos=(small, large))))
    assert "ε spent, of 9 5.124" in page
    assert "a ε 0.9995 of 1 spent" in page
    assert "b ε 5.124 of 9 spent" in page


def test_a_loss_on_raw_test_records_is_named_as_not_private(tmp_path):
    for name in ("a", "test"):
        (tmp_path / f"{name}.csv").write_text(
            "x,y\n" + "".join(f"{k % 9},{k % 5}\n" for k in range(80))
        )
    column = (
        '[columns.x]\ntype = "number"\nrange = [0, 9]\n[label]\ncolumn = "y"\ntask = '
        '"regression"\nrange = [0, 5]\n'
    )
    (tmp_path / "s.toml").write_text(column)
    files = (
        "--schema",
        tmp_path / "s.toml",
        "--silo",
        tmp_path / "a.csv",
        "--test",
        tmp_path / "test.csv",
        "--out",
        tmp_path / "run",
    )
    with pytest.raises(SystemExit) as stop:
        command(
            "train", *files, "--model", "linear", "--algorithm", "mb-sgd", "--rounds", 1, "--json"
        )
    assert not stop.value.code
    page = plain(report(runs.read(tmp_path / "run")))
    assert "The test loss was measured on raw test records: a research figure, not private." in page
    assert "test loss (not private)" in page


@pytest.fixture(scope="module")
def batched(tmp_path_factory):
    """By rule, the folder of a run on sampled batches, with what its ledger said after three of its
    questions.
    """
    found = {}
    for rule in ("renyi", "committed"):
        folder = tmp_path_factory.mktemp("batched") / rule
        told = (
            "--model",
            "logistic",
            "--algorithm",
            "mb-sgd",
            "--sampling",
            "poisson:0.1",
            "--rule",
            rule,
            "--rounds",
            40,
            "--scale",
            "none",
        )
        with pytest.raises(SystemExit) as stop:
            command(
                "train",
                "--data",
                "wbcd",
                "--epsilon",
                1,
                "--held-out",
                0.2,
                *told,
                "--out",
                folder,
                "--json",
            )
        assert not stop.value.code
        found[rule] = folder
    return found


def copied(folder, to):
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("rule", ["gdp", "renyi"])
def test_what_evaluations_cost_is_in_the_sentence_that_is_signed_and_beside_what_training_cost(
    tmp_path, trained, batched, rule
):
    folder = tmp_path / "run"
    if rule == "renyi":
        copied(batched["renyi"], folder)
    else:
        with pytest.raises(SystemExit):
            command(
                "train",
                "--data",
                "wbcd",
                "--epsilon",
                1,
                "--held-out",
                0.2,
                "--rounds",
                5,
                "--out",
                folder,
                "--json",
            )
    with pytest.raises(SystemExit) as stop:
        command("evaluate", folder, "--epsilon", 5, "--json")
    assert not stop.value.code
    ends, run = json.loads((folder / "summary.json").read_text())["silos"], runs.read(folder)
    shown = plain(report(run))
    claimed = [
        float(n)
        for n in re.search(r"evaluations is \(([^,]+), ([^)]+)\)", plain(report(run))).groups()
    ]
    for end, silo in zip(ends, run.silos, strict=True):
        assert silo.together == (end["in_all"]["epsilon"], end["in_all"]["delta"])
        assert (silo.spent, silo.evaluated.epsilon) == (
            end["spent_epsilon"],
            end["evaluations"]["epsilon"],
        )
        assert silo.together[0] > 5
        assert all(
            said >= known * (1 - 1e-9) for said, known in zip(claimed, silo.together, strict=True)
        )
        assert silo.used == pytest.approx(sum(share for _, _, share in silo.charges))
        assert silo.used <= 1 + 1e-6, "evaluations are beside the budget of the run, not out of it"
        spent, own, both = (
            rounded_up(e, 4) for e in (silo.spent, silo.evaluated.epsilon, silo.together[0])
        )
        assert f"{silo.name} ε {spent} of 1 spent in training" in shown
        assert (
            f"In addition, 1 evaluation: ε {own} at δ {rounded_up(silo.evaluated.delta)}." in shown
        )
        assert f"Together ε {both} at δ {rounded_up(silo.together[1])}." in shown
    assert (run.silos[0].together[1] > run.silos[0].delta) == (rule == "renyi")


@pytest.mark.parametrize("rule", ["renyi", "committed"])
def test_a_run_on_sampled_batches_that_was_killed_shows_what_its_rule_says_and_never_a_square_root(
    tmp_path, batched, rule
):
    folder = copied(batched[rule], tmp_path / "run")
    (folder / "summary.json").unlink()
    lines = (folder / "progress.jsonl").read_text().splitlines(keepends=True)[:3]
    (folder / "progress.jsonl").write_text("".join(lines))
    about, last, run = (
        json.loads((folder / "run.json").read_text()),
        json.loads(lines[-1]),
        runs.read(folder),
    )
    assert about["rule"] == rule
    for silo in run.silos:
        assert silo.spent == (last["epsilon"][silo.name] if rule == "renyi" else silo.epsilon)
        least = composed_epsilon(
            ((Poisson(0.1), last["answered"][silo.name]["noise_multiplier"], 3),), silo.delta
        )
        assert silo.spent >= least > 0
        root = gdp_epsilon(gdp_mu(Budget(silo.epsilon, silo.delta)) * silo.used**0.5, silo.delta)
        assert root < (silo.spent if rule == "renyi" else least), "so much for the square root"


def test_a_page_over_silos_says_that_ledgers_add_what_is_not_in_it(gated, tmp_path):
    for _ in gated.conduct(tmp_path / "run", rounds=2, epsilon=("0.1",)):
        pass
    assert "Evaluations, profiles and other runs over the same silos are not included" in plain(
        report(runs.read(tmp_path / "run"))
    )
    lines = [
        json.loads(line)
        for line in (tmp_path / "run/progress.jsonl").read_text().splitlines()
        if '"question"' in line
    ]
    assert 0 < lines[0]["epsilon"]["clinic"] < lines[1]["epsilon"]["clinic"] <= 0.1
    assert all(silo.gaussian for silo in runs.read(tmp_path / "run").silos)
    found = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(
        json.dumps(found | {"order": found["order"] | {"trust": "shuffle"}})
    )
    shuffled = runs.read(tmp_path / "run")
    assert shuffled.totals
    assert shuffled.rule == "gdp"
    assert all(silo.gaussian for silo in shuffled.silos), "totals have the curve of Gaussian noise"


def test_the_report_of_a_comparison_has_every_point_with_its_error_bar_and_says_where_more_was_spent(  # noqa: E501
    study,
):
    run = runs.read(study)
    rows, text, page = (
        json.loads((study / "summary.json").read_text()),
        report(run),
        plain(report(run)),
    )
    assert run.state == "finished"
    assert (run.done, run.total) == (6, 6)
    assert len(rows) == 5
    for row in rows:
        assert f"{row['test_error']:.2%}" in page
        assert f"{row['standard_error']:.2%}" in page
        if row["spent_epsilon"]:
            marked = f'<b class="alarm">{row["spent_epsilon"]:.3f}</b>' in text
            assert marked == (row["spent_epsilon"] > row["epsilon"] * (1 + 1e-9))
    assert (
        text.count('class="whisker') == 2 * 3 * 4
    )  # wide and narrow, three strokes, four private points
    assert "The budget was not charged" in page


def test_the_page_stands_alone_and_forbids_itself_every_request(trained):
    page = report(runs.read(trained))
    assert not re.search(
        r"(?:src|href|action|srcset|data)\s*=|url\(|@import|<script|<link|<iframe|<object|https?:",
        page,
    )
    assert "default-src &#x27;none&#x27;" in page


def test_names_from_the_folder_are_text_and_never_markup(tmp_path, trained):
    for path in trained.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    evil = '<img src=x onerror="alert(1)">'
    for name in ("run.json", "summary.json", "progress.jsonl"):
        text = (
            (tmp_path / name)
            .read_text()
            .replace("benign", json.dumps(evil)[1:-1])
            .replace("mlp:8", "</style><script>")
        )
        (tmp_path / name).write_text(text)
    page = report(runs.read(tmp_path))
    assert "&lt;img src=x" in page
    assert "<img" not in page
    assert "<script" not in page


def test_no_folder_of_anybodys_machine_is_on_the_page_that_is_signed(tmp_path, trained):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    about = json.loads((copy / "run.json").read_text())
    about |= {"algorithm": "/home/anna/secret/own.py:steps", "model": "../anna/own.py:Net"}
    (copy / "run.json").write_text(json.dumps(about))
    for state in ("finished", "ended early"):
        page = report(runs.read(copy))
        assert state == runs.read(copy).state
        assert "own.py:steps" in page
        assert "anna" not in page
        assert str(tmp_path) not in page
        (copy / "summary.json").unlink(missing_ok=True)


def test_the_run_hash_is_what_sha256sum_makes_of_the_files(trained):
    names = sorted(p.name for p in trained.iterdir() if p.suffix not in (".html", ".png", ".svg"))
    lines = subprocess.run(
        ["sha256sum", *names], cwd=trained, capture_output=True, check=True
    ).stdout
    before = runs.fingerprint(trained)
    assert before == hashlib.sha256(lines).hexdigest()
    command_out = trained / "report.html"
    command_out.write_text(report(runs.read(trained)))
    assert runs.fingerprint(trained) == before, "a report does not change what it is about"
    command_out.unlink()


def zeros(multiplier: float, statistic, samples: int):
    """Releases about records whose gradients are exactly zero: nothing but noise."""
    counts, d = (40, 80), 4
    problem = Problem(model_by_name("linear", 3, 0)[0], squared_error, by_name("zero"))
    records = Records.of(
        [(np.zeros((n, 3), np.float32), np.zeros(n, np.float32)) for n in counts], ("a", "b")
    )
    query = Query(
        statistic(torch.zeros(samples, d)),
        Gaussian("anchor", 0.5, torch.tensor([[multiplier, 2 * multiplier]])),
    )
    return (
        query,
        Simulated(problem, records, [(0, i) for i in range(samples)]).answer(query, [0, 1]),
        counts,
    )


@pytest.mark.parametrize(
    "statistic", [Grad, lambda w: LocalSteps(w, 3, 0.01)], ids=["Grad", "LocalSteps"]
)
def test_the_noise_that_a_line_names_is_the_noise_that_is_drawn(statistic):
    query, values, counts = zeros(
        5.0, statistic, 1500
    )  # the error of a mean square is below 5 % at 1e-6
    line = measured(query, values[0], [0, 1], counts, ("a", "b"))
    for i, name in enumerate(("a", "b")):
        assert math.sqrt(values[:, i].square().sum(-1).mean()) == pytest.approx(
            line["answered"][name]["noise"], rel=0.05
        )
    assert math.sqrt(values.mean(1).square().sum(-1).mean()) == pytest.approx(
        line["noise"], rel=0.05
    )
    assert line["norm"] == pytest.approx(float(values[0].mean(0).norm()))


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 8.0])
def test_no_point_of_the_trade_off_curve_is_below_what_epsilon_and_delta_allow_and_one_touches_it(
    epsilon,
):
    mu, alarms = gdp_mu(Budget(epsilon, 1e-5)), np.logspace(-9, -0.001, 4000)
    curve = np.array([misses(mu, a) for a in alarms])
    assert np.allclose(curve, stats.norm.cdf(stats.norm.isf(alarms) - mu))
    slack = curve - (1 - 1e-5 - math.exp(epsilon) * alarms)
    assert slack.min() > -1e-9
    assert slack.min() < 1e-6
    assert gdp_delta(mu, epsilon) <= 1e-5
    assert misses(0.0, 0.3) == pytest.approx(0.7)


@pytest.mark.parametrize(("rate", "std", "delta"), [(0.05, 0.35, 1e-4), (0.1, 0.8, 1e-2)])
def test_the_curve_of_sampled_batches_is_never_above_what_an_attack_on_one_release_reaches(
    rate, std, delta
):
    """A record of norm 1 is replaced by its opposite: a sum of a Poisson batch with noise of this
    deviation has these two laws.
    """
    cuts = np.linspace(-6, 6, 6001)
    there, opposite = (
        (1 - rate) * stats.norm.sf(cuts / std) + rate * stats.norm.sf((cuts - side) / std)
        for side in (1, -1)
    )
    epsilon = composed_epsilon(((Poisson(rate), std / 2, 1),), delta)
    silo = runs.Silo("a", 100, epsilon, delta, epsilon, 1.0)
    run = runs.Run(Path(), "train", "finished", "", {"rule": "committed"}, silos=(silo,))
    (claim,) = claims_of(run)
    assert (np.interp(opposite, *zip(*claim.curve(), strict=True)) <= 1 - there + 1e-9).all()
    assert all(
        claim.misses(a) <= m + 1e-9 for a, m in zip(opposite[::10], 1 - there[::10], strict=True)
    )
    assert claim.misses(0.0) == 1 - delta
    gauss = stats.norm.cdf(stats.norm.isf(opposite) - gdp_mu(Budget(epsilon, delta)))
    assert (gauss > 1 - there + 1e-6).any(), "so much for the Gaussian curve"


def test_a_curve_that_follows_from_epsilon_and_delta_alone_says_so(trained, batched, study):
    gaussian, sampled = (
        plain(report(runs.read(folder))) for folder in (trained, batched["committed"])
    )
    assert "the curve follows from ε and δ alone" in sampled
    assert "the curve follows from ε and δ alone" not in gaussian
    assert "μ = " in gaussian
    assert "μ = " not in sampled
    compared = runs.read(study)
    assert compared.gaussian
    for other in ({"sampling": "poisson:0.1"}, {"methods": ["mb-sgd", "mb-sgd-shuffle"]}):
        assert not replace(compared, about=compared.about | other).gaussian


def test_a_run_is_running_while_it_is_written_and_stopped_once_its_writer_is_gone(
    tmp_path, trained
):
    (tmp_path / "run.json").write_bytes((trained / "run.json").read_bytes())
    lines = (trained / "progress.jsonl").read_text().splitlines()
    writer = Progress(tmp_path, keep=True)
    writer.write(0, json.loads(lines[0]))
    assert (runs.read(tmp_path).state, runs.read(tmp_path).done) == ("running", 1)
    with pytest.raises(BadInput, match="another process writes"):
        Progress(tmp_path, keep=True, patience=0.05)
    writer.close()
    with (tmp_path / "progress.jsonl").open("a") as file:
        file.write(lines[1][:40])  # killed in the middle of a line
    found = runs.read(tmp_path)
    assert (found.state, len(found.rounds)) == ("ended early", 1)
    again = Progress(tmp_path, keep=True)
    again.write(0, json.loads(lines[0]), replayed=True)
    again.write(1, json.loads(lines[1]), replayed=True)
    again.close()
    text = (tmp_path / "progress.jsonl").read_text()
    assert [json.loads(line)["question"] for line in text.splitlines()] == [0, 1]


def test_an_audit_stands_beside_the_curve_and_an_alarm_is_seen(tmp_path, trained):
    row = {
        "algorithm": "spider",
        "gate": "simulated",
        "claimed_epsilon": 6.0,
        "empirical_epsilon": 5.731,
        "lower_bound": 5.512,
        "alarm": False,
    }
    (tmp_path / "audit.json").write_text(
        json.dumps({"rows": [row, row | {"algorithm": "adam", "empirical_epsilon": 4.242}]})
    )
    page = plain(report(runs.read(trained), runs.audits(tmp_path)))
    assert "5.731" in page
    assert "not refuted" in page
    assert "4.242" not in page, "an attack on another algorithm"
    assert "REFUTED" in report(runs.read(trained), [row | {"alarm": True}])
    (tmp_path / "audit.json").write_text("{}")
    with pytest.raises(BadInput, match="contains no audit"):
        runs.audits(tmp_path)


def test_the_command_writes_the_page_and_says_what_is_no_run(tmp_path, trained, capsys):
    with pytest.raises(SystemExit):
        command("report", trained, "--out", tmp_path / "page.html", "--json")
    assert json.loads(capsys.readouterr().out)["run_sha256"] == runs.fingerprint(trained)
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    with pytest.raises(SystemExit) as stop:
        command("report", tmp_path)
    assert stop.value.code == 2
    assert "contains no run" in capsys.readouterr().err


def test_a_line_ends_inside_no_option():
    words = "Give its folder with `--audit`, as in `silodp report RUN --audit FOLDER`."
    option, command = re.findall(r"<code[^>]*>", sentence(words))
    assert (option, command) == ('<code class="option">', "<code>")
    assert ".option{white-space:nowrap}" in STYLE


def test_a_link_that_came_with_the_folder_is_not_written_through(tmp_path, trained, capsys):
    folder, victim = copied(trained, tmp_path / "run"), tmp_path / "keys"
    victim.write_text("precious")
    (folder / "report.html").symlink_to(victim)
    with pytest.raises(SystemExit) as stop:
        command("report", folder)
    assert stop.value.code == 2
    assert "not a plain file" in capsys.readouterr().err
    assert victim.read_text() == "precious"
    (folder / "report.html").unlink()
    (folder / "report.html").hardlink_to(victim)  # what a check for links alone does not see
    with pytest.raises(SystemExit) as stop:
        command("report", folder)
    assert not stop.value.code
    assert victim.read_text() == "precious"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    ("name", "call"), [("tensorboard", export.to_tensorboard), ("mlflow", export.to_mlflow)]
)
def test_an_export_without_its_package_names_it(name, call, trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BadInput, match=rf"silodp\[{name}\]"):
        call(runs.read(trained), tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_gets_the_curves(trained, tmp_path):
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = runs.read(trained)
    export.to_tensorboard(run, tmp_path)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [e.value for e in read.Scalars("release/norm")] == pytest.approx(
        [r["norm"] for r in run.rounds]
    )
    assert read.Scalars("budget/benign")[-1].value == pytest.approx(run.silos[0].used)


@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_settings_and_curves(trained, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    run = runs.read(trained)
    export.to_mlflow(run, tmp_path)
    client = mlflow.MlflowClient(tracking_uri=tmp_path.resolve().as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("silodp").experiment_id])
    assert found.data.params["algorithm"] == "spider"
    history = client.get_metric_history(found.info.run_id, "release/noise_share")
    assert [m.value for m in sorted(history, key=lambda m: m.step)] == pytest.approx(
        [s for _, s in run.noise_shares]
    )


def test_settings_of_its_own_that_an_order_gives_an_algorithm_are_shown(root, tmp_path):
    """A federation's order lists them as texts, such as "caution=0"."""
    folder = tmp_path / "clinic"
    shutil.copytree(root / "clinic", folder)
    path = folder / "run.json"
    about = json.loads(path.read_text())
    about["order"]["settings"] = ["caution=0"]
    path.write_text(json.dumps(about))
    assert "Caution" in str(report(runs.read(folder), ()))
    assert "Caution" not in str(report(runs.read(root / "clinic"), ()))
