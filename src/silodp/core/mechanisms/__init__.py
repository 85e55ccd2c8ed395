"""How an answer is made private: one mechanism a file."""

from silodp.core.mechanisms.gaussian import Gaussian
from silodp.core.mechanisms.totals import Shuffled

Mechanism = Gaussian | Shuffled

__all__ = ["Gaussian", "Mechanism", "Shuffled"]
