"""`silodp shuffler`: for the operator of a shuffler, who should be neither the server's nor a silo's.

Silos take the shuffler's keys, and the shuffler takes their pseudonyms, from each other and not from the server: whoever hands out these
keys could hand out its own.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from silodp.cli import console
from silodp.core.errors import BadInput
from silodp.host import listening

shuffler = console.group("The shuffler: adds the silos' counts and passes on totals.")
out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)

SettingsFile = Annotated[Path, typer.Argument(help="The shuffler's shuffler.toml.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")]

COMMENTS = {
    "askers": "Ed25519 public keys, 64 hexadecimal digits each, of the servers that may ask for totals.",
    "roster": "The members' pseudonyms, 64 hexadecimal digits each, as the silos themselves have given them to you. No names.",
    "largest": "Records that one member may claim, at most: what bounds how many a lying one can make up.",
    "rounds_per_hour": "Totals that are passed on in an hour, at most.",
    "seal_key": "The key that opens the silos' boxes. It stays here.",
    "sign_key": "The key that signs totals. It stays here.",
    "store": "What has been passed on. It is never made anew, nor restored from a copy: if it is lost, make another shuffler.",
    "log": "Rounds, and how many boxes were dropped and why; no counts.",
    "log_bytes": "Size at which a log is put aside; five of them are kept.",
    "socket": "Where the courier knocks. Paths are relative to this file's folder.",
    "socket_mode": "Its mode; others than owner and group are never let in.",
    "socket_group": "Its group, which the courier's user belongs to; \"\" leaves the daemon's own.",
    "couriers": "Users, by name or number, that may ask; with an empty list all whom the mode lets in.",
    "connections": "Open connections, at most.",
    "timeout": "Seconds after which a silent or slow courier is hung up on.",
    "maximum_frame": "Bytes of a request, at most.",
}


def provision(folder: Path, *, askers: Sequence[str], members: Sequence[str], largest: int, **changes: Any) -> dict[str, str]:
    """Afterwards the folder has shuffler.toml, two keys, an empty store and shuffler.json, whose public keys are returned; or BadInput.

    Without members, who need these keys to have pseudonyms, the roster is written empty: `serve` refuses it until they are in.
    `changes` are other values for fields of the settings, such as socket_group or rounds_per_hour.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    from silodp.shuffler.daemon import public
    from silodp.shuffler.settings import Settings
    from silodp.shuffler.store import Store

    found: dict[str, Any] = {
        "askers": tuple(askers), "roster": tuple(members) or ("0" * 64, "1" * 64), "largest": largest, "rounds_per_hour": 1000, "seal_key": "seal.key",
        "sign_key": "sign.key", "store": "rounds.db", "log": "shuffler.log", "log_bytes": 1_000_000, "socket": "shuffler.sock",
        "socket_mode": "0660", "socket_group": "", "couriers": (), "connections": 32, "timeout": 30.0, "maximum_frame": 2**28,
    }  # fmt: skip
    settings = Settings.of(found | changes | ({} if members else {"roster": ("0" * 64, "1" * 64)}))  # written empty, which `serve` refuses
    seal, sign = X25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    card = {"seal": public(seal), "sign": public(sign)}
    lines = [
        line
        for name, value in (asdict(settings) | {"roster": tuple(members)}).items()
        for line in (f"# {COMMENTS[name]}", f"{name} = {_toml(value)}", "")
    ]
    files = {
        "shuffler.toml": "\n".join(lines),
        settings.seal_key: seal.private_bytes_raw().hex() + "\n",
        settings.sign_key: sign.private_bytes_raw().hex() + "\n",
        settings.store: "",
        "shuffler.json": json.dumps(card) + "\n",
    }
    try:
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)  # the courier's user must come to the socket, and sees nothing else
        with ExitStack() as undo:
            for name, text in files.items():
                with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
                    undo.callback((folder / name).unlink)
                    file.write(text)
            Store.create(folder / settings.store, **card)
            undo.pop_all()
    except OSError as error:
        raise BadInput(f"{error.filename or folder} cannot be made: {error.strerror}; nothing is ever written over") from None
    return card


def enrol(path: Path, members: Sequence[str]) -> int:
    """Adds pseudonyms to the roster in a settings file; how many it has then. A shuffler that runs reads it when it starts again."""
    from silodp.shuffler.settings import Settings

    try:
        text = path.read_text("utf-8")
        table = tomllib.loads(text)
        roster = tuple(dict.fromkeys((*table["roster"], *members)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"settings {str(path)!r} cannot be read ({type(error).__name__}); give a shuffler's shuffler.toml") from None
    Settings.of(table | {"roster": roster})
    new, lines = re.subn(r"^roster = \[.*\]$", f"roster = {_toml(roster)}", text, flags=re.MULTILINE)
    if lines != 1 or tomllib.loads(new) != table | {"roster": [*roster]}:
        raise BadInput(f"settings {str(path)!r} have no line of the form 'roster = [...]'; write the pseudonyms into them by hand")
    part = path.with_name(f"{path.name}.part")
    part.touch(mode=0o600)
    part.write_text(new, "utf-8")
    part.replace(path)
    return len(roster)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


@shuffler.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder for settings, keys and store; made if it is not there.", show_default=False)],
    asker: Annotated[list[str], typer.Option(help="A server's public key, 64 hexadecimal digits; may be repeated.")],
    largest: Annotated[int, typer.Option(help="Records of the largest silo: more than this no member may claim.")],
    member: Annotated[
        list[str] | None, typer.Option(help="A silo's pseudonym, 64 hexadecimal digits; once for each silo, or later by `enrol`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a shuffler's settings, keys and store. Writes over nothing.

    Example: `silodp shuffler init mixer --asker KEY --largest 500`, and the silos' pseudonyms into mixer/shuffler.toml afterwards
    """
    card = provision(folder, askers=asker, members=member or (), largest=largest)
    if as_json:
        print(json.dumps(card))
        return
    out.print(f"Wrote {folder / 'shuffler.toml'}: read it. The two keys and the store stay here.")
    out.print(f"Silos seal their counts for {card['seal']}; give it to each of them yourself, not through the server.")
    out.print(f"The server knows your totals by {card['sign']}; both keys are in {folder / 'shuffler.json'}.")
    if not member:
        out.print(f"It has no member yet: silodp shuffler enrol {folder / 'shuffler.toml'} PSEUDONYM ...")
    out.print(f"Then start it: silodp shuffler serve {folder / 'shuffler.toml'}")


@shuffler.command(name="enrol")
def enrol_members(
    settings: SettingsFile,
    member: Annotated[list[str], typer.Argument(help="Pseudonyms, as the silos themselves have given them to you.", show_default=False)],
) -> None:
    """Add members to the roster, before the shuffler starts.

    Example: `silodp shuffler enrol mixer/shuffler.toml PSEUDONYM PSEUDONYM`
    """
    out.print(f"The roster has {enrol(settings, member)} members.")


@shuffler.command()
def serve(settings: SettingsFile) -> None:
    """Pass on totals at the socket of the settings until SIGTERM.

    Example: `silodp shuffler serve mixer/shuffler.toml`
    """
    from silodp.shuffler import daemon

    with listening.guarded() as stop:
        daemon.serve(settings, stop, lambda found: print(f"the shuffler answers at {found.socket}", flush=True))


@shuffler.command()
def status(settings: SettingsFile, as_json: Json = False) -> None:
    """Whether the shuffler runs, how many rounds it has passed on, what it has declined.

    Example: `silodp shuffler status mixer/shuffler.toml`
    """
    from silodp.shuffler.daemon import public, read_keys
    from silodp.shuffler.settings import Settings
    from silodp.shuffler.store import Store

    found = Settings.load(settings)
    runs, words = listening.running(found.store, "store"), listening.tally(found.log)
    seal, sign = map(public, read_keys(found))
    passed = Store(Path(found.store), seal=seal, sign=sign).since(0)
    declined = {code: times for code, times in sorted(words.items()) if code not in ("passed", "repeated", "started", "stopped")}
    told = {
        "running": runs, "socket": found.socket, "members": len(found.roster), "passed": passed, "repeated": words.get("repeated", 0),
        "declined": declined, "seal": seal, "sign": sign,
    }  # fmt: skip
    if as_json:
        print(json.dumps(told))
        return
    out.print(f"The shuffler {f'runs, and answers at {found.socket}' if runs else 'does not run'}; it has {len(found.roster)} members.")
    said = ", ".join(f"{code} {times}" for code, times in declined.items()) or "none"
    out.print(f"Rounds passed on: {passed}; repeated {told['repeated']}; declined: {said}.")
    out.print(f"Silos seal for {seal}; totals are signed by {sign}.")
