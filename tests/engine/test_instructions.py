"""What is said to the last bit of clipped sums and of a gate's rows holds on processors of every
kind: the tests that say it, for each instruction set.
"""

import os
import subprocess
import sys

import pytest

import instruction_sets

ANSWER = "tests/silo/answer"
SUMS = ("tests/engine/test_clipping.py", "tests/engine/test_structured.py")
ROWS = (
    *(
        f"{ANSWER}/test_slots.py::test_a_record_has_the_same_integers_{where}"
        for where in ("in_every_batch_that_it_is_in", "whatever_the_others_hold")
    ),
    f"{ANSWER}/test_slots.py::test_a_record_moves_a_total_by_no_more_than_twice_the_clip",
    f"{ANSWER}/test_slots.py::test_no_point_makes_a_poisson_release_give_away_more_than_is_charged[5-0.25]",
    f"{ANSWER}/test_slots.py::test_a_gate_tries_its_kernels_before_it_serves",
    f"{ANSWER}/test_exact.py::test_replacing_one_record_changes_its_own_row_alone_to_the_last_bit",
    f"{ANSWER}/test_products.py::test_a_records_integers_are_the_same_whatever_the_others_hold",
    f"{ANSWER}/test_products.py::test_products_of_a_chunk_are_those_of_integers",
)
EXACT = (
    "not raising and (test_clipping or test_slots or test_exact or test_products or bad_record "
    "or padding or not_finite or weight_0)"
)
"""Of the structured path, what changes no bit; of the others everything but models in Python that
raise, which no processor has a part in.
"""


@instruction_sets.each
def test_all_this_holds_with_every_instruction_set(forced):
    """Clipped sums to the last bit, and a gate's rows."""
    forced.check(*SUMS, *ROWS, "-k", EXACT)


@pytest.mark.parametrize(
    "level", ["baseline", "x86-64-v3", *(["x86-64-v4"] if "SILODP_LONG" in os.environ else [])]
)
def test_the_path_in_c_holds_for_every_level_that_was_built(level):
    """Plain x86-64, with AVX2 and, with SILODP_LONG=1, with AVX-512."""

    def run(*words: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"SILODP_NATIVE": level, "OMP_NUM_THREADS": "1"}
        settings = {
            "env": environment,
            "cwd": instruction_sets.ROOT,
            "timeout": instruction_sets.LIMIT,
        }
        return subprocess.run(
            [sys.executable, *words], **settings, capture_output=True, text=True, check=False
        )

    if run("-c", "from silodp.engine import native; assert native.library()").returncode:
        pytest.skip(f"not tested: {level} was not built, or this processor does not run it")
    done = run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "tests/engine/test_native.py",
    )
    assert done.returncode == 0, done.stdout + done.stderr
