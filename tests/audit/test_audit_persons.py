"""At claim 1 an attacker learns no more of a person than is claimed, and far more where the same
file is trained by rows.
"""

import pytest

from mistakes.mutants import MUTANTS
from silodp.audit.bounds import epsilon_of, gdp_lower
from silodp.audit.canary import persons
from silodp.audit.pipeline import SOUND
from silodp.audit.transcript import Case, Stage, attack_gate, attack_persons, played
from silodp.core.problem.person import present
from silodp.silo.data.records import Records

CASE = Case("mb-sgd", 1.0, {"rounds": 4})


def bound(scores):
    return epsilon_of(gdp_lower(*scores, 0.05), 1e-5)


@pytest.mark.parametrize("first", [20, 1])
def test_a_person_is_protected_as_claimed_whatever_rows_it_has(first):
    assert 0.7 < bound(attack_persons(CASE, 1000, first=first)) <= 1.0


def test_the_same_file_by_rows_gives_a_person_away():
    """What a person is promised by nobody: the same people, in a file that is trained on row by
    row.
    """
    worlds = []
    for world in persons():
        there = present(world.y)
        worlds.append(
            Records(world.x[there][None], world.y[there][None], (int(there.sum()),), world.names)
        )
    stage = Stage(CASE, CASE.plan(worlds[0].counts, SOUND), (worlds[0], worlds[1]), SOUND)
    assert bound(played(stage, 1000, 0)) > 4.0


def test_clipping_rows_instead_of_persons_is_caught():
    assert bound(attack_persons(CASE, 1000, pipeline=MUTANTS["clips rows, not persons"])) > 4.0


@pytest.mark.parametrize("first", [20, 1])
def test_an_answer_of_a_deployed_gate_tells_no_more_of_a_person_than_is_charged(first):
    assert gdp_lower(*attack_gate(200, first=first), 1e-6) <= 1.0


def test_a_gate_that_clips_rows_gives_a_person_away():
    assert (
        gdp_lower(*attack_gate(150, pipeline=MUTANTS["clips rows, not persons, at the gate"]), 1e-6)
        > 2.0
    )
