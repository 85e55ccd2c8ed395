"""Run the gate daemon, `silodp silo serve`: the process around a door.

It loads the silo's own files, listens on a Unix socket and keeps a log. Whatever a courier does
with its end of the socket, each reply is the door's reply or one of `LINE_CODES`. Nothing that is
printed or logged contains a record.
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
    """Return the problem in the silo's own words. The door checks if the policy approves it."""
    words = Words(
        place.model,
        schema or Task.plain(len(place.classes)),
        place.prox,
        place.loss,
        place.feature_map,
    )
    return build(words, features, load=_approved(place))


def approved_map(place: DaemonSettings, schema: Schema | None) -> FeatureMap | None:
    """Return the feature map that the policy names, or None."""
    if not place.feature_map:
        return None
    from silodp.core.features.feature_map import feature_map

    shape = schema.shape if schema else ()
    load = _approved(place)
    load_again = _approved(place, run_again)
    return feature_map(place.feature_map, load, shape, load_again)


def _bytes(path: str) -> bytes:
    """Return the bytes of a file. Raise BadInput if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInput(
            f"{path} of the policy cannot be read: {error.strerror}; restore that file"
        ) from None


def _approved(
    place: DaemonSettings, execute: Callable[[bytes, str], ModuleType] = run
) -> Callable[[str], Any]:
    """Return a loader of FILE.py:NAME for files whose SHA-256 the policy approves, and no others.

    Raise BadInput if a file has another hash. The bytes that are run, by `execute`, are those that
    were hashed. A file is read once, however many words name it, so each word's hash is of the
    bytes that all of them run.
    """
    sources = {
        path: _bytes(path) for path in dict.fromkeys(path for path, _ in place.code.values())
    }
    for what, (path, wanted) in place.code.items():
        digest = hashlib.sha256(sources[path]).hexdigest()
        if digest != wanted:
            raise BadInput(
                f"the policy approves a {what} file with SHA-256 {wanted or '(none)'}, but "
                f"that of {path} is {digest}; restore the approved file"
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
    """One line for each frame, without data or addresses.

    It has the time, the code, the statistic, the query, its price and what is left.
    """

    def __init__(self, path: str, most: int) -> None:
        super().__init__(path, most)
        self._ledger: DurableLedger | None = None
        self._used = 0.0

    def follow(self, ledger: DurableLedger) -> None:
        """Log prices from now on: what the ledger has used up since the last frame."""
        self._ledger = ledger
        self._used = ledger.used()

    def note(self, note: FrameNote) -> None:
        """Log one frame."""
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
    """Return a function that sets a gate's states for monitoring.

    They follow from ledger, policy and clock alone. A charge shows at the end of its slot. The
    ledger's count of entries is left out, since it would show when an answer was ready.
    """

    @functools.cache
    def shown() -> DurableLedger:
        if not policy.answer_after:
            return ledger
        from silodp.silo.ledger.delayed import delayed

        return delayed(Path(place.ledger), lambda: policy.answer_after, clock=clock)

    def look() -> None:
        view = shown()
        metrics.gauge("silodp_budget_used_ratio", view.used())
        metrics.gauge("silodp_budget_held_ratio", sum(hold.share for hold in listed(view)))
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

        return Sealer(shuffling, read_key(shuffling.pseudonym))
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
    """Return the silo's door, its features and the model's number of parameters.

    Everything is made of the silo's own files. Raise BadInput, without a record in it, if anything
    is not as the policy requires. No record decides whether the door opens. `tell` gets sentences
    about the records for the hospital alone. It must write to the officer's own screen, and never
    into a reply.
    """
    # Reading is loaded here, once, and apart from all that answers.
    from silodp.silo.data.faults import Faults
    from silodp.silo.data.reading import find_schema, read_records

    faults = Faults()
    schema = find_schema(place)
    data = read_records(place, schema, faults)
    mapped = approved_map(place, schema)
    if mapped and is_file(mapped.text):
        from silodp.silo.service.elsewhere import refuse_other_elsewhere

        source = _bytes(parse(place.feature_map)[0])
        refuse_other_elsewhere(mapped, source, data.x.shape[-1])
    problem = approved_problem(place, data.x.shape[-1], schema)
    key = read_key(place.key)
    records = data.records()
    door = Door(
        policy,
        problem,
        records,
        ledger,
        held_out=place.held_out,
        signing_key=key,
        trust=_trust(shuffling, masking, key, policy),
        registry=registry,
        noted=noted,
        known_by=data.known_by,
        mapped=mapped,
    )
    faults.records = door.void
    for sentence in faults.sentences():
        tell(sentence)
    return door, data.features, problem.dim


def serve(
    path: str | Path,
    stop: socket.socket,
    ready: Callable[[Policy, DaemonSettings], None],
    tell: Callable[[str], None] = lambda sentence: None,
) -> None:
    """Serve the silo's gate until `stop` can be read, for `silodp silo serve`.

    Raise BadInput, without a record in it, if anything is not as the policy requires. When `silodp
    silo approve` has approved another study, the gate starts again by itself. `tell` is for the
    operator's own screen, as for `open_door`.
    """
    while _serve(path, stop, ready, tell):
        ready = _nobody


def _nobody(policy: Policy, place: DaemonSettings) -> None:
    """Do nothing. `ready` is called at the first start only."""


def _refuse_reachable(files: list[str], place: DaemonSettings) -> None:
    """Raise BadInput if the courier's user could read the times of one of these files."""
    for file in files:
        if reachable(file, group_of(place.socket_group)):
            raise BadInput(
                f"answer_after is set, but the courier's user can reach {file} and "
                "read from its times when an answer was ready; "
                "keep it in a folder with mode 0700, and the socket in a folder of its own"
            )


def _serve(
    path: str | Path,
    stop: socket.socket,
    ready: Callable[[Policy, DaemonSettings], None],
    tell: Callable[[str], None],
) -> bool:
    """Serve the gate, and return whether it ended because another study was approved."""
    entrust([path])  # before the file is read
    approved = approval_stamp(path)
    policy = Policy.load(path)
    place = DaemonSettings.load(path)
    shuffling = Shuffling.load(path)
    masking = load_masking(path)
    secret = [place.data, place.key, place.ledger]
    if shuffling:
        secret.append(shuffling.pseudonym)
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
        if policy.answer_after:
            dated = [place.ledger, str(ledger.anchor), place.log, *filter(None, [ledger.witness])]
            _refuse_reachable(dated, place)
        door, _, _ = open_door(
            policy, place, shuffling, ledger, masking=masking, noted=log.note, tell=tell
        )
        key = read_key(place.key)
        log.follow(ledger)

        def handle(frame: bytes) -> bytes:
            if pause.on():
                door.pause()
            else:
                door.resume()
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
