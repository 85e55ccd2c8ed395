"""What an evaluation means in words, and which of several models is better."""

import pytest

from silodp.core import quality


def figure(value, noise=0.01, sampling=0.01, **more):
    return {
        "value": value,
        "noise": noise,
        "sampling": sampling,
        "low": value - 2 * noise,
        "high": value + 2 * noise,
        "too_noisy": False,
    } | more


def row(accuracy, balanced, auc, larger=0.8, off=0.0, slope=1.0, other=None):
    figures = {
        "accuracy": figure(accuracy),
        "balanced accuracy": figure(balanced),
        "auc": figure(auc),
        "larger class": figure(larger),
    }
    figures |= {"calibration in the large": figure(off), "calibration slope": figure(slope)}
    return {"name": "all", "held_out": 1000, "classes": 2, "figures": figures | (other or {})}


MAJORITY, USEFUL = row(0.8, 0.5, 0.51), row(0.75, 0.77, 0.85)


def test_the_useful_model_is_ranked_before_the_one_that_always_says_the_larger_class():
    found, why = quality.ranking({"majority": MAJORITY, "useful": USEFUL})
    assert [(s.name, s.place, s.tied) for s in found] == [("useful", 1, ()), ("majority", 2, ())]
    assert "Ranked by AUC" in why
    assert (
        "majority has the smaller error (20.0% against 25.0%), but its AUC is 0.51 against "
        "0.85, no better than guessing."
    ) in why


def test_models_whose_intervals_overlap_share_a_place_and_it_is_said():
    found, why = quality.ranking(
        {"a": row(0.8, 0.7, 0.80), "b": row(0.8, 0.7, 0.82), "c": MAJORITY}
    )
    assert [(s.name, s.place) for s in found] == [("b", 1), ("a", 1), ("c", 3)]
    assert found[0].tied == ("a",)
    assert "b is not clearly better than a: their 95 % intervals overlap." in why


def test_nothing_is_ranked_by_figures_that_differ_or_that_noise_has_drowned():
    number = {"name": "all", "held_out": 9, "figures": {"squared error": figure(1.0)}}
    assert quality.ranking({"a": MAJORITY, "b": number})[0] == []
    drowned = row(0.8, 0.7, 0.9, other={"auc": figure(0.9, too_noisy=True)})
    found, why = quality.ranking({"a": MAJORITY, "b": drowned})
    assert not found
    assert "hides the AUC of b" in why


def test_several_classes_are_ranked_by_balanced_accuracy():
    many = [
        {**r, "classes": 5, "figures": {k: v for k, v in r["figures"].items() if k != "auc"}}
        for r in (MAJORITY, USEFUL)
    ]
    found, why = quality.ranking({"majority": many[0], "useful": many[1]})
    assert [s.name for s in found] == ["useful", "majority"]
    assert "Ranked by balanced accuracy" in why
    assert "guessing has 0.2" in quality.verdict(many[1])


def test_a_verdict_says_whether_guessing_does_as_well_and_why_accuracy_misleads():
    assert quality.verdict(MAJORITY).startswith(
        "The model is not significantly better than guessing: AUC 0.51 (0.48-0.54)"
    )
    assert "is not significantly above the share of the larger class, 80.0%." in quality.verdict(
        MAJORITY
    )
    assert quality.verdict(USEFUL).startswith(
        "The model is significantly better than guessing: AUC 0.85 (0.82-0.88)"
    )
    assert "larger class" not in quality.verdict(row(0.9, 0.9, 0.95))
    drowned = row(0.8, 0.7, 0.9, other={"auc": figure(0.9, too_noisy=True)})
    assert (
        quality.verdict(drowned)
        == "The noise hides how good the model is: its AUC is too noisy. Evaluate with a larger "
        "epsilon, or on more held-out records."
    )
    assert quality.verdict({"figures": {"squared error": figure(1.0)}}) == ""


@pytest.mark.parametrize(
    ("off", "slope", "words"),
    [
        (0.0, 1.0, "Its risks show no detectable average error."),
        (0.1, 1.0, "On average its risks are too high by 10.0 points (7.2 to 12.8)."),
        (
            -0.1,
            0.5,
            (
                "On average its risks are too low by 10.0 points (7.2 to 12.8). They are too "
                "extreme: calibration slope 0.5 (0.472-0.528)"
            ),
        ),
    ],
)
def test_calibration_is_said_in_words(off, slope, words):
    assert words in quality.verdict(row(0.9, 0.9, 0.95, off=off, slope=slope))


def test_an_interval_holds_noise_and_sampling_together_and_stays_within_what_a_share_can_be():
    assert quality.interval("auc", figure(0.5, noise=0.03, sampling=0.04)) == pytest.approx(
        (0.5 - 0.0987, 0.5 + 0.0987), abs=1e-3
    )
    assert quality.interval("auc", figure(0.99, noise=0.03))[1] == 1.0
    assert quality.interval("loss", figure(0.01, noise=0.03))[0] == 0.0
    assert quality.interval("calibration in the large", figure(-0.1))[0] < -0.1
    assert quality.short(row(0.9, 0.9, 0.95), "calibration in the large") == "0 (-0.028 to 0.028)"
    assert quality.short({"figures": {}}, "auc") == "-"


# --- groups of records ---------------------------------------------------------------------------


def groups(*pairs, **more):
    """Groups a, b, ... with the accuracies of each and of all others."""
    return {
        "by": "sex",
        "note": "",
        "rows": [
            {
                "name": name,
                "records": 100.4,
                "records_noise": 3.2,
                "figures": {"accuracy": figure(own, **more)},
                "rest": {"figures": {"accuracy": figure(rest)}},
            }
            for name, (own, rest) in zip("abcdefghijkl", pairs, strict=False)
        ],
    }


def test_a_group_is_said_to_be_worse_off_only_where_intervals_do_not_overlap():
    worse = quality.differences(groups((0.7, 0.9), (0.9, 0.7)))
    assert worse == (
        "The model is clearly less accurate where sex is a, 0.70 (0.67-0.73) against 0.90 "
        "(0.87-0.93) for all others."
    )
    same = quality.differences(groups((0.87, 0.9), (0.9, 0.87)))
    assert same == "No difference by sex is visible at this price, but there may be one."
    assert quality.by_group(groups((0.7, 0.9)))[1] == [
        ("a", "100 ± 3.2", "0.70 (0.67-0.73)", "0.90 (0.87-0.93)")
    ]


def test_many_groups_are_many_chances_to_be_wrong_so_their_intervals_are_wider():
    pair = (0.84, 0.9)
    assert quality.differences(groups(pair, (0.9, 0.84))).startswith(
        "The model is clearly less accurate where sex is a"
    )
    assert quality.differences(groups(pair, *[(0.9, 0.9)] * 11)).startswith("No difference")


def test_drowned_groups_are_said_and_nobody_is_called_fair():
    some = groups((0.7, 0.9), (0.9, 0.8), (0.9, 0.8))
    some["rows"][2]["figures"]["accuracy"]["too_noisy"] = True
    assert quality.differences(some).endswith("for all others. The noise hides 1 of 3 groups.")
    none = quality.differences(groups((0.7, 0.9), (0.9, 0.7), too_noisy=True))
    assert (
        none
        == "The noise hides all differences by sex. Evaluate with a larger epsilon, or on more "
        "held-out records."
    )
    assert quality.by_group(groups((0.7, 0.9), too_noisy=True))[1][0][2] == "too noisy"


def whole(value, low, high):
    return {"value": value, "low": low, "high": high, "sampling": 0.1, "whole": True}


def test_an_interval_that_has_all_parts_is_not_made_wider():
    assert quality.interval("accuracy", whole(0.8, 0.7, 0.9)) == (0.7, 0.9)


def test_a_model_of_two_classes_is_described_by_what_happens_to_a_hundred_records():
    row = {
        "kind": "binary",
        "classes": 2,
        "outcome": "readmitted is yes",
        "threshold": 0.2,
        "figures": {
            "auc": whole(0.8, 0.7, 0.9),
            "prevalence": whole(0.13, 0.1, 0.16),
            "sensitivity": whole(0.75, 0.6, 0.9),
            "positive predictive value": whole(0.4, 0.3, 0.5),
            "flagged": whole(0.25, 0.2, 0.3),
        },
    }
    words = quality.verdict(row)
    assert "Of 100 records, readmitted is yes for 13 (10 to 16)." in words
    assert (
        "At a risk of 0.2 or more: 25 (20 to 30) of 100 records are flagged; 75 (60 to 90)" in words
    )


@pytest.mark.parametrize(
    ("kind", "figure", "sentence"),
    [
        ("regression", "explained variance (R2)", "The model explains 50% of the variance (40% to"),
        ("count", "explained deviance", "The model explains 50% of the deviance (40% to 60%)"),
    ],
)
def test_a_model_of_numbers_is_described_by_what_it_explains(kind, figure, sentence):
    row = {"kind": kind, "figures": {figure: whole(0.5, 0.4, 0.6)}}
    row["figures"]["absolute error"] = whole(3.2, 3.0, 3.4)
    words = quality.verdict(row)
    assert sentence in words
    assert "On average a prediction is off by 3.2 (3 to 3.4)." in words
    hidden = {"kind": kind, "figures": {figure: whole(None, -1.0, 1.0)}}
    assert "The noise hides how much of the" in quality.verdict(hidden)


def test_several_classes_and_survival_times_have_a_sentence_of_their_own():
    row = {"kind": "multiclass", "classes": 3, "figures": {"accuracy": whole(0.7, 0.6, 0.8)}}
    row["figures"]["balanced accuracy"] = whole(0.6, 0.5, 0.7)
    assert "it predicts the class of 70 (60 to 80) correctly" in quality.verdict(row)
    row = {"kind": "survival", "outcome": "died by t 3", "figures": {"auc": whole(0.7, 0.6, 0.8)}}
    assert "The figures are about died by t 3." in quality.verdict(row)
