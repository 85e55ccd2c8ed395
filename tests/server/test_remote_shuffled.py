"""Totals through a shuffler from the server's side: what counts as charged where a total is
refused, also when it is replayed.
"""

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.mechanisms import Shuffled
from silodp.core.protocol.card import Card
from silodp.core.protocol.relay import Passed, encode_outcome
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.server.federation import StopRun
from silodp.server.journal import Heard, Journal, Round
from silodp.server.question import Question
from silodp.server.remote_shuffled import SITE, ShuffledRemote, Shuffler

KEY = Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32)
PUBLIC = KEY.public_key().public_bytes_raw().hex()
CARDS = [
    Card(f"silo-{i}", PUBLIC, 50, 3.0, 1e-6, "gdp", "x", "zero", (), (), 3, "0" * 64)
    for i in range(2)
]
QUERY = Query(Grad(torch.zeros(1, 3)), Shuffled("minibatch", 1.0, 2.0, counted=2))


def test_a_total_of_too_few_silos_counts_as_charged_also_where_it_comes_from_the_journal(tmp_path):
    def remote() -> ShuffledRemote:
        journal = Journal(tmp_path / "journal", "run", "config")
        return ShuffledRemote(
            CARDS, None, shuffler=Shuffler(PUBLIC), run="run", key=KEY, journal=journal
        )

    first = remote()
    first._make_frames(QUERY, [0, 1])
    heard = {
        card.name: Heard("0" * 64, 1, "0" * 64, box=str(i) * 64) for i, card in enumerate(CARDS)
    }
    total = Passed(first._envelope(QUERY, 0).shuffle_round, 1, np.zeros(3, np.int64), {})
    assert first._journal.read() is None
    first._open_question(QUERY, Question.replayed(heard, {}, ()))
    first._write_record(heard)
    first._journal.write(Round(0, {SITE: "0" * 64}, {}, replies={SITE: encode_outcome(total, KEY)}))
    first._journal.close()
    again = remote()
    with pytest.raises(StopRun, match="total is over 1 silos"):
        again.ask(QUERY, [0, 1])
    assert again.charges == {"silo-0": 1, "silo-1": 1}
    again._journal.close()
