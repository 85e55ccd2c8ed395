"""Every command says what it does, with an example that it understands, and what each of its
options and arguments is.
"""

import re
from importlib.metadata import version

import click
import pytest
import typer
from packaging.version import Version
from typer.testing import CliRunner

from silodp.cli import groups
from silodp.cli.app import MOVED, Silodp, app


def commands(group, path=("silodp",)):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            if command.invoke_without_command:
                yield " ".join((*path, name)), command
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(typer.main.get_command(app)))
LOST = Version(version("typer")) < Version("0.21") and Version(version("click")) >= Version("8.5")
"""This typer with this click drops the help of arguments; the extra `flower` keeps the two apart.
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_itself(name):
    command = COMMANDS[name]
    said = command.help or ""
    first = said.split("\n\n")[0].strip()
    assert 20 <= len(first) <= 260, f"{name}: the first paragraph is {first!r}"
    assert first[-1] in ".:", f"{name}: {first!r} is not a sentence"
    examples = re.findall(r"`(silodp [^`]+)`", said.partition("Example")[2])
    assert examples, f"{name}: no example"
    assert any(example.startswith(name) for example in examples), (
        f"{name}: its examples are of other commands"
    )
    for parameter in command.params:
        if parameter.name == "help" or (LOST and isinstance(parameter, click.Argument)):
            continue
        assert len(getattr(parameter, "help", None) or "") >= 2, (
            f"{name}: {parameter.opts[0]} has no help"
        )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_speaks_to_machines_too(name):
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert "--json" in options, f"{name} has no --json"


def test_the_list_of_commands_is_in_panels_and_says_of_each_what_it_is():
    panels = {}
    for listed in Silodp.listed:
        panels.setdefault(listed.panel, []).append(listed.name)
        assert listed.summary.endswith(".")
        assert len(listed.summary) <= 66, (
            f"{listed.name}: on a narrow terminal this is more than a line"
        )
    assert [*panels] == ["Start", "Choose", "Deploy"]
    assert panels["Start"][:3] == ["init", "train", "evaluate"]
    assert len(Silodp.listed) <= 16


@pytest.mark.parametrize("group", [groups.export, groups.stats, groups.federation, groups.ledger])
def test_each_command_of_a_group_has_one_short_line(group):
    for listed in group.listed:
        assert listed.summary.endswith(".")
        assert len(listed.summary) <= 66, f"{listed.name}: more than a line"


@pytest.mark.parametrize("old", MOVED)
def test_a_former_name_of_a_command_gets_the_new_one_in_a_sentence(silodp, old):
    code, out, said = silodp(old, "--json")
    assert (code, out) == (2, "")
    assert said == f"silodp: `silodp {old}` has a new name; use `silodp {MOVED[old]}`\n"
    found = typer.main.get_command(app)
    for word in MOVED[old].partition(" --")[0].split():
        assert isinstance(found, click.Group)
        found = found.commands[word]


@pytest.mark.parametrize("words", [["runs/train", "--to", "onnx"], ["--to", "onnx", "runs/train"]])
def test_export_without_what_to_write_gets_the_three_commands(silodp, words):
    code, out, said = silodp("export", *words)
    assert (code, out) == (2, "")
    assert "`silodp export model`, `silodp export card` or `silodp export evidence`" in said


def test_options_of_the_whole_audit_are_refused_before_certify(silodp):
    code, _, said = silodp("audit", "--runs", "500", "certify", "mine.py:f", "--epsilon", "1")
    assert (code, said) == (2, "silodp: --runs is before certify; write its options after it\n")


def test_a_former_name_is_not_completed_and_not_an_error_while_completing():
    root = typer.main.get_command(app)
    with root.make_context("silodp", ["card"], resilient_parsing=True) as context:
        assert isinstance(root, click.Group)
        assert "card" not in [item.value for item in root.shell_complete(context, "ca")]
        assert root.resolve_command(context, ["card"])[1] is None


@pytest.mark.parametrize(
    "words",
    [["-h"], ["train", "-h"], ["silo", "-h"], ["silo", "serve", "-h"], ["federation", "run", "-h"]],
)
def test_help_comes_by_the_short_option_everywhere(words):
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, "Usage:" in done.stdout) == (0, True)
    assert "--install-completion" not in done.stdout or words == ["-h"]
