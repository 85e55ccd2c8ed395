"""From what people say to what an algorithm takes; what cannot be run is refused in one
sentence.
"""

import math
from typing import Annotated

import pytest

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement
from silodp.server.algorithms import ALGORITHMS, find
from silodp.server.algorithms.signature import Algorithm, Setting
from silodp.server.federation import Balanced, Everyone, Uniform
from silodp.server.settings import (
    default_shares,
    participation_by_name,
    prepared,
    sampling_by_name,
    samplings_by_name,
)

SAID = {
    "rounds": 24,
    "phase": 4,
    "local_steps": 3,
    "inner": 6,
    "restarts": 2,
    "slope": 0.5,
    "momentum": 0.8,
    "kappa": 0.6,
}


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("prox-sgd", {"rounds": 24}),
        ("mb-sgd", {"rounds": 24}),
        ("local-sgd", {"rounds": 24, "local_steps": 3}),
        ("prox-svrg", {"rounds": 24, "inner": 6, "slope": 0.5}),
        ("prox-pl-svrg", {"restarts": 2, "rounds": 24, "inner": 6, "slope": 0.5, "seed": 0}),
        ("spider", {"rounds": 24, "phase": 4, "slope": 0.5, "form": "move"}),
        ("spider-alternate", {"rounds": 24, "slope": 0.5, "form": "move"}),
        ("diff2", {"rounds": 24, "phase": 4, "slope": 0.5}),
        ("diff2-local", {"rounds": 24, "phase": 4, "local_steps": 3, "slope": 0.5}),
        ("scaffold", {"rounds": 24, "local_steps": 3}),
        ("momentum", {"rounds": 24, "momentum": 0.8}),
        ("adam", {"rounds": 24, "momentum": 0.8, "decay": 0.999, "floor": 1e-8}),
        ("disk", {"rounds": 24, "kappa": 0.6}),
        ("accelerated", {"rounds": 24, "restarts": 2, "strong": 0.0}),
        ("localized", {"rounds": 24, "stages": 3, "pull": 0.01, "growth": 8.0}),
    ],
)
def test_an_algorithm_takes_its_own_settings_and_no_others(name, taken):
    assert find(name).schedule(SAID) == taken


def test_a_setting_that_must_be_given_is_asked_for_in_its_own_words():
    def own(
        fed,
        problem,
        w,
        *,
        step,
        mass: Annotated[float, Setting(help="How heavy the ball is.")],
        minibatch: Gaussian,
    ):
        yield w

    with pytest.raises(
        BadInput,
        match=r"^own needs the setting 'mass' \(How heavy the ball is\); give --set mass=VALUE$",
    ):
        Algorithm.of(own, "own").schedule({})


def test_every_algorithm_is_found_by_its_name():
    assert all(find(name).name == name for name in ALGORITHMS)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("mb-sgd", {"rounds": 0}, r"^rounds is 0; it must be 1 or more$"),
        ("spider", {"phase": -1}, r"^phase is -1; it must be 1 or more$"),
        ("local-sgd", {"local_steps": 0}, r"^local steps is 0; it must be 1 or more$"),
        ("prox-svrg", {"inner": 0}, r"^inner steps is 0; it must be 1 or more$"),
        ("prox-pl-svrg", {"restarts": 0}, r"^restarts is 0; it must be 1 or more$"),
        (
            "spider",
            {"slope": 0.0},
            r"^slope is 0; it must be greater than 0 \(inf to clip at 2 L alone\)$",
        ),
        ("spider", {"slope": -2.0}, r"^slope is -2; it must be greater than 0"),
        ("spider", {"slope": math.nan}, r"^slope is nan; it must be greater than 0"),
        (
            "spider",
            {"phase": 25},
            r"^phase is 25 but there are only 24 rounds; choose a phase between 1 and 24$",
        ),
        (
            "prox-svrg",
            {"inner": 25},
            (
                r"^24 rounds are less than one epoch of 25 inner steps; use fewer inner steps "
                r"or more rounds$"
            ),
        ),
        (
            "accelerated",
            {"restarts": 25},
            r"^24 rounds are fewer than 25 restarts; use fewer restarts or more rounds$",
        ),
        ("localized", {"pull": -1.0}, r"^pull is -1; it must be 0 or more, and finite$"),
        (
            "diff2",
            {"slope": math.inf},
            (
                r"^slope is inf, but diff2 has no other bound on a difference; give a finite "
                r"slope, or use spider$"
            ),
        ),
        ("momentum", {"momentum": 1.0}, r"^momentum is 1; it must be 0 or more, and less than 1$"),
        ("adam", {"momentum": -0.1}, r"^momentum is -0.1; it must be 0 or more"),
        ("adam", {"momentum": math.nan}, r"^momentum is nan; it must be 0 or more"),
        (
            "disk",
            {"kappa": 0.0},
            r"^kappa is 0; it must be greater than 0, and at most 1 \(which is mb-sgd\)$",
        ),
        ("disk", {"kappa": 1.5}, r"^kappa is 1.5; it must be greater than 0, and at most 1"),
        ("prox-pl-svrg", {"inner": 13}, r"^24 rounds are less than one epoch of 26 inner steps"),
    ],
)
def test_a_schedule_that_cannot_be_run_is_refused(name, change, sentence):
    with pytest.raises(BadInput, match=sentence):
        find(name).schedule(SAID | change)


def test_a_phase_matters_only_to_those_who_have_one():
    assert find("mb-sgd").schedule(SAID | {"phase": 99}) == {"rounds": 24}


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(
        BadInput,
        match=(
            r"^algorithm 'lamb' is unknown; choose one of accelerated, adam, diff2, .*, "
            r"spider-alternate, or give FILE.py:NAME$"
        ),
    ):
        find("lamb")


def test_prepared_leaves_only_the_mechanisms_open():
    run = prepared(find("spider"), {"rounds": 3, "phase": 2, "slope": 1.0}, 0.1)
    assert run.keywords == {"rounds": 3, "phase": 2, "slope": 1.0, "step": 0.1}
    assert run.func is ALGORITHMS["spider"].run


# --- shares --------------------------------------------------------------------------------------


def test_an_algorithm_with_one_kind_of_release_has_nothing_to_split():
    assert default_shares(find("mb-sgd"), {"rounds": 5}) is None


def test_the_share_given_is_taken():
    assert default_shares(find("spider"), {"phase": 5, "slope": 1.0}, 0.25) == {
        "anchor": 0.25,
        "refine": 0.75,
    }


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 2.0, math.nan])
def test_a_senseless_share_is_refused(share):
    with pytest.raises(
        BadInput,
        match=r"^the anchors' share of the budget is .*; it must lie strictly between 0 and 1$",
    ):
        default_shares(find("spider"), {"phase": 5, "slope": 1.0}, share)


@pytest.mark.parametrize("phase", [2, 5, 10])
def test_the_default_share_of_the_plain_form_minimises_the_variance_of_the_carried_estimate(phase):
    """Mean over the q - 1 rounds after an anchor: its variance 1 / a, and k differences of twice
    the clip in the k-th of them.
    """
    shares = default_shares(find("spider"), {"phase": phase, "slope": math.inf})

    def variance(anchor):
        carried = [1 / anchor + k * 2.0**2 * (phase - 1) / (1 - anchor) for k in range(1, phase)]
        return sum(carried) / (phase - 1)

    best = variance(shares["anchor"])
    assert shares["anchor"] + shares["refine"] == pytest.approx(1.0)
    assert all(best <= variance(i / 200) + 1e-12 for i in range(1, 200))


def test_anchors_take_less_in_longer_phases_and_more_where_differences_are_clipped_tighter():
    clipped = [
        default_shares(find("spider"), {"phase": q, "slope": 1.0})["anchor"] for q in (2, 5, 10)
    ]
    plain = [
        default_shares(find("spider"), {"phase": q, "slope": math.inf})["anchor"]
        for q in (2, 5, 10)
    ]
    assert clipped == sorted(clipped, reverse=True)
    assert all(c > p for c, p in zip(clipped, plain, strict=True))
    assert default_shares(find("prox-svrg"), {"inner": 5, "slope": 1.0}) == default_shares(
        find("spider"), {"phase": 5, "slope": 1.0}
    )


# --- sampling and participation by name ----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "sampling"),
    [
        (None, "mb-sgd", FullBatch()),
        (None, "prox-sgd", DisjointBatches(24)),
        ("full", "prox-sgd", FullBatch()),
        ("disjoint", "mb-sgd", DisjointBatches(24)),
        ("disjoint", "adam", DisjointBatches(24)),
        ("poisson:0.1", "spider", Poisson(0.1)),
        ("poisson:1", "spider", Poisson(1.0)),
        ("without-replacement:0.25", "local-sgd", WithoutReplacement(0.25)),
    ],
)
def test_sampling_is_known_by_its_name(text, name, sampling):
    assert sampling_by_name(text, find(name), 24) == sampling


@pytest.mark.parametrize(
    "text",
    [
        "poisson",
        "poisson:",
        "poisson:0",
        "poisson:1.5",
        "poisson:x",
        "poisson:nan",
        "without-replacement:-1",
    ],
)
def test_a_rate_that_is_none_is_refused(text):
    with pytest.raises(
        BadInput,
        match=(
            rf"^sampling '{text}' needs a rate between 0 and 1, such as "
            r"(poisson|without-replacement):0\.1$"
        ),
    ):
        sampling_by_name(text, find("mb-sgd"), 24)


@pytest.mark.parametrize("text", ["with-replacement:0.1", "shuffle", "0.5"])
def test_an_unknown_sampling_is_refused(text):
    with pytest.raises(
        BadInput,
        match=(
            rf"^sampling '{text}' is unknown; use full, disjoint, poisson:RATE or "
            r"without-replacement:RATE$"
        ),
    ):
        sampling_by_name(text, find("mb-sgd"), 24)


@pytest.mark.parametrize("text", ["full:3", "disjoint:3", "anchor=full:2,refine=full"])
def test_a_number_that_would_be_passed_over_is_refused(text):
    with pytest.raises(BadInput, match="takes no number"):
        samplings_by_name(text, find("spider" if "=" in text else "mb-sgd"), 24)


@pytest.mark.parametrize(
    "text", ["anchor=full,anchor=poisson:0.1,refine=full", "anchor=,refine=full"]
)
def test_each_kind_has_one_sampling(text):
    with pytest.raises(BadInput, match="must name each kind of release of spider once"):
        samplings_by_name(text, find("spider"), 24)


@pytest.mark.parametrize(
    "name",
    [
        "local-sgd",
        "scaffold",
        "prox-svrg",
        "prox-pl-svrg",
        "spider",
        "spider-alternate",
        "diff2",
        "diff2-local",
    ],
)
def test_disjoint_batches_are_refused_where_records_are_needed_again(name):
    with pytest.raises(
        BadInput,
        match=(
            rf"^{name} needs each record more than once; disjoint batches suit prox-sgd and "
            r"mb-sgd$"
        ),
    ):
        sampling_by_name("disjoint", find(name), 24)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("all", Everyone), ("uniform:3", Uniform), ("random:3", Uniform), ("balanced:3", Balanced)],
)
def test_participation_is_known_by_its_name_and_made_afresh(text, kind):
    make = participation_by_name(text, 7, seed=1)
    first, second = make(), make()
    assert type(first) is type(second) is kind
    assert first is not second
    assert [first.draw() for _ in range(5)] == [second.draw() for _ in range(5)]


def test_random_participation_has_between_one_and_m_silos():
    who = participation_by_name("random:3", 7, seed=1)()
    assert {len(who.draw()) for _ in range(100)} == {1, 2, 3}


@pytest.mark.parametrize(
    "text", ["some", "uniform", "uniform:", "uniform:x", "balanced:-1", "random:1.5", "uniform:²"]
)
def test_an_unknown_participation_is_refused(text):
    with pytest.raises(
        BadInput,
        match=(
            rf"^participation '{text}' is unknown; use all, uniform:M, random:M, random:L:M or "
            r"balanced:M$"
        ),
    ):
        participation_by_name(text, 7, seed=1)


@pytest.mark.parametrize(
    "text",
    ["uniform:8", "random:8", "balanced:8", "uniform:0", "balanced:0", "random:0", "random:0:3"],
)
def test_more_silos_than_there_are_or_none_are_refused(text):
    with pytest.raises(BadInput, match=r"^\d of 7 silos cannot take part; choose between 1 and 7$"):
        participation_by_name(text, 7, seed=1)()
