"""`silodp export evidence`: write one signed archive about a run, and verify it anywhere."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp import __version__
from silodp.cli.console import AuditFolder, Json, Statistics, dump, say
from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema
from silodp.core.text import check_name
from silodp.host.atomic import write_out
from silodp.host.keys import make_key, public, read_key
from silodp.pages.evidence import pack, verify

if TYPE_CHECKING:
    from silodp.pages.checked import Checked
    from silodp.pages.runs import Run
    from silodp.pages.statements import OwnerFacts

VERIFY = "verify"
EXCERPT = (
    "rule",
    "epsilon",
    "delta",
    "records",
    "created",
    "spent_epsilon",
    "local_epsilon",
    "left_epsilon",
    "used",
    "released_count",
    "released_head",
    "closed",
    "runs",
)
"""The fields copied from a ledger's summary. Paths are left out. So are count and head of the whole
chain, which depend on edits of the data.
"""


def evidence(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A finished run's folder, or the word verify before an archive.",
            show_default=False,
        ),
    ],
    archive: Annotated[
        Path | None,
        typer.Argument(metavar="[ARCHIVE]", help="With verify: the archive.", show_default=False),
    ] = None,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The archive to write; NAME-evidence.zip by default. It is never overwritten.",
        ),
    ] = None,
    key: Annotated[
        str,
        typer.Option(
            help=(
                "File of the signing key, created if missing. With verify: the public "
                "key that you expect."
            )
        ),
    ] = "",
    audit: AuditFolder = None,
    statistics: Statistics = None,
    ledger: Annotated[
        list[Path] | None,
        typer.Option(help="Output of an officer's `silodp ledger show --json`; may be repeated."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the study.")] = "",
    curator: Annotated[
        list[str] | None, typer.Option(help="Publisher of the model; may be repeated.")
    ] = None,
    use: Annotated[
        str, typer.Option(help="Intended use and users of the model, in your words.")
    ] = "",
    region: Annotated[
        str, typer.Option(help="Region of the records, or of the law that applies.")
    ] = "",
    sector: Annotated[
        str, typer.Option(help="Healthcare, Education, Finance, Government, Technology or Energy.")
    ] = "",
    author: Annotated[
        list[str] | None, typer.Option(help="Author of these statements; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one signed archive about a run, for readers without access to this machine: price,
    guarantee, attacks, model card, report, ledger figures and forms. `verify` checks an archive.

    The forms are drafts for the registry of DP deployments, NIST SP 800-226, EDPB 28/2024 with an
    annex to a DPIA, egress, and Croissant. Each statement names its source or states "not covered".
    The archive contains no record and no path of this machine.

    Examples: `silodp export evidence runs/train --use "Triage of adults"` · `silodp export evidence
    verify train-evidence.zip`
    """
    if str(what) == VERIFY:
        return _verify(archive, key, as_json)
    if archive is not None:
        raise BadInput(
            f"{archive} is one argument too many; give one run's folder, or `verify` and an archive"
        )
    from silodp.cli.checked import archived
    from silodp.pages import runs
    from silodp.pages.statements import OwnerFacts

    run = runs.read(what)
    if run.kind != "statistics":
        runs.check_trained(run, "evidence")
    answered = run.statistics or runs.statistics_in(statistics)
    if sector and sector not in (
        sectors := ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance")
    ):
        raise BadInput(f"--sector is {sector!r}; the registry has only {', '.join(sectors)}")
    owner = OwnerFacts(name, tuple(curator or ()), use, region, sector, tuple(author or ()))
    rows = runs.audits_beside(what, audit)
    checks = archived(run)
    if run.kind == "statistics":
        files = _files_of_statistics(run, ledger or [], checks)
    else:
        files = _files(run, owner, rows, ledger or [], checks, answered)
    place = Path(key or "evidence.key")
    if place.exists():
        signing = read_key(place)
    else:
        signing = make_key(place)
    check_name("the name of the run's folder", what.resolve().name)
    out = out_file or Path(f"{what.resolve().name}-evidence.zip")
    about = {
        "run": what.resolve().name,
        "kind": run.kind,
        "made": _now().isoformat(timespec="seconds"),
        "silodp": __version__,
        "fingerprint": runs.fingerprint(what),
    }
    write_out(out, pack(files, about, signing))
    if as_json:
        return dump(
            {
                "archive": str(out),
                "key": public(signing),
                "files": sorted(files),
                "not_stated": owner.missing(),
            }
        )
    say(
        f"Wrote {out}: {len(files)} files, signed by {public(signing)} ({place}).",
        "A reader verifies it: silodp export evidence verify " + str(out),
    )
    say(*(f"{one.state.capitalize()} (also in its report): {one.words}" for one in checks))
    if (missing := owner.missing()) and run.kind != "statistics":
        say(f"Not stated, and marked so in the archive: {', '.join(missing)}.")
    if not rows and run.kind != "statistics":
        say(
            "It contains no audit. To add one: `silodp audit --json > audit.json`, then "
            "--audit audit.json."
        )


def _verify(archive: Path | None, key: str, as_json: bool) -> None:
    if archive is None:
        raise BadInput("verify needs an archive: silodp export evidence verify NAME-evidence.zip")
    try:
        raw = archive.read_bytes()
    except OSError as error:
        raise BadInput(f"{archive} cannot be read: {error.strerror}") from None
    found = verify(raw, key or None)
    if as_json:
        return dump({"key": found.key, **found.about, "files": sorted(found.files)})
    say(
        f"The archive is unchanged since it was signed by {found.key}.",
        (
            f"About {found.about['run']} ({found.about['kind']}), made {found.about['made']} by "
            f"silodp {found.about['silodp']}; {len(found.files)} files:"
        ),
    )
    say(*(f"  {name}" for name in sorted(found.files)))
    if not key:
        say("Ask the sender over another channel whether that key is theirs. --key KEY checks it.")


def _files(
    run: Run,
    owner: OwnerFacts,
    rows: list[dict[str, Any]],
    ledgers: list[Path],
    checks: list[Checked],
    answered: Sequence[dict[str, Any]],
) -> dict[str, bytes]:
    from silodp.host.model import about_of
    from silodp.pages import statements
    from silodp.pages.card import card, facts
    from silodp.pages.report import report

    texts = {
        "registry.yaml": statements.registry(run, owner, _now().date().isoformat(), __version__),
        "nist-sp-800-226.md": statements.nist(run, bool(rows)),
        "edpb-28-2024.md": statements.edpb(run, bool(rows)),
        "model-card.md": card(run, owner.use),
        "report.html": report(run, rows, checks=checks, statistics=answered),
        "spends.json": _text({"privacy": facts(run), "silos": [asdict(s) for s in run.silos]}),
        "run.json": _text(
            {
                k: v
                for k, v in run.about.items()
                if k not in ("data", "folder", "paths", "schema_text")
            }
        ),
        "ledgers.json": _text(
            {
                "heads": {s.name: s.ledger for s in run.silos},
                "excerpts": [_excerpt(path) for path in ledgers],
            }
        ),
    }
    texts["questions.json"] = _text(list(run.rounds))
    texts["environment.json"] = _text(run.environment)
    if run.evaluations:
        texts["evaluations.json"] = _text(list(run.evaluations))
    if answered:
        texts["statistics.json"] = _text(list(answered))
    if rows:
        texts["audit.json"] = _text({"rows": rows})
    about = about_of(run.folder)
    if "schema" in about:
        texts["croissant.json"] = statements.croissant(
            Schema.parse(about["schema"], "the model"), owner.name or run.folder.resolve().name
        )
        texts["schema.toml"] = about["schema"]
    texts["model.sha256"] = f"{about['sha256']}  model.safetensors\n"
    texts["egress.md"] = statements.egress(run, sorted([*texts, "egress.md"]))
    return {name: text.encode() for name, text in texts.items()}


def _files_of_statistics(run: Run, ledgers: list[Path], checks: list[Checked]) -> dict[str, bytes]:
    """Return the files about answers to `silodp stats`, which have no model."""
    from silodp.pages.report import report
    from silodp.pages.statistics import spent

    spends = [
        {"name": name, "answers": count, "epsilon": epsilon, "delta": delta}
        for name, (count, epsilon, delta) in spent(run.statistics).items()
    ]
    texts = {
        "report.html": report(run, checks=checks),
        "statistics.json": _text(list(run.statistics)),
        "spends.json": _text({"silos": spends}),
        "ledgers.json": _text({"excerpts": [_excerpt(path) for path in ledgers]}),
    }
    return {name: text.encode() for name, text in texts.items()}


def _excerpt(path: Path) -> dict[str, Any]:
    found: Any = None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
    if isinstance(found, dict):
        queries: Any = found.get("queries", [])
    else:
        queries = None
    if not (isinstance(queries, list) and all(isinstance(q, dict) for q in queries)):
        raise BadInput(
            f"{path} is not output of `silodp ledger show --json`; ask the officer for that output"
        )
    public = {name: found[name] for name in EXCERPT if name in found}
    if "queries" in found:
        public["queries"] = [{k: v for k, v in q.items() if k != "entry"} for q in queries]
    return public


def _text(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, default=str) + "\n"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
