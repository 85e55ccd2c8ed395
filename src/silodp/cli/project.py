"""`silodp init`: a folder with a run's settings, the public schema, a model and the next commands.
Also --project, which reads it.
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
from silodp.cli.questions import ask_project
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
"""Keys of a command's context: the options of --settings, and a project's epsilon for one run."""
PATHS = ("schema", "silo", "test", "model")
FILL_IN = "fill in"

SETTINGS = """\
# Settings of this project. `silodp train --project .`, `silodp federation up --project .` and `silodp federation run --project .`
# take every option from here that is not on the command line. Paths are relative to this folder.

schema = "schema.toml"
# One file, or folder of images, for each silo, for trials on one machine. In a real deployment each silo keeps its own file.
silo = [{silos}]
{test}{model}# Model, algorithm, rounds, step, clip and weights are chosen from public facts: sizes, columns and budgets.
# `silodp plan --advise` shows the choice. To set them yourself, add lines such as:
# algorithm = "mb-sgd", rounds = 40, step = 2.0, clip = 1.0, weights = "records".

prox = "zero"                      # or a penalty: l1:0.01, squared-l2:0.1, ...

epsilon = 3.0                      # epsilon that one run may spend, for each record
budget = 10.0                      # epsilon that a silo's ledger allows in total, for all runs (federation up)
"""  # noqa: E501
MODEL = '''\
"""The model, in plain PyTorch. It processes one record at a time, so it has no BatchNorm and no dropout. Silos approve the hash of this file."""

from torch import nn


def build(features: int, outputs: int) -> nn.Module:
    """Return the model. `features` and `outputs` follow from schema.toml, and the loss from its task."""
    return nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, outputs))
'''  # noqa: E501
DRAFT = """\
# The public schema: the columns of every silo's file, and the label to predict. The server and all silos use this same file. Silos
# approve its hash.
#
# FILL IT IN FROM PUBLIC KNOWLEDGE, NEVER FROM THE DATA. A range or a category that was read from the records reveals something about
# them, and no budget pays for that. Write what the column can contain, not what it does contain.
{source}
ignore = [{ignore}]                # other columns that a file may have; they are not used
{person}"""  # noqa: E501
PERSON = """\
person = {column}                  # all rows with the same value in this column are one person; epsilon protects persons, not rows
rows_per_person = 8                # public: the most rows used of one person, the first in the file
combine = "mean"                   # of the losses of a person's rows; "sum" for survival in long form, with one row for each period
"""  # noqa: E501
NO_PERSON = """\
# person = "patient_id"            # the column that identifies the person, if a person can have several rows; without it privacy is per row
"""  # noqa: E501
COLUMN = {
    "": """\
# a number:    range = [0, 100], and perhaps missing = 50 with indicator = true
# a category:  categories = ["a", "b", "other"], and perhaps missing = "own"
# a boolean:   perhaps missing = false with indicator = true
""",
    "number": """\
range = ["fill in", "fill in"]     # public: lowest and highest possible value; values are clipped to them
missing = "refuse"                 # or a public number to fill in, with indicator = true for a feature that marks missing values
""",  # noqa: E501
    "category": """\
# aliases = {F = "female"}         # other spellings, and their categories
categories = "fill in"             # public, such as ["a", "b", "other"]; "other" is for all values not in the list
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
# binary, multiclass:  classes = ["no", "yes"], and perhaps public weights = [0.25, 1]; the largest must be 1, or the clip cancels them
# binary:              perhaps positive = 0.12, a public estimate of the share of the second class, not from the data
# ordinal:             classes = ["none", "mild", "severe"], three or more, in order
# count:               most = 20, the public largest count; larger ones are clipped to it
# regression:          range = [0, 30], and perhaps huber = 3
# survival:            instead of column: time = "months", event = "died", edges = [6, 12, 24, 60] (the ends of the time bins)
"""  # noqa: E501
README = """\
# A silodp project
- `schema.toml` describes every silo's file. It is public, and equal at all silos.{todo}
- `silodp.toml` has the settings of a run.
- {model}
{data}
## Try it on one machine
    silodp train --project . --held-out 0.2
    silodp evaluate runs/train
    silodp report runs/train

## Try it over a network engine, each silo a separate process
    silodp federation up --project . --engine flower --held-out 0.2
    silodp federation run --project .
    silodp federation evaluate --project .
    silodp federation down --folder federation

## Deploy it, each silo on its own machine
The server's operator creates a key. The silos get its public half, `schema.toml` and the model:

    silodp federation key asker.key

Each silo's operator reads them, and then runs:

    silodp silo init gate --data OWN.csv --schema schema.toml --model {word} --epsilon 10 --asker PUBLIC_KEY
    silodp silo serve gate/policy.toml

Each operator sends gate/silo.json back to the server's operator. The deployment guide describes the rest.
"""  # noqa: E501
MADE_UP = """- `data/` has four hospitals and a test file. **A formula made these records: they belong to no person.**
"""  # noqa: E501


def use_project(context: typer.Context, folder: Path | None) -> Path | None:
    """Make the project's settings the defaults of the current command. An option on the command
    line wins.
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
        # The silos approve the model, and may have approved another one since.
        settings.pop("model", None)
    if context.info_name == "evaluate":
        settings.pop("epsilon", None)  # It is the epsilon of a run, not of an evaluation.
    for name in ("epsilon", "delta"):
        if context.info_name in ("train", "run") and name in settings:
            settings[name] = [str(settings[name])]
    known = {name: value for name, value in settings.items() if name in own and value is not None}
    # The options of --settings win, whichever of the two options came first.
    context.default_map = known | context.meta.get(SAID, {})
    return folder


def use_settings(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's settings the defaults of the current command. They win over those of a
    project.
    """
    if path is None:
        return None
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        raise BadInput(
            f"the settings {path} cannot be read; `silodp plan --advise --write {path}` "
            "writes such a file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"the settings {path} are not TOML: {error}") from None
    if unknown := [name for name in table if name not in ORDER]:
        raise BadInput(
            f"{path}: the setting {unknown[0]!r} is unknown; the settings are {', '.join(ORDER)}"
        )
    own = {parameter.name for parameter in context.command.params}
    given = {}
    for name, value in table.items():
        if name not in own:
            continue
        if name in MANY:
            value = [str(one) for one in _as_list(value)]
        given[name] = value
    context.meta[SAID] = given
    context.default_map = {**(context.default_map or {}), **given}
    return path


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [value]


SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        help=(
            "A TOML file of options, as `plan --advise --write` writes it. Options on "
            "the command line win."
        ),
        is_eager=True,
        callback=use_settings,
    ),
]


Project = Annotated[
    Path | None,
    typer.Option(
        help=(
            "A folder made by `silodp init`. Its silodp.toml sets the options that are not given."
        ),
        is_eager=True,
        callback=use_project,
    ),
]


def read_project(folder: Path) -> dict[str, Any]:
    """Read the settings in a project's folder, with absolute paths. Raise BadInput if they cannot
    be read.
    """
    try:
        table = tomllib.loads((folder / FILE).read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        raise BadInput(
            f"{folder} has no readable {FILE}; `silodp init {folder}` creates one"
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
            wanted = "a text"
            if name == "silo":
                wanted = "a text or a list of texts"
            raise BadInput(f"{folder / FILE}: {name} is {table[name]!r}; it must be {wanted}")
    inside = folder.resolve()
    found = table | {
        name: str(inside / table[name]) for name in ("schema", "test") if name in table
    }
    if "silo" in table:
        found["silo"] = [str(inside / str(path)) for path in _as_list(table["silo"])]
    if ".py:" in table.get("model", ""):
        found["model"] = str(inside / table["model"])
    return found


def init(
    folder: Annotated[
        Path,
        typer.Argument(help="The project's folder; created if missing.", show_default=False),
    ],
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help=(
                "A silo's file. Only the names given by --type, --columns and --label "
                "are copied from its header."
            ),
        ),
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            help=(
                "COLUMN=number, category, boolean, person or ignore, from public "
                "knowledge; may be repeated."
            ),
        ),
    ] = None,
    columns: Annotated[
        str,
        typer.Option(help="More columns of the file, such as age,sex. Fill in their types later."),
    ] = "",
    label: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=(
                "linear, logistic, additive:KNOTS, mlp, mlp:HIDDEN, cnn, or own for a "
                "model.py. By default it is chosen when you train."
            )
        ),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Add four made-up hospitals, for trials.")
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            help=(
                "Seed of the made-up hospitals. On one machine, the people of one seed "
                "share one budget."
            )
        ),
    ] = 0,
    template: Annotated[
        str | None, typer.Option(help="A complete schema to start from: omop or fhir.")
    ] = None,
    ask: Annotated[
        bool | None,
        typer.Option(
            "--ask/--yes",
            help=(
                "Ask for everything that the schema needs, or write a draft to fill "
                "in. By default a terminal is asked."
            ),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Start a project: silodp.toml, schema.toml and a README with the next commands. Existing files
    are not overwritten.

    Examples: `silodp init trial --demo` · `silodp init study --from clinic.csv --type age=number
    --type id=ignore --label outcome` · `silodp init study --template omop`
    """
    if demo and (source or types or label):
        raise BadInput("--demo has its own schema; leave out --from, --type and --label")
    if seed < 0:
        raise BadInput(f"seed is {seed}; it must be 0 or more")
    word = {None: "", "own": "model.py:build", "mlp": "mlp:16"}.get(model, model or "")
    if model is not None and not re.fullmatch(
        r"model\.py:build|linear|logistic|cnn|(additive|mlp):[1-9]\d*", word
    ):
        raise BadInput(
            f"model {model!r} is unknown; use linear, logistic, additive:KNOTS, mlp, "
            "mlp:HIDDEN, cnn, or own for a model.py. Without it the model is chosen "
            "when you train"
        )
    files = {"schema.toml": "", "README.md": _readme(word, demo)}
    left_out = 0
    own = []
    if template and (demo or source or types or label or template not in TEMPLATES):
        raise BadInput(
            f"--template is {template!r}; it must be one of {', '.join(TEMPLATES)}, "
            "without --demo, --from, --type and --label"
        )
    if ask is None:
        ask = sys.stdin.isatty() and not as_json
    asks = bool(ask and not demo and not template)
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
        given_types = dict(map(_typed, types or ()))
        known = [
            *given_types,
            *(name.strip() for name in columns.split(",") if name.strip()),
            *([label] if label else []),
        ]
        form = _form(source)
        names, left_out = _names(source, known, form, asks=asks)
        if asks:
            answers, paths = ask_project(names, given_types, label)
            files["schema.toml"] = schema_text(form | answers)
            left_out = 0
            own = [os.path.relpath(path, folder.resolve()) for path in paths]
        else:
            files["schema.toml"] = draft(names, given_types, label, form)
    silos = ", ".join(
        json.dumps(name)
        for name in own or [n for n in files if n.startswith("data/") and n != "data/test.csv"]
    )
    test = ""
    if demo:
        test = (
            "# This file is scored without privacy, because it belongs to no person. Remove it for "
            'real records.\ntest = "data/test.csv"\n'
        )
    model_line = ""
    if word:
        model_line = f'model = "{word}"\n'
    files[FILE] = SETTINGS.format(silos=silos, test=test, model=model_line)
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
            f"{left_out} columns of {source} were not named and are not in the draft. "
            "Add them by --type or --columns, or by hand."
        )
    say(f"Wrote {', '.join(sorted(files))} in {folder}.")
    if "person" not in dict(map(_typed, types or ())).values():
        say(BY_ROW)
    if demo:
        return say(
            "The hospitals are made up and contain no real records. Next: silodp train "
            f"--project {folder}"
        )
    if template or asks:
        listed = ""
        if not own:
            listed = f"List the silos' files in {folder / FILE}. "
        return say(
            f"{listed}Next, at each silo: silodp silo check FILE --schema {folder / 'schema.toml'}",
            f"Then: silodp train --project {folder}",
        )
    say(
        (
            "schema.toml is a draft. Fill in types, ranges, categories and the task "
            "from public knowledge, never from the data."
        ),
        f"Then list the silos' files in {folder / FILE}, and: silodp train --project {folder}",
    )


def draft(
    names: list[str], types: dict[str, str], label: str | None, form: dict[str, str] | None = None
) -> str:
    """Return a schema.toml with these columns, to be filled in. It contains names and the user's
    words, but no value of any record. Raise BadInput if two columns identify the person.
    """
    ignored, people = (
        [name for name in names if types.get(name) == kind] for kind in ("ignore", "person")
    )
    if len(people) > 1:
        raise BadInput(
            f"--type names {people[0]!r} and {people[1]!r} as the person; give only one such column"
        )
    if people:
        person = PERSON.format(column=json.dumps(people[0], ensure_ascii=False))
    else:
        person = NO_PERSON
    heading = ""
    if names:
        heading = (
            "#\n# The names below were given by hand and are in one file's header. Nothing else "
            "was copied from that file.\n"
        )
    written = "".join(f"{name} = {toml(value)}\n" for name, value in (form or {}).items())
    lines = [
        DRAFT.format(
            source=heading,
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
    """Return the format of the file as its header shows it, where it differs from the default.

    The schema contains it, so that each silo can change its own copy.
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
    """Return the names that the user gave, in the header's order, and the number of other columns.

    No other name enters the public draft or a sentence: the first line of a file without a header
    is a record. Raise BadInput for names that the header does not have.
    """
    if source is None:
        if known and not asks:
            raise BadInput(
                "--type, --columns and --label name columns of a file, here "
                f"{known[0]!r}; give that file with --from FILE"
            )
        return known, 0
    from silodp.silo.data.files import header

    names = header(source, Form(**form))
    if any(
        re.fullmatch(r"[-+.\d][-+.,\d]*(e[-+]?\d+)?", name, re.IGNORECASE) or not name
        for name in names
    ):
        raise BadInput(
            f"{source} seems to have no header: a column's name is a number or empty; "
            "give each column a name"
        )
    if not known and not asks:
        raise BadInput(
            f"no columns of {source} are named; name them by --type or --columns, and "
            "--label. The first line is not copied, because it may be a record"
        )
    for name in known:
        if name not in names:
            raise BadInput(
                f"{source} has no column {name!r} in its first line; is that line a header "
                "of names, separated by commas?"
            )
    left_out = len(set(names) - set(known))
    if not asks:
        names = [name for name in names if name in known]
    return names, left_out


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
            "The model is chosen from public facts when you train. `silodp plan "
            "--advise --schema schema.toml --records ...` shows the choice before."
        )
    if demo:
        return README.format(model=own, word=word or "MODEL", todo="", data=MADE_UP)
    todo = " **Fill it in first, from public knowledge.**"
    return README.format(model=own, word=word or "MODEL", todo=todo, data="")
