"""`silodp federation shuffler`: for the operator of a shuffler, who should operate neither the
server nor a silo.

Silos and shuffler exchange keys and pseudonyms directly, not through the server. A server that
passed on these keys could replace them by its own.
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

shuffler = group("Run a shuffler, which adds the silos' numbers and sends on the totals.")

SettingsFile = Annotated[
    Path, typer.Argument(help="The shuffler's shuffler.toml.", show_default=False)
]


@shuffler.command()
def init(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder for settings, keys and store; created if missing.", show_default=False
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
                "A silo's pseudonym, 64 hexadecimal digits; once for each silo. "
                "`enrol` adds more later."
            )
        ),
    ] = None,
    units: Annotated[
        bool,
        typer.Option(
            "--units",
            help="Use the socket, group and courier's user of the systemd units.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Create a shuffler's settings, keys and store. Existing files are not overwritten. Add the
    silos' pseudonyms to mixer/shuffler.toml afterwards.

    Example: `silodp federation shuffler init mixer --asker KEY`
    """
    from silodp.shuffler.provision import provision

    unit = {}
    if units:
        unit = for_unit("shuffler")
    card = provision(folder, askers=asker, members=member or (), **unit)
    if as_json:
        return dump(card)
    settings = folder / "shuffler.toml"
    say(f"Wrote {settings}. Read it. The two keys and the store stay here.")
    say(
        f"Silos seal their numbers for the key {card['seal']}. Give it to each silo "
        "yourself, not through the server."
    )
    say(
        f"The key {card['sign']} signs your totals. Both public keys are in "
        f"{folder / 'shuffler.json'}."
    )
    if not member:
        say(
            f"It has no members yet. Add them: silodp federation shuffler enrol {settings} "
            "PSEUDONYM ..."
        )
    say(f"Then start it: silodp federation shuffler serve {settings}")


@shuffler.command(name="enrol")
def enrol_members(
    settings: SettingsFile,
    member: Annotated[
        list[str],
        typer.Argument(help="Pseudonyms, received directly from the silos.", show_default=False),
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
    """Send on totals at the socket of the settings until SIGTERM.

    Example: `silodp federation shuffler serve mixer/shuffler.toml`
    """
    from silodp.shuffler import daemon
    from silodp.shuffler.settings import ShufflerSettings

    def on_start(found: ShufflerSettings) -> None:
        tell({"socket": found.socket}, as_json, f"the shuffler answers at {found.socket}")

    with guarded() as stop:
        daemon.serve(settings, stop, on_start)


@shuffler.command()
def status(settings: SettingsFile, as_json: Json = False) -> None:
    """Show whether the shuffler runs, its rounds passed on, and the requests that it declined.

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
    state = {
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
        return dump(state)
    runs_words = "does not run"
    if runs:
        runs_words = f"runs, and answers at {found.socket}"
    say(f"The shuffler {runs_words}. It has {len(found.roster)} members.")
    sentence = ", ".join(f"{code} {times}" for code, times in declined.items()) or "none"
    say(f"Rounds passed on: {passed}; repeated {state['repeated']}; declined: {sentence}.")
    say(f"Silos seal for {seal}; totals are signed by {sign}.")
