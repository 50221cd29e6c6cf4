"""Pictures: well-formed, described, and with a mark for everything they stand for."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from piper.recipe import import_file
from piper.schedules.grid import NAMES, Action, Grid, grid_for
from piper.view.cells import of_plans, of_schedule
from piper.view.svg import grid
from tests.view.scenes import again, demo

DRAWINGS = Path(__file__).parents[2] / "docs" / "pictures"
LANES, HEIGHTS, PLACEMENT = (
    import_file(DRAWINGS / f"{name}.py") for name in ("lanes", "heights", "placement")
)
SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def classes(svg: str) -> list[str]:
    return [node.get("class", "") for node in parsed(svg).iter()]


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_has_a_cell_for_each_action(name: str) -> None:
    schedule = grid_for(name, 4, 8)
    svg = grid(of_schedule(schedule, name))
    titles = [node.text or "" for node in parsed(svg).iter(f"{SVG}title")]
    drawn = [title.partition(":")[0] for title in titles if ":" in title]
    assert drawn == [str(action) for _, action in schedule.actions()]
    assert titles[0] == name


def test_a_pair_that_overlaps_is_outlined_once() -> None:
    schedule = grid_for("dualpipe-v", 2, 4)
    pairs = sum(len(group) > 1 for row in schedule.rows for group in row)
    svg = grid(of_schedule(schedule, "v"))
    assert classes(svg).count("pair") == pairs + 1, "and one in the legend"


def test_the_description_tells_the_whole_picture() -> None:
    schedule = Grid(
        rows=(
            (
                (Action(stage=0, phase="F", microbatch=0),),
                (Action(stage=0, phase="B", microbatch=0),),
            ),
        )
    )
    svg = grid(of_schedule(schedule, "one"))
    described = parsed(svg).find(f"{SVG}desc")
    assert described is not None
    assert described.text == "3 units of time, 0% idle. rank 0: 0F0 0B0"


def test_what_programs_draw_is_what_their_schedule_draws() -> None:
    subject = demo()
    pipeline = of_plans(subject.plans, subject.tags, "demo", subject.orderings)
    schedule = of_schedule(grid_for("dualpipe-v", 2, 4), "demo")

    def work(row: int, of: str) -> list[tuple[object, ...]]:
        cells = (pipeline if of == "plans" else schedule).rows[row]
        return sorted((str(cell.stage), cell.phase, cell.part) for cell in cells)

    for row in range(2):
        wanted = [
            cell for cell in work(row, "schedule") if cell != ("0", "BI", (2,)) and cell != ("0", "BI", (3,))
        ]
        assert [cell for cell in work(row, "plans") if cell[:2] != ("0", "BI")] == wanted
    paired = [cell for row in pipeline.rows for cell in row if cell.pair >= 0]
    assert len(paired) == sum(cell.pair >= 0 for row in schedule.rows for cell in row)


def overlaid(svg: str) -> list[str]:
    """What boxes with falling lines stand for, by their titles; a legend's have none."""
    assert [pattern.get("id") for pattern in parsed(svg).iter(f"{SVG}pattern")] == ["hatch", "again"]
    return [
        group.findtext(f"{SVG}title") or ""
        for group in parsed(svg).iter(f"{SVG}g")
        if any(box.get("fill") == "url(#again)" for box in group)
    ]


def test_a_forward_that_runs_again_is_hatched_in_the_forwards_colour() -> None:
    subject = again()
    svg = grid(of_plans(subject.plans, subject.tags, "again"))
    assert overlaid(svg) == [f"0R{part}: forward again, stage 0, microbatch {part}" for part in range(4)]
    assert svg.count("url(#again)") == 4 + 1, "and one in the legend"
    cells = [group for group in parsed(svg).iter(f"{SVG}g") if "R" in (group.findtext(f"{SVG}title") or "")]
    assert [box.get("class") for group in cells for box in group.iter(f"{SVG}rect")] == [
        name for part in range(4) for name in (f"F{part}", None)
    ]
    described = parsed(svg).findtext(f"{SVG}desc") or ""
    assert "devices 0,1: 0F0 0F1 0R0 0B0 0F2 0R1 0B1" in described


def test_lanes_and_heights_hatch_what_runs_again_and_what_is_gathered_for_it() -> None:
    subject = again()
    plan, timeline, memory = (
        subject.plans.plans[0],
        subject.planned.timelines[0],
        subject.planned.memories[0],
    )
    svg = LANES.lanes(plan, timeline, title="streams")
    wanted = [f"{place}: {ins.node}" for place, ins in enumerate(plan.instrs) if "R[" in ins.node]
    assert overlaid(svg) == wanted
    assert any("gather[" in name for name in wanted)
    assert svg.count("url(#again)") == len(wanted) + 1
    one = next(place for place, ins in enumerate(plan.instrs) if ins.again)
    assert ">R PP=0 MB=0<" in LANES.lanes(plan, timeline, title="one", only=[one])
    svg = HEIGHTS.heights(
        [HEIGHTS.MemoryRow(name="a", plan=plan, timeline=timeline, memory=memory)], title="bytes"
    )
    assert overlaid(svg) == [ins.node for ins in plan.instrs if ins.again]
    assert svg.count(">forward again<") == 1


def test_where_nothing_runs_again_nothing_speaks_of_it() -> None:
    subject = demo()
    plan, timeline = subject.plans.plans[0], subject.planned.timelines[0]
    for svg in (
        grid(of_plans(subject.plans, subject.tags, "demo", subject.orderings)),
        LANES.lanes(plan, timeline, title="all"),
        HEIGHTS.heights(
            [HEIGHTS.MemoryRow(name="a", plan=plan, timeline=timeline, memory=subject.planned.memories[0])],
            title="b",
        ),
    ):
        assert "forward again" not in svg
        assert "url(#again)" not in svg


def test_a_drawing_is_right_on_light_and_dark_paper() -> None:
    svg = grid(of_schedule(grid_for("zero-bubble", 2, 4), "zb"))
    style = re.search(r"<style>(.*)</style>", svg)
    assert style is not None
    assert "@media(prefers-color-scheme:dark)" in style[1]
    assert "var(" not in style[1], "converters to PDF know no CSS variables"
    used = {word for text in classes(svg) for word in text.split()}
    assert all(f".{word}" in style[1] for word in used - {"onF", "onB", "onBI", "onBW"})


def test_titles_are_escaped() -> None:
    assert (
        parsed(grid(of_schedule(grid_for("1f1b", 1, 1), 'a <b> & "c"'))).findtext(f"{SVG}title")
        == 'a <b> & "c"'
    )


def test_lanes_have_a_bar_for_each_instruction_and_an_arrow_for_each_event_across_streams() -> None:
    subject = demo()
    plan, timeline = subject.plans.plans[0], subject.planned.timelines[0]
    chosen = [place for place, ins in enumerate(plan.instrs) if "MB=3" in ins.node and "PP=0" in ins.node]
    svg = LANES.lanes(plan, timeline, title="a part", only=chosen)
    titles = [node.text or "" for node in parsed(svg).iter(f"{SVG}title")][1:]
    assert titles == [f"{place}: {plan.instrs[place].node}" for place in chosen]
    signals = {plan.instrs[place].signals: plan.instrs[place].stream for place in chosen}
    waits = [
        (event, plan.instrs[place].stream)
        for place in chosen
        for event in plan.instrs[place].waits
        if signals.get(event, plan.instrs[place].stream) != plan.instrs[place].stream
    ]
    assert classes(svg).count("arrow") == len(waits) > 0


def test_a_whole_device_has_no_arrows() -> None:
    subject = demo()
    svg = LANES.lanes(subject.plans.plans[0], subject.planned.timelines[0], title="all")
    assert "arrow" not in classes(svg)
    assert "arrow is an event" not in svg


def test_placement_shows_shards_experts_and_slices() -> None:
    plans = demo().plans
    dense = next(bucket for bucket in plans.buckets.values() if bucket.zero == 3)
    expert = next(bucket for bucket in plans.buckets.values() if len(bucket.groups) == 2)
    first, second = dense.devices
    assert [PLACEMENT.held(dense, device, 3) for device in (first, second)] == [
        PLACEMENT.HeldPiece(index=0, of=2),
        PLACEMENT.HeldPiece(index=1, of=2),
    ]
    assert [PLACEMENT.held(expert, device, 3) for device in expert.devices] == [
        PLACEMENT.HeldPiece(index=0, of=2),
        PLACEMENT.HeldPiece(index=1, of=2),
    ]
    assert [PLACEMENT.slice_of(plans, device) for device in range(4)] == [
        PLACEMENT.HeldPiece(index=0, of=2),
        PLACEMENT.HeldPiece(index=1, of=2),
        PLACEMENT.HeldPiece(index=0, of=2),
        PLACEMENT.HeldPiece(index=1, of=2),
    ]
    described = parsed(PLACEMENT.placement(plans, title="who")).findtext(f"{SVG}desc") or ""
    assert described.startswith("device 0: samples 1/2; parameters of PP=0 1/2, gradients of PP=0 1/2")


def test_heights_are_on_one_scale_and_tell_what_the_page_shows() -> None:
    subject = demo()
    plan, timeline, memory = (
        subject.plans.plans[0],
        subject.planned.timelines[0],
        subject.planned.memories[0],
    )
    fuller = replace(memory, live=tuple(2 * live for live in memory.live), peak=2 * memory.peak)
    fuller = replace(fuller, resident=2 * memory.resident)
    rows = [
        HEIGHTS.MemoryRow(name=n, plan=plan, timeline=timeline, memory=m)
        for n, m in (("b", fuller), ("a", memory))
    ]
    svg = HEIGHTS.heights(rows, title="two")
    described = parsed(svg).find(f"{SVG}desc")
    assert described is not None
    assert described.text == "b: peak 100%, time 100%; a: peak 50%, time 100%"
    drawn = [node.text for node in parsed(svg).iter(f"{SVG}title")]
    assert drawn == ["two", *[ins.node for ins in plan.instrs if ins.op == "compute"] * 2]
    curves = [
        node.get("d", "") for node in parsed(svg).iter() if node.get("class") == "quiet" and node.get("d")
    ]
    tops = [min(float(y) for y in re.findall(r"V([\d.]+)", curve)) for curve in curves]
    floors = [float(re.findall(r"V([\d.]+)Z", curve)[0]) for curve in curves]
    full, half = (floor - top for floor, top in zip(floors, tops, strict=True))
    assert full == pytest.approx(2 * half, abs=0.05)
