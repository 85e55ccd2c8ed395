"""At claim 1 an attacker learns no more of a person than is claimed, and far more where the same file is trained by rows."""

from dataclasses import replace

import pytest

from silodp.core.problem.person import filled, present
from silodp.engine.clipping import clipped_sum
from silodp.lab.audit.bounds import epsilon_of, gdp_lower
from silodp.lab.audit.persons import attack_persons, attack_rows
from silodp.lab.audit.pipeline import SOUND
from silodp.lab.audit.transcript import Case
from silodp.silo.answer.simulated import Simulated

CASE = Case("mb-sgd", 1.0, {"rounds": 4})


class ClipsRows(Simulated):
    """Clips each row, and adds a person's rows up: what a person can move is as many clips as it has rows."""

    def _mean(self, w, reference, mechanism, silos):
        r = self.records
        parts = r.x.flatten(1, 2), filled(r.y).flatten(1, 2), present(r.y).flatten(1, 2).to(r.x.dtype)
        return clipped_sum(self.problem.by_row, w, *parts, mechanism.clip) / r.counts[0]


def bound(scores):
    return epsilon_of(gdp_lower(*scores, 0.05), 1e-5)


@pytest.mark.parametrize("first", [20, 1])
def test_a_person_is_protected_as_claimed_whatever_rows_it_has(first):
    assert 0.7 < bound(attack_persons(CASE, 1000, first=first)) <= 1.0


def test_the_same_file_by_rows_gives_a_person_away():
    assert bound(attack_rows(CASE, 1000)) > 4.0


def test_clipping_rows_instead_of_persons_is_caught():
    assert bound(attack_persons(CASE, 1000, pipeline=replace(SOUND, answerer=ClipsRows))) > 4.0
