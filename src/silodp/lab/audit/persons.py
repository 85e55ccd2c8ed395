"""Persons as canaries: one with 20 rows that all pull the same way, and one whose number of rows changes."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from silodp.core.mechanisms import Gaussian
from silodp.core.problem.person import Person
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.lab.audit.canary import OUTPUTS, RECORDS, STEEP, tilted
from silodp.lab.audit.pipeline import SOUND, Pipeline
from silodp.lab.audit.transcript import Case, Stage, played
from silodp.silo.data.records import Records

ROWS = 20


def person_problem() -> Problem:
    return Problem(nn.Linear(1, OUTPUTS), tilted, person=Person("person", ROWS))


def neighbours(first: int = ROWS, *, quiet: bool = False) -> tuple[Records, Records]:
    """Two silos that differ in person 0: `first` rows that pull one way, or ROWS that pull the other. The others have a row each, which pulls
    at nothing if `quiet`."""
    worlds = []
    for sign, rows in ((-1.0, first), (1.0, ROWS)):
        y = torch.full((1, RECORDS, ROWS), math.nan)
        y[0, :, 0] = torch.linspace(-0.4, 0.5, RECORDS) * (0.0 if quiet else 1.0)
        y[0, 0, :rows] = sign * STEEP
        worlds.append(Records(torch.ones(1, RECORDS, ROWS, 1), y, (RECORDS,), ("silo",)))
    return worlds[0], worlds[1]


def attack_persons(case: Case, runs: int, *, first: int = ROWS, seed: int = 0, pipeline: Pipeline = SOUND) -> tuple[np.ndarray, np.ndarray]:
    """Scores as of `transcript.attack`, where a person is exchanged."""
    worlds = neighbours(first)
    return played(Stage(case, case.plan(worlds[0].counts, pipeline), worlds, pipeline, person_problem()), runs, seed)


def attack_gate(runs: int, *, first: int = ROWS, pipeline: Pipeline = SOUND) -> tuple[np.ndarray, np.ndarray]:
    """Scores of answers of the deployed arithmetic at noise multiplier 1, in two silos that differ in a person: each is 1-GDP."""
    problem, scores = person_problem(), []
    query = Query(Grad(problem.initial([0]).double()), Gaussian("gradient", 1.0, 1.0))
    for world in neighbours(first, quiet=True):
        gate = pipeline.open_gate(problem, world)
        scores.append(np.array([float(gate.answer(query, [0]).value.sum()) for _ in range(runs)]))
    return scores[0], scores[1]
