"""Opens a trained model's file: the parameters, and what is needed to use them on rows of columns,
all of it public.

A model that was made by a FILE.py needs that file again. It is never taken from where the model
lies, since running a stranger's folder would be running a stranger's code: whoever starts the
program names a copy, which must have the hash that was trained with.
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
"""In a model's file: the silo to whose records it was fitted without noise. Such a model may not
leave that silo.
"""
CODE = ("model", "feature_map")
"""What may be FILE.py:NAME."""


@dataclass(frozen=True)
class Stored:
    """A model that is ready to use. `about` is what its file says of it."""

    reading: Reading
    schema: Schema
    about: dict[str, str]
    path: Path

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def contents(given: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What the model's file says of itself, and its tensors, whatever they are."""
    with _opened(given) as (_, file):
        return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@contextlib.contextmanager
def _opened(given: Path) -> Iterator[tuple[Path, Any]]:
    path = given / FILE if given.is_dir() else given
    try:
        with safe_open(path, "pt") as file:
            yield path, file
    except (OSError, SafetensorError):
        raise BadInput(
            f"{given} has no {FILE} that can be read; give a finished run's folder, or the "
            "file itself"
        ) from None


def refuse_personal(path: Path, about: Mapping[str, str]) -> None:
    """BadInput where the model was fitted to a silo's own records: whatever is asked with it, or
    made of it, would carry it out.
    """
    if PERSONAL in about:
        raise BadInput(
            f"{path} is the personal model of {about[PERSONAL]}: it is not private and may "
            "not leave that silo; `silodp predict` uses it there"
        )


def open_model(
    given: Path, code: dict[str, str | None] | None = None, *, personal: bool = False
) -> Stored:
    """The model in a run's folder, or in its file; `code` has this user's own copies of what was
    FILE.py:NAME.

    One that was fitted to a silo's own records is not private: it is opened only for who says that
    it stays there.
    """
    path, (about, tensors) = given / FILE if given.is_dir() else given, contents(given)
    if not personal:
        refuse_personal(path, about)
    if "schema" not in about and "plain" not in about:
        raise BadInput(
            f"{path} does not say which columns it reads: it is of an older version, or of "
            "another program; train again"
        )
    own = {what: _own_copy(what, about, (code or {}).get(what)) for what in CODE}
    try:
        if "schema" in about:
            schema = Schema.parse(about["schema"], str(path))
        else:
            schema = plain_schema(**json.loads(about["plain"]))
        raw = len(schema.features)
        if own["feature_map"]:
            mapped = feature_map(own["feature_map"], load, schema.shape)
        else:
            mapped = None
        known = (
            schema if "schema" in about else schema.task
        )  # as in training, where a file without a schema has plain numbers
        problem = build(
            Words(own["model"], known, features=own["feature_map"]), raw, load=load
        )  # loss and prox are for training alone
        w = torch.cat([tensors[name].flatten() for name in problem.shapes])[None]
        width = mapped.width(raw) if mapped else raw
        scaling = (
            tensors.get("scaling.mean", torch.zeros(width)),
            tensors.get("scaling.scale", torch.ones(width)),
        )
        if about.get("loss"):  # in whose place the weights had no part
            schema = replace(schema, label=replace(schema.label, weights=()))
        return Stored(Reading(schema, problem, w, scaling, mapped), schema, about, path)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(
            f"{path} is not whole ({type(error).__name__}); give the file as training wrote it"
        ) from None


def about_of(given: Path) -> dict[str, str]:
    """What a model's file says of itself, and its hash, without building anything."""
    with _opened(given) as (path, file):
        return dict(file.metadata() or {}) | {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest()
        }


def facts(**words: str) -> dict[str, str]:
    """For a model's file: each word and, where it is FILE.py:NAME, the file's own name and hash:
    where it lay is nobody's business.
    """
    found: dict[str, Any] = {}
    for what, text in words.items():
        if not text:
            continue
        if is_file(text):
            found[what] = f"{Path(parse(text)[0]).name}{text[len(parse(text)[0]) :]}"
        else:
            found[what] = text
        if is_file(text):
            found[f"{what}_sha256"] = file_hash(text)
    return found


def _own_copy(what: str, about: dict[str, str], given: str | None) -> str:
    """The word to build by; of FILE.py:NAME the copy that was given, if it is the file that was
    trained with.
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
