"""Options that several commands share: each has one name, one type, one default and one help text.

The options of an order to train are written here once. `takes_order` gives them to a command, which
receives the Order.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import click
import typer
from click.core import ParameterSource

from silodp.cli.console import FeatureMapName
from silodp.cli.console import Json as Json
from silodp.core.errors import BadInput
from silodp.server.order import Order

Out = Annotated[Path | None, typer.Option("--out", help="Run folder; by default under runs/.")]
OutFolder = Annotated[
    Path | None,
    typer.Option(
        "--out", help="The run's folder. It must not contain a run. By default a new one in runs/."
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help=(
            "Resume the interrupted run in --out, or the latest one, with its original settings."
        ),
    ),
]
New = Annotated[
    bool,
    typer.Option("--new", help="Start another run, even if the last one is unfinished."),
]
SchemaFile = Annotated[
    Path | None,
    typer.Option(
        help=(
            "The public schema of the silos' files, in TOML; `silodp init` drafts one. "
            "In a federation it must equal the silos' schema."
        )
    ),
]
AlgorithmName = Annotated[
    str,
    typer.Option(
        "--algorithm",
        help=(
            "auto, prox-sgd, mb-sgd, local-sgd, prox-svrg, prox-pl-svrg, spider, "
            "spider-alternate, diff2, diff2-local, scaffold, momentum, adam, disk, "
            "accelerated, localized, or FILE.py:NAME. auto chooses the algorithm from "
            "public facts, and also model, rounds, step, clip and weights unless they "
            "are given."
        ),
    ),
]
Rounds = Annotated[
    int, typer.Option(help="Communication rounds R. Default 25 with an --algorithm.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="NAME=VALUE: a setting that your own algorithm declares; may be repeated.",
    ),
]
Drops = Annotated[
    float,
    typer.Option(
        help=(
            "Fraction of rounds expected to be repeated because a silo drops out, with --trust "
            "masks. The budget covers them."
        )
    ),
]

ORDER: dict[str, Any] = {
    "algorithm": AlgorithmName,
    "model": Annotated[
        str | None,
        typer.Option(
            help=(
                "linear, logistic, additive:KNOTS, mlp:HIDDEN, cnn, or FILE.py:FUNCTION for "
                "your own torch module. By default it is chosen, or mlp:8 with an --algorithm. A "
                "federation takes the model that its silos approved; give its FILE.py here too."
            )
        ),
    ],
    "prox": Annotated[
        str,
        typer.Option(
            help=(
                "Penalty or constraint: zero, l1:0.01, squared-l2:0.1, l2-ball:5, box:0:1, ..., or "
                "FILE.py:NAME:0.1."
            )
        ),
    ],
    "loss": Annotated[
        str,
        typer.Option(
            help="Your own loss, FILE.py:NAME. By default the loss of the label's task.",
            show_default=False,
        ),
    ],
    "feature_map": FeatureMapName,
    "epsilon": Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Budget of each record: a number, or NAME=NUMBER for one silo; may be repeated. "
                "3 by default. In a federation, by default each silo's whole budget."
            )
        ),
    ],
    "delta": Annotated[
        list[str] | None, typer.Option(help="Given like --epsilon. Default 1/n^2 for each silo.")
    ],
    "user_level": Annotated[
        bool,
        typer.Option(
            "--user-level", help="Protect a whole silo by epsilon and delta, not each record."
        ),
    ],
    "trust": Annotated[
        str,
        typer.Option(
            help=(
                "Trust model: isrl (no trust), masks (trusts the other silos to add "
                "their noise), shuffle (trusts a shuffler) or central (trusts the "
                "server)."
            )
        ),
    ],
    "least": Annotated[
        int | None,
        typer.Option(
            help=(
                "Fewest silos in a total, with --trust masks or shuffle. By default "
                "all queried silos."
            )
        ),
    ],
    "colluding": Annotated[
        int,
        typer.Option(
            help=(
                "Silos that may give the server their noise, with --trust masks or shuffle. "
                "Epsilon holds against all of them together."
            )
        ),
    ],
    "drops": Drops,
    "rounds": Rounds,
    "phase": Annotated[
        int,
        typer.Option(
            help="Phase q of spider, diff2 and diff2-local: a fresh anchor every q rounds."
        ),
    ],
    "settings": Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="NAME=VALUE, for a setting of this algorithm only; may be repeated."
        ),
    ],
    "step": Annotated[float, typer.Option(help="Step size. Default 0.5 with an --algorithm.")],
    "clip": Annotated[
        float,
        typer.Option(
            help=(
                "Clip threshold L: each record's whole gradient is clipped to this "
                "norm. Default 1 with an --algorithm."
            )
        ),
    ],
    "slope": Annotated[
        float,
        typer.Option(
            help=(
                "Differences are clipped at slope x the move of w, at most 2 L. inf: only at 2 L."
            )
        ),
    ],
    "local_steps": Annotated[
        int,
        typer.Option(help="Noisy local steps a round, for local-sgd, scaffold and diff2-local."),
    ],
    "inner": Annotated[int, typer.Option(help="Inner steps of an SVRG epoch.")],
    "restarts": Annotated[
        int, typer.Option(help="Restarts of prox-pl-svrg, stages of accelerated.")
    ],
    "momentum": Annotated[
        float, typer.Option(help="Momentum, and beta_1 of adam. Default 0.9 with an --algorithm.")
    ],
    "kappa": Annotated[
        float,
        typer.Option(help="Gain of disk's filter: the weight of a new gradient; 1 is mb-sgd."),
    ],
    "sampling": Annotated[
        str | None,
        typer.Option(
            "--sampling",
            help=(
                "full, disjoint, poisson:RATE or without-replacement:RATE. Or one for "
                "each kind: anchor=full,refine=poisson:0.1."
            ),
        ),
    ],
    "participation": Annotated[
        str,
        typer.Option(
            help=(
                "Which silos answer a round: all, uniform:M, random:M (1 to M), random:L:M "
                "(L to M) or balanced:M."
            )
        ),
    ],
    "weights": Annotated[
        str,
        typer.Option(
            help=(
                "Weight of each silo in a mean: equal, records (by their number) or precision (by "
                "their noise too). With an --algorithm the default is equal."
            )
        ),
    ],
    "rule": Annotated[
        str | None,
        typer.Option(
            "--rule",
            help="Ledger rule: gdp, renyi or committed. By default the tightest that applies.",
        ),
    ],
    "anchor_share": Annotated[
        float | None,
        typer.Option(help="Share of the budget for anchors; differences get the rest."),
    ],
    "noise": Annotated[
        str, typer.Option(help="exact, or paper for the paper's constants, with their exact price.")
    ],
    "from_theory": Annotated[
        bool,
        typer.Option(
            "--from-theory",
            help=(
                "Take rounds, batches, phase, step, clip and noise from the "
                "algorithm's theorem, with the constants below."
            ),
        ),
    ],
    "lipschitz": Annotated[float | None, typer.Option(help="L, for the theory.")],
    "smoothness": Annotated[float | None, typer.Option(help="beta, for the theory.")],
    "pl": Annotated[
        float | None, typer.Option(help="mu, the proximal-PL constant, for the theory.")
    ],
    "gap": Annotated[float | None, typer.Option(help="Delta >= F(w_0) - F*, for the theory.")],
    "output": Annotated[
        str,
        typer.Option(
            "--output",
            help="last, random (the paper's rule) or tail. Default last with an --algorithm.",
        ),
    ],
    "recalibration": Annotated[
        float,
        typer.Option(
            "--recalibration",
            help=(
                "Share of the budget for one last question, which recalibrates the model's risks. "
                "By default none with an --algorithm."
            ),
        ),
    ],
    "no_recalibration": Annotated[
        bool, typer.Option("--no-recalibration", help="Leave this last question out.")
    ],
    "seed": Annotated[
        int | None,
        typer.Option(
            help=(
                "Seed of the public random choices: the start, and the queried silos. "
                "In simulation it also fixes all noise. Use it for research only: "
                "known noise protects no record."
            )
        ),
    ],
}
"""The options of an Order, under its fields' names."""
MANY = ("epsilon", "delta", "settings")
"""The options that may be repeated."""
SWITCHES = ("from_theory", "no_recalibration")
"""The options without a value, each of which stands for a value of another field."""
PRESCRIBED = (
    "rounds",
    "phase",
    "inner",
    "restarts",
    "step",
    "clip",
    "slope",
    "sampling",
    "output",
    "rule",
    "anchor_share",
)
"""The settings that a theorem decides."""


PANELS = {
    "Model": (
        *("algorithm", "model", "prox", "loss", "feature_map", "scale"),
        *("rounds", "phase", "step", "clip"),
    ),
    "Privacy": ("epsilon", "delta", "user_level", "trust", "colluding"),
    "Participation": (
        *("participation", "weights", "least", "drops", "quorum", "deadline", "patience", "retry"),
        *("hub", "card", "key_file", "shuffler"),
    ),
    "Expert": (
        *("settings", "slope", "local_steps", "inner", "restarts", "momentum", "kappa"),
        *("sampling", "rule", "anchor_share", "noise", "output"),
        *("recalibration", "no_recalibration", "seed"),
        *("from_theory", "lipschitz", "smoothness", "pl", "gap", "dimension"),
        *("test", "signal", "candidates", "repetitions", "trials"),
        *("peers", "own_name", "gate", "relay", "run_id"),
    ),
}
"""Panels of the help, after the first, with the options of each command that takes an order."""
COMMON = "Common"
"""The first panel: every option that no other panel names."""


def panel_of(name: str) -> str:
    """Return the panel of an option in the help, by the name of its parameter."""
    return next((panel for panel, names in PANELS.items() if name in names), COMMON)


def _in_panel(parameter: inspect.Parameter) -> inspect.Parameter:
    """Copy a parameter and put it into its panel; other commands share the original."""
    kind, *about = get_args(parameter.annotation)
    option = copy.copy(about[0])
    option.rich_help_panel = panel_of(parameter.name)
    return parameter.replace(annotation=Annotated[kind, option])


def takes_order(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of ORDER, without those named, in place of its first parameter
    `order`.

    Its help shows all options in panels.
    """
    names = [name for name in ORDER if name not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        known = inspect.signature(command, eval_str=True)
        defaults: dict[str, Any] = dict.fromkeys(SWITCHES, False)
        for name in names:
            if name not in SWITCHES:
                defaults[name] = getattr(Order, name)
        defaults |= dict.fromkeys(MANY)
        options = [
            inspect.Parameter(
                n, inspect.Parameter.KEYWORD_ONLY, default=defaults[n], annotation=ORDER[n]
            )
            for n in names
        ]
        own = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in known.parameters.values()
            if p.name != "order"
        ]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            order = order_of({name: given.pop(name) for name in names})
            command(order, **given)

        panels = [COMMON, *PANELS]
        everything = sorted(
            map(_in_panel, [*own, *options]), key=lambda one: panels.index(panel_of(one.name))
        )
        run.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in everything}
        return run

    return decorate


def order_of(given: dict[str, Any]) -> Order:
    """Return the Order that the options make. This is the only place where options become an
    Order.
    """
    words = dict(given)
    if words.pop("from_theory", False):
        if clash := sorted(typed() & set(PRESCRIBED)):
            named = ", ".join("--" + name.replace("_", "-") for name in clash)
            raise BadInput(
                f"--from-theory sets {named} by a theorem; leave out --from-theory or these options"
            )
        words["noise"] = "theory"
    elif words.get("noise") == "theory":
        raise BadInput("noise 'theory' needs the theorem's schedule; give --from-theory")
    if words.pop("no_recalibration", False):
        if words.get("recalibration"):
            raise BadInput("give --recalibration or --no-recalibration, not both")
        words["recalibration"] = 0.0
    found: dict[str, Any] = {
        **words,
        **{name: tuple(words.get(name) or ()) for name in MANY if name in words},
    }
    return Order(**found)


def typed() -> set[str]:
    """Return the names of the options that were given on the command line."""
    context = click.get_current_context()
    return {
        name
        for name in context.params
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


def check_writable(folder: Path) -> None:
    """Raise BadInput if the run's folder could not be made or written. The folder is not made
    yet.
    """
    there = next(
        place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place)
    )
    try:
        tempfile.TemporaryDirectory(dir=there, prefix=".silodp-").cleanup()
    except OSError as error:
        raise BadInput(
            f"the output folder {folder} cannot be written ({error.strerror}); choose "
            "another with --out"
        ) from None


def positive(name: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise BadInput(f"{name} is {value:g}; it must be greater than 0")
    return value
