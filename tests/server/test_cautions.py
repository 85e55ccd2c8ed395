"""Settings that are rarely meant get a sentence with the reason; usual ones get none."""

import pytest

from silodp.server.cautions import cautions
from silodp.server.order import Order

NAMES = ("north", "west")
USUAL = {"algorithm": "mb-sgd", "rounds": 25, "step": 0.5, "clip": 1.0, "epsilon": ("3",)}


def said(records=(300, 120), **changes):
    return cautions(Order(**(USUAL | changes)), NAMES, records)


def test_usual_settings_get_no_warning():
    assert said() == []
    assert said(records=(20, 20), epsilon=("20",), delta=("0.05",)) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epsilon": ("30",)}, "epsilon 30 protects little: what is released may change the odds"),
        ({"epsilon": ("north=3", "west=30")}, "by a factor of 10^13. Use 10 or less."),
        ({"delta": ("0.009",)}, "delta is above 1/n at north (0.009; 300 records), west"),
        ({"records": (300, 19)}, "fewer than 20 records at west (19 records). Noise hides"),
        ({"step": 500.0}, "step 500 with clip 1 may move the model by 500 in one round"),
        ({"step": 1e-5}, "moves the model by at most 0.00025 in 25 rounds. It will stay"),
    ],
)
def test_a_setting_that_is_rarely_meant_gets_one_sentence_that_says_why(changes, sentence):
    found = said(**changes)
    assert len(found) == 1
    assert sentence in found[0]
