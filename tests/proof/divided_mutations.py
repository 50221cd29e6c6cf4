"""Random edits of what only divided plans have: collectives inside regions, places, slices, lanes, groups."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, get_args

from piper.ir.devices import Devices
from piper.ir.ids import SlotId
from piper.ir.sharding import Collective, CollectiveOp, Shard, Sharding
from piper.plan.bucket import Bucket
from piper.plan.instr import Instr
from piper.plan.ops import Collecting
from piper.plan.plan import Plans
from piper.plan.updates import Piece
from tests.proof.mutations import Edit, mended, pick, with_instrs

OPS: tuple[CollectiveOp, ...] = get_args(CollectiveOp)
ATTEMPTS = 20
Choice = TypeVar("Choice")


def another(rng: random.Random, choices: Sequence[Choice], than: Choice) -> Choice:
    """Choose another of several values, or the same where there is no other."""
    return rng.choice([choice for choice in choices if choice != than] or [than])


def in_groups(ins: Instr) -> bool:
    return ins.op in ("collect", "slice")


def everywhere(plans: Plans, node: str, new: Callable[[Instr], Instr | None]) -> Plans:
    """Change the instructions of a node on all programs, or leave them out."""
    edited = []
    for plan in plans:
        instrs = [new(ins) if ins.node == node and in_groups(ins) else ins for ins in plan.instrs]
        edited.append(replace(plan, instrs=tuple(ins for ins in instrs if ins is not None)))
    return replace(plans, plans=tuple(edited))


def changed_shard(rng: random.Random, shard: Shard | None) -> Shard | None:
    if shard is None:
        return rng.choice((None, Shard(dim=1)))
    return rng.choice(
        (
            replace(shard, dim=(shard.dim + 1) % 3),
            replace(shard, zigzag=not shard.zigzag),
            replace(shard, blocks=3 - shard.blocks),
        )
    )


def change_how(rng: random.Random, plans: Plans) -> Plans | None:
    """A collective does something else, on one program or on all."""
    picked = pick(rng, plans, in_groups)
    if picked is None:
        return None
    number, place, ins = picked
    how = ins.collects.how
    new: Collective = rng.choice(
        (
            replace(how, op=another(rng, OPS, how.op)),
            replace(how, joined=changed_shard(rng, how.joined)),
            replace(how, cut=changed_shard(rng, how.cut)),
            replace(how, degree=how.degree * 2),
            replace(how, axis={"TP": "CP", "CP": "TP"}[how.axis]),
            how.adjoint,
        )
    )
    if rng.random() < 0.7:
        return everywhere(plans, ins.node, lambda x: replace(x, payload=replace(x.collects, how=new)))
    instrs = [*plans.plans[number].instrs]
    instrs[place] = replace(ins, payload=replace(ins.collects, how=new))
    return with_instrs(plans, number, instrs)


def change_run(rng: random.Random, plans: Plans) -> Plans | None:
    """A collective is that of another chunk, phase or microbatch."""
    picked = pick(rng, plans, in_groups)
    if picked is None:
        return None
    ins = picked[2]
    payloads = [x.collects for plan in plans for x in plan.instrs if in_groups(x)]
    new: Collecting = another(rng, payloads, ins.collects)
    how = new.how if rng.random() < 0.5 else ins.collects.how
    return everywhere(
        plans, ins.node, lambda x: replace(x, payload=replace(x.collects, run=new.run, how=how))
    )


def bypass(rng: random.Random, plans: Plans) -> Plans | None:
    """A collective is left out: who reads what it makes reads what it takes instead."""
    picked = pick(rng, plans, in_groups)
    if picked is None:
        return None
    node, given, made = picked[2].node, picked[2].reads[0], picked[2].writes[0]
    edited = []
    for plan in everywhere(plans, node, lambda _: None):
        instrs = [
            replace(ins, reads=tuple(given if slot == made else slot for slot in ins.reads))
            for ins in plan.instrs
        ]
        edited.append(replace(plan, instrs=tuple(instrs)))
    return replace(plans, plans=tuple(edited))


def exchange_slots(field: str) -> Edit:
    """Two collectives of a program exchange what they read, or what they write, on all programs."""

    def edit(rng: random.Random, plans: Plans) -> Plans | None:
        picked = pick(rng, plans, in_groups)
        if picked is None:
            return None
        number, _, first = picked
        second = rng.choice([ins for ins in plans.plans[number].instrs if in_groups(ins)])
        changes = {first.node: getattr(second, field), second.node: getattr(first, field)}
        for node, slots in changes.items():
            plans = everywhere(plans, node, lambda x, slots=slots: replace(x, **{field: slots}))  # type: ignore[misc]
        return plans

    return edit


def read_input(rng: random.Random, plans: Plans) -> Plans | None:
    """One reader of what a collective makes reads what it takes."""
    picked = pick(rng, plans, in_groups)
    if picked is None:
        return None
    number, _, ins = picked
    instrs = [*plans.plans[number].instrs]
    places = [i for i, x in enumerate(instrs) if ins.writes[0] in x.reads]
    if not places:
        return None
    place = rng.choice(places)
    reads = tuple(ins.reads[0] if slot == ins.writes[0] else slot for slot in instrs[place].reads)
    instrs[place] = replace(instrs[place], reads=reads)
    return with_instrs(plans, number, instrs)


def change_comm(rng: random.Random, plans: Plans) -> Plans | None:
    """A collective goes over another communicator of groups."""
    picked = pick(rng, plans, lambda ins: ins.op == "collect")
    if picked is None:
        return None
    names = [comm.name for comm in plans.comms.values() if comm.kind == "groups"]
    comm = another(rng, names, picked[2].comm or "")
    return everywhere(plans, picked[2].node, lambda x: replace(x, comm=comm))


def regrouped(rng: random.Random, groups: tuple[Devices, ...]) -> tuple[Devices, ...]:
    """Return the same devices in other groups, or in another order."""
    flat = [device for group in groups for device in group]
    size = len(groups[0])
    if len(groups) > 1 and rng.random() < 0.6:
        return tuple(tuple(flat[i :: len(groups)]) for i in range(len(groups)))
    if len(groups) > 1 and rng.random() < 0.3:
        return (tuple(sorted(flat)),)
    return tuple(tuple(reversed(flat[i : i + size])) for i in range(0, len(flat), size))


def regroup(rng: random.Random, plans: Plans) -> Plans | None:
    """A communicator joins other devices."""
    comms = [comm for comm in plans.comms.values() if comm.kind == "groups"]
    comm = rng.choice(comms)
    return replace(plans, comms={**plans.comms, comm.name: replace(comm, groups=regrouped(rng, comm.groups))})


def cross_lanes(rng: random.Random, plans: Plans) -> Plans | None:
    """A transfer between stages ends at other devices."""
    comms = [comm for comm in plans.comms.values() if comm.kind == "pairs"]
    if not comms:
        return None
    comm = rng.choice(comms)
    receivers = [pair[1] for pair in comm.groups]
    rng.shuffle(receivers)
    pairs = tuple((pair[0], receiver) for pair, receiver in zip(comm.groups, receivers, strict=True))
    return replace(plans, comms={**plans.comms, comm.name: replace(comm, groups=pairs)})


def renamed(plans: Plans, old: SlotId, new: SlotId) -> Plans:
    """Return plans with a resident under another id."""
    edited = []
    for plan in plans:
        residents = {new if slot == old else slot: held for slot, held in plan.residents.items()}
        instrs = tuple(
            replace(ins, reads=tuple(new if slot == old else slot for slot in ins.reads))
            for ins in plan.instrs
        )
        edited.append(replace(plan, residents=residents, instrs=instrs))
    return replace(plans, plans=tuple(edited))


def change_place(rng: random.Random, plans: Plans) -> Plans | None:
    """Devices take another place in their groups."""
    slots = sorted({slot for plan in plans for slot in plan.residents if slot.kind == "place"})
    if not slots:
        return None
    slot = rng.choice(slots)
    home, group = slot.devices
    devices = rng.choice(
        (
            (home[::-1], group[::-1]),
            (home, home[: 2 * len(group) : 2]),
            (home, home[: len(group) * 2]),
            (home, home[: len(group)]),
        )
    )
    return renamed(plans, slot, SlotId("place", slot.owner, devices=devices))


def changed_sharding(rng: random.Random, held: Sharding) -> Sharding:
    return rng.choice(
        (
            replace(held, dim=1 - held.dim if held.dim < 2 else 1),
            replace(held, stride=3 - held.stride if held.stride < 3 else 1),
            replace(held, zigzag=not held.zigzag),
            replace(held, blocks=2),
        )
    )


def change_load(rng: random.Random, plans: Plans) -> Plans | None:
    """A load takes other slices of a field, or the samples of other devices, on all programs that do it."""
    picked = pick(rng, plans, lambda ins: ins.op == "load")
    if picked is None:
        return None
    field = picked[2].loads
    changes = [
        replace(field, degree=1 if field.degree > 1 else 2),
        replace(field, degree=field.degree * 2),
        replace(field, devices=field.devices[::-1]),
        replace(field, slices=()),
        replace(field, slices=(*field.slices, Sharding(dim=1, degree=2))),
        replace(field, slices=tuple(changed_sharding(rng, held) for held in field.slices)),
    ]
    new = rng.choice(changes)
    edited = [
        replace(
            plan,
            instrs=tuple(
                replace(ins, payload=new) if ins.op == "load" and ins.loads == field else ins
                for ins in plan.instrs
            ),
        )
        for plan in plans
    ]
    return replace(plans, plans=tuple(edited))


def change_slice(rng: random.Random, plans: Plans) -> Plans | None:
    """A device takes another part of a value than its own."""
    picked = pick(rng, plans, lambda ins: ins.op == "slice")
    if picked is None:
        return None
    taken = picked[2].collects
    new = rng.choice(
        (
            replace(taken, devices=taken.devices[::-1]),
            replace(taken, stride=taken.stride * 2),
            replace(taken, devices=taken.devices[1:] + taken.devices[:1]),
        )
    )
    return everywhere(plans, picked[2].node, lambda x: replace(x, payload=new))


def change_bucket(rng: random.Random, plans: Plans) -> Plans | None:
    """A bucket is divided, reduced or counted in another way; its communicators follow its groups."""
    bucket = rng.choice([*plans.buckets.values()])
    pieces: list[Piece] = [*bucket.pieces]
    at = rng.randrange(len(pieces))
    shardings = pieces[at].shardings
    cut = tuple(changed_sharding(rng, held) for held in shardings)
    pieces[at] = replace(pieces[at], shardings=rng.choice((cut, shardings[1:], (*shardings, *shardings[:1]))))
    groups = regrouped(rng, bucket.groups)
    split = tuple((device,) for group in bucket.groups for device in group)
    new: Bucket = rng.choice(
        (
            replace(bucket, pieces=tuple(pieces)),
            replace(bucket, copies=bucket.copies * 2),
            replace(bucket, copies=max(1, bucket.copies // 2)),
            replace(bucket, groups=groups),
            replace(bucket, groups=split),
        )
    )
    over = {
        ins.comm
        for plan in plans
        for ins in plan.instrs
        if ins.op in ("gather", "all_reduce", "reduce_scatter") and ins.bucket == bucket.name
    }
    comms = {
        name: replace(comm, groups=new.groups) if name in over and comm.groups == bucket.groups else comm
        for name, comm in plans.comms.items()
    }
    return replace(plans, buckets={**plans.buckets, bucket.name: new}, comms=comms)


def change_copies(rng: random.Random, plans: Plans) -> Plans | None:
    """The loss of a group is counted once for every device, or less than once."""
    return replace(plans, copies=rng.choice((1, 2, 4, 8)))


def sum_more(rng: random.Random, plans: Plans) -> Plans | None:
    """A gradient is summed over groups once more, over any communicator."""
    picked = pick(rng, plans, lambda ins: ins.op == "all_reduce" and ins.run is not None)
    if picked is None:
        return None
    comms = [comm.name for comm in plans.comms.values() if comm.kind == "groups"]
    comm, node = rng.choice(comms), picked[2].node
    edited = []
    for plan in plans:
        instrs: list[Instr] = []
        for ins in plan.instrs:
            instrs.append(ins)
            if ins.node == node and ins.op == "all_reduce":
                instrs.append(replace(ins, node=f"{node} again", comm=comm, frees=(), waits=(), signals=None))
        edited.append(replace(plan, instrs=tuple(instrs)))
    return replace(plans, plans=tuple(edited))


def sum_less(rng: random.Random, plans: Plans) -> Plans | None:
    """A gradient is not summed over its devices."""
    picked = pick(rng, plans, lambda ins: ins.op == "all_reduce")
    if picked is None:
        return None
    node = picked[2].node
    edited = [replace(p, instrs=tuple(i for i in p.instrs if i.node != node)) for p in plans]
    return replace(plans, plans=tuple(edited))


KINDS: Mapping[str, Edit] = {
    "do something else": change_how,
    "be another collective": change_run,
    "leave out a collective": bypass,
    "exchange what collectives read": exchange_slots("reads"),
    "exchange what collectives write": exchange_slots("writes"),
    "read what a collective takes": read_input,
    "use another communicator": change_comm,
    "join other devices": regroup,
    "cross lanes": cross_lanes,
    "take another place": change_place,
    "load another slice": change_load,
    "take another part": change_slice,
    "divide a bucket otherwise": change_bucket,
    "count losses otherwise": change_copies,
    "sum once more": sum_more,
    "do not sum": sum_less,
}


def mutant(rng: random.Random, plans: Plans, kind: str) -> Plans | None:
    """Return plans with one random edit of a kind, with fresh events and frees."""
    for _ in range(ATTEMPTS):
        edited = KINDS[kind](rng, plans)
        if edited is not None and edited != plans:
            return mended(edited)
    return None
