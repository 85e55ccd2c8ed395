"""`silodp silo personalise`: a released model fitted further to the silo's own records, which never leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silodp.cli.console import Json, dump, say
from silodp.cli.silo import PolicyFile, silo


@silo.command()
def personalise(
    policy: PolicyFile,
    trained: Annotated[Path, typer.Argument(metavar="MODEL", help="The released model: a run's folder, or its file.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Fit a released model further to this silo's own records, inside the silo. It costs nothing, since nothing leaves.

    The personal model is not private and must never be sent. It is pulled towards the shared one as strongly as cross-validation in here finds best,
    and is written into `personal` beside the policy, for its owner alone. `silodp predict` takes it.

    Example: `silodp silo personalise clinic/policy.toml runs/train` and then `silodp predict clinic/personal new.csv`
    """
    from silodp.silo.personal import STAYS
    from silodp.silo.personal import personalise as made

    found = made(policy, trained)
    if as_json:
        kept = str(found.path) if found.path else None
        return dump(
            {
                "records": found.records,
                "pull": found.pull,
                "shared_loss": found.shared,
                "personal_loss": found.personal,
                "model": kept,
                "private": False,
            }
        )
    losses = f"loss {found.personal:.4g} on records that it was not fitted to, where the shared model has {found.shared:.4g}"
    if found.path is None:
        say(f"No personal model was made: the shared one does as well on these {found.records} records ({losses}). Nothing was sent.")
        return None
    say(
        f"Wrote {found.path}, for its owner alone: {losses}; pull {found.pull:g} towards the shared model. Nothing was sent, and nothing is charged."
    )
    say(STAYS, style="bold")
    say(f"Use it here: silodp predict {found.path.parent} FILE")
