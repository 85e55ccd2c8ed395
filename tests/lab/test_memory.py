"""The peak of a simulation is what `silodp plan` says it is, as a child process that runs one finds."""

import json
import os
import subprocess
import sys

import pytest

from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.engine import native
from silodp.lab import memory
from silodp.lab.memory import simulation_bytes

CHILD = """
import json, sys
import torch
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.mechanisms import Gaussian
from silodp.core.query import Query
from silodp.core.statistics import Grad, GradDiff
from silodp.lab.memory import program_bytes
from silodp.silo.data.records import Records
from silodp.silo.answer.simulated import Simulated

silos, records, features, model, difference = json.loads(sys.argv[1])
problem = Problem(*model_by_name(model, features, 2))
w = problem.initial([0])
rest = program_bytes()
x, y = torch.randn(silos, records, features), torch.randint(2, (silos, records))
simulated = Simulated(problem, Records(x, y, (records,) * silos, tuple(map(str, range(silos)))), [0])
for k in range(3):
    statistic = GradDiff(w, w + 1e-3 * k) if difference else Grad(w)
    simulated.answer(Query(statistic, Gaussian("minibatch", 1.0, 2.0)), range(silos))
print(json.dumps([rest, program_bytes()]))
"""


CASES = {
    "many records": (25, 8000, 50, "mlp:64", False),
    "many records, in C": (25, 8000, 50, "mlp:64", False),
    "differences": (10, 2000, 784, "mlp:256", True),
    "many silos, in C": (50, 20, 784, "mlp:256", False),
}


@pytest.fixture(params=CASES)
def case(request, monkeypatch):
    if "in C" in request.param and native.library() is None:
        pytest.skip("there is no C compiler")
    if "in C" not in request.param:
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setenv("SILODP_NATIVE", "0")
    return CASES[request.param]


def said(silos, records, features, model, difference):
    return simulation_bytes(Problem(*model_by_name(model, features, 2)), (features,), [records] * silos, difference=difference)


def measured(case, **environment):
    """What the program takes before a simulation, and its peak."""
    child = [sys.executable, "-c", CHILD, json.dumps(case)]
    return json.loads(subprocess.run(child, capture_output=True, text=True, check=True, env=os.environ | environment).stdout)


def test_the_peak_of_a_simulation_is_within_a_fifth_of_what_is_said(case):
    rest, peak = measured(case)
    assert 0.8 * (rest + said(*case)) <= peak <= 1.2 * (rest + said(*case))


def test_beyond_the_program_and_the_heap_s_gaps_too(case, monkeypatch):
    """A block mapped alone leaves no gap, so this does not hang on the heap's layout, which differs from process to process."""
    rest, peak = measured(case, MALLOC_MMAP_THRESHOLD_="131072")
    monkeypatch.setattr(memory, "HEAP", 1.0)
    assert 0.8 * said(*case) <= peak - rest <= 1.2 * said(*case)
