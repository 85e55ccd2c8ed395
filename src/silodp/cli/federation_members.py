"""`silodp federation add | remove | renew`: who is at the server's engine, and under which
certificates, without reissuing anybody else's.

They are for the server's operator, on the folder that `provision` made. Whom a run asks is another
matter: its cards say so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silodp.cli.console import Json, dump, say, tell
from silodp.core.errors import BadInput
from silodp.host.certificates import SOON, certificates, expiring

Engine = Annotated[
    Path,
    typer.Argument(
        help="The folder that the engine's `provision` made.", metavar="FOLDER", show_default=False
    ),
]
Names = Annotated[
    list[str],
    typer.Argument(
        help="The silos' names; for Flower, to add one, NAME=node.pub.",
        metavar="SILO...",
        show_default=False,
    ),
]


def add(folder: Engine, silo: Names, as_json: Json = False) -> None:
    """Let a silo in: a kit of its own (NVFlare), or its node's key (Flower). Nobody else's
    certificates change; the engine may run.

    Example: `silodp federation add fed west`
    """
    if _engine(folder) == "nvflare":
        from silodp.wire.nvflare import kits

        kits.add(folder, silo)
        said = (
            f"Hand {' and '.join(str(folder / 'kits' / name) for name in silo)} to the silo's "
            "operator, over a channel that both trust."
        )
    else:
        from silodp.wire.flower import site

        pairs = [word.partition("=") for word in silo]
        if not all(sign for _, sign, _ in pairs):
            raise BadInput(
                f"the silos are {', '.join(silo)}; for Flower each is NAME=node.pub, the "
                "public key that its operator has sent"
            )
        site.register(folder / "server", {name: Path(file) for name, _, file in pairs})
        said = "SuperLink lets them in from now on."
    tell({"silos": silo}, as_json, said)


def remove(folder: Engine, silo: Names, as_json: Json = False) -> None:
    """Let a silo in no more: it is asked nothing from now on. The others notice nothing; the engine
    may run (Flower's must).

    Example: `silodp federation remove fed south`
    """
    if _engine(folder) == "nvflare":
        from silodp.wire.nvflare import kits

        kits.remove(folder, silo)
    else:
        from silodp.wire.flower import site

        site.unregister(folder / "server", silo)
    tell(
        {"silos": silo},
        as_json,
        "They are let in no more, and asked nothing. Leave their cards out of the next run.",
    )


def renew(folder: Engine, as_json: Json = False) -> None:
    """New certificates by the same authority, before the old ones expire; both hold until then, so
    that each restarts when it suits.

    Example: `silodp federation renew fed`
    """
    if _engine(folder) == "nvflare":
        from silodp.wire.nvflare import kits

        silos = kits.renew(folder)
        said = (
            f"Restart the server; send {folder / 'renewed'}/NAME.crt, which are public, to the "
            "silos: each puts it in the place of startup/client.crt."
        )
    else:
        from silodp.wire.flower import keys

        silos = list[str]()
        keys.renew(folder / "server", keys.host_of(folder / "server"))
        said = "Restart the server; silos know its authority already, and do nothing."
    tell({"silos": silos}, as_json, said)


def show_certificates(
    folder: Engine,
    days: Annotated[
        int, typer.Option(help="Warn of those that expire within so many days.")
    ] = SOON,
    as_json: Json = False,
) -> None:
    """Every certificate of a folder, and a warning for those that expire soon. Exit code 0, or 3 if
    there is one.

    Example: `silodp federation certificates fed`
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder; give the engine's folder")
    found = certificates(folder)
    soon = expiring(folder, days)
    if as_json:
        dump({"certificates": found, "expiring": soon})
    else:
        say(*(f"{one['subject']}: valid to {one['until']}, {one['days']} days" for one in found))
        say(*(f"{wrong[0].upper()}{wrong[1:]}." for wrong in soon))
    if soon:
        raise typer.Exit(3)


def _engine(folder: Path) -> str:
    for engine, sign in (("nvflare", "kits"), ("flower", "server/ca.key")):
        if (folder / sign).exists():
            return engine
    raise BadInput(
        f"{folder} is no engine's folder; give the one that `python -P -m "
        "silodp.wire.ENGINE.site provision` made"
    )
