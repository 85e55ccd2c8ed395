"""Contestants whose method others made: one file each, with the settings that its authors publish.

All of them promise the same as silodp: neighbouring tables differ by one replaced row, the number
of rows is public, and each silo spends (epsilon, delta) on everything that it releases.
"""

from research.board.contestant import Contestant
from research.board.peers.averaged import AveragedLibrary
from research.board.peers.boosting import PrivateBoosting
from research.board.peers.fedavg import FL4HEALTH, FLAMBY, LIU, FederatedAveraging
from research.board.peers.mean_regularised import MeanRegularised

PEERS: tuple[Contestant, ...] = (
    FederatedAveraging(FLAMBY),
    FederatedAveraging(FL4HEALTH),
    FederatedAveraging(LIU),
    MeanRegularised(),
    AveragedLibrary(),
    PrivateBoosting(),
)
