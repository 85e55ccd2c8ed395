"""The same tests with other instruction sets: in a process of its own, in which ATen, oneDNN and
MKL are told what to use.

    @instruction_sets.each
    def test_it_holds_with_every_instruction_set(forced):
        forced.check("tests/silo/answer/test_slots.py::test_a_row_is_its_own")

runs the named tests once in each of SETTINGS, and there is one outcome for each setting and
library: passed, or skipped with the reason where the library does not heed the setting on this
processor. A test that is red there is red here, whatever a library heeds. Run as a program it is
that process: it looks what is in force, writes it to a file, and hands over to pytest.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1200.0  # seconds; nothing takes so long unless the machine is very busy


@dataclass(frozen=True)
class Setting:
    """What the environment says, and which words must then be found in what each library says of
    itself.
    """

    name: str
    environment: tuple[tuple[str, str], ...]
    wanted: tuple[tuple[str, str], ...]


def _setting(
    name: str, aten: str, onednn: tuple[str, str], mkl: dict[str, str], mkl_says: str, threads: int
) -> Setting:
    environment = {
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn[0],
        "DNNL_MAX_CPU_ISA": onednn[0],
        "OMP_NUM_THREADS": str(threads),
    }
    wanted = {"ATen": aten.upper(), "oneDNN": onednn[1], "MKL": mkl_says, "threads": str(threads)}
    return Setting(name, tuple((environment | mkl).items()), tuple(wanted.items()))


SETTINGS = (
    _setting(
        "plain", "default", ("SSE41", "SSE4.1"), {"MKL_CBWR": "COMPATIBLE"}, "CNR:COMPATIBLE", 1
    ),
    _setting(
        "avx2",
        "avx2",
        ("AVX2", "AVX2"),
        {"MKL_CBWR": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        "CNR:AVX2",
        2,
    ),
    _setting(
        "avx512",
        "avx512",
        ("AVX512_CORE", "AVX-512"),
        {"MKL_CBWR": "AVX512", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
        "CNR:AVX512",
        1,
    ),
    Setting(
        "reproducible",
        (("MKL_CBWR", "AUTO"), ("OMP_NUM_THREADS", "2")),
        (("MKL", "CNR:AUTO"), ("threads", "2")),
    ),
    Setting(
        "sse42",
        (("MKL_ENABLE_INSTRUCTIONS", "SSE4_2"), ("OMP_NUM_THREADS", "1")),
        (("MKL", "SSE4.2"), ("threads", "1")),
    ),
)
"""The last two are MKL's alone; they take as long as the others, and run with SILODP_LONG=1."""
LIBRARY_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_",
    "DNNL_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTEST_",
)


@dataclass(frozen=True)
class Forced:
    """One library under one setting."""

    setting: Setting
    library: str

    def check(self, *tests: str) -> None:
        """The tests pass under the setting; skips where this library did not heed it."""
        code, said, in_force = run(self.setting, *tests)
        assert code == 0, said
        wanted, found = dict(self.setting.wanted)[self.library], in_force[self.library]
        if wanted not in found:
            asked = " ".join(f"{name}={value}" for name, value in self.setting.environment)
            pytest.skip(
                f"not tested: {self.library} here does not heed {asked}; it says {found!r} "
                f"and not {wanted!r}"
            )


each = pytest.mark.parametrize(
    "forced",
    [
        pytest.param(
            Forced(setting, library),
            id=f"{setting.name}-{library}",
            marks=pytest.mark.xdist_group(f"instructions-{setting.name}"),
        )
        for setting in (SETTINGS if "SILODP_LONG" in os.environ else SETTINGS[:3])
        for library, _ in setting.wanted
    ],
)


@functools.lru_cache
def run(setting: Setting, *tests: str) -> tuple[int, str, dict[str, str]]:
    """Exit code and output of pytest on these tests under the setting, and what each library said
    was in force.
    """
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(LIBRARY_VARIABLES)
    }
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        command = [sys.executable, str(Path(__file__)), report.name, *tests]
        threads = {
            "SILODP_TEST_THREADS": dict(setting.environment)["OMP_NUM_THREADS"],
            "OMP_WAIT_POLICY": "passive",
        }
        environment = (
            kept | dict(setting.environment) | threads
        )  # threads that spin while they wait would keep a busy machine busy
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
        )
        text = report.read()
    return done.returncode, done.stdout + done.stderr, json.loads(text) if text else {}


def in_force() -> dict[str, str]:
    """What each library says of itself, from its own report on one small product and one small
    convolution.
    """
    import torch

    one = torch.ones(8, 8, dtype=torch.float64)
    image = torch.ones(4, 8, 16, 16)
    with tempfile.TemporaryFile("w+") as said:
        sys.stdout.flush()
        screen = os.dup(1)
        os.dup2(said.fileno(), 1)
        try:
            with torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
                one @ one
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                torch.nn.functional.conv2d(image, torch.ones(8, 8, 3, 3))
            _flush_c()
        finally:
            os.dup2(screen, 1)
            os.close(screen)
        said.seek(0)
        lines = said.read().splitlines()
    mkl = " ".join(line for line in lines if line.startswith("MKL_VERBOSE"))
    isa = [line.rpartition("isa:")[2] for line in lines if "isa:" in line]
    return {
        "ATen": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": isa[0] if isa else "nothing",
        "MKL": " ".join(re.findall(r"(?<=architecture ).*? processors|CNR:\S+", mkl)) or "nothing",
        "threads": str(torch.get_num_threads()),
    }


def _flush_c() -> None:
    import ctypes

    ctypes.CDLL(None).fflush(None)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(in_force()))
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-x", *sys.argv[2:]]))
