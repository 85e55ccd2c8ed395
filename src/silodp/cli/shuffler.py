"""`silodp federation shuffler`: for the operator of a shuffler, who should be neither the server's
nor a silo's.

Silos take the shuffler's keys, and the shuffler takes their pseudonyms, from each other and not
from the server: whoever hands out these keys could hand out its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silodp.cli.console import Json, dump, group, say, tell
from silodp.host.keys import public
from silodp.host.lock import running
from silodp.host.log import tally
from silodp.host.process import guarded
from silodp.host.site import for_unit

shuffler = group("The shuffler: adds the silos' numbers and passes on totals.")

SettingsFile = Annotated[
    Path, typer.Argument(help="The shuffler's shuffler.toml.", show_default=False)
]


@shuffler.command()
def init(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder for settings, keys and store; made if it is not there.", show_default=False
        ),
    ],
    asker: Annotated[
        list[str],
        typer.Option(help="A server's public key, 64 hexadecimal digits; may be repeated."),
    ],
    member: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "A silo's pseudonym, 64 hexadecimal digits; once for each silo, or later by "
                "`enrol`."
            )
        ),
    ] = None,
    units: Annotated[
        bool,
        typer.Option(
            "--units",
            help="For the systemd units: their socket, its group, and the courier's user.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a shuffler's settings, keys and store. Writes over nothing.

    Example: `silodp federation shuffler init mixer --asker KEY`, and the silos'
    pseudonyms into mixer/shuffler.toml afterwards
    """
    from silodp.shuffler.provision import provision

    card = provision(
        folder,
        askers=asker,
        members=member or (),
        **(for_unit("shuffler") if units else {}),
    )
    if as_json:
        return dump(card)
    settings = folder / "shuffler.toml"
    say(f"Wrote {settings}: read it. The two keys and the store stay here.")
    say(
        f"Silos seal their numbers for {card['seal']}; give it to each of them yourself, "
        "not through the server."
    )
    say(
        f"The server knows your totals by {card['sign']}; both keys are in "
        f"{folder / 'shuffler.json'}."
    )
    if not member:
        say(f"It has no member yet: silodp federation shuffler enrol {settings} PSEUDONYM ...")
    say(f"Then start it: silodp federation shuffler serve {settings}")


@shuffler.command(name="enrol")
def enrol_members(
    settings: SettingsFile,
    member: Annotated[
        list[str],
        typer.Argument(
            help="Pseudonyms, as the silos themselves have given them to you.", show_default=False
        ),
    ],
    as_json: Json = False,
) -> None:
    """Add members to the roster, before the shuffler starts.

    Example: `silodp federation shuffler enrol mixer/shuffler.toml PSEUDONYM PSEUDONYM`
    """
    from silodp.shuffler.provision import enrol

    members = enrol(settings, member)
    tell({"members": members}, as_json, f"The roster has {members} members.")


@shuffler.command()
def serve(settings: SettingsFile, as_json: Json = False) -> None:
    """Pass on totals at the socket of the settings until SIGTERM.

    Example: `silodp federation shuffler serve mixer/shuffler.toml`
    """
    from silodp.shuffler import daemon
    from silodp.shuffler.settings import ShufflerSettings

    def told(found: ShufflerSettings) -> None:
        tell({"socket": found.socket}, as_json, f"the shuffler answers at {found.socket}")

    with guarded() as stop:
        daemon.serve(settings, stop, told)


@shuffler.command()
def status(settings: SettingsFile, as_json: Json = False) -> None:
    """Whether the shuffler runs, how many rounds it has passed on, what it has declined.

    Example: `silodp federation shuffler status mixer/shuffler.toml`
    """
    from silodp.shuffler.daemon import read_keys
    from silodp.shuffler.settings import ShufflerSettings
    from silodp.shuffler.store import RoundStore

    found = ShufflerSettings.load(settings)
    runs = running(found.store, "store")
    words = tally(found.log)
    seal, sign = map(public, read_keys(found))
    passed = RoundStore(Path(found.store), seal=seal, sign=sign).since(0)
    declined = {
        code: times
        for code, times in sorted(words.items())
        if code not in ("passed", "repeated", "started", "stopped")
    }
    told = {
        "running": runs,
        "socket": found.socket,
        "members": len(found.roster),
        "passed": passed,
        "repeated": words.get("repeated", 0),
        "declined": declined,
        "seal": seal,
        "sign": sign,
    }
    if as_json:
        return dump(told)
    say(
        "The shuffler "
        f"{f'runs, and answers at {found.socket}' if runs else 'does not run'}; it has "
        f"{len(found.roster)} members."
    )
    said = ", ".join(f"{code} {times}" for code, times in declined.items()) or "none"
    say(f"Rounds passed on: {passed}; repeated {told['repeated']}; declined: {said}.")
    say(f"Silos seal for {seal}; totals are signed by {sign}.")
