"""Which model, algorithm and settings to train with, and what to expect: chosen from public facts
alone, so that it costs no privacy.
"""

from silodp.server.advice.chooser import Advice, choose
from silodp.server.advice.facts import Facts, kinds_of

__all__ = ["Advice", "Facts", "choose", "kinds_of"]
