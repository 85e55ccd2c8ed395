"""One order: an option that plan, train and federation run share is one option, with one type, one
default and one help text.
"""

import json
from dataclasses import fields, replace

import pytest
import typer

from silodp.cli.app import app
from silodp.cli.options import ORDER, PANELS, panel_of
from silodp.core.errors import BadInput
from silodp.server.order import Order

COMMANDS = ("plan", "train", "federation run", "tune")
DIFFERS = {
    **{("tune", name): "tune tries several" for name in ("rounds", "phase", "step", "clip")},
    **{
        (
            "tune",
            name,
        ): (
            "a tuning says of each source whether it is free or charged, and goes on in its "
            "one folder"
        )
        for name in ("data", "silo", "records", "features", "classes", "scale", "out_dir")
    },
    ("plan", "classes"): "there is no file whose classes could be listed: plan takes their number",
}
"""(command, option) with the reason why it is another than elsewhere."""
NOT_ORDER = {"from_theory", "no_recalibration"}
"""Options of an order that set a field of another name."""


def options(command):
    found = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]
    return {option.name: option for option in found.params}


EVERY = {command: options(command) for command in COMMANDS}
SHARED = sorted(
    {
        name
        for some in EVERY.values()
        for name in some
        if sum(name in other for other in EVERY.values()) > 1
    }
)


def told(option):
    """Type, default, help text, names on the command line, and whether it may be repeated."""
    return (
        type(option.type).__name__,
        option.default,
        option.help,
        option.opts,
        option.secondary_opts,
        option.multiple,
        option.is_flag,
    )


@pytest.mark.parametrize("name", SHARED)
def test_the_same_option_is_the_same_everywhere(name):
    found = {
        command: told(some[name])
        for command, some in EVERY.items()
        if name in some and (command, name) not in DIFFERS
    }
    assert len({str(what) for what in found.values()}) == 1, found


def test_every_option_of_an_order_has_a_panel_and_no_panel_names_what_is_gone():
    named = [name for names in PANELS.values() for name in names]
    assert len(named) == len({*named})
    assert ORDER.keys() <= {*named}
    assert {*named} <= {name for some in EVERY.values() for name in some}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_five_panels_in_order(command):
    order = ["Common", *PANELS]
    assert order == ["Common", "Model", "Privacy", "Participation", "Expert"]
    panels = [
        option.rich_help_panel for name, option in EVERY[command].items() if option.name != "help"
    ]
    assert panels == [panel_of(name) for name in EVERY[command] if name != "help"]
    assert [*dict.fromkeys(panels)] == [panel for panel in order if panel in panels]
    assert {"Common", "Model", "Privacy", "Expert"} <= {*panels}


def test_the_panels_of_one_command_leave_other_commands_as_they_are():
    typer.main.get_command(app)
    assert options("federation up")["as_json"].rich_help_panel is None


def test_every_exception_is_still_one():
    for (command, name), reason in DIFFERS.items():
        others = {
            told(some[name])[:3]
            for other, some in EVERY.items()
            if other != command and name in some
        }
        assert others, reason
        assert told(EVERY[command][name])[:3] not in others, reason


def test_an_orders_options_have_its_own_defaults():
    assert set(ORDER) - NOT_ORDER == {field.name for field in fields(Order)}
    for command, some in EVERY.items():
        for name in ORDER.keys() & some.keys() - NOT_ORDER:
            wanted = getattr(Order(), name)
            if (command, name) in DIFFERS:
                continue
            assert (some[name].default or ()) == (wanted or ()), (command, name)


def test_an_order_is_read_back_as_it_was_written(tmp_path):
    order = Order(
        "spider",
        epsilon=("2", "a=1"),
        slope=float("inf"),
        sampling="anchor=full,refine=poisson:0.1",
        seed=3,
        model="net.py:build",
    )
    found = Order.read(json.loads(json.dumps({"order": order.words()})), tmp_path)
    assert replace(found, model=None) == replace(order, model=None)
    assert found.model.endswith("/net.py:build")


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"order": {"algorithm": "spider"}},
        {"order": []},
        [],
        {"order": Order().words() | {"gone": 1}},
    ],
)
def test_a_folder_of_an_older_version_is_said_to_be_one(tmp_path, found):
    with pytest.raises(BadInput, match="older version"):
        Order.read(found, tmp_path)
