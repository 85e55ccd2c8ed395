"""Build the optional C extension; everything else about the package is in pyproject.toml.

One source is compiled once for each level of processor, and `silodp.engine.native` loads the best
that the processor runs. A level that cannot be built here is left out, and torch does its work.
"""

import platform
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/silodp/engine/c")
FLAGS = ["-std=c11", "-O3", "-g0", "-ffp-contract=fast", "-fno-math-errno"]
# It is linked without OpenMP's library: torch has loaded one, and both share its threads.
FLAGS.append("-fopenmp")

if sys.platform != "linux":
    LEVELS = {}  # the C code needs gcc and is tested on Linux alone
elif platform.machine() == "x86_64":
    WIDE = "-mprefer-vector-width=512"
    LEVELS = {
        "baseline": ["-march=x86-64", WIDE],
        "x86-64-v3": ["-march=x86-64-v3", WIDE],
        "x86-64-v4": ["-march=x86-64-v4", WIDE],
    }
else:
    LEVELS = {"baseline": []}

# The libraries use nothing of Python, so one wheel serves every version. Setuptools refuses that
# name for Python without its global lock.
any_python = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            f"silodp.engine.c.{level}",
            sources=[str(FOLDER / "native.c")],
            depends=[str(path) for path in sorted(FOLDER.glob("*.c"))],
            extra_compile_args=[*FLAGS, *flags],
            libraries=["m"],
            py_limited_api=any_python,
            optional=True,
        )
        for level, flags in LEVELS.items()
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if any_python else {},
)
