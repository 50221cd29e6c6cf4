"""Makes full values of the parts that devices hold."""

from collections.abc import Iterable, Mapping
from itertools import chain

from torch import Tensor

from piper.checkpoint.bucket_spans import spans
from piper.ir.sharding import flat_runs, whole_sizes
from piper.plan.bucket import Bucket
from piper.plan.plan import Plans
from piper.runtime.bucket_layout import runs_of_slice, runs_of_whole

Parts = Mapping[int, Mapping[str, Tensor]]  # what each device holds, by name


def holders(buckets: Iterable[Bucket]) -> dict[int, list[str]]:
    """Return which devices to ask for which buckets, so that their answers hold every element once."""
    asked: dict[int, list[str]] = {}
    for bucket in buckets:
        for device in chain(*bucket.update.distinct):
            asked.setdefault(device, []).append(bucket.name)
    return asked


def whole_parameters(buckets: Iterable[Bucket], owned: Parts) -> dict[str, Tensor]:
    """Return parameters in full, by name, from what devices own of buckets; of tied ones, the first."""
    whole: dict[str, Tensor] = {}
    for update in (bucket.update for bucket in buckets):
        new: dict[str, Tensor] = {}
        for device, flat in ((d, flats[update.name]) for d, flats in owned.items() if update.name in flats):
            for piece in update.pieces:
                if piece.name not in whole and piece.name not in new:
                    new[piece.name] = flat.new_empty(whole_sizes(piece.shape, piece.shardings))
            low, high = update.owned(device)
            for name, own_runs in spans(update, device, low, high).items():
                for runs in own_runs if name in new else ():
                    runs_of_whole(new[name], runs).copy_(runs_of_slice(flat, runs, low))
        whole |= new
    return whole


def whole_buffers(plans: Plans, held: Parts) -> dict[str, Tensor]:
    """Return buffers in full by name, from what each device holds of them; of copies, the first."""
    whole: dict[str, Tensor] = {}
    written: set[tuple[str, int]] = set()
    for device, values in held.items():
        slots = plans.of(device).buffers
        for name, value in values.items():
            slot, position = slots[name], slots[name].position(device)
            part = name, slot.sharding.index(position)
            if name not in whole:
                whole[name] = value.new_empty(whole_sizes(value.shape, slot.shardings))
            for runs in flat_runs(value.shape, slot.shardings, position) if part not in written else ():
                runs_of_whole(whole[name], runs).copy_(runs_of_slice(value.contiguous(), runs))
            written.add(part)
    return whole
