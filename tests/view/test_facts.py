"""What the page is told: complete, and small enough to send to a colleague."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from piper.plan.ops import TRAVELS
from piper.plan.text import read_plans, show_plans
from piper.view import report
from piper.view.facts import Columns, data_edges, facts_of, pattern
from piper.view.report import page
from tests.view.scenes import again, deep, demo, measured


def told() -> dict[str, object]:
    found: dict[str, object] = json.loads(json.dumps(facts_of(demo())))
    return found


def rows(value: object) -> list[Columns]:
    assert isinstance(value, list)
    return value


@pytest.mark.parametrize(
    ("node", "template", "parts"),
    [
        ("F[PP=0 MB=3]", "F[PP=0 MB=@]", "3"),
        ("load[x MB=12 @0,1]", "load[x MB=@ @0,1]", "12"),
        ("gather[PP=0/0 for F[PP=0 MB=0]]", "gather[PP=0/0 for F[PP=0 MB=@]]", "0"),
        ("update[@0,1]", "update[@0,1]", ""),
    ],
)
def test_names_are_kept_without_their_parts(node: str, template: str, parts: str) -> None:
    assert pattern(node, ["MB"]) == (template, parts)


def test_every_name_comes_back_from_its_pattern() -> None:
    facts = told()
    nodes = facts["nodes"]
    assert isinstance(nodes, list)
    for plan, program in zip(demo().plans, rows(facts["programs"]), strict=True):
        indices = program["indices"]
        assert isinstance(indices, list)
        columns = zip(rows(program["node"]), rows(program["index"]), plan.instrs, strict=True)
        for number, index, ins in columns:
            parts = iter(str(indices[index]).split(","))  # type: ignore[call-overload]
            assert re.sub(r"@(?!\d)", lambda _: next(parts), nodes[number]) == ins.node  # type: ignore[call-overload]  # noqa: B023


def test_a_forward_that_runs_again_is_a_phase_of_its_own_to_the_page() -> None:
    facts = json.loads(json.dumps(facts_of(again())))
    first, second = facts["pipeline"]["rows"]
    cells = zip(first["phase"], first["microbatch"], strict=True)
    assert [microbatch for phase, microbatch in cells if phase == "R"] == list("0123")
    assert "R" not in second["phase"]
    program, plan = facts["programs"][0], again().plans.plans[0]
    assert [phase == "R" for phase in program["phase"]] == ["R[" in ins.node for ins in plan.instrs]
    words = [program["args"][number] for number in program["arg"]]
    assert {word for word, ins in zip(words, plan.instrs, strict=True) if ins.again} == {
        "R PP=0",
        "R PP=0 EP=0",
        "R PP=0 #1",
    }


def test_every_collective_of_a_divided_region_has_words() -> None:
    ops = facts_of(demo())["ops"]
    assert isinstance(ops, dict)
    words = {op: ops[op]["label"] for op in TRAVELS}
    assert words == {
        "all_gather": "all-gather",
        "reduce_scatter": "reduce-scatter",
        "all_reduce": "all-reduce",
        "max": "max",
        "all_to_all": "all-to-all",
        "shift": "shift",
        "shift_back": "shift-back",
    }


def test_data_edges_go_from_writer_to_reader() -> None:
    plan = demo().plans.plans[0]
    edges = [*data_edges(plan)]
    assert len(edges) > 10
    for source, target in edges:
        assert source < target
        assert set(plan.instrs[source].writes) & set(plan.instrs[target].reads)


def test_every_communicator_is_counted_once_for_each_device_that_sends() -> None:
    total = sum(int(str(comm["nbytes"])) for comm in rows(told()["comms"]))
    sent = [
        ins.nbytes * len(plan.devices)
        for plan in demo().plans
        for ins in plan.instrs
        if ins.comm and ins.op != "recv"
    ]
    assert total == sum(sent)


def test_nothing_in_the_facts_can_end_their_script() -> None:
    text = page(replace(demo(), title="</script><script>alert(1)</script>", source="</script>{{script}}"))
    embedded = re.search(r'<script type="application/json" id="facts">(.*?)</script>', text, re.S)
    assert embedded is not None
    assert json.loads(embedded[1])["source"] == "</script>{{script}}"
    assert "<title>&lt;/script&gt;" in text


def test_every_script_of_the_page_is_in_it() -> None:
    folder = Path(report.__file__).parent / "page"
    assert sorted(report.SCRIPTS) == sorted(path.name for path in folder.glob("*.js"))


def test_the_page_asks_nothing_of_the_network() -> None:
    text = page(demo())
    assert "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)=["'](?!#|data:,)""", text)
    assert "http://" not in text
    assert "https://" not in text


def test_a_page_for_sixteen_stages_and_sixty_four_microbatches_is_small() -> None:
    assert len(page(deep()).encode()) < 2_000_000


def test_measured_times_stand_beside_planned_ones() -> None:
    subject = demo()
    run = replace(subject, measured=measured(subject, "F[PP=0 MB=0]"))
    facts = json.loads(json.dumps(facts_of(run)))
    assert sorted(facts["measured"]) == ["0", "2"]
    assert len(facts["measured"]["0"]["start"]) == len(subject.plans.plans[0].instrs)
    assert facts["measured"]["0"]["end"] / facts["ticks"] == pytest.approx(run.measured[0].end, rel=1e-5)


def test_plans_know_the_tags_of_their_chunks() -> None:
    subject = demo()
    back = read_plans(show_plans(subject.plans))
    assert {name: chunk.tags for name, chunk in back.chunks.items()} == subject.tags
