"""Read and write a study: the TOML file that an operator proposes and silos approve.

A study may have files of code beside it. It is public, and a silo trusts nothing in it: the silo
builds what it names, and compares the hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.core.extension import CODE, is_file, parse
from silodp.core.text import STUDY, is_name
from silodp.host.atomic import new_files
from silodp.host.tables import check_line, check_text, check_texts, of_table, read_toml, table_text

COMMENTS = {
    "study": "The study's name, which silos and server show to people.",
    "definition": (
        "SHA-256 of model, loss, prox, constants, schema and torch version: what a silo approves."
    ),
    "model": (
        "linear, logistic, additive:KNOTS, mlp:HIDDEN, cnn, or FILE.py:FUNCTION, beside this file."
    ),
    "model_sha256": 'SHA-256 of that FILE.py; "" for a model by name.',
    "prox": "Penalty or constraint: zero, l1:0.01, l2-ball:5, ..., or FILE.py:NAME:PARAMETERS.",
    "prox_sha256": "SHA-256 of the prox's FILE.py.",
    "loss": 'FILE.py:NAME; "" for the loss of the task.',
    "loss_sha256": "SHA-256 of the loss's FILE.py.",
    "feature_map": (
        'What the model sees of a record: photo:M, digit or FILE.py:NAME; "" for the record itself.'
    ),
    "feature_map_sha256": "SHA-256 of that FILE.py.",
    "schema": (
        'The public schema in its one spelling; "" where silos read plain columns: those stay '
        "as they are."
    ),
    "statistics": "What would be asked; empty for what the silo allows already.",
}
HEAD = "# A study that is proposed to silos. At each: silodp silo approve THIS-FILE policy.toml\n"


@dataclass(frozen=True)
class Study:
    """What is learnt, in words, with the hash of the definition that the words make.

    `read_study` makes one from a file. Every field is checked.
    """

    study: str
    definition: str
    model: str
    prox: str = "zero"
    loss: str = ""
    feature_map: str = ""
    model_sha256: str = ""
    prox_sha256: str = ""
    loss_sha256: str = ""
    feature_map_sha256: str = ""
    schema: str = ""
    statistics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_text(
            "study",
            "study",
            self.study,
            STUDY,
            "1 to 64 letters, digits, dots, underscores or hyphens",
        )
        check_text(
            "study",
            "definition",
            self.definition,
            r"[0-9a-f]{64}",
            "64 lower-case hexadecimal digits",
        )
        for what in CODE:
            self._check_code(what)
        check_texts("study", "statistics", self.statistics)
        for name in self.statistics:
            check_text("study", "statistics", name, r"[A-Za-z]{1,64}", "a list of statistics")

    def _check_code(self, what: str) -> None:
        """Raise BadInput unless the field is a line, and its file has a plain name and a hash."""
        text = getattr(self, what)
        check_line("study", what, text, "a text of one line")
        if is_file(text):
            pattern = r"[0-9a-f]{64}"
        else:
            pattern = ""
        check_text(
            "study",
            f"{what}_sha256",
            getattr(self, f"{what}_sha256"),
            pattern,
            f"the SHA-256 of the {what}'s file, if it is one",
        )
        if not is_file(text):
            return
        path = parse(text)[0]
        if Path(path).name != path:
            raise BadInput(
                f"study: {what} is {text!r}; its file must be in the study's folder, and "
                "be named without a folder"
            )
        if not is_name(path):
            raise BadInput(
                f"study: {what} is {text!r:.100}; the name of its file must have 1 to 200 "
                "visible characters with single spaces between words"
            )

    @property
    def code(self) -> dict[str, str]:
        """Return the names of the files of code, each with its SHA-256."""
        return {
            parse(text)[0]: getattr(self, f"{what}_sha256")
            for what in CODE
            if is_file(text := getattr(self, what))
        }

    def write(self, folder: Path, sources: Mapping[str, bytes]) -> Path:
        """Make STUDY.toml in the folder, and the files of code beside it. Return its path.

        Raise BadInput if a file is in the way. Then no file is new.
        """
        files = {f"{self.study}.toml": HEAD + table_text(asdict(self), COMMENTS)}
        new = {
            name: source for name, source in sources.items() if not _holds(folder / name, source)
        }
        with new_files(folder, files | new):
            pass
        return folder / f"{self.study}.toml"


def _holds(path: Path, source: bytes) -> bool:
    return path.is_file() and path.read_bytes() == source


def read_study(path: Path) -> tuple[Study, dict[str, bytes]]:
    """Return the study in a file, and the bytes of its code, without running any.

    Raise BadInput unless each file of code has the hash that the study names.
    """
    study = of_table("study", Study, read_toml("study", path))
    sources = {}
    for name, wanted in study.code.items():
        try:
            sources[name] = (path.parent / name).read_bytes()
        except OSError as error:
            raise BadInput(
                f"{path.parent / name} of the study cannot be read: {error.strerror}; it "
                f"must be in the folder of {path.name}"
            ) from None
        if hashlib.sha256(sources[name]).hexdigest() != wanted:
            raise BadInput(
                f"{path.parent / name} is not the file of which the study {study.study} was "
                "made: its SHA-256 differs; ask for the original file"
            )
    return study, sources
