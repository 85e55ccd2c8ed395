"""`silodp init`: a folder with a run's settings, the public schema, a model and the next commands;
and --project, which reads it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.console import Json, dump, say
from silodp.cli.options import MANY, ORDER
from silodp.cli.questions import ask_schema, ask_silos
from silodp.cli.templates import TEMPLATES
from silodp.core.errors import BadInput
from silodp.core.problem.person import BY_ROW
from silodp.core.problem.schema import TYPES, Form
from silodp.host.atomic import new_files
from silodp.host.schema import schema_text
from silodp.host.tables import toml

FILE = "silodp.toml"
SAID = "silodp.settings"
SPEND = "silodp.spend"
"""What a command's context keeps: options of --settings, and what one run of the project may spend.
"""
PATHS = ("schema", "silo", "test", "model")
FILL_IN = "fill in"

SETTINGS = """\
# How this project is trained: `silodp train --project .` takes every option that it is not given from here, and so do
# `silodp federation up --project .` and `silodp federation run --project .`. Paths are relative to this folder.

schema = "schema.toml"
# One file, or folder of images, for each silo, to try things on one machine; in earnest each silo keeps its own.
silo = [{silos}]
{test}{model}# Model, algorithm, rounds, step, clip and weights are chosen from public facts: sizes, columns and budgets. `silodp plan --advise` shows the choice;
# what is written here stays as it is. For instance: algorithm = "mb-sgd", rounds = 40, step = 2.0, clip = 1.0, weights = "records".

prox = "zero"                      # or a penalty: l1:0.01, squared-l2:0.1, ...

epsilon = 3.0                      # what one run may spend, of each record's privacy
budget = 10.0                      # what a silo's ledger allows in all, ever (federation up)
"""  # noqa: E501
MODEL = '''\
"""The model, in plain PyTorch. It sees one record at a time, so no BatchNorm and no dropout; silos approve the hash of this file."""

from torch import nn


def build(features: int, outputs: int) -> nn.Module:
    """`features` and `outputs` follow from schema.toml; the loss is the one of its task."""
    return nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, outputs))
'''  # noqa: E501
DRAFT = """\
# The public schema: what every silo's file holds, and what is predicted. The server and all silos use this very file; its hash is part
# of what a silo approves.
#
# FILL IT IN FROM PUBLIC KNOWLEDGE, NEVER FROM THE DATA. A range or a category that was read off the records says something about them
# that no budget pays for. Ask what the column can hold, not what it does hold.
{source}
ignore = [{ignore}]                # columns that a file may have besides, and that are not used
{person}"""  # noqa: E501
PERSON = """\
person = {column}                  # all rows with one value here are one person's: people are protected, and not rows
rows_per_person = 8                # public: so many rows of a person are used, the first in the file
combine = "mean"                   # of the losses of a person's rows; "sum" for survival in long form, a row for each period
"""  # noqa: E501
NOBODY = """\
# person = "patient_id"            # the column that says whose a row is, if anybody has several: without it rows are protected, not people
"""  # noqa: E501
COLUMN = {
    "": """\
# a number:    range = [0, 100], and perhaps missing = 50 with indicator = true
# a category:  categories = ["a", "b", "other"], and perhaps missing = "own"
# a boolean:   perhaps missing = false with indicator = true
""",
    "number": """\
range = ["fill in", "fill in"]     # public: what it can be; values are clipped to it
missing = "refuse"                 # or a public number to fill in, and indicator = true for a feature that says where
""",  # noqa: E501
    "category": """\
categories = "fill in"             # public, such as ["a", "b", "other"]; "other" takes what is not in the list
missing = "refuse"                 # or "own"
""",  # noqa: E501
    "boolean": """\
missing = "refuse"                 # or true or false, to fill in
""",
}
LABEL = """
[label]
column = {column}
task = "{fill}"                    # binary, multiclass, ordinal, regression, count or survival
# binary, multiclass:  classes = ["no", "yes"], and perhaps weights = [0.25, 1], public; keep the largest at 1, or the clip undoes them
# ordinal:             classes = ["none", "mild", "severe"], three or more, in order
# count:               most = 20, the public largest count; larger ones are clipped to it
# regression:          range = [0, 30], and perhaps huber = 3
# survival:            instead of column: time = "months", event = "died", edges = [6, 12, 24, 60], the ends of the time bins
"""  # noqa: E501
README = """\
# A silodp project
- `schema.toml` says what every silo's file holds. It is public and the same everywhere.{todo}
- `silodp.toml` has the settings of a run.
- {model}
{data}
## On one machine, to try it
    silodp train --project . --held-out 0.2
    silodp evaluate runs/train
    silodp report runs/train

## Over a network engine, each silo a process of its own
    silodp federation up --project . --engine flower --held-out 0.2
    silodp federation run --project .
    silodp federation evaluate --project .
    silodp federation down --folder federation

## In earnest, each silo on its own machine
The server's operator makes a key and sends its public half, `schema.toml` and the model to the silos:

    silodp federation key asker.key

Each silo's operator reads them, and then:

    silodp silo init gate --data OWN.csv --schema schema.toml --model {word} --epsilon 10 --asker PUBLIC_KEY
    silodp silo serve gate/policy.toml

and hands gate/silo.json back. The deployment guide has the rest.
"""  # noqa: E501
MADE_UP = """- `data/` has four hospitals and a test file, **made up from a formula: nobody's records**.
"""  # noqa: E501


def use_project(context: typer.Context, folder: Path | None) -> Path | None:
    """Makes the project's settings the defaults of the command at hand, so that an option on the
    command line still wins.
    """
    if folder is None:
        return None
    settings = read_project(folder)
    own = {parameter.name for parameter in context.command.params}
    budget = settings.pop("budget", None)
    if context.info_name == "up":
        context.meta[SPEND] = settings.get("epsilon")
        if budget is not None:
            settings["epsilon"] = budget
        else:
            settings["epsilon"] = settings.get("epsilon")
        settings |= {"folder": str(folder / "federation")}
    elif context.info_name in ("run", "evaluate", "propose"):
        settings |= {"folder": str(folder / "federation")}
    if context.info_name == "run" and ".py:" not in settings.get("model", ""):
        settings.pop(
            "model", None
        )  # the silos approve the model, and may have approved another since
    if context.info_name == "evaluate":
        settings.pop("epsilon", None)  # that is what a run may spend, and scoring one is not a run
    for name in ("epsilon", "delta"):
        if context.info_name in ("train", "run") and name in settings:
            settings[name] = [str(settings[name])]
    known = {name: value for name, value in settings.items() if name in own and value is not None}
    context.default_map = known | context.meta.get(
        SAID, {}
    )  # what --settings has said, whichever of the two options came first
    return folder


def use_settings(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the file's settings the defaults of the command at hand, before those of a project."""
    if path is None:
        return None
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        raise BadInput(
            f"the settings {path} cannot be read; `silodp plan --advise --write {path}` "
            "makes such a file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"the settings {path} are not TOML: {error}") from None
    if unknown := [name for name in table if name not in ORDER]:
        raise BadInput(
            f"{path}: the setting {unknown[0]!r} is unknown; the settings are {', '.join(ORDER)}"
        )
    own = {parameter.name for parameter in context.command.params}
    listed = {
        name: [str(v) for v in (value if isinstance(value, list) else [value])]
        for name, value in table.items()
        if name in MANY
    }
    context.meta[SAID] = said = {
        name: value for name, value in {**table, **listed}.items() if name in own
    }
    context.default_map = {**(context.default_map or {}), **said}
    return path


SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        help=(
            "A TOML file of options, such as `plan --advise --write` makes; those on the "
            "command line win."
        ),
        is_eager=True,
        callback=use_settings,
    ),
]


Project = Annotated[
    Path | None,
    typer.Option(
        help=(
            "A folder made by `silodp init`: options that are not given come from its silodp.toml."
        ),
        is_eager=True,
        callback=use_project,
    ),
]


def read_project(folder: Path) -> dict[str, Any]:
    """The settings in a project's folder, its paths made absolute."""
    try:
        table = tomllib.loads((folder / FILE).read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        raise BadInput(
            f"{folder} has no {FILE} that can be read; `silodp init {folder}` makes one"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{folder / FILE} is not TOML: {error}") from None
    known = (
        "algorithm",
        "anchor_share",
        "budget",
        "clip",
        "delta",
        "engine",
        "epsilon",
        "inner",
        "kappa",
        "local_steps",
        "model",
        "momentum",
        "output",
        "participation",
        "phase",
        "prox",
        "restarts",
        "rounds",
        "sampling",
        "schema",
        "silo",
        "slope",
        "step",
        "test",
        "weights",
    )
    for name in table:
        if name not in known:
            raise BadInput(
                f"{folder / FILE}: the setting {name!r} is unknown; the settings are "
                f"{', '.join(known)}"
            )
    for name in PATHS:
        if name in table and not (
            isinstance(table[name], str) or (name == "silo" and isinstance(table[name], list))
        ):
            raise BadInput(
                f"{folder / FILE}: {name} is {table[name]!r}; it must be a "
                f"text{', or a list of them' if name == 'silo' else ''}"
            )
    inside = folder.resolve()
    found = table | {
        name: str(inside / table[name]) for name in ("schema", "test") if name in table
    }
    if "silo" in table:
        found["silo"] = [
            str(inside / str(path))
            for path in ([table["silo"]] if isinstance(table["silo"], str) else table["silo"])
        ]
    if ".py:" in table.get("model", ""):
        found["model"] = str(inside / table["model"])
    return found


def init(
    folder: Annotated[
        Path,
        typer.Argument(help="The project's folder; made if it is not there.", show_default=False),
    ],
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help=(
                "A silo's file, whose header has the names given by --type, --columns and "
                "--label; only these are written."
            ),
        ),
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            help=(
                "COLUMN=number, category, boolean, person or ignore, from what is known; may "
                "be repeated."
            ),
        ),
    ] = None,
    columns: Annotated[
        str,
        typer.Option(
            help="More columns of the file, such as age,sex, whose types are filled in later."
        ),
    ] = "",
    label: Annotated[str | None, typer.Option(help="The column that is to be predicted.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=(
                "linear, logistic, additive:KNOTS, mlp, mlp:HIDDEN, cnn, or own for a "
                "model.py; chosen by default."
            )
        ),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="With four made-up hospitals, to try everything on.")
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            help=(
                "Other people in the made-up hospitals: those of one seed have one budget on a "
                "machine."
            )
        ),
    ] = 0,
    template: Annotated[
        str | None, typer.Option(help="A whole schema to start from: omop or fhir.")
    ] = None,
    ask: Annotated[
        bool | None,
        typer.Option(
            "--ask/--yes",
            help=(
                "Ask for all that the schema needs, or leave a draft to fill in; a terminal is "
                "asked."
            ),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Start a project: silodp.toml, schema.toml and a README with the next commands. Writes over
    nothing.

    Examples: `silodp init trial --demo` · `silodp init study --from clinic.csv --type age=number
    --type id=ignore --label outcome` · `silodp init study --template omop`
    """
    if demo and (source or types or label):
        raise BadInput(
            "--demo comes with a schema of its own; leave out --from, --type and --label"
        )
    if seed < 0:
        raise BadInput(f"seed is {seed}; it must be 0 or more")
    word = {None: "", "own": "model.py:build", "mlp": "mlp:16"}.get(model, model or "")
    if model is not None and not re.fullmatch(
        r"model\.py:build|linear|logistic|cnn|(additive|mlp):[1-9]\d*", word
    ):
        raise BadInput(
            f"model {model!r} is unknown; use linear, logistic, additive:KNOTS, mlp, "
            "mlp:HIDDEN or cnn, own for a model.py, or leave it out: then it is chosen"
        )
    files = {"schema.toml": "", "README.md": _readme(word, demo)}
    left_out = 0
    own = []
    if template and (demo or source or types or label or template not in TEMPLATES):
        raise BadInput(
            f"--template is {template!r}; it must be one of {', '.join(TEMPLATES)}, "
            "without --demo, --from, --type and --label"
        )
    asks = not (demo or template) and (
        ask if ask is not None else sys.stdin.isatty() and not as_json
    )
    if demo:
        from silodp.silo.data import demo as made_up

        files["schema.toml"] = made_up.SCHEMA
        files |= {
            f"data/{name}.csv": made_up.csv_text(name, seed)
            for name in (*made_up.HOSPITALS, "test")
        }
    elif template:
        files["schema.toml"] = TEMPLATES[template]
    else:
        said = dict(map(_typed, types or ()))
        known = [
            *said,
            *(name.strip() for name in columns.split(",") if name.strip()),
            *([label] if label else []),
        ]
        form = _form(source)
        names, left_out = _names(source, known, form, asks=asks)
        if asks:
            files["schema.toml"] = schema_text(form | ask_schema(names, said, label))
            left_out = 0
            own = [os.path.relpath(path, folder.resolve()) for path in ask_silos()]
        else:
            files["schema.toml"] = draft(names, said, label, form)
    silos = ", ".join(
        json.dumps(name)
        for name in own or [n for n in files if n.startswith("data/") and n != "data/test.csv"]
    )
    if demo:
        test = (
            "# Scored in the clear, as it is nobody's; leave it out with real records.\ntest "
            '= "data/test.csv"\n'
        )
    else:
        test = ""
    files[FILE] = SETTINGS.format(
        silos=silos, test=test, model=f'model = "{word}"\n' if word else ""
    )
    if word == "model.py:build":
        files["model.py"] = MODEL
    with new_files(folder, files, mode=0o700):
        pass
    if as_json:
        return dump(
            {
                "folder": str(folder),
                "files": sorted(files),
                "draft": not (demo or template or asks),
                "columns_left_out": left_out,
            }
        )
    if left_out:
        say(
            f"Columns of {source} that were not named, and are not in the draft: "
            f"{left_out}. Add them by --type or --columns, or by hand."
        )
    say(f"Wrote {', '.join(sorted(files))} in {folder}.")
    if "person" not in dict(map(_typed, types or ())).values():
        say(BY_ROW)
    if demo:
        return say(
            f"The hospitals are made up: nobody's records. Next: silodp train --project {folder}"
        )
    if template or asks:
        if own:
            listed = ""
        else:
            listed = f"List the silos' files in {folder / FILE}. "
        return say(
            f"{listed}Next, at each silo: silodp silo check FILE --schema {folder / 'schema.toml'}",
            f"Then: silodp train --project {folder}",
        )
    say(
        (
            "schema.toml is a draft: fill in types, ranges, categories and the task from "
            "public knowledge. Nothing of them was, or may be, read "
            "off the data."
        ),
        f"Then list the silos' files in {folder / FILE}, and: silodp train --project {folder}",
    )


def draft(
    names: list[str], types: dict[str, str], label: str | None, form: dict[str, str] | None = None
) -> str:
    """A schema.toml with these columns, to be filled in; it holds names and what the user said, and
    no value of any record.
    """
    ignored, people = (
        [name for name in names if types.get(name) == kind] for kind in ("ignore", "person")
    )
    if len(people) > 1:
        raise BadInput(
            f"--type names {people[0]!r} and {people[1]!r} as the person; one column says "
            "whose a row is"
        )
    if people:
        person = PERSON.format(column=json.dumps(people[0], ensure_ascii=False))
    else:
        person = NOBODY
    said = (
        "# The names below were given by hand, and are in one file's header; nothing of that "
        "file was copied.\n"
    )
    written = "".join(f"{name} = {toml(value)}\n" for name, value in (form or {}).items())
    lines = [
        DRAFT.format(
            source=f"#\n{said}" if names else "",
            ignore=", ".join(map(json.dumps, ignored)),
            person=written + person,
        )
    ]
    for name in [name for name in names if name not in (*ignored, *people, label)] or ["NAME"]:
        kind = types.get(name, "")
        if kind:
            first = f'type = "{kind}"'
        else:
            first = f'type = "{FILL_IN}"                   # number, category or boolean; then, for'
        lines.append(f"[columns.{json.dumps(name, ensure_ascii=False)}]\n{first}\n{COLUMN[kind]}")
    return "\n".join(lines) + LABEL.format(
        column=json.dumps(label or FILL_IN, ensure_ascii=False), fill=FILL_IN
    )


def _form(source: Path | None) -> dict[str, str]:
    """How the file is written, as its header shows, where that is not as by default: the schema
    says so, for every silo's own copy to change.
    """
    from silodp.silo.data.files import form_of

    if source:
        return {
            name: value
            for name, value in asdict(form_of(source)).items()
            if value != getattr(Form(), name)
        }
    return {}


def _names(
    source: Path | None, known: list[str], form: dict[str, str], *, asks: bool = False
) -> tuple[list[str], int]:
    """The names that the user gave, in the header's order, and how many others there are. No other
    goes into the draft, which is public, or into a sentence: what stands first in a file without a
    header is a record."""
    if source is None:
        if known and not asks:
            raise BadInput(
                f"--type, --columns and --label name columns of a file, here {known[0]!r}; "
                "give --from FILE, which has them"
            )
        return known, 0
    from silodp.silo.data.files import header

    names = header(source, Form(**form))
    if any(
        re.fullmatch(r"[-+.\d][-+.,\d]*(e[-+]?\d+)?", name, re.IGNORECASE) or not name
        for name in names
    ):
        raise BadInput(
            f"{source} seems to have no header, for a column has a number or nothing for a "
            "name; give each column a name"
        )
    if not known and not asks:
        raise BadInput(
            f"name the columns of {source} by --type or --columns, and --label: its first "
            "line may be a record, and is not copied"
        )
    for name in known:
        if name not in names:
            raise BadInput(
                f"{source} has no column {name!r} in its first line; is that line a header "
                "of names, separated by commas?"
            )
    return names if asks else [name for name in names if name in known], len(
        set(names) - set(known)
    )


def _typed(word: str) -> tuple[str, str]:
    name, _, kind = word.rpartition("=")
    kinds = (*TYPES, "person", "ignore")
    if not name or kind not in kinds:
        raise BadInput(f"--type is {word!r}; it must be COLUMN={', COLUMN='.join(kinds)}")
    return name, kind


def _readme(word: str, demo: bool) -> str:
    if word == "model.py:build":
        own = "`model.py` has the model, in plain PyTorch."
    elif word:
        own = f"The model is `{word}`, by name."
    else:
        own = (
            "The model is chosen from public facts when you train; `silodp plan --advise "
            "--schema schema.toml --records ...` shows it beforehand."
        )
    if demo:
        todo = ""
    else:
        todo = " **Fill it in first, from public knowledge.**"
    return README.format(model=own, word=word or "MODEL", todo=todo, data=MADE_UP if demo else "")
