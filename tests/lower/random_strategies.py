"""Strategies drawn at random, each directive from a number: a failing list shrinks to fewer directives."""

import random
from collections.abc import Sequence

from piper.directives import Directive, order, place, remat, replicate, shard, split
from piper.ir.chunk import CapturedModel
from piper.ir.select import At, Index, at

FAMILIAR = ((0,), (1,), (0, 1), (2, 3), (1, 2), (4, 5), (0, 1, 2, 3), (4, 5, 6, 7), (2, 3, 4, 5), (3, 1))
STREAMS = (None, None, "pp", "compute")
PASSES = (None, None, "F", "B", "BI", "BW")


class Dice(random.Random):
    """Draws the pieces of a directive, mostly such that a graph has what they name."""

    def __init__(self, number: int, outline: CapturedModel) -> None:
        super().__init__(number)
        tags = [dict(chunk.tags) for chunk in outline.chunks]
        self.last = max(tag["PP"] for tag in tags)
        self.routed = any("EP" in tag for tag in tags)
        self.tags = list(dict.fromkeys(name for tag in tags for name in tag))

    def stage(self) -> int:
        return self.randint(0, self.last if self.random() < 0.97 else 3)

    def devices(self) -> tuple[int, ...]:
        """A set: alone or several, of many sizes, often overlapping others."""
        return (
            self.choice(FAMILIAR) if self.random() < 0.7 else tuple(self.sample(range(6), self.randint(1, 4)))
        )

    def index(self) -> Index:
        return self.choice((0, 1, 0, 1, 2, "*", None))

    def stages(self) -> At:
        """A filter by stage, or by nothing."""
        return at(PP=self.stage()) if self.random() < 0.8 else at()

    def filter(self) -> At:
        """A filter by a few tags, some of which the graph may not have."""
        tags = self.sample(("PP", "PP", "MB", "EP" if self.routed else "PP"), self.choice((0, 1, 1, 2)))
        return at(PASS=self.choice(PASSES), **{tag: self.index() for tag in tags})

    def experts(self) -> At:
        """A filter that finds expert regions, in graphs that have some."""
        return at(EP=self.choice((0, 1, "*", "*"))) if self.random() < 0.8 else self.filter()

    def row(self) -> Directive:
        """An order of one stage's passes over two parts, such as a pipeline's row."""
        stage = self.stage()
        halves = self.choice((("B",), ("B",), ("BI", "BW"), ("BW",)))
        steps = [(phase, part) for phase in ("F", *halves) for part in range(2)]
        if self.random() < 0.3:
            self.shuffle(steps)
        return order([[at(PP=stage, MB=part, PASS=phase)] for phase, part in steps])

    def groups(self) -> Directive:
        """An order of anything."""
        return order([[self.filter() for _ in range(self.randint(1, 2))] for _ in range(self.randint(1, 3))])

    def again(self) -> Directive:
        """Less is kept of some regions; often nothing, across regions around them."""
        across = self.choice((None, "PP", "PP", "PP", *self.tags))
        index: Index = self.choice(("*", "*", 0, 1))
        inside = at(None, **{across: index}) if across else at()
        where = self.choice((inside, inside, self.stages(), at(EP=None), self.experts()))
        return remat(where, self.choice((0, 0.5, 1)), across)

    def directive(self) -> Directive:
        """Any one directive."""
        kinds = ["place", "replicate", "replicate", "split", "row", "row", "row", "order", "order"]
        kinds += ["remat", "remat"]
        match self.choice(kinds + ["shard"] * (4 if self.routed else 0)):
            case "place":
                where = self.stages() if self.random() < 0.7 else self.filter()
                return place(where, self.devices(), stream=self.choice(STREAMS))
            case "replicate":
                return replicate(
                    self.stages() if self.random() < 0.8 else self.filter(),
                    self.devices(),
                    zero=self.randint(0, 3),
                    bucket_mb=self.choice((None, 1e-5, 1)),
                    reduce_stream=self.choice(STREAMS),
                    gather_stream=self.choice(STREAMS),
                    keep=self.choice(("use", "use", "step")),
                )
            case "shard":
                devices = self.devices()
                ways = self.choice((None, None, 1, len(devices), 2, 3))
                return shard(self.experts(), devices, ways, self.choice(STREAMS))
            case "split":
                where = at(PP=0) if self.random() < 0.1 else at()
                return split(where, self.choice(("MB", "K")), self.randint(1, 3))
            case "row":
                return self.row()
            case "remat":
                return self.again()
            case _:
                return self.groups()

    def scaffold(self) -> list[Directive]:
        """Directives that place everything, mostly; and split, often."""
        chosen: list[Directive] = []
        if self.random() < 0.95:
            chosen.append(replicate(at(), self.devices(), self.randint(0, 3)))
        for stage in self.sample(range(self.last + 1), self.randint(0, 2)):
            chosen.append(
                replicate(at(PP=stage), self.devices(), self.randint(0, 3), self.choice((None, 1e-5)))
            )
        if self.routed and self.random() < 0.5:
            for stage in range(self.last + 1):
                devices = self.devices()
                ways = len(devices) if len(devices) % 2 or self.random() < 0.5 else 2
                chosen += [
                    replicate(at(PP=stage), devices, self.randint(0, 3)),
                    shard(at(EP=stage), devices, ways),
                ]
        if self.random() < 0.7:
            chosen.append(split(at(), parts=self.randint(1, 3)))
        if self.random() < 0.2:
            chosen.append(self.again())
        if self.random() < 0.1:
            self.shuffle(chosen)
        return chosen


def strategy_of(outline: CapturedModel, scaffold: int, others: Sequence[int]) -> list[Directive]:
    """A scaffold and some directives after it, each from its number."""
    return [*Dice(scaffold, outline).scaffold(), *(Dice(number, outline).directive() for number in others)]
