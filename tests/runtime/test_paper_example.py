"""A JSON strategy in the published form trains an annotated Qwen3-style mixture of experts to one device's numbers."""

from pathlib import Path

import pytest

from piper.check.check import check
from piper.compiler import compile
from piper.run.launch import launch_inline
from tests.runtime.grid import Cell, case_of, job

STRATEGY = """
[
  {"op": "place", "filter": {"PP": 0}, "devices": [0, 2], "stream": "pp"},
  {"op": "place", "filter": {"PP": 1}, "devices": [1, 3], "stream": "pp"},
  {"op": "replicate", "filter": {"PP": 0}, "devices": [0, 2], "reduce_stream": "dp", "shard_grads": true},
  {"op": "replicate", "filter": {"PP": 1}, "devices": [1, 3], "reduce_stream": "dp", "shard_grads": true},
  {"op": "shard", "filter": {"PP": 0, "EP": "*"}, "devices": [0, 2], "stream": "ep"},
  {"op": "shard", "filter": {"PP": 1, "EP": "*"}, "devices": [1, 3], "stream": "ep"},
  {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2},
  {"op": "order", "filters": [
    [{"PP": 0, "MB": 0, "PASS": "F"}],
    [{"PP": 0, "MB": 1, "PASS": "F"}],
    [{"PP": 0, "MB": 0, "PASS": "B"}],
    [{"PP": 0, "MB": 1, "PASS": "B"}]
  ]},
  {"op": "order", "filters": [
    [{"PP": 1, "MB": 0, "PASS": "F"}],
    [{"PP": 1, "MB": 1, "PASS": "F"}, {"PP": 1, "MB": 0, "PASS": "B"}],
    [{"PP": 1, "MB": 1, "PASS": "B"}]
  ]}
]
"""


@pytest.mark.parametrize("name", ["moe", "qwen3_moe_hf"])
def test_the_published_strategy(name: str, tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    path.write_text(STRATEGY, encoding="utf-8")
    cell = Cell(case=name)
    case = case_of(cell)
    batches = [case.batch(8, seed) for seed in range(2)]
    program = compile(job(cell, strategy=path, data=lambda: batches))
    streams = {ins.stream for plan in program.plans for ins in plan.instrs}
    assert {"ep", "dp", "pp.send", "pp.recv"} <= streams
    report = check(program, launch_inline, batches)
    assert report.ok, report
