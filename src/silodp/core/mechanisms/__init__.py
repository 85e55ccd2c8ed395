"""List how an answer is made private, one mechanism in each file."""

from silodp.core.fields import discovered
from silodp.core.mechanisms.gaussian import Gaussian
from silodp.core.mechanisms.masked import Masked
from silodp.core.mechanisms.mechanism import Mechanism
from silodp.core.mechanisms.totals import Shuffled

MECHANISMS: dict[str, type[Mechanism]] = discovered(Mechanism, __name__, __path__)

__all__ = ["MECHANISMS", "Gaussian", "Masked", "Mechanism", "Shuffled"]
