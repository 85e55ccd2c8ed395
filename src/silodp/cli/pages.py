"""`silodp report` and `silodp ui`: pages about runs and, at a silo, about its gate."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.console import AuditFolder, Json, Statistics, dump, say, tell
from silodp.core.errors import BadInput
from silodp.host.atomic import write, write_new
from silodp.host.cards import read_card, schema_of
from silodp.runs import RunFolder

MARK = b": report</title><style>"
"""The text that identifies a page as a report."""


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="Folder of `silodp train`, `federation run`, `stats --record` or a study.",
            show_default=False,
        ),
    ],
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The page to write; report.html in the run's folder by default."
        ),
    ] = None,
    audit: AuditFolder = None,
    statistics: Statistics = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also write the curves for TensorBoard into this folder.")
    ] = None,
    mlflow: Annotated[
        Path | None,
        typer.Option(help="Also write settings and curves as an MLflow run into this folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page that stands alone, to read, print and sign. It shows what was trained, what it
    cost, and what was not protected.

    Examples: `silodp report runs/train` · `silodp report runs/compare-wbcd-R25 --audit runs/audit`
    """
    from silodp.cli.checked import ledgers
    from silodp.pages import export, runs
    from silodp.pages.checked import NOT_HERE, checks_of
    from silodp.pages.report import report as written

    found = runs.read(run)
    rows = runs.audits_beside(run, audit)
    answered = runs.statistics_in(statistics)
    if tensorboard:
        export.to_tensorboard(found, tensorboard)
    if mlflow:
        export.to_mlflow(found, mlflow)
    page = out_file or run / "report.html"
    checks = checks_of(found, ledgers)
    # Figures on raw records are for the owner alone, here as in their own file.
    raw = RunFolder(run).comparison.exists()
    text = written(found, rows, checks=checks, statistics=answered, raw=True)
    put(page, text, over_any=out_file is None, mode=0o600 if raw else 0o666)
    if as_json:
        return dump(
            {
                "page": str(page),
                "run_sha256": runs.fingerprint(run),
                "checks": [{"state": one.state, "words": one.words} for one in checks],
            }
        )
    say(
        f"Wrote {page}. It is one file, and can be printed.",
        *(f"{one.state.capitalize()}: {one.words}" for one in checks if one.state != NOT_HERE),
    )


def _ours(page: Path) -> bool:
    """Return whether the file is an earlier report, which a new one may replace."""
    with page.open("rb") as file:
        return MARK in file.read(2000)


def put(page: Path, text: str, *, over_any: bool = False, mode: int = 0o666) -> None:
    """Write the page, with this mode less the umask. It replaces an earlier report, or with
    `over_any` any plain file. A link is neither followed nor replaced. Raise BadInput if the page
    cannot be written.
    """
    try:
        if os.path.lexists(page) and not stat.S_ISREG(os.lstat(page).st_mode):
            raise BadInput(
                f"{page} exists and is not a plain file; remove it, or choose another name"
            )
        if not over_any and page.is_file() and not _ours(page):
            raise BadInput(f"{page} exists and is not a report of silodp; choose another name")
        write(page, text, mode=mode)
    except OSError as error:
        raise BadInput(
            f"{page} cannot be written ({error.strerror}); choose another name"
        ) from None


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def ui(
    runs: Annotated[
        Path | None,
        typer.Option(help="Directory of run folders; runs/ by default, or none with --silo."),
    ] = None,
    silo: Annotated[
        Path | None, typer.Option(help="A silo's policy.toml, at the silo. Its gate is shown too.")
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port on this machine. 0 selects a free port.", min=0, max=65535)
    ] = 8377,
    token: Annotated[
        Path | None,
        typer.Option(help="File with the token for pausing a gate; created if missing."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="This machine only: 127.0.0.1, localhost or ::1.")
    ] = "127.0.0.1",
    as_json: Json = False,
) -> None:
    """Show runs in a browser on this machine, also while they train. At a silo, show its gate too.

    The pages only read files. The one exception is pausing a gate, which needs the token. No other
    machine can connect. With --silo every page asks for the password that is printed at the start.
    Without it, any account of this machine can read the pages. They never show a record.

    Examples: `silodp ui` · `silodp ui --silo clinic/policy.toml --token clinic/ui.token`
    """
    if host not in LOOPBACK:
        raise BadInput(
            f"--host is {host!r}; this page is for this machine only: 127.0.0.1, localhost or ::1"
        )
    if token and not silo:
        raise BadInput("--token is for pausing a gate; give the silo's policy with --silo")
    try:
        import uvicorn

        from silodp.cli.checked import ledgers
        from silodp.pages.app import application
    except ImportError as error:
        raise BadInput(f"`silodp ui` needs the package {error.name}; install silodp[ui]") from None
    root = runs
    if not runs and not silo:
        root = Path("runs")
    if root and not root.is_dir():
        raise BadInput(f"{root} is not a directory; give the directory of run folders with --runs")
    tabs = []
    routes = []
    password = None
    if silo:
        from silodp.silo.service.page import GatePage

        tabs = [("The gate", "/silo")]
        shown = [("Runs", "/"), *tabs]
        if not root:
            shown = tabs
        routes = GatePage(silo, _token(token, quiet=as_json), shown, judge_of(silo)).routes()
        password = secrets.token_urlsafe(32)
    listener = _bound(host, port)
    bound = listener.getsockname()[1]
    app = application(root, port=bound, tabs=tabs, routes=routes, check=ledgers, password=password)
    name = host
    if ":" in host:
        name = f"[{host}]"
    address = f"http://{name}:{bound}/"
    answer = {"address": address}
    sentences = [f"Open {address} in a browser on this machine; Ctrl-C ends it."]
    if password:
        answer["password"] = password
        sentences.append(
            f"It asks for a user name, which can be any, and for the password {password}"
        )
    tell(answer, as_json, *sentences)
    uvicorn.Server(config(uvicorn, app)).run(sockets=[listener])


def judge_of(policy: Path) -> Any:
    """Return a function that explains a score that this silo has answered. It uses only the silo's
    public card.

    Return None without a card, held-out records or classes.
    """
    try:
        card = read_card(policy.parent / "silo.json")
    except BadInput:
        return None
    if not card.held_out or not card.classes:
        return None
    schema = schema_of(card)

    def judge(value: Any, multiplier: float) -> dict | None:
        from dataclasses import replace

        import torch

        from silodp.core.mechanisms import Gaussian
        from silodp.server.estimates.scoring import as_rows, asked_of, noise_of, scores_of

        label = None
        if schema:
            label = schema.label
        # The answer does not repeat the edges of the bins, and the AUC does not need them.
        asked = asked_of(len(card.classes), label, None, cap=1.0)
        cells = len(value) - asked.numbers
        if cells < 4 or cells % 2:
            return None
        statistic = replace(asked.statistic(torch.zeros(1, 1)), bins=cells // 2)
        noise = noise_of(statistic, Gaussian("score", 1.0, multiplier), card.held_out, 0)
        return as_rows([scores_of(card.name, card.held_out, value, noise, asked)], asked)[0]

    return judge


def config(uvicorn: Any, app: Any) -> Any:
    """Return uvicorn's settings: quiet, without websockets, and ignoring the headers of proxies."""
    # Uvicorn's own logging first shuts down all other handlers, and absl's handler then closes the
    # stream that it was given.
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
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise BadInput(
            f"port {port} cannot be used ({os.strerror(error.errno or 0)}); choose another "
            "with --port"
        ) from None


def _token(path: Path | None, *, quiet: bool = False) -> str | None:
    """Return the token in a file that only its owner can read. Create the file if it is missing."""
    if path is None:
        return None
    try:
        if not path.exists():
            write_new(path, secrets.token_urlsafe(32) + "\n")
            if not quiet:
                say(f"Wrote a new token to {path}.")
        if path.stat().st_mode & 0o077:
            raise BadInput(f"other users can read {path}; restrict it with chmod 600")
        found = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"the token {path} cannot be used ({type(error).__name__}); give another file"
        ) from None
    if len(found) < 20:
        raise BadInput(
            f"the token in {path} has {len(found)} characters; it must have 20 or more, "
            "to be hard to guess"
        )
    return found
