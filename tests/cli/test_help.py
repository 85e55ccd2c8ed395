"""Every command says what it does, with an example that it understands, and what each of its options and arguments is."""

import re
from importlib.metadata import version

import click
import pytest
import typer
from packaging.version import Version

from silodp.cli.app import app


def commands(group, path=("silodp",)):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(typer.main.get_command(app)))
LOST = Version(version("typer")) < Version("0.21") and Version(version("click")) >= Version("8.5")
"""This typer with this click drops the help of arguments; the extra `flower` keeps the two apart."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_itself(name):
    command = COMMANDS[name]
    said = command.help or ""
    first = said.split("\n\n")[0].strip()
    assert 20 <= len(first) <= 260, f"{name}: the first paragraph is {first!r}"
    assert first[-1] in ".:", f"{name}: {first!r} is not a sentence"
    examples = re.findall(r"`(silodp [^`]+)`", said.partition("Example")[2])
    assert examples, f"{name}: no example"
    assert any(example.startswith(name) for example in examples), f"{name}: its examples are of other commands"
    for parameter in command.params:
        if parameter.name == "help" or (LOST and isinstance(parameter, click.Argument)):
            continue
        assert len(getattr(parameter, "help", None) or "") >= 2, f"{name}: {parameter.opts[0]} has no help"
