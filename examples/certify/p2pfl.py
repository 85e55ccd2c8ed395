"""p2pfl 0.4.4, DifferentialPrivacyCompressor: `silodp audit certify
examples/certify/p2pfl.py:laplace --epsilon 3 --unit silo`, or `:gaussian`.

The claim: "epsilon: The privacy budget" and "Privacy guaranteed even against malicious aggregators"
(dp_strategy.py), at its own defaults: clip 1, epsilon 3. A client's whole update is replaced; its
compressed form is what is sent. Needs: pip install --no-deps p2pfl==0.4.4 opendp
"""

import numpy as np
from p2pfl.learning.compression.dp_strategy import DifferentialPrivacyCompressor

COMPRESSOR, TIMES = DifferentialPrivacyCompressor(), 5


def sent(x: np.ndarray, y: np.ndarray, noise: str) -> np.ndarray:
    """A linear model's first step, with every weight five times: 40 numbers for 8 columns. Who sees
    all may add up the five.
    """
    update = np.repeat(10 * ((y - 0.5)[:, None] * x).mean(0), TIMES)
    (noisy,), _ = COMPRESSOR.apply_strategy([update], noise_type=noise)
    return noisy.reshape(-1, TIMES).sum(1)


def laplace(x, y, seed):
    return sent(x, y, "laplace")  # its noise comes from the system: no seed


def gaussian(x, y, seed):
    return sent(x, y, "gaussian")
