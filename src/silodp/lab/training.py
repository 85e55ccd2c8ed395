"""From the words of `silodp train` to an order that can be run: files or a built-in set, budgets by name, scaling."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget, record_budget_for_user
from silodp.core.problem.schema import Schema
from silodp.core.sampling import DisjointBatches, FullBatch
from silodp.lab.hidden import mark_of
from silodp.lab.local import Order, train
from silodp.lab.planning import check_seed, default_delta, finite, warn_of_delta
from silodp.server.algorithms import find
from silodp.server.settings import participation_by_name, sampling_by_name
from silodp.silo.data.datasets import DATASETS
from silodp.silo.data.files import load_silos
from silodp.silo.data.heldout import split_records
from silodp.silo.data.records import Records
from silodp.silo.data.tables import load_by_schema, read_table

UNCHARGED = "The built-in data sets come standardised with statistics of the raw data, as in the paper; that is not charged to the budget."


@dataclass(frozen=True)
class Request:
    """The options of `silodp train` as given."""

    data: str | None
    silos: tuple[Path, ...]
    label: str
    classes: str | None
    algorithm: str
    model: str
    prox: str
    epsilon: tuple[str, ...]
    delta: tuple[str, ...]
    step: float
    clip: float
    schedule: dict
    sampling: str | None
    participation: str
    rule: str | None
    anchor_share: float | None
    scale: str
    output_rule: str
    user_level: bool
    seed: int | None
    data_dir: Path | None
    folder: Path
    schema: Path | None = None
    test: Path | None = None
    held_out: float = 0.0

    @cached_property
    def read_by(self) -> Schema | None:
        """The public schema by which the silos' files are read, where there is one."""
        return Schema.load(self.schema) if self.schema else None


def run_request(request: Request, *, quiet: bool, resume: bool = False) -> dict:
    """Checks everything that can be checked without data, loads, trains; with `resume` the run that was interrupted in its folder."""
    check_seed(request.seed)
    algorithm = find(request.algorithm)
    settings = algorithm.schedule(request.schedule)
    sampling = sampling_by_name(request.sampling, algorithm, request.schedule["rounds"])
    records, classes, _, held_out, scale = load_records(request)
    budgets = budgets_of(request, records, gaussian=isinstance(sampling, FullBatch | DisjointBatches))
    defaults, mark = by_default(request, records), mark_of(records) if request.held_out else None
    if request.held_out:
        records, _ = split_records(records, request.held_out)
    order = Order(
        algorithm=algorithm, settings=settings, step=request.step, clip=request.clip, sampling=sampling, model=request.model,
        prox=request.prox, budgets=budgets, classes=classes, scale=scale, output_rule=request.output_rule, rule=request.rule,
        participation=participation_by_name(request.participation, len(records), request.seed or 0), anchor_share=request.anchor_share,
        seed=request.seed, schema=request.read_by,
    )  # fmt: skip
    total = request.schedule["rounds"]
    with Progress(TextColumn("round"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), disable=quiet) as bar:
        task = bar.add_task("rounds", total=total)

        def progress(iterates: Iterator[Tensor]) -> Iterator[Tensor]:
            warn_of_delta(defaults)  # only now: a mistake gets its own sentence and no other
            for w in iterates:
                bar.advance(task)
                yield w

        about = {"data": request.data, "rounds": total, "participation": request.participation, "user_level": request.user_level}
        files = {"request.json": json.dumps(words_of(request), indent=1) + "\n"} | ({"records.json": mark} if mark else {})
        note = UNCHARGED if request.data else ""
        return train(order, records, request.folder, progress, held_out, note=note, about=about, files=files, resume=resume)


def load_records(request: Request, *, holes: bool = False) -> tuple[Records, int, tuple[str, ...], tuple[Tensor, Tensor] | None, str]:
    """(all records, classes, names of the features, raw test records of a built-in set, what is left to scale), public ranges applied."""
    records, classes, features, test = _load_by(request.read_by, request) if request.read_by else _load(request, holes)
    scale = "none" if request.data or request.read_by else request.scale
    if scale not in ("private", "none"):
        records, scale = _with_ranges(records, _ranges(Path(scale), features)), "public"
    return records, classes, features, test, scale


def words_of(request: Request) -> dict:
    """request.json: what `--resume` needs to go on, and `silodp evaluate` to find the same held-out records; all paths are absolute."""
    files = {name: path.resolve() for name in ("schema", "test", "data_dir") if (path := getattr(request, name))}
    model = Path(request.model).resolve() if ".py:" in request.model else request.model
    scale = request.scale if request.scale in ("private", "none") else Path(request.scale).resolve()
    words = asdict(request) | {"silos": [path.resolve() for path in request.silos], "model": model, "scale": scale} | files
    return json.loads(json.dumps(words, default=str))


def request_to_resume(folder: Path, asked: Request, given: Collection[str]) -> Request:
    """The request of the run in `folder`; BadInput if one of the options `given` asks for something else than it did."""
    found = read_request(folder)
    was, now = words_of(found), words_of(asked)
    was, now = was | was["schedule"], now | now["schedule"]
    if differs := sorted(name for name in given if name in now and now[name] != was[name]):
        raise BadInput(f"the run in {folder} was begun with another {', '.join(differs)}; leave that out to go on with it")
    return found


def read_request(folder: Path) -> Request:
    """The options of the run in `folder`."""
    try:
        words = json.loads((folder / "request.json").read_text())
        paths = {"silos": tuple(Path(path) for path in words["silos"]), "folder": folder}
        paths |= {name: Path(words[name]) if words.get(name) else None for name in ("data_dir", "schema", "test")}
        return Request(**words | paths | {"epsilon": tuple(words["epsilon"]), "delta": tuple(words["delta"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder} holds no run of `silodp train` ({type(error).__name__}); give its run folder") from None


def _load(request: Request, holes: bool) -> tuple[Records, int, tuple[str, ...], tuple[Tensor, Tensor] | None]:
    if request.test:
        raise BadInput("--test is for --schema, which says what its columns mean; give one")
    if bool(request.data) == bool(request.silos):
        raise BadInput("give either --data NAME or one --silo FILE for each silo")
    if request.data:
        if request.data not in DATASETS:
            raise BadInput(f"data set {request.data!r} is unknown; choose one of {', '.join(DATASETS)}")
        split = DATASETS[request.data].load(request.seed or 0, request.data_dir)
        return split.train, split.classes, (), (split.test_x, split.test_y)
    declared = None if request.classes is None else () if request.classes == "number" else tuple(request.classes.split(","))
    loaded = load_silos(request.silos, request.label, classes=declared, holes=holes)
    classes = 2 if declared is None else len(declared)
    return Records.of(loaded.records_raw, loaded.names), classes, loaded.features, None


def _load_by(schema: Schema, request: Request) -> tuple[Records, int, tuple[str, ...], tuple[Tensor, Tensor] | None]:
    if request.data or not request.silos:
        raise BadInput("--schema is for silos' own files; give one --silo FILE for each silo, and no --data")
    if request.classes is not None or request.label != "label" or request.scale not in ("private", "none"):
        raise BadInput("--schema has the label, its classes and the ranges already; leave out --label, --classes and --scale")
    loaded = load_by_schema(request.silos, schema)
    test = read_table(request.test, schema) if request.test else None
    held_out = (torch.from_numpy(test.x), torch.from_numpy(test.y)) if test else None
    return Records.of(loaded.records_raw, loaded.names), len(loaded.classes), loaded.features, held_out


def budgets_of(request: Request, records: Records, *, gaussian: bool) -> list[Budget]:
    epsilon = _by_silo("epsilon", request.epsilon, records.names)
    delta = _by_silo("delta", request.delta, records.names)
    budgets = []
    for name, n in zip(records.names, records.counts, strict=True):
        if epsilon[name] is None:
            raise BadInput(f"silo {name} has no epsilon; give --epsilon NUMBER for all silos or --epsilon {name}=NUMBER")
        finite(epsilon[name])
        budget = Budget(epsilon[name], default_delta(n) if delta[name] is None else delta[name])
        budgets.append(record_budget_for_user(budget, n, gaussian=gaussian) if request.user_level else budget)
    return budgets


def by_default(request: Request, records: Records) -> dict[str, int]:
    """Silos that get the default delta, with their numbers of records."""
    delta = _by_silo("delta", request.delta, records.names)
    return {name: n for name, n in zip(records.names, records.counts, strict=True) if delta[name] is None}


def _by_silo(field: str, words: Sequence[str], names: Sequence[str]) -> dict:
    values: dict = dict.fromkeys(names)
    for word in sorted(words, key=lambda w: "=" in w):
        name, equals, number = word.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            raise BadInput(f"{field} {word!r} is not a number; use --{field} 2.0 or --{field} NAME=2.0") from None
        if equals and name not in values:
            raise BadInput(f"{field} names silo {name!r}, but the silos are {', '.join(names)}")
        for silo in [name] if equals else names:
            values[silo] = value
    return values


def _ranges(path: Path, features: Sequence[str]) -> Tensor:
    """Public ranges, (features, 2): a TOML or JSON table of feature = [low, high]."""
    try:
        text = path.read_text()
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"the ranges file {path} cannot be read ({error}); --scale takes private, none, or a TOML or JSON table of feature = [low, high]"
        ) from None
    if not isinstance(table, dict):
        raise BadInput(f"{path} holds a {type(table).__name__}, not a table; give feature = [low, high] for every feature")
    missing = [f for f in features if f not in table]
    if missing:
        raise BadInput(f"{path} has no range for {', '.join(missing[:5])}; give feature = [low, high] for every feature")
    pairs = [table[f] for f in features]
    for feature, pair in zip(features, pairs, strict=True):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(v, int | float) for v in pair) and pair[0] < pair[1]):
            raise BadInput(f"the range of {feature} in {path} is {pair!r}; it must be [low, high] with low < high")
    return torch.tensor(pairs, dtype=torch.float64)


def _with_ranges(records: Records, ranges: Tensor) -> Records:
    low, high = ranges[:, 0], ranges[:, 1]
    x = (2 * (records.x.double() - low) / (high - low) - 1).clamp(-1, 1).float()
    return Records(x * records.mask.unsqueeze(-1), records.y, records.counts, records.names, records.missing)
