"""Read a silo's policy: what its data officer allows, as one TOML file.

A policy never sees a record. What it refuses is a function of the query, of this file and of the
ledger's counts. Example:

    silo = "hospital-a"
    epsilon = 2.0
    delta = 1e-6
    definition = "<sha256 of Problem.definition()>"
    statistics = ["Grad", "GradDiff"]
    samplings = ["FullBatch"]
    clip = [1e-6, 10.0]
    minimum_noise_multiplier = 1.0
    minimum_batch = 100
    maximum_local_steps = 1
    queries_per_run = 200
    queries_per_hour = 500
    expires = 2027-06-30
    askers = ["<an Ed25519 public key, 64 hexadecimal digits>"]

The same file may have more tables. A gate daemon reads its own settings, `DaemonSettings`, from the
table [daemon]; `Shuffling` from [shuffle] if the silo takes part in a shuffle; and `Masking` from
[masks] if it takes part in masked totals. `silodp silo init` writes them with comments.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from silodp.core import sampling as samplings
from silodp.core import statistics
from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.extension import is_file, parse
from silodp.core.mechanisms import Shuffled
from silodp.core.privacy.accounting import Budget
from silodp.core.sampling import Sampling
from silodp.core.text import check_name
from silodp.host.site import Site
from silodp.host.study import CODE, NAME
from silodp.host.tables import (
    beside,
    check_keys,
    check_line,
    check_number,
    check_text,
    check_texts,
    check_whole,
    of_table,
    read_toml,
)

if TYPE_CHECKING:
    from silodp.core.protocol.codec import Envelope
    from silodp.silo.service.door import Charges

HOUR = 3600.0
APPROVALS = "approvals.jsonl"
"""The file of approvals, in the policy's folder."""
STATISTICS = tuple(statistics.STATISTICS)
SAMPLINGS = tuple(samplings.SAMPLINGS)


class Addressed(Protocol):
    """A query, or a request about holds and keys, with the silo that it is for and the model it is
    about.

    The model is the SHA-256 of the problem's definition.
    """

    @property
    def silo(self) -> str:
        """Return the name of the silo."""
        ...

    @property
    def model(self) -> str:
        """Return the SHA-256 of the problem's definition."""
        ...


@dataclass(frozen=True)
class Policy:
    """The limits within which a silo answers. `load` makes one from a file."""

    silo: str
    epsilon: float
    delta: float
    definition: str
    statistics: tuple[str, ...]
    samplings: tuple[str, ...]
    clip: tuple[float, float]
    minimum_noise_multiplier: float
    minimum_batch: float
    maximum_local_steps: int
    queries_per_run: int
    queries_per_hour: int
    expires: date
    askers: tuple[str, ...]
    answer_after: float = 0.0
    hold_share: float = 1.0
    holds_per_asker: int = 4
    hold_seconds: int = 3600
    sees_left: tuple[str, ...] = ()
    checked: str = ""
    study: str = ""
    asker_names: tuple[str, ...] = ()
    keep_answers: int = 30

    def __post_init__(self) -> None:
        _text(
            "silo",
            self.silo,
            r"[A-Za-z0-9._-]{1,64}",
            "1 to 64 letters, digits, dots, underscores or hyphens",
        )
        _number("epsilon", self.epsilon, above=0)
        _number("delta", self.delta, above=0, below=1)
        _text(
            "definition",
            self.definition,
            r"[0-9a-f]{64}",
            "the SHA-256 of the approved definition, 64 lower-case hexadecimal digits",
        )
        _choice("statistics", self.statistics, STATISTICS)
        _choice("samplings", self.samplings, SAMPLINGS)
        if not isinstance(self.clip, tuple) or len(self.clip) != 2:
            raise BadInput(
                f"policy: clip is {self.clip!r}; it must be two numbers, [smallest, largest]"
            )
        for bound in self.clip:
            _number("clip", bound, above=0)
        if self.clip[0] > self.clip[1]:
            raise BadInput(
                f"policy: clip is {list(self.clip)}; its first number must not be above its second"
            )
        _number("minimum_noise_multiplier", self.minimum_noise_multiplier, above=0)
        _number("minimum_batch", self.minimum_batch, above=0)
        for name in ("maximum_local_steps", "queries_per_run", "queries_per_hour"):
            check_whole("policy", name, getattr(self, name), 1, 2**31 - 1)
        if not isinstance(self.expires, date) or isinstance(self.expires, datetime):
            raise BadInput(
                f"policy: expires is {self.expires!r}; it must be a date without quotes, "
                "such as 2027-06-30"
            )
        _text(
            "checked",
            self.checked,
            r".{0,120}",
            'a date and a name of one line, such as "2026-11-17 by A. Officer", or ""',
        )
        check_line("policy", "checked", self.checked, "a date and a name of one line")
        _text(
            "study",
            self.study,
            f"({NAME})?",
            (
                "the name of the approved study, of letters, digits, dots, underscores and "
                'hyphens, or ""'
            ),
        )
        check_keys("policy", "askers", self.askers)
        check_texts("policy", "asker_names", self.asker_names)
        for name in self.asker_names:
            check_name("policy: asker_names", name, 64)
        if self.asker_names and len(self.asker_names) != len(self.askers):
            raise BadInput(
                f"policy: asker_names has {len(self.asker_names)} names for "
                f"{len(self.askers)} askers; give one for each, or none"
            )
        if type(self.answer_after) not in (int, float) or not 0 <= self.answer_after <= HOUR:
            raise BadInput(
                f"policy: answer_after is {self.answer_after!r}; it must be seconds, 0 "
                f"(off) or more and at most {HOUR:g}"
            )
        if type(self.hold_share) not in (int, float) or not 0 < self.hold_share <= 1:
            raise BadInput(
                f"policy: hold_share is {self.hold_share!r}; it must be a share of the "
                "budget, above 0 and at most 1"
            )
        check_whole("policy", "holds_per_asker", self.holds_per_asker, 1, 64)
        check_whole("policy", "hold_seconds", self.hold_seconds, 1, 30 * 86400)
        check_whole("policy", "keep_answers", self.keep_answers, 1, 36500)
        if not isinstance(self.sees_left, tuple) or any(
            key not in self.askers for key in self.sees_left
        ):
            raise BadInput(
                f"policy: sees_left is {self.sees_left!r}; it must be a list of some of "
                "the askers, or empty"
            )

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Return the policy in a TOML file, without its tables [daemon], [shuffle] and [masks].

        Raise BadInput with the name of a field that cannot be used.
        """
        table = {
            name: value
            for name, value in read_toml("policy", path).items()
            if name not in ("daemon", "shuffle", "masks")
        }
        return of_table("policy", cls, table)

    @property
    def budget(self) -> Budget:
        """Return the privacy budget of the silo's records."""
        return Budget(float(self.epsilon), float(self.delta))

    def called(self, asker: str) -> str:
        """Return the asker's name for people, or the first digits of its key if it has none."""
        names = dict(zip(self.askers, self.asker_names, strict=False))
        return names.get(asker, asker[:8])

    def check(self, envelope: Envelope, asker: str, *, n: int, now: float) -> None:
        """Raise Refused unless this asker may ask this query of n records at this time.

        n is public, and `now` is in seconds since 1970. A clip of exactly 0 is allowed whatever the
        range, since its answer is zero. A SPIDER step that did not move asks for it.
        """
        query = envelope.query
        mechanism = envelope.query.mechanism
        self.check_asker(envelope, asker, now=now)
        if type(query.statistic).__name__ not in self.statistics:
            raise Refused("statistic")
        if type(mechanism.sampling).__name__ not in self.samplings:
            raise Refused("sampling")
        if not (mechanism.clip == 0 or self.clip[0] <= mechanism.clip <= self.clip[1]):
            raise Refused("clip")
        self._check_noise(query.event())
        if not 1 <= query.statistic.releases <= self.maximum_local_steps:
            raise Refused("steps")
        self._check_batch(mechanism.sampling, n)

    def check_planned(self, event: Event | TotalEvent, *, n: int) -> None:
        """Raise Refused if no query of this event would be answered.

        Then nothing is held for it, and its price is not computed.
        """
        if type(event.sampling).__name__ not in self.samplings:
            raise Refused("sampling")
        self._check_noise(event)
        self._check_batch(event.sampling, n)

    def _check_noise(self, event: Event | TotalEvent) -> None:
        try:
            enough = event.multiplier >= self.minimum_noise_multiplier
        except (ArithmeticError, ValueError):
            enough = False
        if not enough:
            raise Refused("noise")

    def _check_batch(self, sampling: Sampling, n: int) -> None:
        try:
            batch = sampling.batch(n)
        except ArithmeticError:
            # There are no batches, or the rate is beyond all numbers.
            raise Refused("batch") from None
        if not self.minimum_batch <= batch <= n:
            raise Refused("batch")

    def check_asker(self, envelope: Addressed, asker: str, *, now: float) -> None:
        """Raise Refused unless this asker may ask this silo about this model at this time."""
        if asker not in self.askers:
            raise Refused("asker")
        if envelope.silo != self.silo:
            raise Refused("silo")
        if datetime.fromtimestamp(now, UTC).date() > self.expires:
            raise Refused("expired")
        if envelope.model != self.definition:
            raise Refused("model")

    def check_quotes(self, events: int, more: int) -> None:
        """Raise Refused if `more` events would pass the limit of events that an asker may ask to
        hold.

        `events` were asked for in the last hour. The limit is that of queries, counted separately.
        """
        if events + more > self.queries_per_hour:
            raise Refused("rate")

    def check_rate(self, asker: str, run: str, *, now: float, counts: Charges) -> None:
        """Raise Refused if one more entry in the ledger would pass a limit.

        It is for queries that have no entry yet.
        """
        if counts.in_run(asker, run) >= self.queries_per_run:
            raise Refused("run-limit")
        if counts.since(now - HOUR) >= self.queries_per_hour:
            raise Refused("rate")


@dataclass(frozen=True)
class Shuffling:
    """Whom the silo's numbers are for, and on what condition: the table [shuffle] of a policy file.

    A gate cannot see what a shuffler does. What it can do is to seal its numbers for this one key,
    to sign them with a pseudonym, and to demand that they leave only inside a total of as many
    silos as the price counts on, and `colluding` more, whose noise may be missing.
    """

    shuffler: str
    pseudonym: str

    members: int
    colluding: int
    maximum_local_epsilon: float = math.inf

    def __post_init__(self) -> None:
        _text(
            "shuffler",
            self.shuffler,
            r"[0-9a-f]{64}",
            "the shuffler's X25519 public key, 64 lower-case hexadecimal digits",
        )
        _text("pseudonym", self.pseudonym, r"[^\0\n]{1,4096}", "the path of a key file")
        for name, least in (("members", 2), ("colluding", 0)):
            check_whole("policy", name, getattr(self, name), least, 2**42 - 1)
        if self.maximum_local_epsilon != math.inf:  # which sets no limit
            _number("maximum_local_epsilon", self.maximum_local_epsilon, above=0)

    @classmethod
    def load(cls, path: str | Path) -> Shuffling | None:
        """Return the table in a policy file, or None. The pseudonym's path is from the file's own
        folder.

        Raise BadInput with the name of a field that cannot be used.
        """
        table = own_table(path, "shuffle", "shuffler, pseudonym, members and colluding")
        if table is None:
            return None
        return beside(path, of_table("policy", cls, table), ["pseudonym"])

    def check(self, asked: Shuffled | TotalEvent) -> None:
        if not 1 <= asked.counted <= self.members - self.colluding:
            raise Refused("contributions")


@dataclass(frozen=True)
class DaemonSettings(Site):
    """The paths of the silo's own files, its model and its socket: the table [daemon] of a policy
    file.
    """

    data: str
    label: str
    classes: tuple[str, ...]
    model: str
    model_sha256: str
    prox: str
    ledger: str
    key: str
    schema: str = ""
    held_out: float = 0.0
    loss: str = ""
    loss_sha256: str = ""
    prox_sha256: str = ""
    feature_map: str = ""
    feature_map_sha256: str = ""

    def __post_init__(self) -> None:
        for name in ("data", "label", "model", "prox", "ledger", "key"):
            _text(name, getattr(self, name), r"[^\0\n]{1,4096}", "a text of one line")
        for what in CODE:
            _text(
                f"{what}_sha256",
                getattr(self, f"{what}_sha256"),
                r"([0-9a-f]{64})?",
                f'the SHA-256 of the {what}\'s file, or "" for a {what} by name',
            )
        _text("loss", self.loss, r"[^\0\n]{0,4096}", 'FILE.py:NAME, or "" for the loss of the task')
        _text(
            "feature_map",
            self.feature_map,
            r"[^\0\n]{0,4096}",
            'photo:M, digit, FILE.py:NAME, or "" for none',
        )
        _text("schema", self.schema, r"[^\0\n]{0,4096}", 'the path of the public schema, or ""')
        check_texts("policy", "classes", self.classes)
        self.check("policy")
        if type(self.held_out) not in (int, float) or not 0 <= self.held_out < 1:
            raise BadInput(
                f"policy: held_out is {self.held_out!r}; it must be a share of the "
                "records, 0 or more and less than 1"
            )

    @classmethod
    def load(cls, path: str | Path) -> DaemonSettings:
        """Return the settings in a policy file, with paths from the file's own folder.

        Raise BadInput with the name of a field that cannot be used.
        """
        table = read_toml("policy", path).get("daemon")
        if not isinstance(table, dict):
            raise BadInput(
                f"policy {str(path)!r} has no table [daemon]; `silodp silo init` writes one"
            )
        place = of_table("policy", cls, table)
        paths = ["data", "ledger", "key", "log", "socket", "schema"]
        return beside(path, place, [*paths, *place.code])

    @property
    def code(self) -> dict[str, tuple[str, str]]:
        """Return the file, and its approved SHA-256, of each field that is FILE.py:NAME.

        The fields are model, loss, prox and feature map.
        """
        files = {}
        for what in CODE:
            text = getattr(self, what)
            if is_file(text):
                files[what] = (parse(text)[0], getattr(self, f"{what}_sha256"))
        return files


def approval_stamp(policy: str | Path) -> object:
    """Return a value that changes with every approval of a study for this policy file."""
    try:
        status = os.stat(Path(os.path.realpath(policy)).parent / APPROVALS)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def own_table(path: str | Path, name: str, wanted: str) -> dict[str, Any] | None:
    """Return the table of this name in a policy file, or None. Raise BadInput if it is no table."""
    table = read_toml("policy", path).get(name)
    if table is not None and not isinstance(table, dict):
        raise BadInput(f"policy: {name} is no table; it must be [{name}] with {wanted}")
    return table


_text = partial(check_text, "policy")
_number = partial(check_number, "policy")


def _choice(name: str, value: object, names: Iterable[str]) -> None:
    """Raise BadInput unless the value is a list of some of these names."""
    if not isinstance(value, tuple) or not value or any(item not in names for item in value):
        raise BadInput(
            f"policy: {name} is {value!r}; it must be a list of some of {', '.join(names)}"
        )
