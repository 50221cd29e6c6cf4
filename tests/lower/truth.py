"""What every phase of every chunk should see and give, told from the outline and the places alone."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import TypeVar, cast

from piper.ir.chunk import (
    AxisPosition,
    Batch,
    CapturedModel,
    Chunk,
    Constant,
    HostPlace,
    Output,
    Phase,
    Source,
    Tags,
)
from piper.ir.graph import Graph
from tests.lower.symbols import WHOLE, Note, Row, Rows, Share, Slope, Terms, Value

Method = TypeVar("Method", bound=Callable[..., object])


def remembered(method: Method) -> Method:
    """A method that works each answer out once: the same is asked in every order that a plan allows."""

    @wraps(method)
    def ask(truth: "Truth", *args: Hashable) -> object:
        known: dict[Hashable, object] = vars(truth).setdefault(f"known {method.__name__}", {})
        if args not in known:
            known[args] = method(truth, *args)
        return known[args]

    return cast(Method, ask)


@dataclass(frozen=True)
class Truth:
    """What every phase of every chunk should see and give, told from the outline and the places alone."""

    graph: Graph
    cells: int

    @property
    def outline(self) -> CapturedModel:
        return self.graph.outline

    @cached_property
    def chunks(self) -> dict[str, Chunk]:
        return self.graph.chunks

    @cached_property
    def homes(self) -> dict[str, dict[Tags, tuple[int, ...]]]:
        """The devices of each chunk, for each part."""
        found: dict[str, dict[Tags, tuple[int, ...]]] = {}
        for node in self.graph.nodes.values():
            found.setdefault(node.chunk, {})[node.part] = node.devices
        return found

    @cached_property
    def parts(self) -> dict[str, list[Tags]]:
        found: dict[str, list[Tags]] = {}
        for cell in self.graph.index.cells:
            found.setdefault(cell.chunk, []).append(cell.part)
        return found

    @cached_property
    def readers(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Of each value: the inputs through which it gets a gradient."""
        found: dict[str, list[tuple[str, int]]] = {}
        for chunk in self.outline.chunks:
            if chunk.kind in ("compute", "expert") and "B" in chunk.phases:
                for position in chunk.phases["B"].grad_inputs:
                    found.setdefault(self.name(chunk.inputs[position]), []).append((chunk.name, position))
        return {name: tuple(sorted(terms)) for name, terms in found.items()}

    def name(self, source: Source) -> str:
        """What a source is called: routing only moves rows, so it does not rename them."""
        match source:
            case Batch(field=field):
                return f"batch.{field}"
            case Constant(name=name):
                return f"constant.{name}"
            case Output(chunk=owner, index=index):
                if self.chunks[owner].kind in ("route", "unroute"):
                    return self.name(self.chunks[owner].inputs[index])
                return f"{owner}.out{index}"
            case AxisPosition(axis=axis) | HostPlace(axis=axis):
                return f"place.{axis}"

    def ways(self, chunk: str) -> int:
        return self.graph.policy(chunk).ways if self.chunks[chunk].kind != "compute" else 1

    def slice(self, devices: tuple[int, ...], device: int, part: Tags) -> tuple[Row, ...]:
        """The rows that a device of a set holds of a part."""
        position, each = devices.index(device), self.cells // len(devices)
        return tuple((cell, part) for cell in range(position * each, (position + 1) * each))

    @remembered
    def rows(self, chunk: str, device: int, part: Tags) -> tuple[tuple[Row, ...], Share]:
        """The rows that a chunk works on: its own slice; in a divided region its group's, for a share of experts."""
        home, ways = self.homes[chunk][part], self.ways(chunk)
        if self.chunks[chunk].kind != "expert" or ways == 1:
            return self.slice(home, device, part), WHOLE
        position = home.index(device)
        group = home[position // ways * ways :][:ways]
        rows = tuple(row for member in group for row in self.slice(home, member, part))
        return rows, (position % ways, ways)

    def value(self, source: Source, chunk: str, device: int, part: Tags) -> Value:
        """What a chunk should find at one of its inputs."""
        rows, share = self.rows(chunk, device, part)
        match source:
            case Constant():
                return Note(self.name(source))
            case Output() if self.is_alike(self.name(source)):
                return Rows(self.name(source), ())
        return Rows(self.name(source), rows, share)

    def is_alike(self, name: str) -> bool:
        """Whether a value is the same for all samples: it has axes, and none of them counts samples or experts."""
        owner, _, index = name.rpartition(".out")
        spec = self.chunks[owner].outputs[int(index)]
        return spec.dtype == "int64" and len(spec.shape) > 1

    def output(self, chunk: str, index: int, device: int, part: Tags) -> Rows:
        """What a chunk's forward gives."""
        name = f"{chunk}.out{index}"
        rows, share = self.rows(chunk, device, part)
        return Rows(name, ()) if self.is_alike(name) else Rows(name, rows, share)

    def slope(self, index: int, chunk: str, device: int, part: Tags) -> Slope:
        """The whole gradient of a chunk's output."""
        name = f"{chunk}.out{index}"
        rows, share = self.rows(chunk, device, part)
        return Slope(Rows(name, rows, share), self.readers[name])

    @remembered
    def gradient(self, param: str, share: Share) -> Terms:
        """The gradient of a parameter over the whole step: every row of every chunk that trains it, once."""
        found: Terms = Counter()
        for chunk in self.outline.chunks:
            if "B" not in chunk.phases or param not in chunk.phases["B"].grad_params:
                continue
            ways = self.ways(chunk.name)
            shares = [share] if share[1] == ways else [(part, ways) for part in range(ways)]
            for part in self.parts[chunk.name]:
                for cell in range(self.cells):
                    for one in shares:
                        found[chunk.name, (cell, part), one] += 1
        return found

    def again(self, backwards: Mapping[str, Collection[Phase]]) -> set[str]:
        """The chunks whose forwards run a second time: a backward of their region needs it, or another one does."""
        found: set[str] = set()
        wanted: list[str] = []
        for name in self.graph.reruns:
            for phase in backwards.get(name, ()):
                spec = self.chunks[name].phases[phase]
                wanted += [name] if spec.saved else []
                wanted += self.inner(name, spec.inputs)
        while wanted:
            name = wanted.pop()
            if name not in found:
                found.add(name)
                wanted += self.inner(name, self.chunks[name].phases["F"].inputs)
        return found

    def inner(self, chunk: str, positions: Iterable[int]) -> Iterator[str]:
        """Of a chunk that runs again: who makes these of its inputs in its own region, without communication."""
        regions, chunks = self.graph.reruns, self.chunks
        for position in positions:
            source = chunks[chunk].inputs[position]
            while isinstance(source, Output) and chunks[source.chunk].kind in ("route", "unroute"):
                if self.ways(source.chunk) > 1:
                    break
                source = chunks[source.chunk].inputs[source.index]
            if not isinstance(source, Output) or self.homes[source.chunk] != self.homes[chunk]:
                continue
            if regions.get(source.chunk) == regions[chunk]:
                yield source.chunk

    def losses(self, source: Output) -> Counter[Row]:
        """Every slice of a loss, once."""
        return Counter((cell, part) for part in self.parts[source.chunk] for cell in range(self.cells))
