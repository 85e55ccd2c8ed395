"""Which iterate a run hands over."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from silodp.core.errors import BadInput
from silodp.server.kept import Kept
from silodp.server.loop import Run
from silodp.server.output import RULES, output


def points(count):
    return [torch.full((2, 3), float(t)) for t in range(count)]


def test_the_last_iterate_is_the_default():
    assert output(iter(points(5))).tolist() == [[4.0] * 3] * 2


def test_the_last_rule_keeps_one_iterate_at_a_time():
    alive = []

    def run():
        for t in range(5):
            alive.append(t)
            yield torch.full((1, 1), float(t))

    assert output(run()).item() == 4.0
    assert alive == [0, 1, 2, 3, 4]


def test_the_tail_is_the_mean_of_the_second_half():
    assert output(points(6), "tail").tolist() == [[4.0] * 3] * 2
    assert output(points(5), "tail").tolist() == [[3.0] * 3] * 2
    assert output(points(1), "tail").tolist() == [[0.0] * 3] * 2


def test_the_tail_leaves_the_iterates_as_they_were():
    kept = points(4)
    output(kept, "tail")
    assert [float(p[0, 0]) for p in kept] == [0.0, 1.0, 2.0, 3.0]


def test_a_random_iterate_is_each_with_the_same_probability():
    """Chi-square over 5 iterates and 2000 fixed seeds; false-alarm rate 1e-6 (the statistic's upper
    quantile for 4 degrees is 33.4).
    """
    kept = points(5)
    hits = np.bincount(
        [int(output(kept, "random", seed=s)[0, 0]) for s in range(2000)], minlength=5
    )
    assert ((hits - 400) ** 2 / 400).sum() < 33.4


def test_a_random_iterate_is_the_same_for_the_same_seed():
    assert torch.equal(output(points(50), "random", seed=3), output(points(50), "random", seed=3))


@pytest.mark.parametrize("rule", RULES)
def test_a_run_without_a_step_is_refused(rule):
    with pytest.raises(BadInput, match="the algorithm made no step; give it at least one round"):
        output([], rule)


def test_an_unknown_rule_is_refused_before_the_run_begins():
    def run():
        raise RuntimeError("the run began")
        yield

    with pytest.raises(
        BadInput, match="output rule 'best' is unknown; choose one of last, random, tail"
    ):
        output(run(), "best")


@pytest.mark.parametrize("rule", RULES)
def test_iterates_in_a_file_give_the_same_to_the_last_bit_and_are_not_held(tmp_path, rule):
    generator, kept, plain, alive = torch.Generator().manual_seed(0), Kept(tmp_path), [], []
    for _ in range(7):
        w = torch.randn(1, 5, generator=generator)
        kept.append(w)
        plain.append(w.clone())
        alive.append(weakref.ref(w))
    del w
    assert [ref() is not None for ref in alive] == [False] * 6 + [True]
    assert torch.equal(output(kept, rule, seed=3), output(plain, rule, seed=3))
    assert [torch.equal(found, w) for found, w in zip(kept, plain, strict=True)] == [True] * 7
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rule", RULES)
def test_a_run_holds_no_more_iterates_the_longer_it_lasts(tmp_path, rule):
    def walk(fed, problem, w):
        for _ in range(20):
            w = w + 1.0
            yield w

    class Short(Run):
        def _write(self, w):
            handed.append(w)

    def iterate(number, w):
        made.append(weakref.ref(w))
        held.append(sum(ref() is not None for ref in made))

    made, held, handed = [], [], []
    order = SimpleNamespace(output=rule, rounds=20, step=1.0)
    plan, algorithm = SimpleNamespace(asked=[], counts=()), SimpleNamespace(name="walk")
    prepared = SimpleNamespace(
        order=order,
        settings={"rounds": 20},
        run=walk,
        mechanisms={},
        plan=plan,
        algorithm=algorithm,
        recalibration=None,
    )
    problem = SimpleNamespace(dim=2, initial=lambda seeds: torch.zeros(1, 2))
    collaborators = {
        "connect": SimpleNamespace,
        "journal": SimpleNamespace(iterate=iterate, close=lambda: None),
        "reporter": SimpleNamespace(progress=lambda iterates: iterates),
    }
    for _ in Short(prepared, problem, tmp_path, 3, **collaborators):
        pass
    assert max(held) <= 2
    assert torch.equal(
        handed[0], output([torch.full((1, 2), t + 1.0) for t in range(20)], rule, seed=3)
    )


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "silodp.server.kept.tempfile.TemporaryFile",
        lambda dir: open("/dev/full", "r+b", buffering=0),  # noqa: SIM115
    )
    with pytest.raises(
        BadInput,
        match=(
            r"cannot be kept in .* \(No space left on device\); make room there, and resume "
            r"the run"
        ),
    ):
        Kept(tmp_path).append(torch.ones(1, 3))


def test_a_run_that_made_no_iterate_left_no_file_open_in_its_folder(tmp_path):
    with pytest.raises(BadInput, match="made no step"):
        output(Kept(tmp_path), "tail")
    assert not list(tmp_path.iterdir())
