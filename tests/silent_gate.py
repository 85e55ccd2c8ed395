"""A gate for tests only, and in no wheel: `silodp silo serve POLICY` whose lattice draws no noise.
The shipped gate has no switch for it.
"""

import sys

import numpy as np

from silodp.cli import app as cli
from silodp.silo.answer import lattice

if __name__ == "__main__":
    lattice.rounded_gaussian = lambda scale, size: np.zeros(size, np.int64)
    sys.argv = ["silodp", "silo", "serve", *sys.argv[1:]]
    cli.main()
