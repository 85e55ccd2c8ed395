"""The built-in data sets have the paper's silos and are read as scikit-learn reads them."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits

from silodp.core.errors import BadInput
from silodp.silo.data import datasets
from silodp.silo.data.datasets import DATASETS, Split


def rows(split: Split) -> torch.Tensor:
    """All records of a split, training and test, one row each, in lexicographic order."""
    x = torch.cat([split.train.x[split.train.mask], split.test_x]).flatten(1).double().numpy()
    return torch.from_numpy(x[np.lexsort(x.T[::-1])])


@pytest.mark.parametrize(
    ("name", "counts"), [("wbcd", (285, 169)), ("digits", (288, 288, 290, 288, 283))]
)
def test_embedded_sets_have_their_silos_and_a_fifth_held_out(name, counts):
    dataset, split = DATASETS[name], DATASETS[name].load(0, None)
    assert split.train.counts == counts
    assert len(split.train) == dataset.silos
    assert sum(counts) + len(split.test_y) == dataset.records
    assert (split.train.x.dtype, split.test_x.dtype) == (torch.float32, torch.float32)
    assert (split.train.y.dtype, split.test_y.dtype, split.classes) == (torch.int64, torch.int64, 2)


@pytest.mark.parametrize("name", ["wbcd", "digits"])
def test_a_trial_is_a_random_split_of_the_same_records_and_repeats_exactly(name):
    first, again, other = (DATASETS[name].load(trial, None) for trial in (0, 0, 1))
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.test_y, again.test_y)
    assert not torch.equal(first.train.x, other.train.x)
    assert torch.equal(rows(first), rows(other))


def test_wbcd_has_one_diagnosis_in_each_silo_and_standardised_features():
    split = DATASETS["wbcd"].load(3, None)
    assert split.train.names == ("benign", "malignant")
    for k in range(2):
        assert split.train.y[k, split.train.mask[k]].unique().tolist() == [k]
    assert split.test_y.bincount().tolist() == [72, 43]
    everything = rows(split)
    torch.testing.assert_close(
        everything.mean(0), torch.zeros(30, dtype=torch.float64), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(
        everything.std(0, correction=0), torch.ones(30, dtype=torch.float64), atol=1e-6, rtol=0
    )
    raw, target = load_breast_cancer(return_X_y=True)
    larger = (
        raw[target == 0, 0].mean() > raw[target == 1, 0].mean()
    )  # malignant cells have the larger radius
    assert larger == bool(split.train.x[1, :169, 0].mean() > split.train.x[0, :285, 0].mean())


def test_digits_silos_hold_an_even_and_an_odd_digit_scaled_by_the_public_range():
    split = DATASETS["digits"].load(0, None)
    assert split.train.names == ("0/1", "2/3", "4/5", "6/7", "8/9")
    for k in range(5):
        assert split.train.y[k, split.train.mask[k]].unique().tolist() == [0, 1]
    assert (split.train.x.min(), split.train.x.max()) == (0, 1)


def test_a_negative_trial_is_refused():
    with pytest.raises(BadInput, match="trial is -1"):
        DATASETS["wbcd"].load(-1, None)


def test_pixels_for_a_map_of_features_are_the_same_records_within_public_bounds():
    as_the_paper, pixels = (DATASETS["digits"].of(1, None, raw=raw) for raw in (False, True))
    assert torch.equal(pixels.train.y, as_the_paper.train.y)
    assert torch.allclose(pixels.test_x, 2 * as_the_paper.test_x - 1)
    assert (pixels.train.x.min(), pixels.train.x.max()) == (-1, 1)
    assert not pixels.train.x[~pixels.train.mask].any(), "padding stays zero"
    assert torch.equal(
        DATASETS["wbcd"].of(0, None, raw=True).test_x, DATASETS["wbcd"].load(0, None).test_x
    ), "no pictures, no pixels"


@pytest.mark.parametrize(
    ("load", "read"),
    [(load_breast_cancer, ("breast_cancer.csv", 1)), (load_digits, ("digits.csv.gz",))],
)
def test_tables_of_scikit_learn_are_read_as_it_reads_them(load, read):
    for mine, theirs in zip(datasets._of_sklearn(*read), load(return_X_y=True), strict=True):
        assert mine.tobytes() == np.ascontiguousarray(theirs).tobytes()
