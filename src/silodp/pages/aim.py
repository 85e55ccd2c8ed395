"""Say in one line what a run predicts, and from what."""

from __future__ import annotations

import json
from collections.abc import Sequence

from silodp.core.errors import BadInput
from silodp.core.problem.reading import plain_schema
from silodp.core.problem.schema import Label, Schema
from silodp.host.model import about_of
from silodp.pages.runs import Run
from silodp.runs import RunFolder

PLAIN = ("yes", "true", "1", "ja", "oui", "positive")
"""Classes that say no more than the label's own name."""
SHOWN = 2


def aim(run: Run) -> str:
    """Return what is predicted from what, such as "Death within 60 months from age, sex and 6
    more". Return nothing where the run's folder does not tell.
    """
    schema = _schema(run)
    if schema is None:
        return ""
    data = run.about.get("data")
    if data:
        return f"The class in {data} from {len(schema.columns)} features"
    return f"{predicted(schema.label)} from {_sources(schema)}"


def _schema(run: Run) -> Schema | None:
    """Return the schema of the run's model, or of its silos' cards while there is no model."""
    try:
        if RunFolder(run.folder).model.is_file():
            about = about_of(run.folder)
            if "schema" in about:
                return Schema.parse(about["schema"], "the model")
            if "plain" in about:
                return plain_schema(**json.loads(about["plain"]))
        if text := run.about.get("schema_text"):
            return Schema.parse(str(text), "the card")
    except (BadInput, TypeError, ValueError):
        return None
    return None


def predicted(label: Label) -> str:
    """Return what a label is about, in words."""
    if label.task == "survival":
        time, event = label.columns
        words = f"{event} within {label.edges[-1]:g} {time}"
    elif label.task == "binary" and label.classes[1].casefold() not in PLAIN:
        words = label.classes[1]
        if label.columns:
            words = f"{words} ({label.columns[0]})"
    elif label.columns:
        words = label.columns[0]
    else:
        words = "class"
    words = words.replace("_", " ")
    return words[:1].upper() + words[1:]


def _sources(schema: Schema) -> str:
    """Return the first columns by name, and the number of the others."""
    if schema.images:
        return "images"
    names = [column.name.replace("_", " ") for column in schema.columns]
    if len(names) <= SHOWN + 1:
        return _joined(names)
    return f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more"


def _joined(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
