"""No name in a file, and no word of the command line, steers the screen of the person who reads."""

import copy
import json
import re
import shutil
import sys
from dataclasses import asdict

import click
import pytest
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.cli import console
from silodp.cli.app import app, main
from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema
from silodp.core.protocol.card import Card
from silodp.host.log import Log
from silodp.host.study import Study
from silodp.pages import evidence

ESCAPE = "\x1b[1A\x1b[2K\x1b[8m"
NAMES = {
    "escape": f"m{ESCAPE}.py",
    "c1": "m\x9b2K",
    "bidi": "m\u202egpj.py",
    "isolate": "m\u2066x\u2069",
    "hidden": "m\u200b",
    "line": "m\nis pinned; its words were right",
    "return": "m\rno",
    "separator": "m\u2028no",
}
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]"
)
hostile = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)


def commands(group, words=()):
    """(words, command) of every command, however deep."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def arguments(words):
    return [p for p in COMMANDS[words].params if p.param_type_name == "argument"]


def assert_harmless(*texts):
    for text in texts:
        assert OBEYED.findall(text) == []
        assert "\nis pinned" not in text


# --- the words of a command line -----------------------------------------------------------------


def test_the_walk_finds_the_commands():
    assert len(COMMANDS) > 40
    assert ("silo", "approve") in COMMANDS


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_word_of_any_command_line_steers_the_screen(silodp, words):
    for name in NAMES.values():
        code, out, err = silodp(*words, f"--{name}")
        assert code == 2
        assert_harmless(out, err)


SERVES = ("ledger", "metrics")
"""Serves whatever files there are until it is ended, and prints its address alone."""


@pytest.mark.parametrize(
    "words", [w for w in COMMANDS if arguments(w) and w != SERVES], ids=" ".join
)
def test_no_name_of_a_file_steers_the_screen(silodp, words, tmp_path):
    """The file is there, has nothing of use in it, and the command may refuse it or not."""
    for name in (f"m{ESCAPE}.toml", "m\u202e.csv", "m\nis pinned"):
        (tmp_path / name).write_text("nothing\n")
        code, out, err = silodp(*words, *[name for _ in arguments(words)])
        assert code
        assert_harmless(out, err)


# --- names in files ------------------------------------------------------------------------------

STUDY = {"study": "second", "definition": "0" * 64, "model": "linear"}
CARD = asdict(
    Card("north", "a" * 64, 50, 1.0, 1e-6, "gdp", "linear", "zero", ("x",), ("0", "1"), 2, "b" * 64)
)
SCHEMA = {
    "columns": {"sex": {"type": "category", "categories": ["f", "m"]}},
    "label": {"column": "ill", "task": "binary", "classes": ["no", "yes"]},
    "ignore": ["notes"],
    "missing_codes": ["?"],
    "person": "patient",
}


def refused(make, *words):
    with pytest.raises(BadInput) as error:
        make(*words)
    return str(error.value)


@hostile
@pytest.mark.parametrize("field", ["study", "definition", "model", "prox", "loss", "feature_map"])
def test_a_study_with_a_hostile_name_is_refused(name, field):
    refused(lambda: Study(**STUDY | {field: name}))
    refused(lambda: Study(**STUDY | {"model": f"{name}.py:build", "model_sha256": "0" * 64}))
    refused(lambda: Study(**STUDY | {"statistics": (name,)}))


@hostile
@pytest.mark.parametrize(
    "field", [field for field, value in CARD.items() if isinstance(value, str | tuple)]
)
def test_a_card_with_a_hostile_name_is_refused(name, field):
    if field == "schema":
        pytest.skip("the schema's own parser refuses it")
    value = name if isinstance(CARD[field], str) else [name]
    assert Card.of(CARD).name == "north"
    assert_harmless(refused(Card.of, CARD | {field: value}))


@hostile
def test_a_schema_with_a_hostile_name_is_refused(name):
    assert Schema.of(SCHEMA).columns[0].name == "sex"
    column = SCHEMA["columns"]["sex"]
    label = SCHEMA["label"]
    for change in (
        {"columns": {name: column}},
        {"columns": {"sex": column | {"categories": ["f", name]}}},
        {"label": label | {"column": name}},
        {"label": label | {"classes": ["no", name]}},
        {"ignore": [name]},
        {"missing_codes": [name]},
        {"person": name},
    ):
        refused(Schema.of, SCHEMA | change)


@hostile
def test_an_archive_with_a_hostile_name_is_refused_though_it_is_signed(name):
    key = Ed25519PrivateKey.generate()
    about = {"run": "r", "kind": "train", "made": "2026-11-18", "silodp": "0.1.0"}
    assert evidence.verify(evidence.pack({"a.txt": b""}, about, key)).about["run"] == "r"
    for field in about:
        refused(evidence.verify, evidence.pack({}, about | {field: name}, key))
        less = {other: value for other, value in about.items() if other != field}
        refused(evidence.verify, evidence.pack({}, less, key))
    refused(evidence.verify, evidence.pack({name: b""}, about, key))


@hostile
def test_commands_refuse_files_with_hostile_names_in_a_harmless_sentence(silodp, tmp_path, name):
    (tmp_path / "card.json").write_text(json.dumps(CARD | {"name": name}))
    key = Ed25519PrivateKey.generate()
    about = {"run": name, "kind": "train", "made": "2026-11-18", "silodp": "0.1.0"}
    (tmp_path / "e.zip").write_bytes(evidence.pack({}, about, key))
    (tmp_path / "s.toml").write_text(f"[columns.{json.dumps(name)}]\ntype = 'x'\n")
    for words in (
        ["export", "evidence", "verify", "e.zip"],
        ["plan", "--card", "card.json"],
        ["plan", "--schema", "s.toml", "--records", "100"],
        ["silo", "check", "card.json", "--schema", "s.toml"],
    ):
        code, out, err = silodp(*words)
        assert code == 2
        assert_harmless(out, err)


def leaves(value, path=()):
    """The paths of every text in a JSON value, keys of tables among them."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key), True
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    elif isinstance(value, str):
        yield path, False


def planted(value, path, is_key, name):
    """The value with the hostile name in place of one text."""
    made = copy.deepcopy(value)
    *way, last = path
    at = made
    for step in way:
        at = at[step]
    if is_key:
        at[name] = at.pop(last)
    else:
        at[last] = name
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = ["train", "--data", "wbcd", "--rounds", "2", "--step", "1", "--clip", "1"]
    words += [
        "--algorithm",
        "mb-sgd",
        "--model",
        "logistic",
        "--epsilon",
        "1",
        "--out",
        str(folder),
    ]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:  # noqa: PT012
        patch.setattr(sys, "argv", ["silodp", *words])
        main()
    assert not stop.value.code
    return folder


READERS = {
    "status": ["status", "run"],
    "card": ["export", "card", "run"],
    "report": ["report", "run", "--out", "page.html"],
}


@pytest.mark.parametrize("words", READERS.values(), ids=READERS)
def test_no_text_in_a_run_folder_steers_the_screen_or_a_page(silodp, trained, tmp_path, words):
    name = f"m{ESCAPE}\u202e\u200b"
    for file in ("run.json", "summary.json", "progress.jsonl"):
        if not (trained / file).exists():
            continue
        lines = (trained / file).read_text().splitlines()
        about = json.loads(lines[0] if file.endswith("l") else "\n".join(lines))
        for path, is_key in [*leaves(about)][::3]:
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            shutil.copytree(trained, tmp_path / "run")
            text = json.dumps(planted(about, path, is_key, name))
            rest = lines[1:] if file.endswith("l") else []
            (tmp_path / "run" / file).write_text("\n".join([text, *rest]) + "\n")
            (tmp_path / "page.html").unlink(missing_ok=True)
            _, out, err = silodp(*words)
            assert_harmless(out, err)
            if (tmp_path / "page.html").exists():
                assert_harmless((tmp_path / "page.html").read_text())


# --- what prints ---------------------------------------------------------------------------------


@hostile
def test_everything_that_prints_shows_controls_and_obeys_none(capsys, monkeypatch, name):
    monkeypatch.setattr("builtins.input", lambda question: sys.stdout.write(question) and "x")
    from silodp.cli.questions import Interview

    console.say(name, f"[bold]{name}[/bold]")
    console.item(name, name)
    console.show(console.table(f"{name}|b", [[name, name]], title=name, box=False))
    console.dump({name: name, "x": "\x7f"})
    console.complain(name)
    Interview().ask(name, str, name)
    with console.progress(name) as tick:
        tick(1, 2, name)
    console.put(name.replace("\n", ""))
    captured = capsys.readouterr()
    assert_harmless(captured.out, captured.err)
    assert "[bold]" in captured.out, "markup is not read"


@hostile
def test_one_event_of_a_log_is_one_line(tmp_path, capsys, name):
    log = Log(str(tmp_path / "log"), 10_000)
    log.line(f"answered {name}", at_once=True)
    log.close()
    text = (tmp_path / "log").read_bytes().decode("utf-8", "surrogatepass")
    assert text.count("\n") == 1
    assert_harmless(text)
