"""`silodp silo approve`: another study for the same records. What changes is said in words, an
officer agrees, and the policy is written anew.

The ledger is never touched by it: the budget belongs to the records, whatever is asked about them.
Nothing that a study brings is run before the officer has agreed, and nothing is approved with which
the gate would not start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from silodp.core.errors import BadInput
from silodp.core.extension import is_file, parse
from silodp.core.problem.schema import Schema
from silodp.core.protocol.card import Card
from silodp.core.text import visible
from silodp.host import atomic
from silodp.host.cards import read_card
from silodp.host.schema import load_schema, schema_text
from silodp.host.study import CODE, Study, read_study
from silodp.host.tables import of_table, read_toml, toml
from silodp.silo.service.masking import Masking
from silodp.silo.service.policy import APPROVALS, DaemonSettings, Policy, Shuffling

APPROVED = "approved"
"""Beside the policy: the silo's own copies of what was approved, by hash, and a line for each
approval. A gate that runs looks at the latter.
"""
SAME = "as before"


@dataclass(frozen=True)
class Change:
    """One thing that a study says, in words: what it was and what it would be, "" where it was the
    same.
    """

    what: str
    before: str
    after: str

    @property
    def words(self) -> str:
        if self.before != self.after:
            said = f"{self.before} -> {self.after}"
        else:
            said = f"{self.after}, {SAME}"
        return visible(said)  # a study's words must not steer the officer's screen


@dataclass(frozen=True, eq=False)
class Proposed:
    """A study beside a policy; nothing of it has been run or written."""

    policy: Path
    study: Study
    sources: Mapping[str, bytes]
    rules: Policy
    place: DaemonSettings
    schema: Schema | None
    changes: tuple[Change, ...]

    @property
    def approved(self) -> bool:
        """Whether the policy says so already."""
        return (self.rules.study, self.rules.definition) == (
            self.study.study,
            self.study.definition,
        ) and not self.adds

    @property
    def adds(self) -> tuple[str, ...]:
        """Statistics that the policy does not allow yet."""
        return tuple(name for name in self.study.statistics if name not in self.rules.statistics)


def compare(policy: Path, file: Path) -> Proposed:
    """The study in a file beside the policy in another; BadInput where the silo could not follow
    it.
    """
    real = Path(os.path.realpath(policy))
    rules, place, (study, sources) = Policy.load(real), DaemonSettings.load(real), read_study(file)
    if real.stat().st_uid != os.geteuid():
        raise BadInput(f"{real} belongs to another user; run this as the gate's own user")
    if place.schema:
        old = load_schema(place.schema)
    else:
        old = None
    if old and not study.schema:
        raise BadInput(
            f"the study {study.study} has no schema, but silo {rules.silo} reads its file "
            "by one; propose it with --schema"
        )
    if study.schema:
        new = Schema.parse(study.schema, f"the study {study.study}")
    else:
        new = None
    if new:
        new = replace(new, ignore=_besides(place, old, new))
    found = Proposed(real, study, sources, rules, place, new, ())
    return replace(found, changes=tuple(_changes(found, old)))


def _besides(place: DaemonSettings, old: Schema | None, new: Schema) -> tuple[str, ...]:
    """Columns that the silo's file has and the new schema does not: those that the one before knew,
    which stay in the file.
    """
    from silodp.silo.data.files import header

    if new.images:
        return ()
    if old:
        known = [*(c.name for c in old.columns), *old.label.columns, *old.own, *old.ignore]
    else:
        known = header(Path(place.data))
    used = {*(c.name for c in new.columns), *new.label.columns, *new.own}
    return tuple(name for name in dict.fromkeys(known) if name not in used)


def _changes(found: Proposed, old: Schema | None) -> list[Change]:
    study = found.study
    rules = found.rules
    place = found.place
    words = {"model": "model", "prox": "penalty", "loss": "loss", "feature_map": "features made of"}
    said = [Change("study", rules.study or "without a name", study.study)]
    for what, name in words.items():
        before = getattr(place, what)
        after = getattr(study, what)
        if what != "feature_map" or before or after:
            none = {"loss": "the task's own", "prox": "none"}.get(what, "nothing")
            words_of = [
                _word(text, getattr(owner, f"{what}_sha256")) or none
                for text, owner in ((before, place), (after, study))
            ]
            said.append(Change(name, *words_of))
    if found.schema:
        columns = [
            ", ".join(c.name for c in s.columns) if s else "every column of the file"
            for s in (old, found.schema)
        ]
        said.append(
            Change("columns", *columns)
            if not found.schema.images
            else Change("columns", "images", "images")
        )
        said.append(Change("label", _label(old) if old else _plain(place), _label(found.schema)))
        said.append(
            Change(
                "protected",
                *(
                    f"each person, by {s.person.column}" if s and s.person else "each row"
                    for s in (old, found.schema)
                ),
            )
        )
        if old and old.text != found.schema.text:
            said.append(
                Change(
                    "schema", "its ranges, categories or codes", "others; read the study's schema"
                )
            )
    else:
        said.append(Change("label", _plain(place), _plain(place)))
    asks = ", ".join(rules.statistics)
    said.append(
        Change("may ask", asks, ", ".join((*rules.statistics, *found.adds)) if found.adds else asks)
    )
    return said


def _word(text: str, digest: str) -> str:
    if not is_file(text):
        return "" if text == "zero" else text
    path, name, numbers = parse(text)
    return (
        f"{':'.join((re.sub('^[0-9a-f]{16}-', '', Path(path).name), name, *numbers))} (file "
        f"{digest[:32]})"
    )


def _label(schema: Schema) -> str:
    if schema.label.classes:
        classes = f": {', '.join(schema.label.classes)}"
    else:
        classes = ""
    return f"{schema.label.name} ({schema.label.task}{classes})"


def _plain(place: DaemonSettings) -> str:
    return f"{place.label} ({', '.join(place.classes) or 'a number'})"


# --- once the officer has agreed -----------------------------------------------------------------


def approve(
    found: Proposed,
    by: str = "",
    registry: Path | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Card:
    """Builds what the study names, starts a gate's door on it to see that it would, and only then
    writes policy and card; the new card. `tell` is given what the officer alone should read.

    BadInput, and policy and card are as they were, if anything is not as the study says.
    """
    from silodp.silo.ledger.durable import DurableLedger
    from silodp.silo.service.daemon import open_door

    study = found.study
    folder = found.policy.parent
    old = read_card(folder / "silo.json")
    own, files = _own(found)
    rules, place = _approving(found, own)
    for name, content in files.items():
        _keep(folder / name, content)
    ledger = DurableLedger.open(Path(place.ledger))
    door, features, parameters = open_door(
        rules, place, Shuffling.load(found.policy), ledger, registry=registry, tell=tell
    )
    count, head = ledger.head()
    card = replace(
        old,
        study=study.study,
        model=study.model,
        prox=study.prox,
        feature_map=study.feature_map,
        features=features,
        classes=place.classes,
        records=ledger.records,
        parameters=parameters,
        definition=study.definition,
        schema=found.schema.text if found.schema else "",
        checked=rules.checked,
        statistics=rules.statistics,
    )
    limits = {
        "study": study.study,
        "definition": study.definition,
        "statistics": list(rules.statistics),
        "checked": rules.checked,
    }
    # A policy that pads its replies goes on doing so, whatever the new model takes. An officer's 0
    # stays, and a longer slot, too.
    if rules.answer_after:
        limits["answer_after"] = max(rules.answer_after, door.slot())
    _write(found.policy, limits, own, card)
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "study": study.study,
        "definition": study.definition,
        "model": study.model,
        "by": by,
        "before": {"study": found.rules.study, "definition": found.rules.definition},
        "ledger": {"count": count, "head": head},
    }
    log = folder / APPROVALS
    if log.exists():
        before = log.read_text("utf-8")
    else:
        before = ""
    atomic.write(log, before + json.dumps(line) + "\n")
    return card


def _own(found: Proposed) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The fields of [daemon] that change, paths relative to the policy, and the silo's own copies
    that they name.
    """
    fields: dict[str, Any] = {}
    files = {
        f"{APPROVED}/{hashlib.sha256(source).hexdigest()[:16]}-{name}": source
        for name, source in found.sources.items()
    }
    for what in CODE:
        text = getattr(found.study, what)
        digest = getattr(found.study, f"{what}_sha256")
        fields |= {
            what: f"{APPROVED}/{digest[:16]}-{text}" if is_file(text) else text,
            f"{what}_sha256": digest,
        }
    if found.schema and (
        not found.place.schema or load_schema(found.place.schema).text != found.schema.text
    ):
        table = json.loads(found.schema.text)
        name = f"{APPROVED}/schema-{found.schema.hash[:16]}.toml"
        files[name] = schema_text({"ignore": list(found.schema.ignore)} | table).encode()
        fields |= {
            "schema": name,
            "label": found.schema.label.name,
            "classes": list(found.schema.label.classes),
        }
    return fields, files


def _approving(found: Proposed, own: Mapping[str, Any]) -> tuple[Policy, DaemonSettings]:
    """Policy and place as they would be. What an officer attested was of the schema before, if
    there is another now.
    """
    folder = found.policy.parent
    study = found.study
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in own.items()
    }
    paths = {
        name: str(folder / values[name])
        for name in ("schema", *CODE)
        if name in values and values[name].startswith(f"{APPROVED}/")
    }
    if "schema" in own:
        checked = ""
    else:
        checked = found.rules.checked
    statistics = (*found.rules.statistics, *found.adds)
    rules = replace(
        found.rules,
        study=study.study,
        definition=study.definition,
        statistics=statistics,
        checked=checked,
    )
    return rules, replace(found.place, **values | paths)


def _keep(path: Path, content: bytes) -> None:
    """A copy by its hash, which is there already or is made; a schema's may have another list of
    what is ignored.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        atomic.write(path, content)


def attest(policy: Path, words: str) -> Policy:
    """Afterwards policy and card say that the silo's file was checked, by whom and when; the
    policy.
    """
    real = Path(os.path.realpath(policy))
    rules = replace(Policy.load(real), checked=words)
    _write(
        real, {"checked": words}, {}, replace(read_card(real.with_name("silo.json")), checked=words)
    )
    return rules


def _write(policy: Path, limits: Mapping[str, Any], own: Mapping[str, Any], card: Card) -> None:
    text = edited(policy.read_text("utf-8"), read_toml("policy", policy), limits, own)
    try:
        atomic.write(policy, text, mode=stat.S_IMODE(policy.stat().st_mode))
        atomic.write(policy.parent / "silo.json", json.dumps(asdict(card), indent=1) + "\n")
    except OSError as error:
        raise BadInput(
            f"{error.filename or policy} cannot be written: {error.strerror}; run this as "
            "the gate's own user"
        ) from None


def edited(
    text: str, table: Mapping[str, Any], limits: Mapping[str, Any], own: Mapping[str, Any]
) -> str:
    """The policy's text with these fields changed, of its own and of [daemon], and every other line
    as the officer left it.

    Where that cannot be done line by line, the whole file is written anew.
    """
    from silodp.silo.service.provision import policy_text

    wanted = {**table, **limits, "daemon": {**table["daemon"], **own}}
    parts = re.split(r"(?m)^(?=\s*\[)", text)
    parts[0] = _set(parts[0], limits)
    parts[1:] = [
        _set(part, own) if re.match(r"\s*\[daemon\]", part) else part for part in parts[1:]
    ]
    with contextlib.suppress(tomllib.TOMLDecodeError):
        if tomllib.loads("".join(parts)) == wanted:
            return "".join(parts)
    rest = {
        name: value for name, value in wanted.items() if name not in ("daemon", "shuffle", "masks")
    }
    if "masks" in wanted:
        masking = of_table("policy", Masking, wanted["masks"])
    else:
        masking = None
    return policy_text(rest, wanted["daemon"], wanted.get("shuffle"), masking)


def _set(part: str, fields: Mapping[str, Any]) -> str:
    for name, value in fields.items():
        line = f"{name} = {toml(value)}"
        part, found = re.subn(
            rf"(?m)^[ \t]*{name}[ \t]*=.*$", lambda _, line=line: line, part, count=1
        )
        if found:
            part = part
        else:
            part = f"{part.rstrip()}\n{line}\n\n"
    return part


# --- what a gate and a reader look at ------------------------------------------------------------


def approvals(policy: Path) -> list[dict[str, Any]]:
    """Every approval since the silo was made, the oldest first."""
    path = Path(os.path.realpath(policy)).parent / APPROVALS
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        raise BadInput(
            f"{path} cannot be read; restore it, or move it away: the policy says what is "
            "approved now"
        ) from None
