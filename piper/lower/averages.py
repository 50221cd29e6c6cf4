"""Groups that train apart: the plans of one group repeated for all, and averages of their parameters."""

from collections.abc import Iterator
from dataclasses import replace

from piper.errors import ScheduleError
from piper.ir.averaging import Averaging
from piper.ir.devices import show
from piper.ir.ids import SlotId, state_slot
from piper.ir.node import SlotNode
from piper.lower.state import LoweringState, SequenceEdit
from piper.plan.groups import ChangedDevices, fragments_of
from piper.plan.instr import Instr
from piper.plan.plan import Comm


def add_averages(state: LoweringState) -> LoweringState:
    """Average each bucket right after its update, before updated shards are gathered.

    update[@0]  gather (zero 1, 2)
    -->
    update[@0], average[PP=0/0 @0], gather

    With overlap, what travels since an earlier step goes on from the beginning: average, ..., update, merge.
    """
    averaging = state.graph.averaging
    if averaging is None or not state.settings.trains:
        return state
    by = max(n for n, directive in enumerate(state.graph.directives) if directive.verb == "average")
    check_composition(state, averaging, state.graph.directives[by].title)
    edit, residents = SequenceEdit(state), dict(state.residents)
    for place, node in enumerate(state.sequence):
        for slot in node.writes if node.op == "update" else ():
            if slot.kind != "param":
                continue
            bucket, of_optimizer = state.buckets[slot.owner], state_slot(slot.owner)
            before = state.residents[of_optimizer]
            trained = bucket.update.elements() * bucket.precision.sum_itemsize  # in the type of the optimizer
            nbytes = before.nbytes + averaging.outer_values * trained
            residents[of_optimizer] = replace(before, nbytes=nbytes)
            slots = (slot, of_optimizer) if averaging.outer_values else (slot,)
            travels = (of_optimizer,) if averaging.overlap else slots
            part, peers = -(-trained // max(1, averaging.overlap)), len(averaging.groups) - 1
            where = f"{slot.owner} @{show(node.devices)}"
            average = SlotNode(
                op="average", name=f"average[{where}]", devices=node.devices, reads=travels, writes=travels,
                stream=averaging.stream, origin=(by,), nbytes=2 * part * peers // len(averaging.groups),
            )  # fmt: skip
            if averaging.overlap:
                edit.before(0, average)
                merge = SlotNode(
                    op="merge", name=f"merge[{where}]", devices=node.devices, reads=slots, writes=slots,
                    origin=(by,),
                )  # fmt: skip
                edit.after(place, merge)
            else:
                edit.after(place, average)
    return replace(edit.apply(), residents=residents)


def check_composition(state: LoweringState, averaging: Averaging, by: str) -> None:
    """Refuse groups whose state is on the host, and groups that lie differently on their machines."""
    used = len(set(fragments_of(state.buckets, averaging).values()))
    if used < averaging.fragments:
        raise ScheduleError(
            f"there are no {averaging.fragments} fragments of the parameters",
            by=by,
            facts={"buckets": f"{used} that train"},
            hint="give fewer fragments, or more buckets: replicate(..., bucket_mb=...)",
        )
    offloaded = state.graph.chosen(lambda options: options.offload_state)
    if offloaded:
        raise ScheduleError(
            "groups do not average parameters whose optimizer state is on the host",
            by=by,
            facts={"offloaded": str(state.graph.directives[next(iter(offloaded.values())).by])},
            hint='leave offload(what="optimizer") out, or average',
        )
    for name, options in state.graph.options.items():
        policy = options.policy
        if policy.may_overflow:
            raise ScheduleError(
                "groups that train apart cannot run a step again",
                by=by,
                facts={name: f"capacity={policy.capacity:g}: rows may exceed their blocks"},
                hint=f"give capacity={policy.ways}, which takes any rows, or leave it out",
            )
    protection = state.graph.protection
    if protection is None or not protection.copies:
        return
    first, *others = ([protection.domain(d) for d in group] for group in averaging.groups)
    for group, domains in zip(averaging.groups[1:], others, strict=True):
        pairs = set(zip(first, domains, strict=True))
        if not len(pairs) == len(set(first)) == len(set(domains)):
            raise ScheduleError(
                f"groups lie differently on their {protection.apart}s",
                by=by,
                facts={show(averaging.groups[0]): f"{protection.apart}s {first}", show(group): str(domains)},
                hint="give each group machines of its own, or protect(copies=0)",
            )


def every_update_is_averaged(state: LoweringState) -> Iterator[str]:
    """Yield each parameter that is updated in a group and not averaged with the others."""
    if state.graph.averaging is None or not state.settings.trains:
        return
    seen: set[tuple[SlotId, int]] = set()
    for node in reversed(state.sequence):
        if node.op in ("average", "merge"):
            seen.update((slot, device) for slot in node.writes for device in node.devices)
        if node.op == "update":
            for slot in node.writes:
                if slot.kind == "param" and not all((slot, device) in seen for device in node.devices):
                    yield f"{node.name} updates {slot}, which is not averaged after it"


def repeat_in_groups(state: LoweringState) -> LoweringState:
    """Repeat the plans of the first group on the devices of all groups, and let averages join them.

    0: F, B, update, average, in groups 0 and 1
    -->
    0,1: F, B, update, average over 0,1
    """
    averaging, plans = state.graph.averaging, state.plans
    if averaging is None or plans is None:
        return state
    comm = Comm(
        name=f"{show(averaging.peers[0])} apart:{averaging.stream}", kind="groups", groups=averaging.peers
    )
    plans = ChangedDevices(averaging.everywhere, averaging.copies).all(
        plans, plans.cells * len(averaging.groups)
    )
    size = len(averaging.groups)

    def joined(ins: Instr) -> Instr:
        """Return an average over the communicator, with memory for what a device gives and gets."""
        if ins.op != "average":
            return ins
        return replace(ins, comm=comm.name, workspace=ins.nbytes * size // (size - 1))

    plans = replace(
        plans.with_instrs(joined),
        comms={**plans.comms, comm.name: comm} if state.settings.trains else plans.comms,
        averaging=averaging,
    )
    return replace(state, plans=plans)
