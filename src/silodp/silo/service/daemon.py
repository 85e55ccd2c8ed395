"""The gate daemon, `silodp silo serve`: the process around a door. It loads what the silo owns,
listens on a Unix socket and keeps a log.

Whatever a courier does with its end of the socket, all that goes back is the door's reply or one of
`LINE_CODES`. Nothing that is printed or logged holds a record.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.errors import BadInput
from silodp.core.extension import is_file, parse
from silodp.core.problem.build import Words, build
from silodp.core.problem.problem import Problem
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task
from silodp.core.protocol.codec import Refusal, encode_reply
from silodp.host import daemon, metrics
from silodp.host.extension import named, run, run_again
from silodp.host.keys import read_key
from silodp.host.listener import Server
from silodp.host.lock import sole
from silodp.host.log import Log
from silodp.host.ownership import entrust, group_of, reachable
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.ledger.identity import Registry
from silodp.silo.ledger.reserve import listed
from silodp.silo.service.door import Door, FrameNote
from silodp.silo.service.pause import Pause
from silodp.silo.service.policy import DaemonSettings, Policy, Shuffling, approval_stamp, own_table

if TYPE_CHECKING:
    from silodp.core.features.feature_map import FeatureMap
    from silodp.silo.service.masking import Masking
    from silodp.silo.service.trust import Trust

# --- what the silo owns --------------------------------------------------------------------------


def approved_problem(place: DaemonSettings, features: int, schema: Schema | None) -> Problem:
    """The problem in the silo's own words. Whether the policy approves it is for the door to
    say.
    """
    words = Words(
        place.model,
        schema or Task.plain(len(place.classes)),
        place.prox,
        place.loss,
        place.feature_map,
    )
    return build(words, features, load=_approved(place))


def approved_map(place: DaemonSettings, schema: Schema | None) -> FeatureMap | None:
    """The map of features that the policy names, if it does."""
    if not place.feature_map:
        return None
    from silodp.core.features.feature_map import feature_map

    shape = schema.shape if schema else ()
    fresh = _approved(place, run_again)
    return feature_map(place.feature_map, _approved(place), shape, fresh)


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None


def _approved(
    place: DaemonSettings, execute: Callable[[bytes, str], ModuleType] = run
) -> Callable[[str], Any]:
    """Finds FILE.py:NAME in files whose SHA-256 the policy approves, and no others; what runs are
    the very bytes that were hashed, by `execute`.

    A file is read once, however many words name it: each word's hash is of the bytes that all of
    them run.
    """
    sources = {
        path: _bytes(path) for path in dict.fromkeys(path for path, _ in place.code.values())
    }
    for what, (path, wanted) in place.code.items():
        if (found := hashlib.sha256(sources[path]).hexdigest()) != wanted:
            raise BadInput(
                f"the policy approves a {what} file with SHA-256 {wanted or '(none)'}, but "
                f"that of {path} is {found}"
            )

    def load(text: str) -> Any:
        if not is_file(text):
            from silodp.host.shipped import constants

            return constants(text)
        path = parse(text)[0]
        if path not in sources:
            raise BadInput(
                f"the policy approves no file {path}; name it as FILE.py:NAME, with its SHA-256"
            )
        return named(execute(sources[path], path), text)

    return load


# --- the log -------------------------------------------------------------------------------------


class GateLog(Log):
    """One line for each frame: when, what became of it, which statistic, which query, its price and
    what is left. No data, no addresses.
    """

    def __init__(self, path: str, most: int) -> None:
        super().__init__(path, most)
        self._ledger: DurableLedger | None = None
        self._used = 0.0

    def follow(self, ledger: DurableLedger) -> None:
        """From now on prices are told: what the ledger has used up more than when it was last
        asked.
        """
        self._ledger, self._used = ledger, ledger.used()

    def note(self, note: FrameNote) -> None:
        before = self._used
        if self._ledger is not None and note.code == "answered":
            with contextlib.suppress(BadInput):
                self._used = self._ledger.used()
        if note.code == "answered":
            price = f"price {self._used - before:.4%} "
        else:
            price = ""
        self.line(
            f"{note.code:<10} {note.statistic:<10} {_short(note.query_id):<24} {price}left "
            f"{1 - self._used:.4%}"
        )


def _short(query_id: str) -> str:
    if len(query_id) <= 24:
        return query_id
    return f"{query_id[:11]}..{query_id[-11:]}"


# --- all together --------------------------------------------------------------------------------


def states(
    policy: Policy,
    place: DaemonSettings,
    ledger: DurableLedger,
    halted: Callable[[], bool],
    *,
    clock: Callable[[], float] = time.time,
) -> Callable[[], None]:
    """What a gate tells monitoring: of ledger, policy and clock alone, a charge at the end of its
    slot. Not the ledger's count of entries, which says when an answer was ready.
    """

    @functools.cache
    def shown() -> DurableLedger:
        if not policy.answer_after:
            return ledger
        from silodp.silo.ledger.delayed import delayed

        return delayed(Path(place.ledger), lambda: policy.answer_after, clock=clock)

    def look() -> None:
        seen = shown()
        metrics.gauge("silodp_budget_used_ratio", seen.used())
        metrics.gauge("silodp_budget_held_ratio", sum(hold.share for hold in listed(seen)))
        metrics.gauge("silodp_paused", halted())
        metrics.gauge("silodp_policy_days", (policy.expires - datetime.now(UTC).date()).days)

    return look


def load_masking(path: str | Path) -> Masking | None:
    """Return the table [masks] of a policy file. Masks are loaded only where there is one."""
    if own_table(path, "masks", "members, colluding and least") is None:
        return None
    from silodp.silo.service.masking import Masking

    return Masking.load(path)


def _trust(
    shuffling: Shuffling | None,
    masking: Masking | None,
    key: Ed25519PrivateKey,
    policy: Policy,
    records: int,
) -> Trust | None:
    """Return the object that hides the silo's part of a total, None if it answers no totals.

    Raise `BadInput` where the policy has both tables: a silo trusts masks or a shuffler.
    """
    if shuffling and masking:
        raise BadInput(
            "the policy has the tables [shuffle] and [masks]; a silo takes part in one kind of "
            "total, so remove one of them"
        )
    if shuffling:
        from silodp.silo.service.sealing import Sealer

        return Sealer(shuffling, read_key(shuffling.pseudonym), records)
    if masking:
        from silodp.silo.service.masking import Masker

        return Masker(masking, key, policy.definition)
    return None


def open_door(
    policy: Policy,
    place: DaemonSettings,
    shuffling: Shuffling | None,
    ledger: DurableLedger,
    *,
    masking: Masking | None = None,
    noted: Callable[[FrameNote], None] = lambda note: None,
    registry: Path | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> tuple[Door, tuple[str, ...], int]:
    """All that a silo shows the world, made of its own files, its features and the model's number
    of parameters; BadInput, without a record in it, if anything is not as the policy says.

    No record decides whether the door opens. `tell` is given what the hospital alone should read of
    its records: it must go to the officer's own screen, and never into what leaves.
    """
    # Reading is loaded here, once, and apart from all that answers.
    from silodp.silo.data.faults import Faults
    from silodp.silo.data.reading import find_schema, read_records

    faults = Faults()
    schema = find_schema(place)
    own = read_records(place, schema, faults)
    mapped = approved_map(place, schema)
    if mapped and is_file(mapped.text):
        from silodp.silo.service.elsewhere import refuse_other_elsewhere

        source = _bytes(parse(place.feature_map)[0])
        refuse_other_elsewhere(mapped, source, own.x.shape[-1])
    problem = approved_problem(place, own.x.shape[-1], schema)
    key = read_key(place.key)
    records = own.records()
    door = Door(
        policy,
        problem,
        records,
        ledger,
        held_out=place.held_out,
        signing_key=key,
        trust=_trust(shuffling, masking, key, policy, records.counts[0]),
        registry=registry,
        noted=noted,
        known_by=own.known_by,
        mapped=mapped,
    )
    faults.records = door.void
    for sentence in faults.sentences():
        tell(sentence)
    return door, own.features, problem.dim


def serve(
    path: str | Path,
    stop: socket.socket,
    ready: Callable[[Policy, DaemonSettings], None],
    tell: Callable[[str], None] = lambda sentence: None,
) -> None:
    """`silodp silo serve`: returns once `stop` can be read; BadInput, without a record in it, if
    anything is not as the policy says.

    When `silodp silo approve` has approved another study it begins anew by itself, as if it had
    been started then. `tell` is for the operator's own screen, as for `open_door`.
    """
    while _serve(path, stop, ready, tell):
        ready = _nobody


def _nobody(policy: Policy, place: DaemonSettings) -> None:
    """Told once, at the first start."""


def _serve(
    path: str | Path,
    stop: socket.socket,
    ready: Callable[[Policy, DaemonSettings], None],
    tell: Callable[[str], None],
) -> bool:
    """Whether it ended since another study was approved."""
    entrust([path])  # before a word of it is believed
    approved = approval_stamp(path)
    policy = Policy.load(path)
    place = DaemonSettings.load(path)
    shuffling = Shuffling.load(path)
    masking = load_masking(path)
    secret = (place.data, place.key, place.ledger, shuffling.pseudonym if shuffling else None)
    daemon.check_files(
        place,
        used=(*(path for path, _ in place.code.values()), place.schema, Registry().folder),
        secret=secret,
    )
    with (
        sole(place.ledger),
        contextlib.closing(Pause(path)) as pause,
        contextlib.closing(GateLog(place.log, place.log_bytes)) as log,
    ):
        ledger = DurableLedger.open(Path(place.ledger))
        entrust([ledger.anchor])
        dated = [place.ledger, str(ledger.anchor), place.log, *filter(None, [ledger.witness])]
        for file in dated if policy.answer_after else ():
            if reachable(file, group_of(place.socket_group)):
                raise BadInput(
                    f"answer_after is set, but the courier's user can come to {file} and "
                    "read from its times when an answer was ready; "
                    "keep it in a folder with mode 0700, and the socket in a folder of its own"
                )
        (door, _, _), key = (
            open_door(policy, place, shuffling, ledger, masking=masking, noted=log.note, tell=tell),
            read_key(place.key),
        )
        log.follow(ledger)

        def handle(frame: bytes) -> bytes:
            (door.pause if pause.on() else door.resume)()
            return door.handle(frame)

        server = Server(
            place,
            handle,
            refuse=lambda code: encode_reply(Refusal(code), key),
            limit=door.limit,
            log=log,
            after=policy.answer_after,
        )
        started = (
            f"{policy.silo}, {ledger.records} records, entry {ledger.released()[0]} of the ledger, "
            f"left {1 - ledger.used():.4%}"
        )

        look = states(policy, place, ledger, pause.on)
        return daemon.serve(
            server,
            log,
            stop,
            role="gate",
            started=started,
            ready=lambda: ready(policy, place),
            look=look,
            changed=lambda: approval_stamp(path) != approved,
        )
