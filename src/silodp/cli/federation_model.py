"""The model of `silodp federation up`, where nobody names one: silos approve a model before anybody trains, so it is chosen then."""

from __future__ import annotations

from pathlib import Path

import click

from silodp.cli.console import say
from silodp.cli.project import SPEND


def chosen_model(
    data: str | None, silos: int, files: list[Path], schema: Path | None, label: str, classes: str | None, data_dir: Path | None,
    held_out: float, trust: str, prox: str, budget: float, *, quiet: bool,
) -> str:  # fmt: skip
    """The model that the advisor would train in one run over these silos, from their sizes and columns alone.

    A run spends what the project says, else the whole budget."""
    from silodp.host.extension import load
    from silodp.lab.advised import advised
    from silodp.lab.source import Source
    from silodp.server.order import Order, budgets_of

    order = Order(epsilon=(str(click.get_current_context().meta.get(SPEND) or budget),), trust=trust, prox=prox)
    source = Source(data, tuple(files), label, classes, schema, None, data_dir, "none")
    loaded = source.load(0)
    names, counts = loaded.records.names, loaded.records.counts
    if data:
        total = sum(counts)
        names, counts = [f"silo-{i + 1}" for i in range(silos)], [total // silos + (i < total % silos) for i in range(silos)]
    budgets = budgets_of(order, names, counts, {})
    trained = [max(1, round(n * (1 - held_out))) for n in counts]
    model = advised(order, source, loaded, names, trained, budgets, load).order.model
    assert model is not None
    if not quiet:
        say(f"The model, chosen from sizes and columns alone: {model}. The silos approve it; --model names another.")
    return model
