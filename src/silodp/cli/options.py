"""Options that several commands share: one name, one help text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from silodp.core.errors import BadInput

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Out = Annotated[Path | None, typer.Option("--out", help="Run folder; by default under runs/.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Where MNIST or CIFAR-10 lie; `silodp data` says how to get them.")]
AlgorithmName = Annotated[
    str,
    typer.Option(
        "--algorithm",
        help="prox-sgd, mb-sgd, local-sgd, prox-svrg, prox-pl-svrg, spider, spider-alternate, diff2, scaffold, momentum, adam, disk.",
    ),
]
Rounds = Annotated[int, typer.Option(help="Communication rounds R.")]
Phase = Annotated[int, typer.Option(help="Phase q of spider and diff2: a fresh anchor every q rounds.")]
Clip = Annotated[float, typer.Option(help="Clip threshold L: each record's whole gradient is clipped to this norm.")]
Slope = Annotated[float, typer.Option(help="Differences are clipped at slope x the move of w (at most 2 L); inf: at 2 L alone.")]
LocalSteps = Annotated[int, typer.Option(help="Noisy local steps a round, for local-sgd and scaffold.")]
Inner = Annotated[int, typer.Option(help="Inner steps of an SVRG epoch.")]
Momentum = Annotated[float, typer.Option(help="Of momentum, and beta_1 of adam.")]
Kappa = Annotated[float, typer.Option(help="Gain of disk's filter: the weight of a new gradient; 1 is mb-sgd.")]
Restarts = Annotated[int, typer.Option(help="Restarts of prox-pl-svrg.")]
SamplingName = Annotated[str | None, typer.Option("--sampling", help="full, disjoint, poisson:RATE or without-replacement:RATE.")]
Participation = Annotated[str, typer.Option(help="Who answers a round: all, uniform:M, random:M or balanced:M.")]
RuleName = Annotated[str | None, typer.Option("--rule", help="Ledger rule: gdp, renyi or committed; the tightest that applies by default.")]
AnchorShare = Annotated[float | None, typer.Option(help="Share of the budget that anchors take; differences get the rest.")]
Seed = Annotated[int, typer.Option(help="Public coins: which silos answer.")]


def positive(name: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise BadInput(f"{name} is {value:g}; it must be greater than 0")
    return value
