"""Full values from the parts that devices hold."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from piper.ir.sharding import Sharding, flat_runs, whole_sizes
from piper.plan.bucket import Bucket
from piper.plan.plan import Plans, Slot
from piper.plan.updates import Piece
from piper.runtime.bucket_layout import runs_of_slice, runs_of_whole

T = TypeVar("T")
Owned = Callable[[str, int], Tensor]  # what a device owns of a bucket


def whole_parameters(buckets: Iterable[Bucket], owned: Owned) -> dict[str, Tensor]:
    """Return every parameter in full, by name; of the copies of a tied parameter, the first."""
    found: dict[str, Tensor] = {}
    for bucket in (each.update for each in buckets):
        flats: dict[int, Tensor] = {}  # what each group of devices holds, by its first
        for group in bucket.distinct:
            shards = [owned(bucket.name, device) for device in group]
            flats[group[0]] = torch.cat(shards) if bucket.zero else shards[0]
        for piece in bucket.pieces:
            if piece.name not in found:
                parts = {bucket.devices.index(device): cut(flat, piece) for device, flat in flats.items()}
                found[piece.name] = joined(piece.shape, piece.shardings, parts)
    return found


def joined(shape: Sequence[int], shardings: Sequence[Sharding], parts: Mapping[int, Tensor]) -> Tensor:
    """Return a tensor in full, from the slices of a shape at positions of its devices."""
    first = next(iter(parts.values()))
    if not shardings:
        return first
    full = first.new_empty(whole_sizes(shape, shardings)).view(-1)
    for position, part in parts.items():
        flat = part.reshape(-1)
        for runs in flat_runs(shape, shardings, position):
            runs_of_whole(full, runs).copy_(runs_of_slice(flat, runs))
    return full.view(whole_sizes(shape, shardings))


def whole_buffers(plans: Plans, held: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return buffers in full by name, from what each device holds of them; of copies, the first."""
    parts: dict[str, dict[int, tuple[int, Tensor]]] = {}
    slots: dict[str, Slot] = {}
    for device, values in held.items():
        here = plans.of(device).buffers
        for name, value in values.items():
            slot = slots.setdefault(name, here[name])
            position = slot.position(device)
            parts.setdefault(name, {}).setdefault(slot.sharding.index(position), (position, value))
    return {
        name: joined(next(iter(found.values()))[1].shape, slots[name].shardings, dict(found.values()))
        for name, found in parts.items()
    }


def cut(flat: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a flat bucket as a view in its shape."""
    return flat[piece.offset : piece.offset + piece.numel].view(piece.shape)


def whole_state(
    buckets: Iterable[Bucket], owned: Mapping[tuple[str, int], tuple[Tensor, tuple[str, ...]]]
) -> dict[str, Tensor]:
    """Return in full what optimizers keep for the parameters of some buckets, by parameter.

    owned: by bucket and device, with the names of the parameters that have it there. A parameter that has it
    on no device is left out.
    """
    names = {name for _, held in owned.values() for name in held}
    whole = whole_parameters(buckets, lambda bucket, device: owned[bucket, device][0])
    return {name: value for name, value in whole.items() if name in names}


def holders(buckets: Sequence[Bucket]) -> dict[int, list[str]]:
    """Return which devices to ask for which buckets, so that their answers hold every element once."""
    asked: dict[int, list[str]] = {}
    for bucket in buckets:
        for device in chain(*bucket.update.distinct):
            asked.setdefault(device, []).append(bucket.name)
    return asked


def by_bucket(answers: Mapping[int, Mapping[str, T]]) -> dict[tuple[str, int], T]:
    """Return what devices answer for each of their buckets, by bucket and device."""
    return {(name, device): value for device, values in answers.items() for name, value in values.items()}
