"""What is said of clipped sums to the last bit holds on processors of every kind: the tests that say it, once for each instruction set."""

import os
import signal
import subprocess
import sys

import pytest

import instruction_sets

EXACT = "bad_record or padding or not_finite or weight_0"
"""Of the structured path, what changes no bit; of the others everything."""


@instruction_sets.each
def test_clipped_sums_hold_to_the_last_bit_with_every_instruction_set(forced):
    forced.check("tests/engine/test_clipping.py", "tests/engine/test_structured.py", "-k", f"test_clipping or {EXACT}")


@pytest.mark.parametrize("architecture", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_the_path_in_c_holds_for_every_architecture(architecture):
    """Plain x86-64, with AVX2 and with AVX-512."""

    def run(*words: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"SILODP_NATIVE": architecture, "OMP_NUM_THREADS": "1"}
        settings = {"env": environment, "cwd": instruction_sets.ROOT, "timeout": instruction_sets.LIMIT}
        return subprocess.run([sys.executable, *words], **settings, capture_output=True, text=True, check=False)

    if run("-c", "from silodp.engine import native; assert native.library()").returncode:
        pytest.skip(f"not tested: there is no gcc here that builds for {architecture}")
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/engine/test_native.py")
    if done.returncode == -signal.SIGILL:
        pytest.skip(f"not tested: this processor is no {architecture}")
    assert done.returncode == 0, done.stdout + done.stderr
