"""Random edits of plans, each of one kind. Some give the same numbers; most do not, or cannot run."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from piper.lower.events import synchronised
from piper.plan.instr import Instr
from piper.plan.ops import OfBucket, Routing, Rows
from piper.plan.plan import Plan, Plans

Edit = Callable[[random.Random, Plans], Plans | None]  # None: it finds nothing to edit
Choice = TypeVar("Choice")
REDUCTIONS = ("all_reduce", "reduce_scatter")


def with_instrs(plans: Plans, number: int, instrs: Sequence[Instr]) -> Plans:
    """Return plans with one program's instructions replaced."""
    edited = [*plans.plans]
    edited[number] = replace(edited[number], instrs=tuple(instrs))
    return replace(plans, plans=tuple(edited))


def pick(
    rng: random.Random, plans: Plans, wanted: Callable[[Instr], bool] = lambda ins: True
) -> tuple[int, int, Instr] | None:
    """Pick an instruction of some kind: its program, its place, itself."""
    found = [(n, i, ins) for n, plan in enumerate(plans) for i, ins in enumerate(plan.instrs) if wanted(ins)]
    return rng.choice(found) if found else None


def change(
    rng: random.Random,
    plans: Plans,
    wanted: Callable[[Instr], bool],
    new: Callable[[Plan, Instr], Instr | None],
) -> Plans | None:
    """Change one instruction of some kind."""
    picked = pick(rng, plans, wanted)
    if picked is None:
        return None
    number, place, ins = picked
    edited = new(plans.plans[number], ins)
    if edited is None or edited == ins:
        return None
    instrs = [*plans.plans[number].instrs]
    instrs[place] = edited
    return with_instrs(plans, number, instrs)


def other(rng: random.Random, choices: Sequence[Choice], than: object) -> Choice | None:
    """Choose another of several values."""
    left = [choice for choice in dict.fromkeys(choices) if choice != than]
    return rng.choice(left) if left else None


def drop(rng: random.Random, plans: Plans) -> Plans | None:
    return drop_of(rng, plans, lambda ins: True)


def drop_of(rng: random.Random, plans: Plans, wanted: Callable[[Instr], bool]) -> Plans | None:
    picked = pick(rng, plans, wanted)
    if picked is None:
        return None
    number, place, _ = picked
    instrs = plans.plans[number].instrs
    return with_instrs(plans, number, instrs[:place] + instrs[place + 1 :])


def drop_everywhere(rng: random.Random, plans: Plans) -> Plans | None:
    """A node that communicates, or loads, is left out of all programs."""
    picked = pick(rng, plans, lambda ins: ins.comm is not None or ins.op in ("load", "add", "norm", "update"))
    if picked is None:
        return None
    node = picked[2].node
    edited = [replace(p, instrs=tuple(i for i in p.instrs if i.node != node)) for p in plans]
    return replace(plans, plans=tuple(edited))


def twice_everywhere(rng: random.Random, plans: Plans) -> Plans | None:
    """A collective is done twice on all its members."""
    picked = pick(rng, plans, lambda ins: ins.op in (*REDUCTIONS, "gather", "total", "broadcast", "exchange"))
    if picked is None:
        return None
    node = picked[2].node
    edited = [
        replace(p, instrs=tuple(x for i in p.instrs for x in ((i, i) if i.node == node else (i,))))
        for p in plans
    ]
    return replace(plans, plans=tuple(edited))


def swap_everywhere(rng: random.Random, plans: Plans) -> Plans | None:
    """Two transfers of one communicator change places, on both sides."""
    picked = pick(rng, plans, lambda ins: ins.op == "send")
    if picked is None:
        return None
    first = picked[2]
    nodes = [i.node for p in plans for i in p.instrs if i.comm == first.comm and i.op == "send"]
    second = other(rng, nodes, first.node)
    if second is None:
        return None
    edited = []
    for plan in plans:
        instrs = [*plan.instrs]
        for op in ("send", "recv"):
            places = {i.node: n for n, i in enumerate(instrs) if i.op == op and i.comm == first.comm}
            if first.node in places and second in places:
                a, b = places[first.node], places[second]
                instrs[a], instrs[b] = instrs[b], instrs[a]
        edited.append(replace(plan, instrs=tuple(instrs)))
    return replace(plans, plans=tuple(edited))


def duplicate_accumulation(rng: random.Random, plans: Plans) -> Plans | None:
    picked = pick(
        rng, plans, lambda ins: bool(ins.adds_to) or (ins.op == "accumulate" and len(ins.reads) > 1)
    )
    if picked is None:
        return None
    number, place, ins = picked
    instrs = [*plans.plans[number].instrs]
    instrs.insert(place, replace(ins, frees=(), waits=ins.waits, signals=None))
    return with_instrs(plans, number, instrs)


def duplicate(rng: random.Random, plans: Plans) -> Plans | None:
    picked = pick(rng, plans)
    assert picked is not None
    number, place, ins = picked
    instrs = [*plans.plans[number].instrs]
    instrs.insert(place, replace(ins, frees=(), signals=None))
    return with_instrs(plans, number, instrs)


def begin_again(rng: random.Random, plans: Plans) -> Plans | None:
    """A sum is begun instead of added to."""

    def new(plan: Plan, ins: Instr) -> Instr:
        added = ins.adds_to or ins.reads[1:]
        return replace(ins, reads=tuple(slot for slot in ins.reads if slot not in added))

    def adds(ins: Instr) -> bool:
        return bool(ins.adds_to) or (ins.op in ("accumulate", "reduce_scatter") and len(ins.reads) > 1)

    return change(rng, plans, adds, new)


def exchange_reads(rng: random.Random, plans: Plans) -> Plans | None:
    """Two reads of one instruction change places."""

    def new(plan: Plan, ins: Instr) -> Instr:
        a, b = rng.sample(range(len(ins.reads)), 2)
        reads = [*ins.reads]
        reads[a], reads[b] = reads[b], reads[a]
        return replace(ins, reads=tuple(reads))

    return change(rng, plans, lambda ins: len(ins.reads) > 1, new)


def exchange_writes(rng: random.Random, plans: Plans) -> Plans | None:
    """Two writes of one instruction change places."""

    def new(plan: Plan, ins: Instr) -> Instr:
        a, b = rng.sample(range(len(ins.writes)), 2)
        writes = [*ins.writes]
        writes[a], writes[b] = writes[b], writes[a]
        return replace(ins, writes=tuple(writes))

    return change(rng, plans, lambda ins: len(ins.writes) > 1, new)


def exchange_between(field: str) -> Edit:
    """Two instructions of one program and one op exchange a read, or a write."""

    def edit(rng: random.Random, plans: Plans) -> Plans | None:
        picked = pick(rng, plans, lambda ins: bool(getattr(ins, field)))
        if picked is None:
            return None
        number, place, ins = picked
        instrs = [*plans.plans[number].instrs]
        alike = [
            i
            for i, x in enumerate(instrs)
            if x.op == ins.op and len(getattr(x, field)) == len(getattr(ins, field))
        ]
        there = rng.choice(alike)
        at = rng.randrange(len(getattr(ins, field)))
        a, b = [*getattr(ins, field)], [*getattr(instrs[there], field)]
        if a[at] == b[at]:
            return None
        a[at], b[at] = b[at], a[at]
        instrs[place] = replace(ins, **{field: tuple(a)})  # type: ignore[arg-type]
        instrs[there] = replace(instrs[there], **{field: tuple(b)})  # type: ignore[arg-type]
        return with_instrs(plans, number, instrs)

    return edit


def redirect(field: str, near: bool) -> Edit:
    """A read or a write goes to another slot: of another microbatch, or any other."""

    def edit(rng: random.Random, plans: Plans) -> Plans | None:
        def new(plan: Plan, ins: Instr) -> Instr | None:
            slots = [*getattr(ins, field)]
            at = rng.randrange(len(slots))
            known = [*plan.slots, *plan.residents]
            if near:
                known = [slot for slot in known if slot.base == slots[at].base]
            instead = other(rng, known, slots[at])
            if instead is None:
                return None
            slots[at] = instead
            return replace(ins, **{field: tuple(slots)})  # type: ignore[arg-type]

        return change(rng, plans, lambda ins: bool(getattr(ins, field)), new)

    return edit


def drop_wait(rng: random.Random, plans: Plans) -> Plans | None:
    def new(plan: Plan, ins: Instr) -> Instr:
        gone = rng.choice(ins.waits)
        return replace(ins, waits=tuple(event for event in ins.waits if event != gone))

    return change(rng, plans, lambda ins: bool(ins.waits), new)


def drop_free(rng: random.Random, plans: Plans) -> Plans | None:
    def new(plan: Plan, ins: Instr) -> Instr:
        gone = rng.choice(ins.frees)
        return replace(ins, frees=tuple(slot for slot in ins.frees if slot != gone))

    return change(rng, plans, lambda ins: bool(ins.frees), new)


def free_more(rng: random.Random, plans: Plans) -> Plans | None:
    """A slot is freed a second time, or too early."""
    return change(
        rng,
        plans,
        lambda ins: True,
        lambda plan, ins: replace(ins, frees=(*ins.frees, rng.choice([*plan.slots]))),
    )


def swap_neighbours(rng: random.Random, plans: Plans) -> Plans | None:
    """Two instructions that follow one another on a stream change places."""
    picked = pick(rng, plans)
    assert picked is not None
    number, place, ins = picked
    instrs = [*plans.plans[number].instrs]
    later = next((i for i in range(place + 1, len(instrs)) if instrs[i].stream == ins.stream), None)
    if later is None:
        return None
    instrs[place], instrs[later] = instrs[later], instrs[place]
    return with_instrs(plans, number, instrs)


def move(rng: random.Random, plans: Plans) -> Plans | None:
    """An instruction is issued earlier or later."""
    picked = pick(rng, plans)
    assert picked is not None
    number, place, ins = picked
    instrs = [*plans.plans[number].instrs]
    del instrs[place]
    instrs.insert(max(0, place + rng.choice((-6, -3, -2, -1, 1, 2, 3, 6))), ins)
    return with_instrs(plans, number, instrs)


def update_first(rng: random.Random, plans: Plans) -> Plans | None:
    """An update is issued before the reductions of its gradients."""
    picked = pick(rng, plans, lambda ins: ins.op == "update")
    if picked is None:
        return None
    number, place, ins = picked
    instrs = [*plans.plans[number].instrs]
    del instrs[place]
    instrs.insert(max(0, place - rng.randint(2, 8)), ins)
    return with_instrs(plans, number, instrs)


def change_rows(rng: random.Random, plans: Plans) -> Plans | None:
    """A send, or a copy, takes other rows."""
    cuts = ((0, 1, 2), (1, 2, 2), (0, 1, 3), (1, 3, 3), (0, 2, 3), (1, 2, 3))
    rows = (None, *(Rows(start=start, stop=stop, of=of) for start, stop, of in cuts))
    return change(
        rng,
        plans,
        lambda ins: ins.op in ("send", "copy"),
        lambda plan, ins: replace(ins, payload=other(rng, rows, ins.payload)),
    )


def change_comm(rng: random.Random, plans: Plans) -> Plans | None:
    """A communication goes over another communicator, on one program or on all."""
    picked = pick(rng, plans, lambda ins: ins.comm is not None)
    if picked is None:
        return None
    number, _, ins = picked
    comm = other(rng, [*plans.comms], ins.comm or "")
    if comm is None:
        return None
    everywhere = rng.random() < 0.5
    edited = [
        replace(
            plan,
            instrs=tuple(
                replace(x, comm=comm) if x.node == ins.node and (everywhere or n == number) and x.comm else x
                for x in plan.instrs
            ),
        )
        for n, plan in enumerate(plans)
    ]
    return replace(plans, plans=tuple(edited))


def change_comm_groups(rng: random.Random, plans: Plans) -> Plans | None:
    """A communicator joins its devices in another order."""
    comm = rng.choice([*plans.comms.values()]) if plans.comms else None
    if comm is None:
        return None
    groups = [*comm.groups]
    if comm.kind == "pairs":
        receivers = [pair[1] for pair in groups]
        groups = [(pair[0], r) for pair, r in zip(groups, receivers[1:] + receivers[:1], strict=True)]
    else:
        groups = [tuple(reversed(group)) for group in groups]
    return replace(plans, comms={**plans.comms, comm.name: replace(comm, groups=tuple(groups))})


def swap_sends(rng: random.Random, plans: Plans) -> Plans | None:
    """Two sends of one program send each other's values."""
    picked = pick(rng, plans, lambda ins: ins.op == "send")
    if picked is None:
        return None
    number, place, ins = picked
    instrs = [*plans.plans[number].instrs]
    there = rng.choice([i for i, x in enumerate(instrs) if x.op == "send"])
    if instrs[there].reads == ins.reads:
        return None
    instrs[place] = replace(ins, reads=instrs[there].reads)
    instrs[there] = replace(instrs[there], reads=ins.reads)
    return with_instrs(plans, number, instrs)


def change_bucket(rng: random.Random, plans: Plans) -> Plans | None:
    """A reduction or a gather names another bucket."""
    names = [*plans.buckets]
    return change(
        rng,
        plans,
        lambda ins: ins.op in (*REDUCTIONS, "gather"),
        lambda plan, ins: replace(
            ins, payload=OfBucket(bucket=other(rng, names, ins.bucket) or "", run=ins.run)
        ),
    )


def change_compute(rng: random.Random, plans: Plans) -> Plans | None:
    """A compute instruction runs another phase, or another chunk."""
    known = [
        (ins.computes.phase, ins.computes.chunk)
        for plan in plans
        for ins in plan.instrs
        if ins.op == "compute"
    ]

    def new(plan: Plan, ins: Instr) -> Instr | None:
        found = other(rng, known, (ins.computes.phase, ins.computes.chunk))
        if found is None:
            return None
        phase, chunk = found
        return replace(ins, payload=replace(ins.computes, phase=phase, chunk=chunk))

    return change(rng, plans, lambda ins: ins.op == "compute", new)


def change_microbatch(rng: random.Random, plans: Plans) -> Plans | None:
    """A load, or a compute instruction, is of another microbatch."""

    def new(plan: Plan, ins: Instr) -> Instr:
        axis, index = ins.part[0]
        part = ((axis, (index + 1) % plans.axes[axis]), *ins.part[1:])
        about = ins.computes if ins.op == "compute" else ins.loads
        return replace(ins, payload=replace(about, part=part))

    return change(rng, plans, lambda ins: bool(ins.part) and ins.op in ("load", "compute"), new)


def change_load(rng: random.Random, plans: Plans) -> Plans | None:
    """A load takes another field, or the slices of other devices."""
    fields = [ins.loads.name for plan in plans for ins in plan.instrs if ins.op == "load"]

    def new(plan: Plan, ins: Instr) -> Instr:
        if rng.random() < 0.5:
            name = other(rng, fields, ins.loads.name) or ins.loads.name
            return replace(ins, payload=replace(ins.loads, name=name))
        everyone = tuple(sorted(device for plan in plans for device in plan.devices))
        devices = rng.choice((everyone, ins.loads.devices[::-1]))
        return replace(ins, payload=replace(ins.loads, devices=devices))

    return change(rng, plans, lambda ins: ins.op == "load", new)


def change_exchange(rng: random.Random, plans: Plans) -> Plans | None:
    """Rows go out instead of back, or are those of another region."""
    chunks = [
        ins.payload.run.chunk
        for plan in plans
        for ins in plan.instrs
        if ins.op == "exchange" and isinstance(ins.payload, Routing)
    ]
    known = [(chunk, outward) for chunk in chunks for outward in (True, False)]

    def new(plan: Plan, ins: Instr) -> Instr | None:
        assert isinstance(ins.payload, Routing)
        found = other(rng, known, (ins.payload.run.chunk, ins.payload.outward))
        if found is None:
            return None
        chunk, outward = found
        return replace(ins, payload=Routing(run=replace(ins.payload.run, chunk=chunk), outward=outward))

    return change(rng, plans, lambda ins: ins.op == "exchange", new)


def forget_total(rng: random.Random, plans: Plans) -> Plans | None:
    """An update, a norm or a tied sum leaves out one of its reads."""

    def new(plan: Plan, ins: Instr) -> Instr:
        gone = rng.randrange(len(ins.reads))
        return replace(ins, reads=ins.reads[:gone] + ins.reads[gone + 1 :])

    return change(rng, plans, lambda ins: ins.op in ("update", "norm", "all_reduce") and bool(ins.reads), new)


def change_table(rng: random.Random, plans: Plans) -> Plans | None:
    """Something that plans say outside their instructions changes."""
    name = rng.choice([*plans.buckets])
    bucket = plans.buckets[name]
    changes: list[Plans] = [
        replace(plans, seed=plans.seed * 2),
        replace(plans, weighted=not plans.weighted),
        replace(plans, cells=plans.cells * 2),
        *(
            replace(plans, buckets={**plans.buckets, name: replace(bucket, **{field: value})})  # type: ignore[arg-type]
            for field, value in (
                ("copies", bucket.copies + 1),
                ("zero", (bucket.zero + 1) % 4),
                ("groups", tuple(tuple(reversed(group)) for group in bucket.groups)),
                ("chunks", bucket.chunks[1:]),
            )
        ),
    ]
    return rng.choice(changes)


def change_stream(rng: random.Random, plans: Plans) -> Plans | None:
    """An instruction runs on another stream."""
    streams = [ins.stream for plan in plans for ins in plan.instrs]
    return change(
        rng,
        plans,
        lambda ins: True,
        lambda plan, ins: replace(ins, stream=other(rng, streams, ins.stream) or ins.stream),
    )


KINDS: Mapping[str, Edit] = {
    "drop an instruction": drop,
    "drop a gather": lambda rng, plans: drop_of(rng, plans, lambda ins: ins.op == "gather"),
    "drop a reduction": lambda rng, plans: drop_of(rng, plans, lambda ins: ins.op in REDUCTIONS),
    "drop an accumulation": lambda rng, plans: drop_of(rng, plans, lambda ins: ins.op == "accumulate"),
    "drop a load": lambda rng, plans: drop_of(rng, plans, lambda ins: ins.op == "load"),
    "drop a node everywhere": drop_everywhere,
    "do a collective twice": twice_everywhere,
    "swap two transfers on both sides": swap_everywhere,
    "duplicate an accumulation": duplicate_accumulation,
    "duplicate an instruction": duplicate,
    "begin a sum again": begin_again,
    "exchange two reads": exchange_reads,
    "exchange two writes": exchange_writes,
    "exchange reads between instructions": exchange_between("reads"),
    "exchange writes between instructions": exchange_between("writes"),
    "read another microbatch": redirect("reads", near=True),
    "read another slot": redirect("reads", near=False),
    "write another microbatch": redirect("writes", near=True),
    "write another slot": redirect("writes", near=False),
    "drop a wait": drop_wait,
    "drop a free": drop_free,
    "free once more": free_more,
    "swap neighbours on a stream": swap_neighbours,
    "move an instruction": move,
    "update first": update_first,
    "send other rows": change_rows,
    "use another communicator": change_comm,
    "reorder a communicator": change_comm_groups,
    "swap two sends": swap_sends,
    "name another bucket": change_bucket,
    "run another phase or chunk": change_compute,
    "take another microbatch": change_microbatch,
    "load something else": change_load,
    "exchange other rows": change_exchange,
    "forget a read": forget_total,
    "change a table": change_table,
    "change a stream": change_stream,
}
ATTEMPTS = 20  # before a kind of edit is taken to find nothing in some plans
SYNCHRONISATION = ("drop a wait", "drop a free", "free once more")  # what `mended` would undo


def mended(plans: Plans) -> Plans:
    """Return plans with fresh events and frees, so that an edit is hidden from the proof of order."""
    edited = []
    for plan in plans:
        edited.append(replace(plan, instrs=synchronised(plan.instrs, {}, plan.slots)))
    return replace(plans, plans=tuple(edited))


def mutant(rng: random.Random, plans: Plans, kind: str) -> Plans | None:
    """Return plans with one random edit of a kind; half of them mended afterwards."""
    for _ in range(ATTEMPTS):
        edited = KINDS[kind](rng, plans)
        if edited is not None and edited != plans:
            return mended(edited) if kind not in SYNCHRONISATION and rng.random() < 0.7 else edited
    return None
