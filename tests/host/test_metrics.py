"""What monitoring is told is counts, spend and codes, at times that no record decides, to this
machine alone.
"""

import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from silodp.core.errors import BadInput
from silodp.host import log, metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
SAMPLE = re.compile(r'[a-z_]+\{role="[a-z]+"(,[a-z]+="([^"\\\n]|\\.)*")*\} [-0-9.e+]+')


@pytest.fixture(autouse=True)
def own_values(monkeypatch):
    monkeypatch.setattr(metrics, "_values", {})


def test_the_text_is_prometheus_own_form_with_each_family_once():
    metrics.count("silodp_frames_total", code="answered")
    metrics.count("silodp_frames_total", 2, code='od"d\n')
    metrics.gauge("silodp_queue", 3)
    lines = metrics.text("gate").splitlines()
    assert [line.split()[2] for line in lines if line.startswith("# TYPE")] == [
        "silodp_frames_total",
        "silodp_queue",
    ]
    samples = [line for line in lines if not line.startswith("#")]
    assert len(samples) == 3
    assert all(SAMPLE.fullmatch(line) for line in samples), samples
    assert 'silodp_frames_total{role="gate",code="answered"} 1' in samples


def test_a_number_that_is_not_on_the_list_cannot_be_told():
    for tell in (
        lambda: metrics.count("silodp_mean_age"),
        lambda: metrics.gauge("silodp_frames_total", 1),
    ):
        with pytest.raises((KeyError, ValueError)):
            tell()
    assert metrics.text("gate") == ""


def test_a_reply_is_counted_when_it_is_sent_and_not_when_it_is_ready(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SILODP_LOG", "json")
    kept = log.Log(str(tmp_path / "log"), 10_000)
    kept.line("answered   Grad id price 0.1% left 9%")
    kept.line("late       1 since the start")
    assert "silodp_frames_total" not in metrics.text("gate")
    assert capsys.readouterr().out == ""
    kept.line("busy", at_once=True)
    assert metrics.text("gate").count('code="') == 1, (
        "what is turned away at once tells nothing of the reply that is being made"
    )
    kept.sent()
    assert 'code="answered"} 1' in metrics.text("gate")
    assert "late" not in metrics.text("gate"), "how many took long depends on how long they took"
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["event"], one["text"]) for one in told] == [
        ("busy", ""),
        ("answered", "Grad id price 0.1% left 9%"),
        ("late", "1 since the start"),
    ]
    kept.close()
    assert log.tally(str(tmp_path / "log"))["answered"] == 1, "the log itself is as it was"


def test_the_file_is_written_while_the_daemon_serves_and_says_when_it_has_ended(
    tmp_path, monkeypatch
):
    file, looked = tmp_path / "gate.prom", threading.Event()
    monkeypatch.setenv("SILODP_METRICS", str(file))
    with metrics.reporting("gate", looked.set):
        assert looked.wait(60)
    assert 'silodp_up{role="gate"} 0' in file.read_text()
    assert metrics.ill([file], file.stat().st_mtime) == [f"{file} shows that its daemon is down"]
    file.write_text('silodp_up{role="gate"} 1\n')
    assert metrics.ill([file], file.stat().st_mtime) == []
    assert metrics.ill([file], file.stat().st_mtime + metrics.STALE + 1) == [
        f"{file} was not written for 60 seconds"
    ]
    assert metrics.ill([tmp_path / "none"], 0.0) == [f"{tmp_path / 'none'} is missing"]


def test_without_a_name_for_it_no_file_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("SILODP_METRICS", raising=False)
    with metrics.reporting("gate", lambda: pytest.fail("nobody asked")):
        pass


def test_the_page_joins_the_files_answers_on_loopback_and_says_who_is_ill(tmp_path):
    gate, courier = tmp_path / "gate.prom", tmp_path / "courier.prom"
    gate.write_text(
        'silodp_up{role="gate"} 1\nsilodp_queue{role="gate"} 2\nsecret{x="1"} 5\nnonsense\n'
    )
    courier.write_text('silodp_up{role="courier"} 1\n')
    port, there = [], threading.Event()
    threading.Thread(
        target=metrics.serve,
        args=([gate, courier], "127.0.0.1:0", lambda n: (port.append(n), there.set())),
        daemon=True,
    ).start()
    assert there.wait(60)

    def get(path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port[0]}{path}", timeout=60) as page:
                return page.status, page.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    code, page = get("/metrics")
    assert (code, page.count("# TYPE silodp_up gauge"), "secret" in page) == (200, 1, False)
    assert 'silodp_queue{role="gate"} 2' in page
    assert get("/health") == (200, "ok\n")
    courier.write_text('silodp_up{role="courier"} 0\n')
    assert get("/health") == (503, f"{courier} shows that its daemon is down\n")
    assert get("/etc/passwd")[0] == 404


@pytest.mark.parametrize(
    "address", ["0.0.0.0:9464", "10.0.0.1:9464", ":9464", "127.0.0.1:x", "9464"]
)
def test_the_page_is_served_to_this_machine_alone(address):
    with pytest.raises(BadInput, match="must be 127"):
        metrics.serve([], address)


def test_dashboard_and_alerts_speak_of_numbers_that_are_told():
    named = set()
    for file in ("grafana.json", "alerts.yaml"):
        found = set(re.findall(r"silodp_\w+", (DEPLOY / file).read_text()))
        assert found
        assert found <= set(metrics.METRICS)
        named |= found
    assert named >= set(metrics.METRICS) - {"silodp_paused", "silodp_budget_held_ratio"}
    assert json.loads((DEPLOY / "grafana.json").read_text())["panels"]
