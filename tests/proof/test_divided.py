"""The proof of values on plans whose regions are divided: what it accepts, and each of its complaints."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

import pytest

from piper.ir.chunk import Output
from piper.ir.chunk_options import AxisPolicy, Policy
from piper.ir.graph import Graph
from piper.ir.ids import Pass, SlotId, read_slot
from piper.ir.mesh import EXPERTS, Axis, groups_apart, mesh_of
from piper.ir.sharding import AxisPlacement, Shard, Sharding
from piper.plan.instr import Instr
from piper.plan.plan import Comm, Plan, Plans
from piper.plan.prove import ProofError, prove
from piper.proof.covers import Covers
from piper.proof.specification import holding
from piper.proof.symbolic_state import placed_by
from piper.proof.values import prove_values, value_problems
from tests.proof import divided, divided_mutations, mutations
from tests.proof.plans import edited, find

Change = Callable[[Instr], Instr]
Problem = Callable[[], str]


def said(name: str, plans: Plans, graph: Graph | None = None) -> str:
    """Return what the proof of values says of edited plans of a program."""
    program = divided.program_of(name)
    clip = program.job.clip_norm is not None
    return "\n".join(value_problems(plans, graph or program.graph, clip=clip))


def after(name: str, op: str, node: str, change: Change, device: int = 0) -> str:
    """Return what the proof says after a change of one instruction on the program of a device."""

    def edit(instrs: list[Instr]) -> None:
        place = find(instrs, op, node)
        instrs[place] = change(instrs[place])

    return said(name, edited(divided.program_of(name).plans, device, edit))


def without(name: str, op: str, node: str, device: int = 0) -> str:
    """Return what the proof says where a device leaves an instruction out."""
    plans = divided.program_of(name).plans
    return said(name, edited(plans, device, lambda instrs: instrs.pop(find(instrs, op, node))))


def how(**fields: object) -> Change:
    """Return a change of what a collective does."""

    def change(ins: Instr) -> Instr:
        new = replace(ins.collects.how, **fields)  # type: ignore[arg-type]
        return replace(ins, payload=replace(ins.collects, how=new))

    return change


def collecting(**fields: object) -> Change:
    """Return a change of the payload of a collective."""
    return lambda ins: replace(ins, payload=replace(ins.collects, **fields))  # type: ignore[arg-type]


def loading(**fields: object) -> Change:
    """Return a change of the payload of a load."""
    return lambda ins: replace(ins, payload=replace(ins.loads, **fields))  # type: ignore[arg-type]


def reading(*slots: str) -> Change:
    """Return a change of what an instruction reads."""
    return lambda ins: replace(ins, reads=tuple(read_slot(slot, ("MB",)) for slot in slots))


def table(name: str, **fields: object) -> str:
    """Return what the proof says where the plans of a program say something else."""
    return said(name, replace(divided.program_of(name).plans, **fields))  # type: ignore[arg-type]


def bucket(name: str, which: str, **fields: object) -> str:
    """Return what the proof says where a bucket of a program is another."""
    buckets = divided.program_of(name).plans.buckets
    changed = replace(buckets[which], **fields)  # type: ignore[arg-type]
    return table(name, buckets={**buckets, which: changed})


def piece(name: str, which: str, **fields: object) -> str:
    """Return what the proof says where the first parameter of a bucket is held in another way."""
    first, *rest = divided.program_of(name).plans.buckets[which].pieces
    changed = replace(first, **fields)  # type: ignore[arg-type]
    return bucket(name, which, pieces=(changed, *rest))


def comm(name: str, which: str, groups: tuple[tuple[int, ...], ...]) -> str:
    """Return what the proof says where a communicator joins other devices."""
    comms = divided.program_of(name).plans.comms
    return table(name, comms={**comms, which: replace(comms[which], groups=groups)})


def placed(name: str, old: str, *devices: tuple[int, ...]) -> str:
    """Return what the proof says where the places of devices are those of another set or group."""
    slot = read_slot(old)
    new = SlotId("place", slot.owner, devices=devices)
    return said(name, divided_mutations.renamed(divided.program_of(name).plans, slot, new))


def renamed(name: str, old: str, new: str) -> str:
    """Return what the proof says where a resident has another id."""
    return said(
        name, divided_mutations.renamed(divided.program_of(name).plans, read_slot(old), read_slot(new))
    )


def outline(name: str, **fields: object) -> str:
    """Return what the proof says where the captured model is another."""
    program = divided.program_of(name)
    changed = replace(program.outline, **fields)  # type: ignore[arg-type]
    return said(name, program.plans, replace(program.graph, outline=changed))


def sliced(name: str, param: str, **fields: object) -> str:
    """Return what the proof says where a parameter is divided in another way."""
    found = []
    for each in divided.program_of(name).outline.parameters:
        if each.name == param:
            each = replace(each, placements=(replace(each.placements[0], **fields),))  # type: ignore[arg-type]
        found.append(each)
    return outline(name, parameters=tuple(found))


TENSOR, SEQUENCE, OUT, TWO, CONTEXT = (
    "tensor, clipped",
    "sequence, stages",
    "out of one device",
    "two axes",
    "context",
)


def weight_elsewhere() -> str:
    """Return what the proof says where the weight of the loss is an output of a stage on other devices."""
    program = divided.program_of("into one device")
    changed = replace(program.outline, weight=Output(chunk="PP=0", index=0))
    plans = replace(program.plans, weighted=True, seed=1.0)
    return said("into one device", plans, replace(program.graph, outline=changed))


COMPLAINTS: dict[str, tuple[Problem, str]] = {
    "a collective that is left out": (
        lambda: without(SEQUENCE, "collect", "F[PP=0 TP=1 MB=1]"),
        "reads PP=0 TP=1.out0[MB=1], which holds nothing; it should hold output 0 of PP=0 TP=1 on MB=1",
    ),
    "another operation": (
        lambda: after(TENSOR, "collect", "F[PP=0 TP=2]", how(op="max")),
        "F[PP=0 TP=2] does TP 2 max none ->-; it should do TP 2 all_reduce none ->-",
    ),
    "the forward's operation in the backward": (
        lambda: after(
            SEQUENCE,
            "collect",
            "B[PP=0 TP=1 MB=0]",
            how(op="all_gather", joined=Shard(dim=1), cut=None),
        ),
        "B[PP=0 TP=1 MB=0] does TP 2 all_gather all_gather 1>-; it should do TP 2 reduce_scatter all_gather ->1",
    ),
    "another dimension": (
        lambda: after(SEQUENCE, "collect", "F[PP=0 TP=1 MB=0]", how(joined=Shard(dim=2))),
        "does TP 2 all_gather reduce_scatter 2>-; it should do TP 2 all_gather reduce_scatter 1>-",
    ),
    "another order of slices": (
        lambda: after(CONTEXT, "collect", "F[PP=0 CP=0]", how(joined=Shard(dim=1))),
        "it should do CP 2 all_gather reduce_scatter 1z>-",
    ),
    "a shift the other way": (
        lambda: after("ring", "collect", "F[PP=0 CP=0]", how(op="shift_back")),
        "F[PP=0 CP=0] does CP 2 shift_back shift_back ->-; it should do CP 2 shift shift_back ->-",
    ),
    "a shift left out": (
        lambda: without("ring", "collect", "F[PP=0 CP=1]"),
        "reads PP=0 CP=1.out0, which holds nothing; it should hold output 0 of PP=0 CP=1",
    ),
    "another place on the host": (
        lambda: renamed("ring", "host_place.CP@0-3@0,1", "host_place.CP@0-3@0,2"),
        "reads host_place.CP@0-3@0,2, which holds places 0, 0, 1 ... of its devices, on the host; "
        "it should hold places 0, 1, 0 ... of its devices, on the host",
    ),
    "a place in memory of the device": (
        lambda: renamed("ring", "host_place.CP@0-3@0,1", "place.CP@0-3@0,1"),
        "which holds places 0, 1, 0 ... of its devices; "
        "it should hold places 0, 1, 0 ... of its devices, on the host",
    ),
    "blocks": (
        lambda: after(SEQUENCE, "collect", "F[PP=0 TP=1 MB=0]", how(joined=Shard(dim=1, blocks=2))),
        "does TP 2 all_gather reduce_scatter 1/2>-; it should do",
    ),
    "another read": (
        lambda: after(SEQUENCE, "collect", "F[PP=0 TP=1 MB=1]", reading("PP=0 #1.out0[MB=0]")),
        "F[PP=0 TP=1 MB=1] reads PP=0 #1.out0[MB=0], which holds output 0 of PP=0 #1 on MB=0; "
        "it should hold output 0 of PP=0 #1 on MB=1",
    ),
    "a reader of what is not yet summed": (
        lambda: after(TENSOR, "collect", "F[PP=0 TP=4]", reading("PP=0 #2.out0")),
        "F[PP=0 TP=4] reads PP=0 #2.out0, which holds output 0 of PP=0 #2; "
        "it should hold output 0 of PP=0 #4",
    ),
    "another gradient": (
        lambda: after(TENSOR, "collect", "B[PP=0 TP=1]", reading("PP=0 #4.din0")),
        "B[PP=0 TP=1] reads PP=0 #4.din0, which holds the gradient of output 0 of PP=0 TP=3 from input 0 of "
        "PP=0 #4; it should hold the gradient of output 0 of PP=0 TP=1 from input 0 of PP=0 #2",
    ),
    "a collective of a chunk that is none": (
        lambda: after(TENSOR, "collect", "F[PP=0 TP=0]", collecting(run=Pass(phase="F", chunk="PP=0"))),
        "has run=F[PP=0] how=TP 2 all_reduce none ->-, which must not happen here",
    ),
    "a gradient that should pass on": (
        lambda: after(TENSOR, "collect", "F[PP=0 TP=0]", collecting(run=Pass(phase="B", chunk="PP=0 TP=0"))),
        "has run=B[PP=0 TP=0] how=TP 2 all_reduce none ->-, which must not happen here",
    ),
    "a backward of weights": (
        lambda: after(TENSOR, "collect", "B[PP=0 TP=1]", collecting(run=Pass(phase="BW", chunk="PP=0 TP=1"))),
        "has run=BW[PP=0 TP=1] how=TP 2 all_reduce none ->-, which must not happen here",
    ),
    "no collective at all": (
        lambda: after(TENSOR, "collect", "F[PP=0 TP=0]", lambda ins: replace(ins, payload=None)),
        "F[PP=0 TP=0] has nothing, which is not what collect needs",
    ),
    "another microbatch": (
        lambda: after(
            SEQUENCE,
            "collect",
            "F[PP=0 TP=1 MB=1]",
            collecting(run=Pass(phase="F", chunk="PP=0 TP=1", part=(("MB", 0),))),
        ),
        "F[PP=0 TP=1 MB=1] reads PP=0 #1.out0[MB=1], which holds output 0 of PP=0 #1 on MB=1; "
        "it should hold output 0 of PP=0 #1 on MB=0",
    ),
    "other devices": (
        lambda: after(TWO, "collect", "F[PP=0 CP=0]", lambda ins: replace(ins, comm="0,1x4:tp")),
        "goes over 0,1x4:tp, groups 0,1 and 2,3 and 4,5 and 6,7; it should be 0,2 and 1,3 and 4,6 and 5,7",
    ),
    "devices in another order": (
        lambda: comm(TENSOR, "0,1x2:tp", ((1, 0), (3, 2))),
        "goes over 0,1x2:tp, groups 1,0 and 3,2; it should be 0,1 and 2,3",
    ),
    "no communicator": (
        lambda: after(TENSOR, "collect", "F[PP=0 TP=0]", lambda ins: replace(ins, comm=None)),
        "F[PP=0 TP=0] has no communicator; it should go over 2 devices",
    ),
    "a part that is communicated": (
        lambda: after(OUT, "slice", "F[PP=1 TP=2]", lambda ins: replace(ins, op="collect"), device=1),
        "F[PP=1 TP=2] communicates; each device should take its own part",
    ),
    "a sum that is taken apart": (
        lambda: after(TENSOR, "collect", "F[PP=0 TP=0]", lambda ins: replace(ins, op="slice")),
        "F[PP=0 TP=0] takes a part by itself; it should be TP 2 all_reduce none ->-",
    ),
    "a part of another device": (
        lambda: after(OUT, "slice", "F[PP=1 TP=2]", collecting(devices=(2, 1, 4, 3)), device=1),
        "takes the parts of devices 2,1,4,3, 1 apart; it should be 1-4, 1 apart",
    ),
    "a part of devices further apart": (
        lambda: after(OUT, "slice", "F[PP=1 TP=2]", collecting(stride=2), device=1),
        "takes the parts of devices 1-4, 2 apart; it should be 1-4, 1 apart",
    ),
    "places in another order": (
        lambda: placed(TENSOR, "place.TP@0-3@0,1", (3, 2, 1, 0), (1, 0)),
        "which holds places 1, 0, 1 ... of its devices; it should hold places 0, 1, 0 ... of its devices",
    ),
    "places of devices further apart": (
        lambda: placed(TENSOR, "place.TP@0-3@0,1", (0, 1, 2, 3), (0, 2)),
        "which holds places 0, 0, 1 ... of its devices; it should hold places 0, 1, 0 ... of its devices",
    ),
    "places of no set": (
        lambda: placed(TENSOR, "place.TP@0-3@0,1", (0, 1, 2, 3)),
        "which holds the resident place.TP@0-3; it should hold places 0, 1, 0 ... of its devices",
    ),
    "a field that is not divided": (
        lambda: after(CONTEXT, "load", "tokens", loading(slices=())),
        "which holds field tokens; it should hold field tokens (slices 0,1,0,1 of 2 along 1z)",
    ),
    "a field in another order": (
        lambda: after(CONTEXT, "load", "labels", loading(slices=(Sharding(dim=1, degree=2),))),
        "which holds field labels (slices 0,1,0,1 of 2 along 1); "
        "it should hold field labels (slices 0,1,0,1 of 2 along 1z)",
    ),
    "a field along another axis": (
        lambda: after(TWO, "load", "tokens", loading(slices=(Sharding(dim=1, degree=2),))),
        "which holds field tokens (slices 0,1,0,1,0,1,0,1 of 2 along 1); "
        "it should hold field tokens (slices 0,0,1,1,0,0,1,1 of 2 along 1)",
    ),
    "samples of each device": (
        lambda: after(SEQUENCE, "load", "tokens MB=0", loading(degree=1)),
        "loads the samples of devices that it does not run on",
    ),
    "samples of other groups": (
        lambda: after(TENSOR, "load", "tokens", loading(devices=(2, 3, 0, 1))),
        "which holds field tokens, on device 0 of cells 1-1; "
        "it should hold field tokens, on device 0 of cells 0-0",
    ),
    "groups of no devices": (
        lambda: after(TENSOR, "load", "tokens", loading(degree=0)),
        "loads the samples of devices that it does not run on",
    ),
    "a transfer to another shard": (
        lambda: comm(SEQUENCE, "0,1>2,3/2:2", ((0, 3), (1, 2))),
        "which holds output 0 of PP=0 #5 on MB=0, on device 2 of cells 1-1; "
        "it should hold output 0 of PP=0 #5 on MB=0, on device 2 of cells 0-0",
    ),
    "a sum over the group that is left out": (
        lambda: without(SEQUENCE, "all_reduce", "reduce[PP=0 #1/0"),
        "which holds (PP=0 #1 MB=0 + PP=0 #1 MB=1) over cells 0-0; it should hold "
        "(PP=0 #1 MB=0 + PP=0 #1 MB=1) over cells 0-1",
    ),
    "losses of a group counted twice": (
        lambda: table(TENSOR, copies=1),
        "the plans say copies=1; it should be 2",
    ),
    "samples cut over every device": (
        lambda: table(TENSOR, cells=4),
        "the plans say cells=4; it should be 2",
    ),
    "a seed for every device": (
        lambda: table(TENSOR, seed=0.25),
        "the plans say seed=0.25; it should be 0.5",
    ),
    "a parameter that is whole": (
        lambda: piece(TENSOR, "PP=0/0", shardings=(), shape=(8, 4)),
        "PP=0/0 holds embedding.weight whole; it should be 0:2",
    ),
    "a parameter along another dimension": (
        lambda: piece(TENSOR, "PP=0/0", shardings=(Sharding(dim=1, degree=2),), shape=(8, 2)),
        "PP=0/0 holds embedding.weight 1:2; it should be 0:2",
    ),
    "a parameter over other groups": (
        lambda: piece(
            TENSOR, "PP=0/0", shardings=(Sharding(dim=0, degree=2, stride=2, zigzag=True, blocks=2),)
        ),
        "PP=0/0 holds embedding.weight 0/2z:2*2; it should be 0:2",
    ),
    "a parameter of another shape": (
        lambda: piece(TENSOR, "PP=0/0", shape=(8, 4)),
        "PP=0/0 holds embedding.weight as (8, 4) of float64; it should be (4, 4) of float64",
    ),
    "the same gradients summed": (
        lambda: bucket(TENSOR, "PP=0 #1/0", groups=((0, 1, 2, 3),)),
        "PP=0 #1/0 reduces within 0-3; it should be 0,2 and 1,3",
    ),
    "summed gradients kept apart": (
        lambda: bucket("sequence, zero 3", "PP=0 #1/0", groups=((0, 2), (1, 3))),
        "PP=0 #1/0 reduces within 0,2 and 1,3; it should be 0-3",
    ),
    "gradients counted once for a group": (
        lambda: bucket(TENSOR, "PP=0 #1/0", copies=1),
        "PP=0 #1/0 says that 1 devices hold its gradient; it should be 2",
    ),
    "a divided bucket on its devices in another order": (
        lambda: bucket(TENSOR, "PP=0/0", devices=(1, 0, 3, 2), groups=((1, 3), (0, 2))),
        "PP=0/0 holds embedding.weight, which is sharded, on other devices than its chunks",
    ),
    "siblings that are sharded in other ways": (
        lambda: bucket("tied stages", "embedding.weight@PP=0", zero=1),
        "embedding.weight@PP=1 #5 is sharded, zero=0, otherwise than embedding.weight@PP=0",
    ),
    "a collective for another number of devices": (
        lambda: outline(
            TENSOR,
            chunks=tuple(
                replace(chunk, collective=replace(chunk.collective, degree=4)) if chunk.collective else chunk
                for chunk in divided.program_of(TENSOR).outline.chunks
            ),
        ),
        "PP=0 TP=0 is for 4 devices along TP; its region has 2",
    ),
    "a parameter for another number of devices": (
        lambda: sliced(TENSOR, "embedding.weight", degree=4),
        "embedding.weight is sharded over 4 devices along TP; no region is",
    ),
    "a parameter that the model sums": (
        lambda: sliced(TENSOR, "blocks.0.scale", partial=True),
        "PP=0 #1/0 reduces within 0,2 and 1,3; it should be 0-3",
    ),
    "a weight that other devices hold": (
        weight_elsewhere,
        "1 devices hold each loss and 2 each weight; they are counted alike",
    ),
}


@pytest.mark.timeout(120)  # the first of them compile the programs, about a second each
@pytest.mark.parametrize("name", COMPLAINTS)
def test_a_complaint(name: str) -> None:
    make, wanted = COMPLAINTS[name]
    assert wanted in make()


def verdict(name: str, plans: Plans) -> str:
    """Return which proof refuses plans, or that they are accepted."""
    program = divided.program_of(name)
    try:
        prove(plans)
    except ProofError:
        return "order"
    try:
        prove_values(plans, program.graph, clip=program.job.clip_norm is not None)
    except ProofError:
        return "values"
    return "accepted"


@pytest.mark.timeout(120)
def test_divided_plans_are_accepted() -> None:
    for name in divided.PROGRAMS:
        assert verdict(name, divided.program_of(name).plans) == "accepted"


def test_all_divided_programs_train_alike() -> None:
    """They start alike, so the first loss of each is that of the others; the tied model is another one."""
    losses = {name: divided.right_numbers(name).losses[0] for name in ("context", "two axes", "zero-bubble")}
    assert max(losses.values()) - min(losses.values()) < 1e-12


def examine(name: str, kinds: Sequence[str], edits: ModuleType, seed: int) -> Counter[str]:
    """Edit one program in several ways; return how often each proof refused, and how often none."""
    rng = random.Random(f"{name} {seed}")
    found: Counter[str] = Counter()
    for kind in kinds:
        plans = edits.mutant(rng, divided.program_of(name).plans, kind)
        if plans is None:
            found["nothing to edit"] += 1
            continue
        said = verdict(name, plans)
        found[said] += 1
        if said == "accepted":
            got = divided.numbers(name, plans)
            assert got.equals(divided.right_numbers(name)), f"{name}, {kind}, seed {seed}: other numbers"
    return found


@pytest.mark.timeout(180)
def test_edited_plans_are_refused_or_give_the_same_numbers() -> None:
    found: Counter[str] = Counter()
    own, general = [*divided_mutations.KINDS], [*mutations.KINDS]
    for number, name in enumerate(divided.PROGRAMS):
        found += examine(name, own, divided_mutations, seed=1)
        found += examine(
            name, [general[(7 * number + i) % len(general)] for i in range(3)], mutations, seed=1
        )
    assert found["values"] >= 80, found
    assert found["accepted"] <= 20, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", divided.PROGRAMS)
def test_many_edited_plans_are_refused_or_give_the_same_numbers(name: str) -> None:
    found: Counter[str] = Counter()
    for seed in range(2, 8):
        found += examine(name, [*divided_mutations.KINDS], divided_mutations, seed)
    for seed in range(2, 4):
        found += examine(name, [*mutations.KINDS], mutations, seed)
    assert found["values"] >= 40, found


DEVICES = (8, 9, 10, 11, 12, 13, 14, 15)
AXES = tuple(AxisPolicy(axis=axis, degree=2, stream="s", origin=0) for axis in ("TP", "CP"))
MESH = mesh_of(DEVICES, [Axis(name="TP", degree=2), Axis(name="CP", degree=2)])


def test_shards_pass_between_regions_with_the_same_axes_alone() -> None:
    assert MESH.sharing == mesh_of((0, 1, 2, 3), MESH.sharing).sharing  # fewer samples at once
    assert MESH.sharing != mesh_of(DEVICES, [Axis(name="CP", degree=2), Axis(name="TP", degree=2)]).sharing
    assert MESH.sharing != mesh_of(DEVICES, [Axis(name="TP", degree=2)]).sharing
    assert MESH.sharing != mesh_of(DEVICES, [Axis(name="TP", degree=4)]).sharing


def test_how_a_region_holds_a_parameter() -> None:
    def held(*placements: AxisPlacement, ways: int = 1) -> tuple[object, ...]:
        found = holding(Policy(axes=AXES, ways=ways).mesh(DEVICES), placements)
        return found.shardings, groups_apart(DEVICES, found.distinct), found.slices

    along_tp = AxisPlacement(axis="TP", degree=2, placement=Shard(dim=1))
    over_cp = AxisPlacement(axis="CP", degree=2, partial=True)
    experts = AxisPlacement(axis=EXPERTS, degree=2, placement=Shard(dim=0))
    cut = Sharding(dim=1, degree=2, stride=1)
    assert held(along_tp, over_cp) == ((cut,), ((8, 10, 12, 14), (9, 11, 13, 15)), 2)
    assert held(over_cp) == ((), ((8, 10, 12, 14), (9, 11, 13, 15)), 1)
    assert held(replace(over_cp, partial=False)) == ((), ((8, 12), (9, 13), (10, 14), (11, 15)), 1)
    by_expert = Sharding(dim=0, degree=2, stride=4)
    assert held(along_tp, over_cp, experts, ways=2) == (
        (by_expert, cut),
        ((8, 10), (9, 11), (12, 14), (13, 15)),
        4,
    )
    # a slice of its own is never added to the slice of another device, whatever else is said
    assert held(replace(along_tp, partial=True), over_cp) == held(along_tp, over_cp)


def four_devices() -> Covers:
    over = Comm(name="all", kind="groups", groups=((0, 1, 2, 3),))
    plan = Plan(devices=(0, 1, 2, 3), instrs=(), slots={}, residents={})
    return Covers(Plans(plans=(plan,), comms={"all": over}, buckets={}, seed=1.0, weighted=False), cells=2)


def test_neighbours_share_their_samples_and_have_shards_of_their_own() -> None:
    covers = four_devices()
    shared = covers.of_set(0, (0, 1, 2, 3), 2)
    assert shared is not None
    assert covers.on_devices(shared) == (((0, 1, 1),), ((0, 1, 1),), ((1, 2, 1),), ((1, 2, 1),))
    shards = covers.of_set(0, (0, 1, 2, 3), 2, ((Axis(degree=2), 1),))
    assert shards is not None
    assert covers.on_devices(shards) == (((0, 1, 1),), ((2, 3, 1),), ((1, 2, 1),), ((3, 4, 1),))
    assert covers.of_set(0, (0, 1, 2, 3), 3) is None
    own = covers.own_share(0, (0, 1, 2, 3), None, own=((Axis(degree=2), 1),))
    assert covers.on_devices(own) == (((0, 2, 1),), ((2, 4, 1),), ((0, 2, 1),), ((2, 4, 1),))
    every = covers.own_share(0, (0, 1, 2, 3), None, summed=((Axis(degree=2), 1),))
    assert covers.on_devices(every) == (((0, 4, 1),),) * 4
    assert covers.summed("all", ((0, shards),), (0,)) == {0: every}


def test_shares_of_experts_within_shards() -> None:
    plan = Plan(devices=(0, 1, 2, 3), instrs=(), slots={}, residents={})
    covers = Covers(Plans(plans=(plan,), comms={}, buckets={}, seed=1.0, weighted=False), cells=2, shares=2)
    experts = Axis(degree=2, stride=2)
    rows = covers.of_set(0, (0, 1, 2, 3), 2, ((Axis(degree=2), 1),), experts)
    assert rows is not None
    assert covers.on_devices(rows) == (((0, 2, 1),), ((4, 6, 1),), ((2, 4, 1),), ((6, 8, 1),))
    own = covers.own_share(0, (0, 1, 2, 3), experts, own=((Axis(degree=2), 1),))
    assert covers.on_devices(own) == covers.on_devices(rows)
    every = covers.own_share(0, (0, 1, 2, 3), experts, own=((Axis(degree=2), 1),), every_share=True)
    assert covers.on_devices(every) == (((0, 4, 1),), ((4, 8, 1),), ((0, 4, 1),), ((4, 8, 1),))


def test_shares_of_experts_over_devices_that_share_their_samples() -> None:
    plan = Plan(devices=(0, 1, 2, 3), instrs=(), slots={}, residents={})
    covers = Covers(Plans(plans=(plan,), comms={}, buckets={}, seed=1.0, weighted=False), cells=2, shares=4)
    all_four = covers.of_set(0, (0, 1, 2, 3), 2, (), Axis(degree=4))
    assert all_four is not None
    assert covers.on_devices(all_four) == (((0, 2, 1),), ((2, 4, 1),), ((4, 6, 1),), ((6, 8, 1),))
    pairs = covers.of_set(0, (0, 1, 2, 3), 2, (), Axis(degree=2))
    assert pairs is not None
    assert covers.on_devices(pairs) == (((0, 1, 1),), ((2, 3, 1),), ((1, 2, 1),), ((3, 4, 1),))


def test_a_slot_of_places_is_read_as_the_runtime_reads_it() -> None:
    def places(*devices: tuple[int, ...]) -> tuple[str, ...] | None:
        return placed_by(SlotId("place", "TP", devices=devices), (4, 5, 6, 7))

    assert places((4, 5, 6, 7), (4, 5)) == ("0", "1", "0", "1")
    assert places((4, 5, 6, 7), (4, 6)) == ("0", "0", "1", "1")
    assert places((4, 5, 6, 7), (4,)) == ("0", "0", "0", "0")
    assert places((4, 5, 6, 7)) is None
    assert places((4, 5), (4, 5)) is None
    assert places((4, 5, 6, 7), (5, 4)) is None
    assert places((4, 5, 6, 7), ()) is None
