"""Labels in traces of torch's profiler: one for each instruction of a run that records, none otherwise."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler
from torch.profiler import profile, supported_activities

from piper.compiler import Program, compile
from piper.run.launch import launch_inline
from piper.runtime.recorders import labelled
from piper.runtime.worker import Options
from tests.runtime.grid import Cell, batches, compiled, job

CELL = Cell(case="decoder", schedule="zero-bubble", dp=2, zero=3)


def traced(program: Program, options: Options) -> profile:
    """A step under torch's profiler, after one that is not."""
    first, second = batches(CELL, 2)
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    found = profile(activities=supported_activities(), experimental_config=every_thread)
    with launch_inline(program, options) as run:
        run.step(first)
        with found:
            run.step(second)
    return found


def wanted(program: Program) -> Counter[str]:
    """How often each node is run in a step, over all devices."""
    return Counter(ins.node for plan in program.plans for ins in plan.instrs for _ in plan.devices)


def test_what_an_instruction_calls_stands_under_its_node() -> None:
    program = compiled(CELL, "fp32")
    events = traced(program, Options(profile=1)).events()
    nodes = wanted(program)
    assert events is not None
    events = [
        event for event in events if event.device_type == DeviceType.CPU
    ]  # an accelerator repeats labels
    assert Counter(event.name for event in events if event.name in nodes) == nodes
    computes = {ins.node for plan in program.plans for ins in plan.instrs if ins.op == "compute"}
    for event in events:
        assert event.name not in computes or event.cpu_children, f"{event.name} calls nothing"
        if event.name in ("aten::mm", "aten::addmm"):
            while event.cpu_parent is not None:
                event = event.cpu_parent
            assert event.name in computes, "every product belongs to a node"


def test_a_run_that_records_nothing_has_no_label() -> None:
    program = compiled(CELL, "fp32")
    events = traced(program, Options()).events()
    assert events is not None
    assert not {event.name for event in events} & set(wanted(program))


def test_no_label_is_made_where_nobody_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    @contextmanager
    def record_function(name: str) -> Iterator[None]:
        made.append(name)
        yield

    monkeypatch.setattr(profiler, "record_function", record_function)
    run = labelled("F[PP=0]", lambda: made.append("ran"))
    run()
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    run()
    assert made == ["ran", "F[PP=0]", "ran"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_kernels_on_an_accelerator_lie_within_their_node(tmp_path: Path) -> None:
    program = compile(job(CELL), device="cuda")
    found = traced(program, Options(profile=1))
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    told = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {
        kind: [
            (event["name"], event["ts"], event["ts"] + event["dur"])
            for event in told
            if event.get("cat") == kind
        ]
        for kind in ("gpu_user_annotation", "kernel")
    }
    nodes = {name for name, _, _ in spans["gpu_user_annotation"]}
    assert {name for name in wanted(program) if name.startswith(("F[", "B"))} <= nodes
    inside = [
        any(begin <= start and end <= stop for _, begin, stop in spans["gpu_user_annotation"])
        for _, start, end in spans["kernel"]
    ]
    assert sum(inside) > 0.95 * len(inside)
