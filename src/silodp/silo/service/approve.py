"""Approve another study for the same records, for `silodp silo approve`.

The changes are shown in words, an officer agrees, and the policy is written again. The ledger is
never touched: the budget belongs to the records, whatever is asked about them. No code of a study
is run before the officer has agreed. Nothing is approved with which the gate would not start.
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
from silodp.core.extension import CODE, is_file, parse
from silodp.core.problem.schema import Schema
from silodp.core.protocol.card import Card
from silodp.core.text import visible
from silodp.host import atomic
from silodp.host.cards import read_card
from silodp.host.schema import load_schema, schema_text
from silodp.host.study import Study, read_study
from silodp.host.tables import of_table, read_toml, toml
from silodp.silo.service.masking import Masking
from silodp.silo.service.policy import APPROVALS, DaemonSettings, Policy, Shuffling

APPROVED = "approved"
"""The folder, in the policy's folder, of the silo's own copies of approved files, by hash."""
SAME = "as before"


@dataclass(frozen=True)
class Change:
    """One thing that a study changes, in words: before and after. Both may be equal."""

    what: str
    before: str
    after: str

    @property
    def words(self) -> str:
        """Return the change as a line for the officer's screen."""
        if self.before != self.after:
            line = f"{self.before} -> {self.after}"
        else:
            line = f"{self.after}, {SAME}"
        return visible(line)  # a study's text must not control the officer's screen


@dataclass(frozen=True, eq=False)
class Proposed:
    """A study and the policy that it would change. Nothing of the study has been run or written."""

    policy: Path
    study: Study
    sources: Mapping[str, bytes]
    rules: Policy
    place: DaemonSettings
    schema: Schema | None
    changes: tuple[Change, ...]

    @property
    def approved(self) -> bool:
        """Return whether the policy has approved this study already."""
        return (
            self.rules.study == self.study.study
            and self.rules.definition == self.study.definition
            and not self.adds
        )

    @property
    def adds(self) -> tuple[str, ...]:
        """Return the statistics that the policy does not allow yet."""
        return tuple(name for name in self.study.statistics if name not in self.rules.statistics)


def compare(policy: Path, file: Path) -> Proposed:
    """Return the study in a file compared with a policy. Raise BadInput if the silo cannot follow
    it.
    """
    real = Path(os.path.realpath(policy))
    rules = Policy.load(real)
    place = DaemonSettings.load(real)
    study, sources = read_study(file)
    if real.stat().st_uid != os.geteuid():
        raise BadInput(f"{real} belongs to another user; run this as the gate's own user")
    old = None
    if place.schema:
        old = load_schema(place.schema)
    if old and not study.schema:
        raise BadInput(
            f"the study {study.study} has no schema, but silo {rules.silo} reads its file "
            "by one; propose it with --schema"
        )
    new = None
    if study.schema:
        new = Schema.parse(study.schema, f"the study {study.study}")
        new = replace(new, ignore=_besides(place, old, new))
    proposed = Proposed(real, study, sources, rules, place, new, ())
    return replace(proposed, changes=tuple(_changes(proposed, old)))


def _besides(place: DaemonSettings, old: Schema | None, new: Schema) -> tuple[str, ...]:
    """Return columns of the silo's file that the new schema does not have.

    The schema before has them, and they stay in the file.
    """
    from silodp.silo.data.files import header

    if new.images:
        return ()
    if old:
        columns = [*(c.name for c in old.columns), *old.label.columns, *old.own, *old.ignore]
    else:
        columns = header(Path(place.data))
    used = {*(c.name for c in new.columns), *new.label.columns, *new.own}
    return tuple(name for name in dict.fromkeys(columns) if name not in used)


PARTS = {
    "model": ("model", "nothing"),
    "prox": ("penalty", "none"),
    "loss": ("loss", "the task's own"),
    "feature_map": ("features made of", "nothing"),
}
"""Fields of a study that may be code, each with its name on the screen and the word for none."""


def _changes(proposed: Proposed, old: Schema | None) -> list[Change]:
    """Return all changes in words."""
    study = proposed.study
    rules = proposed.rules
    place = proposed.place
    changes = [Change("study", rules.study or "without a name", study.study)]
    for what, (name, none) in PARTS.items():
        before = _word(getattr(place, what), getattr(place, f"{what}_sha256"))
        after = _word(getattr(study, what), getattr(study, f"{what}_sha256"))
        if what != "feature_map" or before or after:
            changes.append(Change(name, before or none, after or none))
    if proposed.schema:
        changes += _schema_changes(place, old, proposed.schema)
    else:
        changes.append(Change("label", _plain(place), _plain(place)))
    allowed = ", ".join(rules.statistics)
    wanted = ", ".join((*rules.statistics, *proposed.adds))
    changes.append(Change("may ask", allowed, wanted))
    return changes


def _schema_changes(place: DaemonSettings, old: Schema | None, new: Schema) -> list[Change]:
    """Return the changes of columns, label, unit of privacy and schema in words."""
    changes = []
    if new.images:
        changes.append(Change("columns", "images", "images"))
    else:
        changes.append(Change("columns", _columns(old), _columns(new)))
    if old:
        changes.append(Change("label", _label(old), _label(new)))
    else:
        changes.append(Change("label", _plain(place), _label(new)))
    changes.append(Change("protected", _unit(old), _unit(new)))
    if old and old.text != new.text:
        changes.append(
            Change("schema", "its ranges, categories or codes", "others; read the study's schema")
        )
    return changes


def _columns(schema: Schema | None) -> str:
    if schema is None:
        return "every column of the file"
    return ", ".join(column.name for column in schema.columns)


def _unit(schema: Schema | None) -> str:
    if schema and schema.person:
        return f"each person, by {schema.person.column}"
    return "each row"


def _word(text: str, digest: str) -> str:
    """Return a field's text for the screen, "" for none. Of a file it has the name and hash."""
    if text == "zero":
        return ""
    if not is_file(text):
        return text
    path, name, numbers = parse(text)
    file = re.sub("^[0-9a-f]{16}-", "", Path(path).name)  # a copy's name begins with its hash
    return f"{':'.join((file, name, *numbers))} (file {digest[:32]})"


def _label(schema: Schema) -> str:
    kind = schema.label.task
    if schema.label.classes:
        kind = f"{kind}: {', '.join(schema.label.classes)}"
    return f"{schema.label.name} ({kind})"


def _plain(place: DaemonSettings) -> str:
    return f"{place.label} ({', '.join(place.classes) or 'a number'})"


# --- once the officer has agreed -----------------------------------------------------------------


def approve(
    proposed: Proposed,
    by: str = "",
    registry: Path | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Card:
    """Approve the study: build it, try a gate's door on it, and only then write policy and card.

    Return the new card. Raise BadInput, and leave policy and card as they were, if anything is not
    as the study states. `tell` gets sentences for the officer alone.
    """
    from silodp.silo.ledger.durable import DurableLedger
    from silodp.silo.service.daemon import open_door

    study = proposed.study
    folder = proposed.policy.parent
    old = read_card(folder / "silo.json")
    settings, files = _own(proposed)
    rules, place = _approving(proposed, settings)
    for name, content in files.items():
        _keep(folder / name, content)
    ledger = DurableLedger.open(Path(place.ledger))
    door, features, parameters = open_door(
        rules, place, Shuffling.load(proposed.policy), ledger, registry=registry, tell=tell
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
        schema=proposed.schema.text if proposed.schema else "",
        checked=rules.checked,
        statistics=rules.statistics,
    )
    limits = {
        "study": study.study,
        "definition": study.definition,
        "statistics": list(rules.statistics),
        "checked": rules.checked,
    }
    # A policy that pads its replies continues to do so, however long the new model takes. An
    # officer's 0 stays, and so does a longer slot.
    if rules.answer_after:
        limits["answer_after"] = max(rules.answer_after, door.slot())
    _write(proposed.policy, limits, settings, card)
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "study": study.study,
        "definition": study.definition,
        "model": study.model,
        "by": by,
        "before": {"study": proposed.rules.study, "definition": proposed.rules.definition},
        "ledger": {"count": count, "head": head},
    }
    log = folder / APPROVALS
    before = ""
    if log.exists():
        before = log.read_text("utf-8")
    atomic.write(log, before + json.dumps(line) + "\n")
    return card


def _own(proposed: Proposed) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the fields of [daemon] that change, and the silo's own copies that they name.

    Paths are relative to the policy.
    """
    fields: dict[str, Any] = {}
    files = {
        f"{APPROVED}/{hashlib.sha256(source).hexdigest()[:16]}-{name}": source
        for name, source in proposed.sources.items()
    }
    for what in CODE:
        text = getattr(proposed.study, what)
        digest = getattr(proposed.study, f"{what}_sha256")
        if is_file(text):
            text = f"{APPROVED}/{digest[:16]}-{text}"
        fields |= {what: text, f"{what}_sha256": digest}
    new = proposed.schema
    old = proposed.place.schema
    if new and (not old or load_schema(old).text != new.text):
        table = json.loads(new.text)
        name = f"{APPROVED}/schema-{new.hash[:16]}.toml"
        files[name] = schema_text({"ignore": list(new.ignore)} | table).encode()
        fields |= {"schema": name, "label": new.label.name, "classes": list(new.label.classes)}
    return fields, files


def _approving(proposed: Proposed, settings: Mapping[str, Any]) -> tuple[Policy, DaemonSettings]:
    """Return policy and settings as they would be.

    An officer's attestation was about the schema before, so another schema removes it.
    """
    folder = proposed.policy.parent
    study = proposed.study
    values: dict[str, Any] = dict(settings)
    if "classes" in values:
        values["classes"] = tuple(values["classes"])
    for name in ("schema", *CODE):
        if name in values and values[name].startswith(f"{APPROVED}/"):
            values[name] = str(folder / values[name])
    checked = proposed.rules.checked
    if "schema" in settings:
        checked = ""
    rules = replace(
        proposed.rules,
        study=study.study,
        definition=study.definition,
        statistics=(*proposed.rules.statistics, *proposed.adds),
        checked=checked,
    )
    return rules, replace(proposed.place, **values)


def _keep(path: Path, content: bytes) -> None:
    """Write a copy under its hash, unless the same copy exists.

    A schema's copy may have another list of ignored columns.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        atomic.write(path, content)


def attest(policy: Path, words: str) -> Policy:
    """Record in policy and card that the silo's file was checked. Return the policy.

    `words` are by whom and when.
    """
    real = Path(os.path.realpath(policy))
    rules = replace(Policy.load(real), checked=words)
    card = replace(read_card(real.with_name("silo.json")), checked=words)
    _write(real, {"checked": words}, {}, card)
    return rules


def _write(
    policy: Path, limits: Mapping[str, Any], settings: Mapping[str, Any], card: Card
) -> None:
    """Write policy and card. Raise BadInput if they cannot be written."""
    text = edited(policy.read_text("utf-8"), read_toml("policy", policy), limits, settings)
    try:
        atomic.write(policy, text, mode=stat.S_IMODE(policy.stat().st_mode))
        atomic.write(policy.parent / "silo.json", json.dumps(asdict(card), indent=1) + "\n")
    except OSError as error:
        raise BadInput(
            f"{error.filename or policy} cannot be written: {error.strerror}; run this as "
            "the gate's own user"
        ) from None


def edited(
    text: str, table: Mapping[str, Any], limits: Mapping[str, Any], settings: Mapping[str, Any]
) -> str:
    """Return the policy's text with these fields changed, of its own and of [daemon].

    Every other line stays as the officer left it. If that cannot be done line by line, the whole
    file is written again.
    """
    from silodp.silo.service.provision import policy_text

    wanted = {**table, **limits, "daemon": {**table["daemon"], **settings}}
    parts = re.split(r"(?m)^(?=\s*\[)", text)
    parts[0] = _set(parts[0], limits)
    for k in range(1, len(parts)):
        if re.match(r"\s*\[daemon\]", parts[k]):
            parts[k] = _set(parts[k], settings)
    with contextlib.suppress(tomllib.TOMLDecodeError):
        if tomllib.loads("".join(parts)) == wanted:
            return "".join(parts)
    rest = {
        name: value for name, value in wanted.items() if name not in ("daemon", "shuffle", "masks")
    }
    masking = None
    if "masks" in wanted:
        masking = of_table("policy", Masking, wanted["masks"])
    return policy_text(rest, wanted["daemon"], wanted.get("shuffle"), masking)


def _set(part: str, fields: Mapping[str, Any]) -> str:
    """Return this part of a policy's text with these fields set."""
    for name, value in fields.items():
        line = f"{name} = {toml(value)}"
        part, count = re.subn(
            rf"(?m)^[ \t]*{name}[ \t]*=.*$", lambda _, line=line: line, part, count=1
        )
        if not count:
            part = f"{part.rstrip()}\n{line}\n\n"
    return part


# --- what a gate and a reader look at ------------------------------------------------------------


def approvals(policy: Path) -> list[dict[str, Any]]:
    """Return every approval since the silo was made, the oldest first.

    Raise BadInput if the list cannot be read.
    """
    path = Path(os.path.realpath(policy)).parent / APPROVALS
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        raise BadInput(
            f"{path} cannot be read; restore it, or move it away: the policy contains what is "
            "approved now"
        ) from None
