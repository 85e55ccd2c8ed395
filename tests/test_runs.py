"""A run's folder: one place knows its files, and one function says in which state its run is."""

import json
import re
from pathlib import Path

import pytest

from silodp.runs import Kind, RunFolder, State
from silodp.server.progress import Progress

SOURCE = Path(__file__).parent.parent / "src" / "silodp"
NAMES = (
    "run.json",
    "summary.json",
    "spent.json",
    "peers.json",
    "config.json",
    "progress.jsonl",
    "evaluations.jsonl",
    "transcript.jsonl",
    "tune.json",
    "journal",
    "seed",
)
TRAINED = {"kind": "train", "silos": []}
END = {"rule": "gdp", "silos": []}
FEDERATED = {"kind": "federation", "cards": []}


def made(folder: Path, **files) -> RunFolder:
    """A run's folder with these files; `_` in a name stands for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("_", ".")).write_text(text)
    return RunFolder(folder)


def end(questions: int, ended: str = "finished") -> dict:
    return {"questions": questions, "ended": ended}


LINE = json.dumps({"question": 0}) + "\n" + json.dumps({"question": 1}) + "\n"


@pytest.mark.parametrize(
    ("files", "kind", "state"),
    [
        ({}, Kind.NONE, State.NOTHING),
        ({"seed": "1", "records_json": {}, "progress_jsonl": ""}, Kind.NONE, State.NOTHING),
        ({"run_json": TRAINED, "seed": "1"}, Kind.TRAINING, State.INTERRUPTED),
        ({"run_json": TRAINED}, Kind.TRAINING, State.ENDED),
        ({"run_json": TRAINED, "seed": "1", "summary_json": END}, Kind.TRAINING, State.FINISHED),
        ({"run_json": TRAINED, "seed": "1", "summary_json": "{"}, Kind.TRAINING, State.ENDED),
        ({"run_json": TRAINED, "seed": "1", "spent_json": END}, Kind.TRAINING, State.FINISHED),
        ({"run_json": TRAINED, "seed": "1", "spent_json": "{"}, Kind.TRAINING, State.ENDED),
        ({"spent_json": END}, Kind.TRAINING, State.FINISHED),
        ({"run_json": FEDERATED}, Kind.FEDERATION, State.INTERRUPTED),
        ({"run_json": "{", "journal": "x"}, Kind.FEDERATION, State.INTERRUPTED),
        ({"journal": "x"}, Kind.FEDERATION, State.ENDED),
        ({"run_json": FEDERATED, "summary_json": end(2)}, Kind.FEDERATION, State.FINISHED),
        (
            {"run_json": FEDERATED, "summary_json": end(2, "diverged")},
            Kind.FEDERATION,
            State.INTERRUPTED,
        ),
        (
            {"run_json": FEDERATED, "summary_json": end(2), "progress_jsonl": LINE},
            Kind.FEDERATION,
            State.FINISHED,
        ),
        (
            {"run_json": FEDERATED, "summary_json": end(1), "progress_jsonl": LINE},
            Kind.FEDERATION,
            State.INTERRUPTED,
        ),
        ({"config_json": {"dataset": "wbcd"}}, Kind.COMPARISON, State.INTERRUPTED),
        (
            {"config_json": {"dataset": "wbcd"}, "summary_json": [{"a": 1}]},
            Kind.COMPARISON,
            State.FINISHED,
        ),
        ({"config_json": {"arms": 1}}, Kind.TUNING, State.INTERRUPTED),
        ({"config_json": {"arms": 1}, "tune_json": {}}, Kind.TUNING, State.FINISHED),
    ],
)
def test_the_files_of_a_folder_say_its_kind_and_its_state(tmp_path, files, kind, state):
    folder = made(tmp_path, **files)
    assert (folder.kind(), folder.state(), folder.state_at_rest()) == (kind, state, state)


def test_a_training_of_an_earlier_version_keeps_its_result_in_spent_json(tmp_path):
    folder = made(tmp_path, run_json=TRAINED)
    assert folder.result == tmp_path / "summary.json"
    made(tmp_path, spent_json=END)
    assert folder.result == tmp_path / "spent.json"
    made(tmp_path, summary_json=END)
    assert folder.result == tmp_path / "summary.json"


@pytest.mark.parametrize("about", [TRAINED, FEDERATED])
def test_a_run_is_running_while_a_process_holds_its_progress_and_no_longer(tmp_path, about):
    folder = made(tmp_path, run_json=about, seed="1")
    writer = Progress(tmp_path, keep=True)
    assert folder.state() is State.RUNNING
    assert folder.state_at_rest() is State.INTERRUPTED
    writer.close()
    assert folder.state() is State.INTERRUPTED


def test_a_lock_on_a_folder_that_holds_no_run_is_no_run(tmp_path):
    writer = Progress(tmp_path, keep=True)
    assert RunFolder(tmp_path).state() is State.NOTHING
    writer.close()


def test_a_run_of_peers_is_finished_once_the_run_of_each_is(tmp_path):
    folder = made(tmp_path, peers_json={"silos": ["a", "b"]})
    assert folder.state() is State.INTERRUPTED
    made(tmp_path / "a", run_json=FEDERATED, summary_json=end(2))
    made(tmp_path / "b", run_json=FEDERATED)
    assert (folder.kind(), folder.state()) == (Kind.PEERS, State.INTERRUPTED)
    writer = Progress(tmp_path / "b", keep=True)
    assert folder.state() is State.RUNNING
    writer.close()
    made(tmp_path / "b", summary_json=end(2))
    assert folder.state() is State.FINISHED
    made(tmp_path, peers_json="{")
    assert folder.state() is State.INTERRUPTED


def test_no_other_module_names_the_files_of_a_run(tmp_path):
    """A name in an expression such as `folder / "run.json"`; sentences may name files."""
    named = re.compile(rf'(?:/|exists\() ?"(?:{"|".join(map(re.escape, NAMES))})"')
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line in path.read_text().splitlines()
        if path.name != "runs.py" or path.parent != SOURCE
        if named.search(line)
    ]
    assert found == []
