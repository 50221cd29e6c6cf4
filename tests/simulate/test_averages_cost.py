"""What a slow link between groups costs, with averages now and then in place of a reduction in every step."""

import json
from pathlib import Path

import pytest

import piper
from piper import at, average, replicate
from piper.plan.groups import kinds_of_step
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.simulate import simulate_cycle
from tests.runtime.averaging import job

CLUSTER = """
memory = 16e9
memory_bandwidth = 1e12
[flops]
float32 = 1e13
float64 = 1e12
[[link]]
name = "inside"
devices = 2
bandwidth = 100e9
latency = 1e-6
[[link]]
name = "between"
bandwidth = 1e6
latency = 1e-3
"""


def mean(path: Path, *strategy: piper.Directive) -> float:
    path.write_text(CLUSTER)
    program = piper.compile(job(replicate(at(), devices=[0, 1, 2, 3]), *strategy), device="cpu")
    cycle = simulate_cycle(program.plans, program.outline, Roofline(load_cluster(path)))
    return sum(count * seconds for count, seconds in cycle) / sum(count for count, _ in cycle)


def test_a_slow_link_costs_less_the_less_often_groups_average(tmp_path: Path) -> None:
    path = tmp_path / "slow.toml"
    together = mean(path)
    eighth = mean(path, average(at(), across=[0, 2], every=8))
    assert eighth < together / 6
    assert mean(path, average(at(), across=[0, 2], every=4)) > eighth


def test_steps_differ_by_what_is_due_in_them() -> None:
    plans = piper.compile(
        job(replicate(at(), devices=[0, 1]), average(at(), across=[0, 1], every=6, fragments=2, overlap=2)),
        device="cpu",
    ).plans
    kinds = {
        frozenset((ins.op, ins.node) for ins in kind.plans[0].instrs if ins.op == "average"): count
        for count, kind in kinds_of_step(plans)
    }
    sent = {len(kind): count for kind, count in kinds.items()}
    assert sum(count for count, _ in kinds_of_step(plans)) == 6
    assert set(sent) == {0, 1}  # no step sends two fragments


def test_the_verb_says_how_long_a_step_takes_in_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from piper.cli import main

    (tmp_path / "slow.toml").write_text(CLUSTER)
    (tmp_path / "recipe.py").write_text(
        "from piper import at, average, replicate\nfrom tests.runtime.averaging import job\n\n\n"
        "def groups():\n    return job(replicate(at(), [0, 1, 2, 3]), average(at(), across=[0, 2], every=8))\n"
    )
    monkeypatch.chdir(tmp_path)
    for more in ([], ["--json"]):
        monkeypatch.setattr(
            "sys.argv", ["piper", "simulate", "recipe.py:groups", "--cluster", "slow.toml", *more]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
    text, report = capsys.readouterr().out.split("{", 1)
    assert "in the mean, because groups train apart: 1 of" in text
    found = json.loads("{" + report)
    assert found["mean_step_s"] < found["step_s"]
