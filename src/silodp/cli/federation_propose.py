"""`silodp federation propose`: describe another study for the present silos in a file. Each silo
approves or rejects it.
"""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path
from typing import Annotated

import click
import typer

from silodp.cli.console import FeatureMapName, Json, dump, say
from silodp.cli.federation import Folder
from silodp.cli.federation_files import built, load_state, words_of
from silodp.cli.project import Project
from silodp.core.errors import BadInput
from silodp.core.extension import is_file, parse
from silodp.host.cards import read_card, schema_of
from silodp.host.schema import load_schema
from silodp.host.study import Study


def propose(
    study: Annotated[
        str,
        typer.Argument(help="A name of the study for its readers.", show_default=False),
    ],
    project: Project = None,
    folder: Folder = Path("federation"),
    model: Annotated[
        str | None,
        typer.Option(
            help=(
                "linear, logistic, additive:KNOTS, mlp:HIDDEN, cnn, or "
                "FILE.py:FUNCTION; by default unchanged."
            )
        ),
    ] = None,
    prox: Annotated[
        str | None, typer.Option(help="Penalty or constraint; by default unchanged.")
    ] = None,
    loss: Annotated[str, typer.Option(help="FILE.py:NAME; by default the loss of the task.")] = "",
    feature_map: FeatureMapName = "",
    schema: Annotated[
        Path | None, typer.Option(help="Another public schema: other columns, or another label.")
    ] = None,
    statistic: Annotated[
        list[str] | None,
        typer.Option(
            help="A statistic that silos do not allow yet, such as Gram; may be repeated."
        ),
    ] = None,
    card: Annotated[
        list[Path] | None,
        typer.Option(help="A silo's silo.json, if there is no --folder; one is enough."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the study's file; FOLDER/studies by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Describe another study for the same records: model, penalty, loss, columns, label. No silo is
    contacted, and nothing changes yet. Each silo's officer reads the changes with `silodp silo
    approve` and decides. The ledgers stay the same.

    Example: `silodp federation propose second --model logistic`
    """
    from silodp.silo.service.policy import STATISTICS

    known = click.get_current_context().get_parameter_source("schema")
    if card:
        policies = []
    else:
        policies = [Path(policy) for policy in load_state(folder)["silos"].values()]
    paths = card or [policy.parent / "silo.json" for policy in policies]
    now = read_card(paths[0])
    words = words_of(now, model=model, prox=prox, feature_map=feature_map) | {"loss": loss}
    if schema and known == click.core.ParameterSource.DEFAULT_MAP and now.schema == "":
        schema = None  # It is a project's schema, but the silos read plain columns.
    if schema:
        read_by = load_schema(schema)
    else:
        read_by = schema_of(now)
    if unknown := [name for name in statistic or () if name not in STATISTICS]:
        raise BadInput(f"--statistic is {unknown[0]!r}; it must be one of {', '.join(STATISTICS)}")
    problem = built(now, read_by, words)
    sources = {}
    named = dict(words)
    for what, text in words.items():
        if is_file(text):
            path = Path(parse(text)[0])
            sources[path.name] = path.read_bytes()
            named[what] = path.name + text[len(str(parse(text)[0])) :]
            named[f"{what}_sha256"] = hashlib.sha256(sources[path.name]).hexdigest()
    definition = hashlib.sha256(problem.definition().encode()).hexdigest()
    schema_text = ""
    if read_by:
        schema_text = read_by.text
    made = Study(
        study=study,
        definition=definition,
        schema=schema_text,
        statistics=tuple(statistic or ()),
        **named,
    )
    place = out
    if place is None and card:
        place = Path()
    elif place is None:
        place = folder / "studies"
    file = made.write(place, sources)
    if as_json:
        return dump(
            {
                "study": study,
                "file": str(file),
                "definition": definition,
                "parameters": problem.dim,
                "code": sorted(sources),
            }
        )
    beside = ""
    if sources:
        beside = f", with {', '.join(sorted(sources))} beside it"
    say(
        f"Wrote {file}{beside}: model {words['model']}, {problem.dim} parameters. The "
        "silos have not changed yet."
    )
    if 0 < len(policies) <= 1:
        where = " ".join(map(str, policies))
    elif policies:
        where = f"{folder}/silos/*/policy.toml"
    else:
        where = "policy.toml"
    say(f"Next, at each silo: silodp silo approve {file} {where}")
    own = "".join(
        f" --{what.replace('_', '-')} {shlex.quote(text)}"
        for what, text in words.items()
        if is_file(text)
    )
    again = "silodp federation run"
    if project:
        again += f" --project {project}"
    elif not card:
        again += f" --folder {folder}"
    say(f"Then here: {again}{own}")
