"""`silodp report` and `silodp ui`: pages about runs and, at a silo, about its gate."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.console import AuditFolder, Json, dump, say, tell
from silodp.core.errors import BadInput
from silodp.host.atomic import write, write_new
from silodp.host.cards import read_card, schema_of

MARK = b": report</title><style>"
"""By which a page is known for a report."""


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="Folder of `silodp train`, `federation run` or a study.",
            show_default=False,
        ),
    ],
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="The page; report.html in the run's folder by default."),
    ] = None,
    audit: AuditFolder = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also write the curves for TensorBoard into this folder.")
    ] = None,
    mlflow: Annotated[
        Path | None,
        typer.Option(help="Also write settings and curves as an MLflow run into this folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """One page that stands alone, to read, print and sign: what was trained, what it cost, what was
    not protected.

    Examples: `silodp report runs/train` · `silodp report runs/compare-wbcd-R25 --audit runs/audit`
    """
    from silodp.cli.checked import ledgers
    from silodp.pages import export, runs
    from silodp.pages.checked import NOT_HERE, checks_of
    from silodp.pages.report import report as written

    found = runs.read(run)
    rows = runs.audits_beside(run, audit)
    if tensorboard:
        export.to_tensorboard(found, tensorboard)
    if mlflow:
        export.to_mlflow(found, mlflow)
    page = out_file or run / "report.html"
    checks = checks_of(found, ledgers)
    put(page, written(found, rows, checks=checks, raw=True), over_any=out_file is None)
    if as_json:
        return dump(
            {
                "page": str(page),
                "run_sha256": runs.fingerprint(run),
                "checks": [{"state": one.state, "words": one.words} for one in checks],
            }
        )
    say(
        f"Wrote {page}: it stands alone, and prints.",
        *(f"{one.state.capitalize()}: {one.words}" for one in checks if one.state != NOT_HERE),
    )


def _ours(page: Path) -> bool:
    """Whether the file is an earlier report, which a new one may replace."""
    with page.open("rb") as file:
        return MARK in file.read(2000)


def put(page: Path, text: str, *, over_any: bool = False) -> None:
    """The page takes the place of an earlier one and, where a run's folder is its place, of any
    file there; a link in its place is neither followed nor written through.
    """
    try:
        if os.path.lexists(page) and not stat.S_ISREG(os.lstat(page).st_mode):
            raise BadInput(f"{page} is there and is no plain file; remove it, or choose another")
        if not over_any and page.is_file() and not _ours(page):
            raise BadInput(f"{page} is there and is no report of silodp; choose another name")
        write(page, text, mode=0o666)
    except OSError as error:
        raise BadInput(f"{page} cannot be written ({error.strerror}); choose another") from None


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def ui(
    runs: Annotated[
        Path | None,
        typer.Option(help="Directory of run folders; runs/ by default, or none with --silo."),
    ] = None,
    silo: Annotated[
        Path | None, typer.Option(help="A silo's policy.toml, at the silo: shows its gate.")
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port on this machine; 0 takes a free one.", min=0, max=65535)
    ] = 8377,
    token: Annotated[
        Path | None,
        typer.Option(
            help="File with the token that lets a gate be paused; made if it is not there."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="This machine only: 127.0.0.1, localhost or ::1.")
    ] = "127.0.0.1",
    as_json: Json = False,
) -> None:
    """Look at runs, also while they train, in a browser on this machine; at a silo also at its
    gate.

    It only reads, but for the pause of a gate, which asks for the token. No other machine can
    connect. With --silo every page asks for the password that is printed at the start. Without it
    any account of this machine can read what is shown, which never is a record.

    Examples: `silodp ui` · `silodp ui --silo clinic/policy.toml --token clinic/ui.token`
    """
    if host not in LOOPBACK:
        raise BadInput(
            f"--host is {host!r}; this page is for this machine only: 127.0.0.1, localhost or ::1"
        )
    if token and not silo:
        raise BadInput("--token is for the pause of a gate; give the silo's policy with --silo")
    try:
        import uvicorn

        from silodp.cli.checked import ledgers
        from silodp.pages.app import application
    except ImportError as error:
        raise BadInput(f"`silodp ui` needs the package {error.name}; install silodp[ui]") from None
    root = runs if runs or silo else Path("runs")
    if root and not root.is_dir():
        raise BadInput(f"{root} is not a directory; give one that holds run folders with --runs")
    tabs = []
    routes = []
    if silo:
        from silodp.silo.service.page import GatePage

        tabs = [("The gate", "/silo")]
        shown = [*([("Runs", "/")] if root else []), *tabs]
        routes = GatePage(silo, _token(token, quiet=as_json), shown, judge_of(silo)).routes()
    listener = _bound(host, port)
    password = secrets.token_urlsafe(32) if silo else None
    bound = listener.getsockname()[1]
    app = application(root, port=bound, tabs=tabs, routes=routes, check=ledgers, password=password)
    address = f"http://{f'[{host}]' if ':' in host else host}:{bound}/"
    answer = {"address": address}
    sentences = [f"Open {address} in a browser on this machine; Ctrl-C ends it."]
    if password:
        answer["password"] = password
        sentences.append(f"It asks for a name, which may be any, and the password {password}")
    tell(answer, as_json, *sentences)
    uvicorn.Server(config(uvicorn, app)).run(sockets=[listener])


def judge_of(policy: Path) -> Any:
    """What a score that this silo has answered says, by the silo's own public card; None where
    there is no card, or no classes to judge.
    """
    try:
        card = read_card(policy.parent / "silo.json")
    except BadInput:
        return None
    if not card.held_out or not card.classes:
        return None
    schema = schema_of(card)

    def judge(value: Any, multiplier: float) -> dict | None:
        import torch

        from silodp.core.mechanisms import Gaussian
        from silodp.core.statistics import Score
        from silodp.server.estimates.scoring import as_rows, asked_of, noise_of, scores_of

        asked, _ = asked_of(
            len(card.classes),
            max(1, (len(value) - 3) // 2),
            1.0,
            schema.label if schema else None,
            None,
        )
        statistic = Score(torch.zeros(1, 1), asked.cells, 1.0)
        if statistic.shape[-1] != len(value):
            return None
        noise = noise_of(statistic, Gaussian("score", 1.0, multiplier), card.held_out, 0)
        return as_rows(
            [scores_of(card.name, card.held_out, value, noise, asked)], len(card.classes)
        )[0]

    return judge


def config(uvicorn: Any, app: Any) -> Any:
    """Quiet, without websockets, and deaf to what a proxy might claim."""
    # Its own logging would begin with shutting down everybody else's handlers, and absl's closes
    # the stream that it was given.
    quiet = {
        "log_config": None,
        "log_level": "critical",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
    }
    return uvicorn.Config(
        app,
        ws="none",
        http="h11",
        loop="asyncio",
        lifespan="off",
        timeout_graceful_shutdown=1,
        **quiet,
    )


def _bound(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
    except OSError as error:
        raise BadInput(
            f"port {port} cannot be used ({os.strerror(error.errno or 0)}); choose another "
            "with --port"
        ) from None


def _token(path: Path | None, *, quiet: bool = False) -> str | None:
    """The token in a file that only its owner may read; a new one where there is no file."""
    if path is None:
        return None
    try:
        if not path.exists():
            write_new(path, secrets.token_urlsafe(32) + "\n")
            if not quiet:
                say(f"Wrote a new token to {path}.")
        if path.stat().st_mode & 0o077:
            raise BadInput(f"others can read {path}; make it yours alone with chmod 600")
        found = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"the token {path} cannot be used ({type(error).__name__}); give a file of your own"
        ) from None
    if len(found) < 20:
        raise BadInput(
            f"the token in {path} has {len(found)} characters; it must have 20 or more, so "
            "that nobody guesses it"
        )
    return found
