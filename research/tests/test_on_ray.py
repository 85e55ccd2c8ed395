"""A study on a Ray cluster: the same rows as here, and it goes on where it stopped."""

import os
import sys
from dataclasses import replace

import pytest
from test_compare import TINY

from research.compare import carry_out
from research.on_ray import Cluster
from research.study import studies_by_name
from silodp.core.errors import BadInput
from silodp.simulation import sweep

STUDY = replace(TINY, methods=("mb-sgd", "mb-sgd-open"))


def test_without_ray_a_sentence_says_what_to_do(research, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, said = research(
        "figures", "wbcd", "--reduced", "--on", "ray", "--out", tmp_path / "run"
    )
    assert (code, "pip install 'silodp[ray]'" in said) == (2, True)
    code, _, said = research("figures", "wbcd", "--on", "moon", "--out", tmp_path / "run")
    assert (code, "must be here or ray" in said) == (2, True)


@pytest.fixture
def cluster():
    if "SILODP_LONG" not in os.environ:
        pytest.skip("long; needs SILODP_LONG=1")
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
    try:
        yield Cluster()
    finally:
        ray.shutdown()


def test_a_cluster_finds_the_same_tables_goes_on_where_it_stopped_and_raises_what_a_task_raises(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        sweep, "_spread", lambda work, tasks, on_gpu: (work(*task) for task in tasks)
    )
    here, there = tmp_path / "here", tmp_path / "there"
    rows = carry_out({here: STUDY})[here]
    some = cluster.spread
    taken: list[int] = []

    def interrupted(work, tasks, on_gpu):
        for result in some(work, tasks, on_gpu):
            if len(taken) == 3:
                raise KeyboardInterrupt
            taken.append(1)
            yield result

    cluster.spread = interrupted
    with pytest.raises(KeyboardInterrupt):
        carry_out({there: STUDY}, cluster=cluster)
    cluster.spread = lambda work, tasks, on_gpu: (
        taken.extend([0] * len(tasks)) or some(work, tasks, on_gpu)
    )
    assert carry_out({there: STUDY}, cluster=cluster)[there] == rows
    assert taken.count(0) + taken.count(1) == len(STUDY.arms()) * STUDY.trials
    for name in ("figure.csv", "summary.json", "data.json"):
        assert (there / name).read_bytes() == (here / name).read_bytes()
    with pytest.raises(BadInput, match="nowhere"):
        list(some(studies_by_name, [("nowhere",)], []))
