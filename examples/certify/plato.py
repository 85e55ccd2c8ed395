"""Plato 1.0 (PyPI: plato-learn): `silodp audit certify examples/certify/plato.py:gaussian --epsilon
1`, or `:response`, or `:laplace`.

The claim: "Implements a Processor for applying local differential privacy using gaussian mechanism"
(feature_gaussian.py; the others likewise). What is protected is a record, what is sent are the
noisy features of each. Needs: pip install --no-deps plato-learn==1.0
"""

from types import SimpleNamespace

import numpy as np
import torch
from plato.processors import feature_gaussian, feature_laplace, feature_randomized_response

EPSILON, DELTA, SENSITIVITY, FEATURES = 1.0, 1e-5, 0.02, 64
CLIENT = {"client_id": 1, "trainer": SimpleNamespace(device="cpu")}
feature_randomized_response.Config = lambda: SimpleNamespace(
    algorithm=SimpleNamespace(epsilon=EPSILON)
)  # a configuration file's line


def sent(processor, features: np.ndarray, seed: int) -> np.ndarray:
    np.random.seed(seed % 2**32)
    return processor.process([(torch.tensor(features, dtype=torch.float32), None)])[0][0].numpy()


def features(x: np.ndarray, y: np.ndarray, length: float, order: int) -> np.ndarray:
    """Features of this length at most, in the norm of this order, that turn round with the label:
    any two are within twice the length.
    """
    rows = np.sign(y - 0.5)[:, None] * x
    return length * rows / np.maximum(np.linalg.norm(rows, order, axis=1, keepdims=True), 1e-12)


def gaussian(x, y, seed):
    processor = feature_gaussian.Processor(
        epsilon=EPSILON, delta=DELTA, sensitivity=SENSITIVITY, **CLIENT
    )
    return sent(processor, features(x, y, SENSITIVITY / 2, 2), seed)


def laplace(x, y, seed):
    return sent(
        feature_laplace.Processor(epsilon=EPSILON, sensitivity=SENSITIVITY, **CLIENT),
        features(x, y, SENSITIVITY / 2, 1),
        seed,
    )


def response(x, y, seed):
    """64 features of each record, each above or below zero."""
    return sent(
        feature_randomized_response.Processor(**CLIENT),
        np.repeat(np.sign(y - 0.5)[:1, None], FEATURES, axis=1),
        seed,
    )
