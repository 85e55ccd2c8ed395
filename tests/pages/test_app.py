"""`silodp ui` towards whoever else may knock: other machines' names, other sites' forms, wrong
tokens, names that are paths.
"""

import base64
import csv
import http.client
import itertools
import json
import os
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from looking import PATIENCE, TOKEN, ask, free_port, served, started, until

from silodp.cli import app as cli
from silodp.core.figures import rounded_up
from silodp.core.protocol.refusals import CODES
from silodp.pages import runs
from silodp.pages.guard import HEADERS
from silodp.pages.style import STYLE
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service.pause import NAME, paused, set_paused
from silodp.silo.service.policy import DaemonSettings

pytest.importorskip("starlette", reason="starlette is not installed (silodp[ui])")
pytest.importorskip("uvicorn", reason="uvicorn is not installed (silodp[ui])")


@pytest.fixture(scope="module")
def root(tmp_path_factory, gated):
    folder = tmp_path_factory.mktemp("runs")
    for _ in gated.conduct(folder / "deep/one"):
        pass
    (folder / "secret.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def port(root, gated):
    with served(root, gated.policy, TOKEN) as found:
        yield found


def own(port: int) -> dict[str, str]:
    return {
        "Origin": f"http://127.0.0.1:{port}",
        "Content_Type": "application/x-www-form-urlencoded",
    }


def pause(port: int, *, token: str = TOKEN, do: str = "pause", **headers: str) -> int:
    return ask(port, "/silo/pause", method="POST", body=f"token={token}&do={do}", **headers)[0]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{}",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.0.0.1.evil.example:{}",
        "localhost:{}@evil.example",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/", "/silo", "/live", "/silo-live", "/live.js"])
def test_another_name_than_this_machines_gets_nothing(port, host, path):
    status, text, _ = ask(port, path, host=host.format(port) or " ")
    assert status == 421
    assert "clinic" not in text
    assert ask(port, path, host=f"localhost:{port}")[0] == 200


def test_every_page_has_a_policy_that_lets_nothing_in_from_elsewhere(port):
    for path in (
        "/",
        "/silo",
        "/run/deep/one",
        "/report/deep/one",
        "/nothing",
        "/live.js",
        "/compare",
    ):
        headers = ask(port, path)[2]
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert not re.search(r"https?:|\*", policy)
        assert (headers["x-content-type-options"], headers["cache-control"]) == (
            "nosniff",
            "no-store",
        )
        assert "server" not in headers


def test_only_this_pages_own_form_with_the_token_pauses_the_gate(port, gated):
    good = own(port)
    for wrong in (
        {},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": f"http://127.0.0.1:{port}.evil.example"},
        {"Origin": f"https://127.0.0.1:{port}"},
        good | {"Sec_Fetch_Site": "cross-site"},
        good | {"Sec_Fetch_Site": "same-site"},
    ):
        assert pause(port, **wrong) == 403
        assert not paused(gated.policy)
    for token in ("", "wrong", TOKEN[:-1], TOKEN + "x", "%00", TOKEN.upper()):
        assert pause(port, token=token, **good) == 403
        assert not paused(gated.policy)
    assert pause(port, do="nonsense", **good) == 400
    assert ask(port, "/silo/pause", method="POST", body="token=" + "x" * 9000, **good)[0] == 413
    assert ask(port, f"/silo/pause?token={TOKEN}&do=pause")[0] == 405
    assert not paused(gated.policy)
    assert pause(port, **good) == 303
    assert paused(gated.policy)
    assert pause(port, do="resume", **good) == 303
    assert not paused(gated.policy)


def test_without_a_token_it_can_only_be_read(root, gated):
    with served(root, gated.policy) as found:
        assert "is read-only" in ask(found, "/silo")[1]
        for token in ("", "None", TOKEN):
            assert pause(found, token=token, **own(found)) == 403
        assert not paused(gated.policy)
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert ask(found, "/", method=method, **own(found))[0] == 405


def test_a_paused_gate_refuses_with_its_code_also_after_a_restart_and_charges_nothing(
    gated, tmp_path
):
    from silodp.silo.ledger.durable import DurableLedger

    def used() -> float:
        return DurableLedger.open(gated.policy.parent / "ledger.db").used()

    before = used()
    set_paused(gated.policy, True)
    try:
        for restart in (False, True):
            if restart:
                gated.process.terminate()
                gated.process.join(PATIENCE)
                gated.start()
            with pytest.raises(cli.BadInput, match="clinic paused"):
                list(gated.conduct(tmp_path / str(restart), deadline=0.5, epsilon=("0.1",)))
        assert used() == before
    finally:
        set_paused(gated.policy, False)
    assert len(list(gated.conduct(tmp_path / "again", epsilon=("0.1",)))) == 4
    assert used() > before
    assert not (gated.policy.parent / NAME).exists()


def test_the_gates_page_shows_every_refusal_with_its_sentence_and_every_charge(
    port, gated, tmp_path
):
    with pytest.raises(cli.BadInput, match="clinic clip"):
        list(gated.conduct(tmp_path / "clip", clip=1e3, deadline=0.5, epsilon=("0.1",)))
    _, page, _ = ask(port, "/silo-live")
    lines = [line.split() for line in (gated.policy.parent / "gate.log").read_text().splitlines()]
    assert page.count("<tr>") >= len(lines)
    assert CODES["clip"].replace("'", "&#x27;") in page
    spent = rounded_up(DurableLedger.open(DaemonSettings.load(gated.policy).ledger).spent(), 4)
    assert f">{spent}<" in ask(port, "/silo")[1]
    for line in lines:
        assert line[0][:19].replace("T", " ") in page
    assert sum(line[1] == "answered" for line in lines) == page.count(
        '<b class="answered">answered</b>'
    )
    assert not re.search(r"\bf17\b", page), "a feature's name, or anything else of the data"


def test_the_gates_page_groups_queries_by_run_has_a_verified_ledger_and_gives_every_charge_away_as_a_table(  # noqa: E501
    port, gated
):
    ledger = DurableLedger.open(DaemonSettings.load(gated.policy).ledger)
    _, page, _ = ask(port, "/silo")
    asked = {entry.run: 0 for entry in ledger.entries() if entry.act == "charge"}
    assert asked
    for run in asked:
        assert page.count(f">run {run[:8]}<") == 1, "one line for a run"
    assert f"verified</span>. The chain of {ledger.head()[0]} entries is valid" in page
    status, text, headers = ask(port, "/silo-charges.csv")
    assert status == 200
    assert headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == sum(entry.act == "charge" for entry in ledger.entries())
    assert sum(float(row["cost"]) for row in rows) == pytest.approx(ledger.used())


def test_a_page_is_told_of_a_change_by_an_event_and_its_button_shows_the_state(port, gated):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    line.request("GET", "/silo-live", headers={"Accept": "text/event-stream"})
    reply = line.getresponse()
    assert reply.getheader("content-type").startswith("text/event-stream")

    def event() -> str:
        lines = []
        while True:
            if (text := reply.readline().decode().rstrip("\n")) or not lines:
                lines += [text] if text.startswith(("id:", "data:")) else []
            else:
                return "\n".join(lines)

    try:
        first = event()
        assert first.startswith("id: ")
        assert "Pause the gate" in first
        assert "Resume the gate" not in first
        set_paused(gated.policy, True)
        second = event()
        assert second.split("\n")[0] != first.split("\n")[0]
        assert "Resume the gate" in second
        assert "Pause the gate" not in second
    finally:
        set_paused(gated.policy, False)
        line.close()


def test_no_value_of_a_record_is_on_any_page(port, gated):
    words = {
        cell
        for line in (gated.folder / "clinic.csv").read_text().splitlines()[1:]
        for cell in line.split(",")[:-1]
    }
    assert len(words) > 1000
    for path in (
        "/",
        "/silo",
        "/silo-live",
        "/silo-charges.csv",
        "/run/deep/one",
        "/report/deep/one",
    ):
        status, page, _ = ask(port, path)
        assert status == 200
        assert not words & set(re.findall(r"[-+.\w]+", page))


@pytest.mark.parametrize(
    "name",
    [
        "../secret.json",
        "..",
        "%2e%2e/x",
        "/etc",
        "deep",
        "deep/one/../one",
        "deep/one%00",
        "deep//one",
    ],
)
def test_a_name_that_is_no_run_is_never_made_a_path(port, name):
    for kind in ("run", "report", "run-live"):
        assert ask(port, f"/{kind}/{name}")[0] == 404


def test_links_are_not_followed_out_of_the_directory(tmp_path, root):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/link").symlink_to(root / "deep")
    assert not runs.found_in(tmp_path / "in")
    assert list(runs.found_in(root)) == ["deep/one"]


RUN = {"order": {"rounds": 1, "epsilon": 1, "algorithm": "spider"}, "run": "x", "cards": []}


def spoilt(folder: Path) -> None:
    """Folders that somebody may send: each would keep the list from being shown."""
    for name, file, content in (
        ("empty cards", "run.json", json.dumps(RUN)),
        ("deep", "run.json", "[" * 100_000),
        ("deep line", "progress.jsonl", "[" * 100_000 + "\n"),
        (
            "other types",
            "spent.json",
            json.dumps({"silos": [{"name": "a", "epsilon": {}, "delta": []}]}),
        ),
        (
            "half a character",
            "run.json",
            json.dumps({"kind": "train", "data": "\ud800", "silos": []}),
        ),
        (os.fsdecode(b"\xff\xfe"), "spent.json", "{}"),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "spent.json").write_text("{}")
        (folder / name / file).write_text(content)
    for name in ("progress.jsonl", "spent.json", "environment.json"):
        (folder / name.partition(".")[0]).mkdir()
        (folder / name.partition(".")[0] / "run.json").write_text(
            json.dumps({"kind": "train", "algorithm": "adam", "silos": []})
        )
        os.mkfifo(folder / name.partition(".")[0] / name)
    (folder / "link").mkdir()
    (folder / "link/run.json").symlink_to("/proc/self/environ")


def test_a_run_that_cannot_be_read_hides_no_other_and_keeps_nobody_waiting(tmp_path, root):
    spoilt(tmp_path)
    shutil.copytree(root / "deep/one", tmp_path / "zz")
    with served(tmp_path) as port:
        for path in ("/", "/live"):
            status, page, _ = ask(port, path)
            assert status == 200
            assert 'href="/run/zz"' in page
            assert page.count("cannot be read") == 6, "the rest can be shown with what there is"
            assert page.count("<tr>") == 1 + len(runs.found_in(tmp_path))
        for name in runs.found_in(tmp_path):
            status, page, _ = ask(port, f"/run/{quote(os.fsencode(name))}")
            assert status == (
                200 if f'href="/run/{quote(os.fsencode(name))}"' in ask(port, "/")[1] else 404
            )


def test_a_tuning_and_what_cannot_be_drawn_get_a_sentence_under_the_guards_headers(
    tmp_path, silodp
):
    """Neither a traceback nor a page that has left the guard behind."""
    rows = "".join(f"{k % 7},{k % 3},{k % 2}\n" for k in range(60))
    (tmp_path / "a.csv").write_text(f"a,b,label\n{rows}")
    told = (
        "--silo",
        "a.csv",
        "--candidates",
        1,
        "--rounds",
        1,
        "--phase",
        1,
        "--out",
        "runs/tune",
        "--json",
    )
    code, _, err = silodp("tune", *told)
    assert code == 0, err
    (tmp_path / "runs/odd").mkdir()
    odd = {
        "dataset": "wbcd",
        "silos": ["a", "b"],
        "trials": 1,
        "rounds": 1,
    }  # can be read, but not drawn
    (tmp_path / "runs/odd/config.json").write_text(json.dumps(odd))
    code, _, err = silodp("report", "runs/tune")
    assert (code, err.count("\n"), "tune.json" in err) == (2, 1, True)
    code, _, err = silodp("report", "runs/odd")
    assert (code, err.count("\n"), "cannot be read" in err) == (2, 1, True)
    with served(tmp_path / "runs") as port:
        for name, sentence in (("tune", "tune.json"), ("odd", "cannot be read")):
            for kind in ("run", "run-live", "report"):
                status, page, headers = ask(port, f"/{kind}/{name}")
                assert (status, sentence in page) == (404, True)
                assert {key.decode() for key in HEADERS} <= headers.keys()
        status, _, headers = ask(port, "/compare?run=tune&run=odd")
        assert (status, "content-security-policy" in headers) == (404, True)
        assert ask(port, "/")[0] == 200


def test_the_command_refuses_another_host_and_serves_on_loopback(
    tmp_path, root, gated, capsys, monkeypatch
):
    for words, why in (
        (["--host", "0.0.0.0"], "this machine only"),
        (["--token", "t"], "give the silo's policy"),
        (["--runs", "nowhere"], "not a directory"),
        (
            ["--runs", root, "--silo", gated.policy, "--token", _file(tmp_path / "short", "abc")],
            "20 or more",
        ),
        (
            [
                "--runs",
                root,
                "--silo",
                gated.policy,
                "--token",
                _file(tmp_path / "open", TOKEN, 0o644),
            ],
            "chmod 600",
        ),
    ):
        monkeypatch.setattr(sys, "argv", ["silodp", "ui", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        assert why in capsys.readouterr().err
    port = free_port()
    process = started(
        "ui",
        "--runs",
        root,
        "--silo",
        gated.policy,
        "--token",
        tmp_path / "new",
        "--port",
        port,
        log=tmp_path / "log",
    )
    try:
        until(
            lambda: (tmp_path / "log").exists() and "password" in (tmp_path / "log").read_text(),
            "the page was not served",
        )
        password = (tmp_path / "log").read_text().rsplit("password ", 1)[1].strip()
        assert ask(port, "/silo")[0] == 401, "another account of this machine sees nothing"
        basic = base64.b64encode(f"officer:{password}".encode()).decode()
        known = {"Authorization": f"Basic {basic}"}
        assert ask(port, "/silo", **known)[0] == 200
        token = (tmp_path / "new").read_text().strip()
        assert pause(port, token=token, do="resume", **own(port)) == 401
        assert pause(port, token=token, do="resume", **own(port), **known) == 303
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    finally:
        process.terminate()
        process.join(PATIENCE)


def _file(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_run_that_is_resumed_keeps_its_lines_and_a_replayed_question_is_not_written_twice(
    gated, tmp_path
):
    run = gated.conduct(tmp_path / "r", rounds=6)
    list(itertools.islice(iter(run), 3))
    run._journal.close()
    run._spending.record.close()  # as a kill does
    assert runs.read(tmp_path / "r").state == "interrupted"
    (tmp_path / "r/progress.jsonl").write_bytes(
        b"".join((tmp_path / "r/progress.jsonl").read_bytes().splitlines(keepends=True)[:2])
    )
    again = gated.conduct(tmp_path / "r", rounds=6)
    list(again)
    lines = [
        json.loads(line)
        for line in (tmp_path / "r/progress.jsonl").read_text().splitlines()
        if '"question"' in line
    ]
    assert [line["question"] for line in lines] == list(range(6))
    assert [line["round"] for line in lines] == list(range(1, 7))
    found = runs.read(tmp_path / "r")
    assert (found.state, found.done) == ("finished", 6)
    assert found.silos[0].spent == again.summary["silos"][0]["spent_epsilon_at_most"]
    assert lines[-1]["used"]["clinic"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(scheme):
    """WCAG 2: 4.5 to 1."""
    light, dark = (
        dict(re.findall(r"--([a-z]+):(#[0-9a-f]{6})", part.partition("}")[0]))
        for part in STYLE.split(":root{")[1:3]
    )
    colours = light if scheme == "light" else light | dark

    def brightness(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for ground, name in itertools.product(
        ("paper", "wash"), ("ink", "soft", "a", "b", "c", "d", "e", "f", "g", "good", "bad", "hold")
    ):
        high, low = sorted((brightness(colours[ground]), brightness(colours[name])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (ground, name)
