"""`silodp ledger metrics`: what gate, courier, server or shuffler tell of themselves, for
Prometheus, on this machine's own address.
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
            help="The files that the daemons write, as SILODP_METRICS names them.",
            show_default=False,
        ),
    ],
    listen: Annotated[
        str, typer.Option(help="127.0.0.1:PORT; other machines come through a proxy of your own.")
    ] = "127.0.0.1:9464",
    as_json: Json = False,
) -> None:
    """Serve /metrics and /health of the daemons on this machine, until it is ended. Counts, spend
    and refusals; nothing that depends on a record.

    Example: `silodp ledger metrics /run/silodp-gate/gate.prom /run/silodp-courier/courier.prom`
    """
    from silodp.host.metrics import serve

    def told(port: int) -> None:
        tell(
            {"port": port},
            as_json,
            f"/metrics and /health are at {listen.rpartition(':')[0]}:{port}.",
        )

    serve(file, listen, told)
