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

from silodp.cli.app import Silodp, app


def commands(group, path=("silodp",)):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
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
        assert listed.says.endswith(".")
        assert len(listed.says) <= 66, (
            f"{listed.name}: on a narrow terminal this is more than a line"
        )
    assert [*panels] == ["Start", "Choose", "Deploy", "Research"]
    assert panels["Start"][:3] == ["init", "train", "evaluate"]


@pytest.mark.parametrize(
    "words",
    [["-h"], ["train", "-h"], ["silo", "-h"], ["silo", "serve", "-h"], ["federation", "run", "-h"]],
)
def test_help_comes_by_the_short_option_everywhere(words):
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, "Usage:" in done.stdout) == (0, True)
    assert "--install-completion" not in done.stdout or words == ["-h"]
