"""The list of runs is sorted as asked, and the compare page shows what differs."""

from dataclasses import replace

import pytest

from silodp.pages.app import ORDERS, Listed, compared
from silodp.pages.markup import join
from silodp.pages.runs import Run, Silo

ROWS = (
    Listed("a", (), "Death from age", "mlp:8", "nobody", 0.7, 3.0),
    Listed("b", (), "Fever from age", "additive:6", "a shuffler", 0.9, 5.0),
    Listed("c", (), "Cough from age", "logistic", "other silos"),
)


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("name", "abc"),
        ("prediction", "cab"),
        ("model", "bca"),
        ("trust", "bac"),
        ("quality", "bac"),
        ("epsilon", "abc"),
    ],
)
def test_each_order_sorts_and_unknown_figures_come_last(order, names):
    assert "".join(row.name for row in sorted(ROWS, key=ORDERS[order])) == names


def test_the_compare_page_shows_results_and_only_the_settings_that_differ(tmp_path):
    silos = (Silo("north", 100, 3.0, 1e-5, 3.0, 1.0),)
    about = {"algorithm": "mb-sgd", "model": "logistic", "step": 1.0, "momentum": 0.9}
    one = Run(tmp_path, "train", "finished", "", about, 5, 5, silos)
    other = replace(one, about=about | {"model": "mlp:8"})
    page = str(join(compared([("one", one), ("other", other)])))
    differ, _, equal = page.partition("settings are equal in all")
    assert ">mlp:8<" in differ
    assert ">step<" not in differ
    assert ">step<" in equal
    assert "momentum" not in page, "mb-sgd has none"
    assert "All settings are equal." in str(join(compared([("a", one), ("b", one)])))
