"""Make what a gate daemon needs: policy, key, card and a ledger with nothing spent.

Neither `silo.json` nor the sentences about the data contain a value of a record. n is public.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.core.errors import BadInput
from silodp.core.extension import is_file
from silodp.core.problem.schema import Schema
from silodp.core.protocol.card import Card
from silodp.core.statistics import STATISTICS
from silodp.host.atomic import new_files
from silodp.host.extension import file_hash
from silodp.host.keys import key_text, public
from silodp.host.schema import load_schema
from silodp.host.tables import COMMENTS as SITE_COMMENTS
from silodp.host.tables import DEFAULTS as SITE_DEFAULTS
from silodp.host.tables import table_text

if TYPE_CHECKING:
    import numpy as np

    from silodp.silo.service.masking import Masking
    from silodp.silo.service.policy import DaemonSettings

COMMENTS = {
    "silo": "The silo's name in its answers.",
    "epsilon": (
        "The privacy budget of each record, for all queries ever. The ledger was made with it."
    ),
    "delta": "The probability with which epsilon may fail.",
    "study": 'The name of the approved study, or "".',
    "definition": (
        "What the silo approves: SHA-256 of model, loss, prox, constants and torch version. "
        "`silodp silo approve` changes it."
    ),
    "statistics": (
        "Statistics that askers may query. The gate refuses an unknown name with the list of the "
        "names that it knows."
    ),
    "samplings": (
        "Allowed samplings: FullBatch, DisjointBatches, and Poisson and WithoutReplacement if "
        "the ledger's rule has a price for them."
    ),
    "clip": "Smallest and largest clip threshold of a record's vector.",
    "minimum_noise_multiplier": "Smallest noise standard deviation divided by sensitivity.",
    "minimum_batch": "Fewest records in a batch.",
    "maximum_local_steps": "Most local steps of one query.",
    "queries_per_run": "Most new answers to one run.",
    "queries_per_hour": "Most new answers in an hour.",
    "checked": (
        "Who ran `silodp silo check` on the data, and when. Entered by hand and public; the "
        'findings are not. "" if not stated.'
    ),
    "expires": "The last day on which the gate answers.",
    "askers": (
        "Ed25519 public keys of the servers that may ask, 64 hexadecimal digits each. Add yours "
        "here."
    ),
    "asker_names": (
        "Names of these servers for readers, in the same order. Empty: the first digits of their "
        "keys."
    ),
    "answer_after": (
        "Seconds of a slot. Every reply is sent at the end of a slot, so that its time reveals "
        "nothing about the records. `silo init` measures it: twice the slowest answer about "
        "made-up records, at least 1. `silo status` counts replies that took longer. 0: send at "
        "once, as in a trial of `federation up`."
    ),
    "hold_share": (
        "Largest share of the budget that one asker may reserve for its runs at once. Other "
        "askers cannot use it for a time."
    ),
    "holds_per_asker": "Most runs for which one asker may reserve budget at once.",
    "hold_seconds": (
        "Seconds after which a reservation ends by itself. A run that continues renews it."
    ),
    "keep_answers": (
        "Days for which an answer is stored, for a server that did not receive it and asks again. "
        "Then its bytes are deleted. Its charge stays."
    ),
    "sees_left": (
        "Askers that receive the rest of the budget when they ask for a reservation. Others can "
        "find it by yes and no."
    ),
    "data": (
        "The silo's own file: CSV, Parquet or NPZ, or a folder of images. Paths are relative "
        "to this file's folder."
    ),
    "label": "Its label column.",
    "classes": "The public list of classes, in order; empty for a number.",
    "model": (
        "linear, logistic, additive:KNOTS, mlp:HIDDEN, cnn, or FILE.py:FUNCTION, called with "
        "(features, outputs)."
    ),
    "model_sha256": "SHA-256 of FILE.py, which you have read. Its imports are not covered.",
    "prox": "Penalty or constraint: zero, l1:0.01, l2-ball:5, ..., or FILE.py:NAME:PARAMETERS.",
    "prox_sha256": "SHA-256 of the prox's FILE.py, which you have read.",
    "loss": 'FILE.py:NAME; "" for the loss of the task.',
    "feature_map": (
        "Public function that turns a record into the model's input: photo:M or digit, which "
        'ship with silodp, or FILE.py:NAME; "" for the record itself.'
    ),
    "feature_map_sha256": (
        "SHA-256 of that FILE.py, which you have read. The file pins the weights that it loads "
        "with silodp.frozen."
    ),
    "loss_sha256": "SHA-256 of the loss's FILE.py, which you have read.",
    "ledger": "The budget's ledger. silodp never makes it a second time.",
    "key": "The key that signs the silo's answers. It stays here.",
    "log": "Queries and their prices; no data.",
    **SITE_COMMENTS,
    "maximum_frame": "Most bytes of a frame, even if the model's queries could be longer.",
    "schema": ('The public schema of the data, or "". Its hash is part of the definition above.'),
    "held_out": (
        "Share of the records, by position, that is held out from training and used for Score. "
        "It does not change budgets."
    ),
    "shuffler": (
        "X25519 public key of the shuffler, 64 hexadecimal digits. Only the shuffler can open "
        "the silo's messages."
    ),
    "pseudonym": (
        "The key that identifies the silo to the shuffler. It stays here. Give its public half "
        "only to the shuffler."
    ),
    "members": (
        "Silos of the shuffle, this one among them. No query may count on more shares of noise."
    ),
    "colluding": "Members whose noise may be missing. So many more silos must be in a total.",
    "maximum_local_epsilon": (
        "Most epsilon that the shuffler, alone or with the server, may learn over all queries "
        "ever, enforced by a filter. Set it once, not after seeing answers. inf: no limit."
    ),
}


SCORES = ("Score", "GroupScore")
"""What evaluations ask."""


@dataclass(frozen=True, kw_only=True)
class Silo(Card):
    """A silo's card, with the policy's path and the findings, which are for its operator alone."""

    policy: str
    findings: tuple[str, ...] = ()
    pseudonym: str = ""

    def card(self) -> dict[str, Any]:
        """Return the fields of the card."""
        return {field.name: getattr(self, field.name) for field in fields(Card)}


def provision(
    folder: Path,
    *,
    data: Path,
    label: str,
    name: str,
    epsilon: float,
    delta: float | None = None,
    classes: Sequence[str] | None = None,
    model: str = "mlp:16",
    prox: str = "zero",
    loss: str = "",
    feature_map: str = "",
    rule: str = "gdp",
    askers: Sequence[str] = (),
    anchor: Path | None = None,
    registry: Path | None = None,
    shuffler: str | None = None,
    members: int = 0,
    colluding: int = 0,
    masking: Masking | None = None,
    schema: Path | None = None,
    padded: bool = False,
    **changes: Any,
) -> Silo:
    """Make policy.toml, silo.key, silo.json and a ledger with nothing spent. Return the silo.

    Raise BadInput if anything is wrong. Then no file is new. With a `shuffler` (its public key) the
    silo takes part in a shuffle of so many `members`, and there is a pseudonym.key too. With
    `masking` it takes part in masked totals with the members that its officer will pin (`silodp
    silo trust`). With `padded`, which is for every real deployment, `answer_after` is measured on
    invented records, and a new folder is closed to other users. Without it replies are sent at
    once. `changes` are other values for fields of the policy and of its [daemon] table, such as
    socket_group or queries_per_run.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from silodp.core.privacy.accounting import Budget
    from silodp.silo.data.heldout import held_out
    from silodp.silo.data.persons import said_of
    from silodp.silo.data.reading import find_schema, read_records
    from silodp.silo.ledger.durable import DurableLedger, Identity
    from silodp.silo.ledger.view import rule_by_name
    from silodp.silo.service.daemon import approved_map, approved_problem
    from silodp.silo.service.door import definition_hash
    from silodp.silo.service.pace import slot_for
    from silodp.silo.service.policy import DaemonSettings, Policy, Shuffling

    if shuffler:
        shuffling = Shuffling(shuffler, "pseudonym.key", members, colluding)
    else:
        shuffling = None
    trust = "isrl"
    if shuffling:
        trust = "shuffle"
    elif masking:
        trust = "masks"
    if trust != "isrl" and rule != "gdp":
        raise BadInput(
            f"the rule is {rule}, which has no price for totals under {trust}; leave out --rule, "
            "or --shuffler and --least"
        )
    for field in changes:
        if field not in COMMENTS:
            raise BadInput(
                f"policy: the field {field!r} is unknown; the fields are {', '.join(COMMENTS)}"
            )
    place_fields = {field.name for field in fields(DaemonSettings)}
    place_changes = {name: value for name, value in changes.items() if name in place_fields}
    policy_changes = {name: value for name, value in changes.items() if name not in place_fields}
    settings = _place(data, label, classes, model, prox, loss, feature_map) | _by(schema)
    place = DaemonSettings(**settings | place_changes)
    place = replace(
        place, **{f"{what}_sha256": file_hash(getattr(place, what)) for what in place.code}
    )
    read_by = find_schema(place)
    silo_data = read_records(place, read_by)
    x, y = silo_data.rows
    features = silo_data.features
    n = len(silo_data.y)
    problem = approved_problem(place, x.shape[1], read_by)
    if delta is None:
        delta = 1 / max(2, n) ** 2
    budget = Budget(epsilon, delta)
    ledger_rule = rule_by_name(rule, [], budget)
    aside = int(held_out(n, place.held_out).sum())
    limits: dict[str, Any] = _limits(
        name, budget.epsilon, budget.delta, definition_hash(problem), n, rule
    )
    limits["statistics"] = served(limits["statistics"], trust)
    if aside:
        limits["statistics"] += SCORES
    # Without askers, a placeholder passes the checks. An empty list is written, which `serve`
    # refuses.
    limits["askers"] = tuple(askers) or ("0" * 64,)
    policy = Policy(**limits | policy_changes)
    if padded:
        width = silo_data.x.shape[-1]
        mapped = approved_map(place, read_by)
        if mapped:
            width = mapped.width(width)
        slot = slot_for(
            problem,
            (*silo_data.x.shape[:-1], width),
            silo_data.y.shape,
            number=silo_data.y.dtype.kind == "f",
            statistics=policy.statistics,
            steps=policy.maximum_local_steps,
        )
        policy = replace(policy, answer_after=slot)
    sentences = said_of(Path(place.data), read_by)
    sentences += findings(x, y, features, place, n if read_by and read_by.person else None)
    if read_by:
        sentences += clipped(x, read_by)
    if padded:
        sentences += _passable(folder, place)
    key = Ed25519PrivateKey.generate()
    pseudonym = Ed25519PrivateKey.generate()
    silo = Silo(
        name=name,
        key=public(key),
        records=n,
        epsilon=budget.epsilon,
        delta=budget.delta,
        rule=rule,
        trust=trust,
        model=model,
        prox=prox,
        features=features,
        classes=place.classes,
        parameters=problem.dim,
        definition=policy.definition,
        held_out=aside,
        schema=read_by.text if read_by else "",
        checked=policy.checked,
        study=policy.study,
        feature_map=feature_map,
        statistics=policy.statistics,
        colluding=masking.colluding if masking else colluding,
        policy=str(folder / "policy.toml"),
        findings=tuple(sentences),
        pseudonym=public(pseudonym) if shuffling else "",
    )
    text = policy_text(
        asdict(policy) | {"askers": tuple(askers)},
        asdict(place),
        asdict(shuffling) if shuffling else None,
        masking,
    )
    files = {
        "policy.toml": text,
        place.key: key_text(key),
        "silo.json": json.dumps(silo.card(), indent=1) + "\n",
    }
    if shuffling:
        files[shuffling.pseudonym] = key_text(pseudonym)
    # If replies are padded, no other user may read the times of ledger and log either.
    mode = 0o700 if padded else 0o711
    with new_files(folder, files, mode=mode):
        DurableLedger.create(
            folder / place.ledger,
            rule=ledger_rule,
            budget=budget,
            records=n,
            identity=Identity.of(*silo_data.known_by),
            anchor=anchor,
            registry=registry,
        )
    return silo


def _passable(folder: Path, place: DaemonSettings) -> list[str]:
    """Return a sentence if a courier's user could see the times of files in the silo's folder.

    The daemon refuses such a folder if replies are padded.
    """
    from silodp.host.ownership import group_of, reachable

    if not folder.is_dir() or not reachable(str(folder / "."), group_of(place.socket_group)):
        return []
    return [
        f"Other users can pass through {folder}, and would see when an answer was ready; "
        f"until `chmod 700 {folder}` the daemon does not start."
    ]


def served(statistics: Sequence[str], trust: str) -> tuple[str, ...]:
    """Return those of the statistics that training asks a silo for under this trust."""
    return tuple(name for name in statistics if trust == "isrl" or STATISTICS[name].in_totals)


def _place(
    data: Path,
    label: str,
    classes: Sequence[str] | None,
    model: str,
    prox: str,
    loss: str = "",
    feature_map: str = "",
) -> dict[str, Any]:
    """Return the fields of [daemon] for these arguments."""
    words = {"model": model, "prox": prox, "loss": loss, "feature_map": feature_map}
    for what, text in words.items():
        if is_file(text):
            words[what] = str(Path(text).resolve())
    if classes is None:
        classes = ("0", "1")
    return {
        "data": str(Path(data).resolve()),
        "label": label,
        "classes": tuple(classes),
        "model_sha256": "",
        **words,
        "ledger": "ledger.db",
        "key": "silo.key",
        "log": "gate.log",
        "socket": "gate.sock",
        **SITE_DEFAULTS,
    }


def _by(schema: Path | None) -> dict[str, Any]:
    """Return the schema's path, label and classes as fields of [daemon]."""
    if schema is None:
        return {}
    label = load_schema(schema).label
    return {"schema": str(schema.resolve()), "label": label.name, "classes": label.classes}


def _limits(
    name: str, epsilon: float, delta: float, definition: str, n: int, rule: str
) -> dict[str, Any]:
    """Return the fields of a new policy."""
    samplings = ("FullBatch", "DisjointBatches")
    if rule != "gdp":
        samplings += ("Poisson", "WithoutReplacement")
    today = datetime.now(UTC).date()
    return {
        "silo": name,
        "epsilon": epsilon,
        "delta": delta,
        "definition": definition,
        "statistics": (
            *("Grad", "ScaledGrad", "Outcomes", "Moments", "GradDiff", "LocalSteps"),
            "RiskCells",
        ),
        "samplings": samplings,
        "clip": (1e-6, 100.0),
        "minimum_noise_multiplier": 0.5,
        "minimum_batch": max(1, n // 20),
        "maximum_local_steps": 20,
        "queries_per_run": 1000,
        "queries_per_hour": 1000,
        "expires": date(today.year + 1, today.month, 28),
    }


def policy_text(
    policy: dict[str, Any],
    place: dict[str, Any],
    shuffling: dict[str, Any] | None,
    masking: Masking | None,
) -> str:
    """Return the text of a policy file, each field with its comment.

    `Policy`, `DaemonSettings`, `Shuffling` and `Masking` are loaded from it.
    """
    from silodp.silo.service.masking import table_of

    head = (
        "# What this silo allows. Its gate reads it when it starts; `silodp silo serve` prints "
        "what is wrong with it.\n"
    )
    text = f"{head}{table_text(policy, COMMENTS)}\n[daemon]\n{table_text(place, COMMENTS)}"
    if shuffling:
        text += f"\n[shuffle]\n{table_text(shuffling, COMMENTS)}"
    if masking:
        text += f"\n{table_of(masking)}"
    return text


def findings(
    x: np.ndarray,
    y: np.ndarray,
    features: tuple[str, ...],
    place: DaemonSettings,
    persons: int | None = None,
) -> list[str]:
    """Return sentences about the data for its operator, without a value of any record."""
    from silodp.host.ownership import changeable, exposed, group_of
    from silodp.silo.data.check import records_said

    sentences = [
        finding.sentence for finding in records_said(x, y, features, place.classes, persons)
    ]
    spread = x.max(0) - x.min(0)
    widths = x.std(0)[spread > 0]
    if widths.size and widths.max() > 100 * widths.min():
        sentences.append(
            "Columns differ in scale by a factor of more than 100; divide each by a public "
            "range, or the model will learn from few of them."
        )
    open_to = changeable(place.data) or exposed(place.data, group_of(place.socket_group))
    if open_to:
        sentences.append(f"{open_to}; until then the daemon does not start.")
    return sentences


def clipped(x: np.ndarray, schema: Schema) -> list[str]:
    """Return a sentence about numbers of which many are at or beyond an end of their public range.

    The file may have other units than the schema.
    """
    numbers = [column.name for column in schema.columns if column.type == "number"]
    shares = {name: float((abs(x[:, schema.features.index(name)]) == 1).mean()) for name in numbers}
    many = [name for name, share in shares.items() if share > 0.2]
    if not many:
        return []
    return [
        "More than a fifth of the values are at or beyond an end of the schema's range, and "
        f"are clipped; are the units right? Columns: {', '.join(many)}."
    ]
