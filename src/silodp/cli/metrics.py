"""`silodp ledger metrics`: serve the counts of gate, courier, server or shuffler to Prometheus, on
this machine's own address.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silodp.cli.console import Json, tell


def metrics(
    file: Annotated[
        list[Path],
        typer.Argument(
            help="The daemons' files, as set by SILODP_METRICS.",
            show_default=False,
        ),
    ],
    listen: Annotated[
        str, typer.Option(help="127.0.0.1:PORT. For other machines, use your own proxy.")
    ] = "127.0.0.1:9464",
    as_json: Json = False,
) -> None:
    """Serve /metrics and /health of the daemons on this machine until the process ends. They
    contain counts, spend and refusals, and nothing that depends on a record.

    Example: `silodp ledger metrics /run/silodp-gate/gate.prom /run/silodp-courier/courier.prom`
    """
    from silodp.host.metrics import serve

    def on_start(port: int) -> None:
        tell(
            {"port": port},
            as_json,
            f"/metrics and /health are at {listen.rpartition(':')[0]}:{port}.",
        )

    serve(file, listen, on_start)
