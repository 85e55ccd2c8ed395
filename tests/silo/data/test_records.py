"""Records pads silos of different size to one tensor, and refuses silos that do not fit
together.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

from silodp.core.errors import BadInput
from silodp.silo.data.records import Records


def two_silos() -> Records:
    return Records.of(
        [([[1.0, 2.0]], [1]), ([[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], [0, 1, 1])], ["north", "south"]
    )


def test_silos_are_padded_with_zero_rows_and_the_mask_says_which():
    records = two_silos()
    assert len(records) == 2
    assert records.counts == (1, 3)
    assert records.x.dtype == torch.float32
    assert records.y.dtype == torch.int64
    assert records.x.tolist() == [[[1, 2], [0, 0], [0, 0]], [[3, 4], [5, 6], [7, 8]]]
    assert records.y.tolist() == [[1, 0, 0], [0, 1, 1]]
    assert records.mask.tolist() == [[True, False, False], [True, True, True]]
    assert records.mask is records.mask


def test_select_keeps_order_names_and_the_length_of_the_padding():
    records = two_silos().select([1, 0])
    assert (records.names, records.counts) == (("south", "north"), (3, 1))
    assert records.x[1].tolist() == [[1, 2], [0, 0], [0, 0]]
    alone = two_silos().select([0])
    assert alone.x.shape == (1, 3, 2)
    assert alone.mask.tolist() == [[True, False, False]]
    with pytest.raises(BadInput, match="no silo is selected"):
        records.select([])


def test_to_moves_features_and_labels_and_keeps_what_is_public():
    records = two_silos().to("meta")
    assert (records.x.device.type, records.y.device.type) == ("meta", "meta")
    assert (records.counts, records.names) == ((1, 3), ("north", "south"))


def test_one_float_target_makes_all_labels_float():
    assert Records.of([([[1]], [1]), ([[2]], [0.5])]).y.tolist() == [[1.0], [0.5]]


def test_images_tensors_and_read_only_arrays_are_taken():
    image = np.zeros((2, 3, 4, 4), np.uint8)
    image.flags.writeable = False
    records = Records.of(
        [(image, np.array([True, False])), (torch.ones(1, 3, 4, 4), torch.tensor([1]))]
    )
    assert records.x.shape == (2, 2, 3, 4, 4)
    assert records.names == ("silo-0", "silo-1")


def test_values_that_are_not_finite_are_kept_for_the_gate_to_clip():
    x = Records.of([([[math.nan, math.inf, 1e300]], [0])]).x[0, 0]
    assert math.isnan(x[0])
    assert x[1:].tolist() == [math.inf, math.inf]


def test_repr_shows_no_record():
    assert repr(two_silos()) == "Records(counts=(1, 3), names=('north', 'south'))"


GOOD = ([[1.0, 2.0]], [1])


@pytest.mark.parametrize(
    ("silos", "sentence"),
    [
        ([], "no silos"),
        ([GOOD, (np.zeros((0, 2)), [])], "'silo-1' has no records"),
        (
            [GOOD, ([[1.0]], [1])],
            r"'silo-1' has records of shape \(1,\) but silo 'silo-0' has \(2,\)",
        ),
        ([GOOD, ([[1.0, 2.0]], [1, 0])], "'silo-1' has 1 rows of features but 2 labels"),
        (
            [GOOD, ([[1.0, 2.0], [1.0]], [1, 0])],
            "features of silo 'silo-1' are not one rectangular array of numbers",
        ),
        ([GOOD, ([["a", "b"]], [1])], "features of silo 'silo-1'"),
        ([GOOD, ([[1.0, 2.0]], ["a"])], "labels of silo 'silo-1'"),
        ([GOOD, ([1.0, 2.0], [1, 0])], r"'silo-1' needs features of shape \(n, ...\)"),
        ([([[1.0]], [[1]])], r"labels of shape \(n,\)"),
    ],
)
def test_silos_that_do_not_fit_are_refused_by_name(silos, sentence):
    with pytest.raises(BadInput, match=sentence) as refusal:
        Records.of(silos)
    assert str(refusal.value).endswith(".")


@pytest.mark.parametrize("names", [["a"], ["a", "a"]])
def test_every_silo_needs_its_own_name(names):
    with pytest.raises(BadInput, match="2 silos need 2 different names"):
        Records.of([GOOD, GOOD], names)


def test_records_that_count_as_zero_do_so_on_another_device_and_among_other_silos():
    records = Records.of([(np.ones((3, 2)), np.zeros(3)), (np.ones((2, 2)), np.zeros(2))])
    void = torch.tensor([[True, False, False], [False, True, False]])
    records = dataclasses.replace(records, void=void)
    assert torch.equal(records.to("cpu").void, void)
    assert torch.equal(records.select([1]).void, void[1:])
