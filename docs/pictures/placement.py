"""Draws placement as SVG: the samples, parameters, gradients and optimizer state of each device."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from piper.plan.bucket import Bucket
from piper.plan.plan import Plans
from piper.view.svg import HUES, drawing, element, hatching, sheet, words

MARGIN, HEADER, COLUMN, GAP = 20.0, 86.0, 104.0, 12.0
BAR, BETWEEN, ROW_GAP, SAMPLES = 9.0, 3.0, 14.0, 20.0
LETTER_WIDTH = 6.6
MOST_DEVICES = 16
MOST_PARTS = 16
KINDS = (("parameters", 3), ("gradients", 2), ("optimizer", 1))  # and the ZeRO level from which it is sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPiece:
    """The piece a device holds: the `index`-th of `of` equal ones."""

    index: int
    of: int


def placement(plans: Plans, *, title: str) -> str:
    """Draw a column per device: its slice of the samples, and its piece of every region's state."""
    devices = sorted(device for plan in plans for device in plan.devices)[:MOST_DEVICES]
    buckets = list(plans.buckets.values())
    names = [region(bucket) for bucket in buckets]
    left = MARGIN + max([len(name) for name in names] + [13]) * LETTER_WIDTH + 84
    block = 3 * BAR + 2 * BETWEEN
    width = left + len(devices) * (COLUMN + GAP) + MARGIN - GAP
    height = HEADER + SAMPLES + ROW_GAP + len(buckets) * (block + ROW_GAP) + MARGIN
    body = [
        element("rect", width=width, height=height, class_="page"),
        words(title, MARGIN, 30, "title"),
        words("filled: what a device holds between uses", MARGIN, 48, "small faint"),
    ]
    for column, device in enumerate(devices):
        x = left + column * (COLUMN + GAP)
        body.append(words(f"device {device}", x + COLUMN / 2, HEADER - 12, "mid num"))
        body += draw_samples(plans, device, x, HEADER)
        for row, bucket in enumerate(buckets):
            if device in bucket.devices:
                y = HEADER + SAMPLES + ROW_GAP + row * (block + ROW_GAP)
                body += draw_state(bucket, device, row, x, y)
    body.append(words("samples", MARGIN, HEADER + SAMPLES / 2 + 4))
    for row, name in enumerate(names):
        y = HEADER + SAMPLES + ROW_GAP + row * (block + ROW_GAP)
        body.append(words(name, MARGIN, y + block / 2 + 4))
        for line, (kind, _) in enumerate(KINDS):
            if buckets[row].trainable or line == 0:
                body.append(words(kind, left - 10, y + line * (BAR + BETWEEN) + BAR - 1, "tiny faint right"))
    return drawing(
        width=width,
        height=height,
        title=title,
        about="; ".join(about(plans, device) for device in devices),
        style=sheet(),
        defs=hatching(),
        body=body,
    )


def region(bucket: Bucket) -> str:
    """Return the name of a bucket: its regions, and how their state is sharded."""
    how = [f"zero={bucket.zero}"] if bucket.zero else []
    how += [f"{len(bucket.groups)} ways"] if len(bucket.groups) > 1 else []
    return ", ".join(bucket.chunks) + (f" ({', '.join(how)})" if how else "")


def held(bucket: Bucket, device: int, level: int) -> HeldPiece:
    """Return the piece of a bucket's state that a device holds. level: the ZeRO level that shards it."""
    expert = bucket.devices.index(device) % len(bucket.groups)
    if bucket.zero < level:
        return HeldPiece(index=expert, of=len(bucket.groups))
    group = next(group for group in bucket.groups if device in group)
    return HeldPiece(index=expert * len(group) + group.index(device), of=len(bucket.groups) * len(group))


def slice_of(plans: Plans, device: int) -> HeldPiece | None:
    """Return the slice of the samples that a device trains on. None: it has no samples and no parameters."""
    loads = (ins.loads.devices for ins in plans.of(device).instrs if ins.op == "load")
    sets = [*loads, *(bucket.devices for bucket in plans.buckets.values() if device in bucket.devices)]
    return HeldPiece(index=sets[0].index(device), of=len(sets[0])) if sets else None


def draw_state(bucket: Bucket, device: int, row: int, x: float, y: float) -> Iterator[str]:
    """Draw a bar each for parameters, gradients and optimizer state; only the first for frozen parameters."""
    for line, (kind, level) in enumerate(KINDS if bucket.trainable else KINDS[:1]):
        piece = held(bucket, device, level)
        top = y + line * (BAR + BETWEEN)
        step = COLUMN / piece.of
        name = f"{kind} of {region(bucket)} on device {device}: piece {piece.index} of {piece.of}"
        outline = element("rect", x=x, y=top, width=COLUMN, height=BAR, rx=2, class_="idle")
        fill = element(
            "rect",
            x=x + piece.index * step,
            y=top,
            width=step,
            height=BAR,
            rx=2,
            class_=f"{('B', 'BI', 'F')[line]}{row % HUES}",
        )
        yield element("g", element("title", name) + outline + fill)


def draw_samples(plans: Plans, device: int, x: float, y: float) -> Iterator[str]:
    """Draw the batch as a bar, in which the device's slice is filled with its microbatches."""
    yield element("rect", x=x, y=y, width=COLUMN, height=SAMPLES, rx=2, class_="idle")
    piece = slice_of(plans, device)
    if piece is None:
        return
    parts = prod(plans.axes.values())
    shown = parts if parts <= MOST_PARTS else 1
    step = COLUMN / piece.of / shown
    for part in range(shown):
        left = x + piece.index * COLUMN / piece.of + part * step
        box = element(
            "rect",
            x=left + 0.5,
            y=y + 0.5,
            width=step - 1,
            height=SAMPLES - 1,
            rx=2,
            class_=f"F{part % HUES}",
        )
        yield box
        if parts > 1 and step >= 11 and shown > 1:
            yield words(str(part), left + step / 2, y + SAMPLES / 2 + 4, "onF mid small num")


def about(plans: Plans, device: int) -> str:
    """Describe one column in words."""
    piece = slice_of(plans, device)
    samples = f"samples {piece.index + 1}/{piece.of}" if piece else "no samples"
    state = ", ".join(
        f"{kind} of {', '.join(bucket.chunks)} {found.index + 1}/{found.of}"
        for bucket in plans.buckets.values()
        if device in bucket.devices
        for kind, level in (KINDS if bucket.trainable else KINDS[:1])
        for found in [held(bucket, device, level)]
    )
    return f"device {device}: {samples}; {state}"
