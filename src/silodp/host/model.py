"""Open a trained model's file: its parameters, and the public facts needed to use them.

A model that was made by a FILE.py needs that file again. The file is never taken from the model's
folder, since that would run a stranger's code. The person who starts the program names a copy,
which must have the hash of the file used in training.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.extension import is_file, parse
from silodp.core.features.feature_map import feature_map
from silodp.core.problem.build import Words, build
from silodp.core.problem.reading import Reading, plain_schema
from silodp.core.problem.schema import Schema
from silodp.host.extension import file_hash, load

FILE = "model.safetensors"
PERSONAL = "personal"
"""Fact in a model's file: the silo to whose records it was fitted without noise. Such a model may
not leave that silo.
"""
CODE = ("model", "feature_map")
"""Facts that may be FILE.py:NAME."""


@dataclass(frozen=True)
class Stored:
    """A model that is ready to use. `about` contains the facts in its file."""

    reading: Reading
    schema: Schema
    about: dict[str, str]
    path: Path

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the model's file."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def contents(given: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the facts in a model's file, and its tensors, without checking them."""
    with _opened(given) as (_, file):
        return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _file_of(given: Path) -> Path:
    """Return the model's file for a run's folder, or for the file itself."""
    if given.is_dir():
        return given / FILE
    return given


@contextlib.contextmanager
def _opened(given: Path) -> Iterator[tuple[Path, Any]]:
    path = _file_of(given)
    try:
        with safe_open(path, "pt") as file:
            yield path, file
    except (OSError, SafetensorError):
        raise BadInput(
            f"{given} has no {FILE} that can be read; give a finished run's folder, or the "
            "file itself"
        ) from None


def refuse_personal(path: Path, about: Mapping[str, str]) -> None:
    """Raise BadInput if the model was fitted to a silo's own records.

    A query with such a model, or a result made of it, would reveal those records.
    """
    if PERSONAL in about:
        raise BadInput(
            f"{path} is the personal model of {about[PERSONAL]}: it is not private and may "
            "not leave that silo; `silodp predict` uses it there"
        )


def open_model(
    given: Path, code: dict[str, str | None] | None = None, *, personal: bool = False
) -> Stored:
    """Return the model in a run's folder or in a file. Raise BadInput if it cannot be used.

    `code` has this user's own copies of what was FILE.py:NAME in training. A model that was fitted
    to a silo's own records is not private. It is opened only with `personal`, by a caller that
    keeps it at the silo.
    """
    path = _file_of(given)
    about, tensors = contents(given)
    if not personal:
        refuse_personal(path, about)
    if "schema" not in about and "plain" not in about:
        raise BadInput(
            f"{path} does not list the columns that it reads: an older version, or another "
            "program, wrote it; train again"
        )
    words = {what: _own_copy(what, about, (code or {}).get(what)) for what in CODE}
    try:
        # In training too, a silo's file without a schema has plain numbers and a task.
        if "schema" in about:
            schema = Schema.parse(about["schema"], str(path))
            schema_or_task = schema
        else:
            schema = plain_schema(**json.loads(about["plain"]))
            schema_or_task = schema.task
        raw = len(schema.features)
        if words["feature_map"]:
            mapped = feature_map(words["feature_map"], load, schema.shape)
            width = mapped.width(raw)
        else:
            mapped = None
            width = raw
        # Loss and prox are for training only.
        problem = build(
            Words(words["model"], schema_or_task, features=words["feature_map"]), raw, load=load
        )
        w = torch.cat([tensors[name].flatten() for name in problem.shapes])[None]
        scaling = (
            tensors.get("scaling.mean", torch.zeros(width)),
            tensors.get("scaling.scale", torch.ones(width)),
        )
        if about.get("loss"):
            # The class weights of the schema had no part in a loss of the user's own.
            schema = replace(schema, label=replace(schema.label, weights=()))
        return Stored(Reading(schema, problem, w, scaling, mapped), schema, about, path)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(
            f"{path} is incomplete or damaged ({type(error).__name__}); give the file as "
            "training wrote it"
        ) from None


def about_of(given: Path) -> dict[str, str]:
    """Return the facts in a model's file, and its hash, without building the model.

    Cards and archives are made of them. Raise BadInput for a model that may not leave its silo.
    """
    with _opened(given) as (path, file):
        about = dict(file.metadata() or {})
        refuse_personal(path, about)
        return about | {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def facts(**words: str) -> dict[str, str]:
    """Return the facts for a model's file: each word, without empty ones.

    For FILE.py:NAME these are the file's name without its folder, and its hash.
    """
    facts_by_name: dict[str, str] = {}
    for what, text in words.items():
        if not text:
            continue
        if is_file(text):
            path = parse(text)[0]
            facts_by_name[what] = f"{Path(path).name}{text[len(path) :]}"
            facts_by_name[f"{what}_sha256"] = file_hash(text)
        else:
            facts_by_name[what] = text
    return facts_by_name


def _own_copy(what: str, about: dict[str, str], given: str | None) -> str:
    """Return the word to build by, which for FILE.py:NAME is the user's own copy.

    Raise BadInput unless that copy is given and has the hash of the file used in training.
    """
    word = about.get(what, "")
    option = "--" + what.replace("_", "-")
    if not is_file(word):
        return word
    if not given or not is_file(given):
        raise BadInput(
            f"the {what.replace('_', ' ')} is {word}, which is code; give your own copy of "
            f"that file: {option} {word}"
        )
    if file_hash(given) != about.get(f"{what}_sha256"):
        path = parse(given)[0]
        raise BadInput(
            f"{path} is not the file with which the model was trained: its SHA-256 "
            f"differs; give {option} {word} as it was then"
        )
    return given
