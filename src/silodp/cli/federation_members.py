"""`silodp federation add | remove | renew`: membership at the server's engine, and its
certificates. Other members' certificates stay the same.

The commands are for the server's operator, on the folder that `provision` made. Which silos a run
asks is decided by the run's cards.
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
        help="The silos' names. To add a silo with Flower: NAME=node.pub.",
        metavar="SILO...",
        show_default=False,
    ),
]


def add(folder: Engine, silo: Names, as_json: Json = False) -> None:
    """Admit a silo: create its kit (NVFlare), or register its node's key (Flower). Other members'
    certificates stay the same, and the engine may be running.

    Example: `silodp federation add fed west`
    """
    if _engine(folder) == "nvflare":
        from silodp.wire.nvflare import kits

        kits.add(folder, silo)
        sentence = (
            f"Hand {' and '.join(str(folder / 'kits' / name) for name in silo)} to the "
            "silo's operator, over a channel that you both trust."
        )
    else:
        from silodp.wire.flower import site

        pairs = [word.partition("=") for word in silo]
        if not all(sign for _, sign, _ in pairs):
            raise BadInput(
                f"the silos are {', '.join(silo)}; for Flower each must be "
                "NAME=node.pub, the public key from its operator"
            )
        site.register(folder / "server", {name: Path(file) for name, _, file in pairs})
        sentence = "SuperLink admits them from now on."
    tell({"silos": silo}, as_json, sentence)


def remove(folder: Engine, silo: Names, as_json: Json = False) -> None:
    """Exclude a silo: from now on it gets no queries. Other members are not affected. NVFlare may
    be running, Flower must be.

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
        "They are excluded and get no more queries. Leave their cards out of the next run.",
    )


def renew(folder: Engine, as_json: Json = False) -> None:
    """Issue new certificates by the same authority, before the old ones expire. Both are valid
    until then, so each member restarts when convenient.

    Example: `silodp federation renew fed`
    """
    if _engine(folder) == "nvflare":
        from silodp.wire.nvflare import kits

        silos = kits.renew(folder)
        sentence = (
            f"Restart the server. Send the public files {folder / 'renewed'}/NAME.crt "
            "to the silos. Each silo replaces startup/client.crt by its file."
        )
    else:
        from silodp.wire.flower import keys

        silos = list[str]()
        keys.renew(folder / "server", keys.host_of(folder / "server"))
        sentence = "Restart the server. Silos need no change: they already have its authority."
    tell({"silos": silos}, as_json, sentence)


def show_certificates(
    folder: Engine,
    days: Annotated[
        int, typer.Option(help="Warn of certificates that expire within this number of days.")
    ] = SOON,
    as_json: Json = False,
) -> None:
    """Show every certificate of a folder, and warn of those that expire soon. Exit code 0, or 3 if
    one expires soon.

    Example: `silodp federation certificates fed`
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give the engine's folder")
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
        f"{folder} is not an engine's folder; give the one that `python -P -m "
        "silodp.wire.ENGINE.site provision` made"
    )
