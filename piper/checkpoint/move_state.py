"""A worker's side of moves: it gives others what they need of its state, and takes what it needs of theirs.

See [Note: moves]. What the optimizer keeps is known only when it runs: of each parameter the device with its
first element says which tensors there are. Those with the shape of the trained tensor move as it does, and
all others, such as counts of steps, go to every device that trains a part of the parameter. Options of the
optimizer, which its step may change too, and the scheduler go to all devices: of a group of parameters from
the first device that trains some of it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from piper.checkpoint.json_state import Plain, decode, encode, flat_state, nested_state
from piper.checkpoint.load import set_options, with_own
from piper.checkpoint.metadata import Trainer
from piper.checkpoint.moves import BucketMove, MovedRuns, PieceMove, last_reads, moves_between, placed
from piper.checkpoint.save import one_trainer, trainer_of
from piper.plan.bucket import Bucket
from piper.runtime.accelerator import is_accelerator, module
from piper.runtime.bucket_layout import runs_of_slice, runs_of_whole
from piper.runtime.bucket_state import BucketState
from piper.runtime.comm.base import Group
from piper.runtime.device_state import DeviceState
from piper.runtime.optimizer_states import optimizers_in, plain_attributes, states_of
from piper.runtime.trainers import is_ours
from piper.runtime.worker import Worker

Kept = Mapping[str, Mapping[str, object]]  # by parameter and key: the type of a tensor that moves, or a value


def move_state(worker: Worker, number: int) -> None:
    """Let a worker hold its state as the program of a number does. All devices of the job do so at once."""
    then = worker.others[number] if number else worker
    before, after = worker.holder, then.env.state
    if before is after:
        return
    comm = next(ins.comm for ins in then.env.plan.instrs if ins.op == "total")
    group = None if comm is None else then.env.comms.group(comm)
    synchronize(worker)
    Movement(before, after, worker.setup.plans.devices, group).run()
    synchronize(worker)
    before.hold(False, before.own(beside=after))
    worker.holder = after
    if after is worker.env.state:
        worker.renew()


def synchronize(worker: Worker) -> None:
    """Wait until an accelerator has done what it was asked to."""
    if is_accelerator(worker.setup.device):
        module(worker.setup.device).synchronize()


@dataclass(slots=True)
class BucketExchange:
    """What one device gives to each other one, as bytes, and what it fills with what they give."""

    gives: dict[int, list[Tensor]] = field(default_factory=dict)
    gets: dict[int, list[Tensor]] = field(default_factory=dict)

    def add(
        self, me: int, transfers: Iterable[MovedRuns], source: "FlatPart | None", target: "FlatPart | None"
    ) -> None:
        """Let the elements of some transfers move from this device's part of a tensor, or to it."""
        for one in transfers:
            for runs in one.runs if me in (one.source, one.target) else ():
                leaves = enters = None
                if one.source == me:
                    assert source is not None, "the proof has looked"
                    leaves = runs_of_slice(source.flat, runs, source.begin)
                if one.target == me:
                    assert target is not None, "the proof has looked"
                    enters = runs_of_whole(target.flat, runs, target.begin)
                if leaves is not None and enters is not None:
                    enters.copy_(leaves)
                elif leaves is not None:
                    leaving = leaves.contiguous().view(-1).view(torch.uint8)
                    self.gives.setdefault(one.target, []).append(leaving)
                elif enters is not None:
                    self.gets.setdefault(one.source, []).append(enters)

    def swap(self, group: Group, devices: Sequence[int], where: torch.device) -> None:
        empty = torch.empty(0, dtype=torch.uint8, device=where)
        parts = [torch.cat([empty, *self.gives.pop(device, ())]) for device in devices]
        lengths = [sum(tensor.nbytes for tensor in self.gets.get(device, ())) for device in devices]
        for device, arrived in zip(devices, group.swap(parts, lengths), strict=True):
            for tensor in self.gets.get(device, ()):
                flat, arrived = arrived[: tensor.nbytes], arrived[tensor.nbytes :]
                tensor.copy_(flat.clone().view(tensor.dtype).view(tensor.shape))  # a clone is aligned


@dataclass(frozen=True, slots=True)
class FlatPart:
    """A device's part of a tensor, and where it begins in the bucket."""

    flat: Tensor
    begin: int


class Movement:
    """A move of one device's state from one layout to another."""

    def __init__(
        self, before: DeviceState, after: DeviceState, devices: Sequence[int], group: Group | None
    ) -> None:
        self.before, self.after, self.devices, self.group = before, after, devices, group
        self.me, self.where = before.device, before.setup.device
        self.leaving = {name: dict(segments) for name, segments in before.segments.items()}
        self.entering = {name: dict(segments) for name, segments in after.segments.items()}

    def run(self) -> None:
        """Move parameters and what the optimizer keeps for them, bucket by bucket."""
        everywhere = self.said_everywhere()
        kept: Kept = {
            name: {key: decode(one, self.where) for key, one in keys.items()}
            for said in everywhere
            for name, keys in said["kept"].items()
        }
        values = (item for keys in kept.values() for item in keys.items())
        like = {key for key, value in values if isinstance(value, torch.dtype)}
        moves = moves_between(self.before.setup.plans.buckets, self.after.setup.plans.buckets)
        leaving, entering = self.before.own(beside=self.after), self.after.own(beside=self.before)
        for move, done in zip(moves, last_reads(moves), strict=True):
            self.after.hold(True, entering & {move.bucket.name})
            self.move(move, kept, like)
            self.before.hold(False, leaving & {*done})
        before, after = self.before.optimizer, self.after.optimizer
        if before is not None and after is not None:
            trained = {tensor for segments in self.entering.values() for tensor in segments.values()}
            kept_before, kept_after = states_of(before), states_of(after)
            for tensor in trained & kept_before.keys():  # of buckets that both layouts have
                kept_after[tensor] = kept_before[tensor]
        if before is not None:
            states_of(before).clear()
        trainer = one_trainer(Trainer(**said["trainer"]) for said in everywhere)
        self.after.regroup(trainer.members)
        if after is not None and trainer.groups is not None:
            if not is_ours(after):  # what the parts that it is given decide stays
                began, other = self.before.began, self.after.began
                counted = next((one["attributes"] for one in everywhere if one["attributes"]), began)
                vars(after).update({k: v for k, v in counted.items() if began.get(k) == other.get(k)})
            groups = cast("list[dict[str, object]]", decode(trainer.groups, self.where))
            loads = type(after).load_state_dict is not Optimizer.load_state_dict
            if trainer.own is not None or (loads and optimizers_in(after) == [after]):
                own = cast("dict[str, Any]", decode(trainer.own, self.where) or {})
                state = {**after.state, **own.get("state", {})}
                after.load_state_dict(with_own(after.state_dict(), own, groups))
                after.state.update(state)  # as it is: loading casts it
            set_options(after, groups)
        if self.after.scheduler is not None and trainer.schedule is not None:
            self.after.scheduler.load_state_dict(cast("dict[str, object]", decode(trainer.schedule)))

    def move(self, move: BucketMove, kept: Kept, like: set[str]) -> None:
        exchange = BucketExchange()
        target = self.after.holdings.get(move.bucket.name)
        # Bits move where both layouts split what they train, else the numbers.
        split = move.bucket.splits and all(piece.before.splits for piece in move.pieces)
        entering = None if target is None else target.master if split else target.trained
        for piece in move.pieces:
            source = self.before.holdings.get(piece.before.name)
            exchange.add(self.me, piece.held, computing(source), computing(target))
            if move.bucket.has_master or move.bucket.splits:
                leaving = None if source is None else source.master if split else source.trained
                exchange.add(self.me, piece.owned, trained(source, leaving), trained(target, entering))
            if piece.owned:
                self.move_kept(move.bucket, piece, exchange, kept.get(piece.name, {}), like)
        if self.group is not None:
            exchange.swap(self.group, self.devices, self.where)
        if target is not None and entering is not None and move.bucket.splits and not split:
            target.take(entering)

    def move_kept(
        self,
        bucket: Bucket,
        piece: PieceMove,
        exchange: BucketExchange,
        kept: Mapping[str, object],
        like: set[str],
    ) -> None:
        """Move what the optimizer keeps for one parameter."""
        leaves = self.leaving.get(piece.before.name, {}).get(piece.name)
        enters = self.entering.get(bucket.name, {}).get(piece.name)
        for key, value in kept.items():
            if not isinstance(value, torch.dtype):
                if enters is not None:
                    self.keep(enters, key, alone(value, enters, key in like))
                continue
            source = target = None
            if leaves is not None:
                assert self.before.optimizer is not None
                given = cast(Tensor, flat_state(states_of(self.before.optimizer)[leaves])[key])
                source = FlatPart(given.reshape(-1), self.begin(piece.before, piece.name))
            if enters is not None:
                made = torch.empty(enters.shape, dtype=value, device=self.where)
                self.keep(enters, key, made)
                target = FlatPart(made.view(-1), self.begin(bucket, piece.name))
            exchange.add(self.me, piece.owned, source, target)
        if enters is not None and kept:
            assert self.after.optimizer is not None
            states = states_of(self.after.optimizer)
            states[enters] = nested_state(states[enters])

    def keep(self, tensor: Tensor, key: str, value: object) -> None:
        """Let the optimizer keep a value for what it trains."""
        assert self.after.optimizer is not None
        states_of(self.after.optimizer)[tensor][key] = value

    def begin(self, bucket: Bucket, name: str) -> int:
        """Return where this device's trained part of a parameter begins in a bucket."""
        (piece,) = (piece for piece in bucket.update.pieces if piece.name == name)
        return max(piece.offset, bucket.update.owned(self.me)[0])

    def said_everywhere(self) -> list[Mapping[str, Any]]:
        """Return what all devices say of their optimizers and schedulers, in the order of devices."""
        attributes = plain_attributes(self.before.optimizer) if self.before.trains else {}
        trainer = asdict(trainer_of(self.before))
        here = {"kept": self.kept_here(), "trainer": trainer, "attributes": attributes}
        text = json.dumps(here).encode()
        if self.group is None:
            return [json.loads(text)]
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.where)
        count = torch.tensor([len(text)], device=self.where)
        counts = self.group.swap([count] * self.group.size, [1] * self.group.size)
        given = self.group.swap([mine] * self.group.size, [int(one) for one in counts])
        return [json.loads(bytes(one.cpu().numpy())) for one in given]

    def kept_here(self) -> dict[str, dict[str, Plain]]:
        """Return what the optimizer keeps for parameters whose first elements this device trains."""
        kept: dict[str, dict[str, Plain]] = {}
        states = {} if self.before.optimizer is None else states_of(self.before.optimizer)
        for name, segments in self.leaving.items():
            bucket = self.before.holdings[name].bucket
            pieces = {piece.name: piece for piece in bucket.update.pieces}
            for parameter, tensor in segments.items():
                shares = placed(bucket, pieces[parameter], "owned").shares
                first = next(devices[0] for devices, runs in shares if min(run.there for run in runs) == 0)
                if first == self.me and tensor in states:
                    kept[parameter] = dict(said(parameter, tensor, flat_state(states[tensor])))
        return kept


def computing(holding: BucketState | None) -> FlatPart | None:
    """Return what a device computes with of a bucket. None: it has none of it."""
    return None if holding is None else FlatPart(holding.flat, holding.layout.held[0])


def trained(holding: BucketState | None, flat: Tensor | None) -> FlatPart | None:
    """Return a flat tensor as what a device trains of a bucket."""
    if holding is None or flat is None:
        return None
    return FlatPart(flat, holding.bucket.update.owned(holding.layout.device)[0])


def said(name: str, tensor: Tensor, state: Mapping[str, object]) -> Iterator[tuple[str, Plain]]:
    """Yield what an optimizer keeps for one tensor, by key: as a type where it moves with the elements."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == tensor.shape:
            yield key, encode(value.dtype, key)
        else:
            yield key, encode(value, f"optimizer.{name}.{key}")


def alone(value: object, tensor: Tensor, elementwise: bool) -> object:
    """Return a value that does not move; `elementwise`: it would, if its parameter were not one number."""
    if not isinstance(value, Tensor):
        return value
    copy = value.clone()
    return copy.view(tensor.shape) if elementwise and copy.numel() == tensor.numel() else copy
