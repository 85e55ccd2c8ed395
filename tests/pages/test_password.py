"""The pages of a gate, towards another account of the same machine: nothing without the password,
and no charge before the end of its slot.
"""

import base64
import csv
import io
from datetime import UTC, datetime

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from looking import TOKEN, ask, served

from gates import write_csv
from silodp.core.events import Event
from silodp.core.sampling import FullBatch
from silodp.host import metrics
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service import daemon
from silodp.silo.service.page import GatePage
from silodp.silo.service.policy import DaemonSettings, Policy
from silodp.silo.service.provision import provision

pytest.importorskip("starlette", reason="starlette is not installed (silodp[ui])")
pytest.importorskip("uvicorn", reason="uvicorn is not installed (silodp[ui])")

BEGIN = 1_750_000_000.0
SLOT = 3.0
PASSWORD = "a-password-that-nobody-guesses"


@pytest.fixture
def policy(tmp_path, monkeypatch):
    """A silo whose gate answers at the end of slots of three seconds."""
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    generator = np.random.default_rng(0)
    data = write_csv(tmp_path / "a.csv", generator.normal(size=(40, 3)), np.arange(40) % 2)
    asker = Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    about = {"label": "label", "name": "clinic", "epsilon": 3.0, "model": "mlp:4"}
    silo = provision(tmp_path / "silo", data=data, askers=[asker], answer_after=SLOT, **about)
    return silo.policy


def answer(policy, monkeypatch, took: float) -> DurableLedger:
    """One question is charged at BEGIN, and its answer stored so many seconds later."""
    at = [0.0]

    def now() -> str:
        return datetime.fromtimestamp(BEGIN + at[0], UTC).isoformat(timespec="milliseconds")

    monkeypatch.setattr("silodp.silo.ledger.file.now", now)
    ledger = DurableLedger.open(DaemonSettings.load(policy).ledger)
    about = {"kind": "grad", "asker": "server", "run": "run", "generation": 0}
    paid = ledger.for_query(query_id="q", digest=bytes(32), **about)
    paid.charge(Event(FullBatch(), 100.0), [0])
    at[0] = took
    paid.store(b"an answer")
    return ledger


@pytest.mark.parametrize("took", [0.02, 0.16])
def test_page_csv_and_metrics_show_a_charge_at_the_end_of_its_slot_and_not_before(
    policy, monkeypatch, took
):
    ledger = answer(policy, monkeypatch, took)
    rules, place, at = Policy.load(policy), DaemonSettings.load(policy), [0.0]
    page = GatePage(policy, None, [], clock=lambda: BEGIN + at[0])
    look = daemon.states(rules, place, ledger, lambda: False, clock=lambda: BEGIN + at[0])

    def shown() -> tuple[int, bool, str]:
        rows = list(csv.DictReader(io.StringIO(page.charges(None).body.decode())))
        look()
        told = [line for line in metrics.text("gate").splitlines() if "used_ratio{" in line]
        return len(rows), "run run" in str(page._now()), told[0].split()[-1]

    for at[0] in (0.0, 0.01, took, took + 0.01, 2.99):
        assert shown() == (0, False, "0")
    at[0] = SLOT
    rows, named, ratio = shown()
    assert (rows, named) == (1, True)
    assert float(ratio) > 0


def test_no_page_of_a_gate_opens_without_the_password(policy):
    with served(None, policy, TOKEN, password=PASSWORD) as port:
        for path in ("/", "/silo", "/silo-live", "/silo-charges.csv", "/live.js", "/nothing"):
            for given in ({}, basic(""), basic("wrong"), basic(PASSWORD[:-1]), basic(TOKEN)):
                status, text, headers = ask(port, path, **given)
                assert (status, "clinic" in text) == (401, False)
                assert headers["www-authenticate"].startswith("Basic ")
        for given in ("Basic", "Basic !", f"Bearer {PASSWORD}", PASSWORD, "Basic " + "=" * 9):
            assert ask(port, "/silo", Authorization=given)[0] == 401
        form = {"Origin": f"http://127.0.0.1:{port}"}
        body = f"token={TOKEN}&do=pause"
        assert ask(port, "/silo/pause", method="POST", body=body, **form)[0] == 401
        assert ask(port, "/silo", **basic(PASSWORD))[0] == 200
        assert ask(port, "/silo-charges.csv", **basic(PASSWORD))[0] == 200


def basic(password: str) -> dict[str, str]:
    encoded = base64.b64encode(f"officer:{password}".encode()).decode()
    return {"Authorization": f"Basic {encoded}"}
