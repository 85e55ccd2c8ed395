"""The figures of docs/tightness.md are those of the code, and its checks exist."""

import math
import re
from pathlib import Path

from silodp.core.privacy import totals
from silodp.server.order import Order
from silodp.simulation.planning import planned

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tightness.md").read_text()


def test_the_distance_in_the_example_is_as_small_as_the_page_shows():
    order = Order("mb-sgd", rounds=50, epsilon=("0.75",), trust="masks")
    share = planned(order, (1238,) * 25)["parameters"]["noise_multiplier"]
    found = totals.log_distance(totals.least_scale(share, 25), 25, totals.MODULUS_BITS)
    (shown,) = re.findall(r"below 10\^\(-([\d,]+)\)", PAGE)
    assert found / math.log(10) < -float(shown.replace(",", ""))


def test_a_price_is_finite_from_as_many_steps_as_the_page_shows():
    (shown,) = re.findall(r"below (\d+) steps of the lattice", PAGE)
    for silos in (2, 25, 2**20):
        steps = int(shown) * math.sqrt(silos) / totals.LEAST_STEPS
        assert totals.total_price(0.95 * steps, silos) == math.inf
        assert math.isfinite(totals.total_price(1.02 * steps, silos))


def test_the_files_that_check_the_claim_are_there():
    for path in re.findall(r"`((?:tests|research|core)/[\w/.]+)`", PAGE):
        assert any((base / path).exists() for base in (ROOT, ROOT / "src/silodp")), path
