"""The model that is tuned: its layers, what can be divided, and tables of costs for every microbatch size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

from piper.capture.layers.short import short_capturing
from piper.capture.recordings import Capturing, Recordings
from piper.capture.trace.annotate import TAG
from piper.compiler.build import Program, build, first_batch, known_recordings
from piper.compiler.optimizer_probe import OptimizerFacts, facts_of_optimizer
from piper.directives import Directive, apply, place
from piper.errors import ConfigError
from piper.ir.chunk import CapturedModel, Chunk
from piper.ir.chunk_options import CodeOptions
from piper.ir.dtypes import job_precision
from piper.ir.graph import start as start_graph
from piper.ir.select import at
from piper.job import Batch, Job
from piper.lower.buckets import make_buckets
from piper.models.huggingface import tensor_plan
from piper.runtime.accelerator import device_kind
from piper.simulate.costs import Costs
from piper.simulate.measured import Prices
from piper.tuning.choice import Divide, Recompute, StrategyChoice, divided_as
from piper.tuning.model_layers import ModelLayers
from piper.tuning.space import Shapes, Space, divisors, rows_of

BY = "tune"
Known = dict[tuple[int, int], tuple[object, ...]]  # by the identities of two tuples, which live longer
SAME = frozenset(("storage", "index", "experts"))  # numbers that are positions, not amounts
DROPPED = frozenset(("key",))  # of code, which differs from size to size
Key = tuple[int, Recompute, int, int, int, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A captured model, with the costs of its layers."""

    job: Job
    capturing: Capturing
    costs: Costs
    tag: str  # numbers the layers
    shapes: Shapes
    divide: Divide
    optimizer_bytes: int  # of the optimizer's state and the master copy, for each element that is trained
    communicator: float = 0.0  # bytes that each communicator of a device takes
    tables: dict[Key, ModelLayers] = field(default_factory=dict, repr=False)

    @property
    def compiled(self) -> bool:
        """Return whether the job will be compiled."""
        return self.capturing.recordings.compiled

    @property
    def recorded(self) -> list[int]:
        """Return the microbatch sizes that were recorded, in order."""
        return sorted(self.capturing.recordings.recorded)

    def record(self, rows: int) -> None:
        """Record the model for a microbatch size, if it was not."""
        if rows not in self.capturing.recordings.recorded:
            self.capturing.traced(rows)
            for key in [key for key in self.tables if key[0] == rows]:
                del self.tables[key]  # was estimated from other sizes

    def layers(self, choice: StrategyChoice) -> ModelLayers:
        """Return the costs of the layers under a candidate, for its microbatch size and what divides them."""
        rows, recompute, experts = choice.rows, choice.recompute, choice.experts
        flat = choice.microbatches > 1 and self.compiled  # compiled backwards add up the gradients of several
        key = (rows, recompute, experts, choice.tensor, choice.context, flat)
        if key not in self.tables and choice.divided:
            whole = self.layers(replace(choice, tensor=1, context=1))
            self.tables[key] = whole.divided(choice.tensor, choice.context)
        elif key not in self.tables:
            # Fewer experts on a device have less weights to read, and the same rows: the fewest give a bound.
            outline = self.outline(rows, recompute, self.shapes.experts if experts > 1 else 1, flat=flat)
            self.tables[key] = ModelLayers(
                outline,
                self.costs,
                self.tag,
                across=recompute.across,
                experts=experts,
                optimizer_bytes=self.optimizer_bytes,
            )
        return self.tables[key]

    def outline(self, rows: int, recompute: Recompute, experts: int, *, flat: bool = False) -> CapturedModel:
        """Return the differentiated model: as recorded, or from two sizes that were. flat: of all chunks."""
        if rows not in self.recorded and len(self.recorded) > 1:
            one, other = (
                self._differentiated(size, recompute, experts, lambda chunk: flat)
                for size in self.recorded[:2]
            )
            between = scaled(one, other, rows)
            if between is not None:
                return between
        self.record(rows)
        return self._differentiated(rows, recompute, experts, lambda chunk: flat)

    def _differentiated(
        self, rows: int, recompute: Recompute, experts: int, flat: Callable[[Chunk], bool]
    ) -> CapturedModel:
        recomputes = recompute != Recompute()
        options = {
            chunk.name: CodeOptions(
                ways=experts if chunk.kind == "expert" else 1,
                budget=recompute.budget if recomputes and chunk.has_code else None,
                flat=flat(chunk),
            )
            for chunk in self.capturing.traced(rows).outline.chunks
        }
        return self.capturing.differentiated(rows, (), options).outline

    def capture(self, choice: StrategyChoice) -> None:
        """Capture the model as a candidate needs it, if it was not and nothing divides its layers."""
        if not choice.divided:
            flat = partial(self._writes_flat, choice)
            self._differentiated(choice.rows, choice.recompute, choice.experts, flat)

    def _writes_flat(self, choice: StrategyChoice, chunk: Chunk) -> bool:
        """Return whether the compiler has the backward of a chunk write gradients into given memory."""
        if not self.compiled:
            return False
        layer = dict(chunk.tags)[self.tag]
        stage = next(number for number, layers in enumerate(choice.stages) if layer in layers)
        return choice.microbatches > 1 or choice.zeros[choice.placement.ranks[stage]] >= 2

    def compile(self, strategy: list[Directive], *, tried: bool = True) -> Program:
        """Compile the job with a strategy. tried: the optimizer need not be tried again."""
        state = self.optimizer_bytes - job_precision(self.job.precision).master_bytes
        return build(
            replace(self.job, strategy=strategy),
            self.capturing,
            optimizer=OptimizerFacts(state_bytes=state) if tried else None,
        )


def layers_of(outline: CapturedModel) -> tuple[str, int]:
    """Return the tag that numbers layers, LAYER or that of all chunks with most indices, and how many."""
    tags: dict[str, set[int]] = {}
    for chunk in outline.chunks:
        for tag, index in chunk.tags:
            tags.setdefault(tag, set()).add(index)
    everywhere = [
        tag for tag in tags if all(tag in dict(chunk.tags) for chunk in outline.chunks) and len(tags[tag]) > 1
    ]
    if not everywhere:
        raise ConfigError(
            "the model has no repeated layers to divide into stages",
            by=BY,
            facts={"regions": ", ".join(f"{tag} {len(indices)}" for tag, indices in tags.items()) or "none"},
            hint="annotate them: model=lambda: piper.annotate_layers(Model()), or annotate_modules(...)",
        )
    tag = max(everywhere, key=lambda name: (name == TAG, len(tags[name]), name))
    return tag, len(tags[tag])


def captured_model(
    job: Job,
    prices: Prices,
    space: Space,
    devices: int,
    captured: Program | Recordings | None = None,
    start: Sequence[Directive] = (),
    *,
    compile: bool = False,
) -> Model:
    """Record a job's model for the two smallest microbatch sizes, and find what it is made of.

    start: a strategy that says how tensor and context parallelism divide the model.
    """
    batch = first_batch(job)
    recordings = known_recordings(job, device_kind(None), batch, captured, compiled=compile)
    samples = len(next(iter(batch.values())))
    sizes = sorted({rows for replicas in divisors(devices) for rows in rows_of(space, samples, replicas)})
    if not sizes:
        raise ConfigError(
            f"{samples} samples in a batch cannot be cut for {devices} devices",
            by=BY,
            hint="give a batch whose samples some number of replicas divides",
        )
    capturing = short_capturing(Capturing(batch=batch, recordings=recordings), sizes[0])
    outline = capturing.traced(sizes[0]).outline
    prices.check(outline)
    tag, count = layers_of(outline)
    alone = replace(job, strategy=[], elastic=None)

    for rows in sizes[1:2]:
        capturing.traced(rows)
    divide = divided_as(start, Divide(weights=weights_of(recordings), fields=sequence_fields(batch)))
    # Context parallelism divides no weights, so where it is asked for none need be known.
    by_context = bool(divide.fields) and (bool(divide.weights) or space.context is not None)
    return Model(
        job=alone,
        capturing=capturing,
        costs=prices.costs,
        tag=tag,
        shapes=Shapes(
            devices=devices,
            samples=samples,
            layers=count,
            experts=max(chunk.experts for chunk in outline.chunks),
            tensor=bool(divide.weights),
            context=by_context,
        ),
        divide=divide,
        optimizer_bytes=optimizer_bytes(alone, outline),
    )


def optimizer_bytes(job: Job, outline: CapturedModel) -> int:
    """Try a job's optimizer on one device, and return its bytes for each element, with the master copy."""
    graph = apply(start_graph(outline), [place(at(), [0])])
    state = facts_of_optimizer(job, graph, make_buckets(graph)).state_bytes
    return state + job_precision(job.precision).master_bytes


def weights_of(recordings: Recordings) -> tuple[tuple[str, int], ...]:
    """Return the weights that tensor parallelism would divide. Empty: the model does not say."""
    try:
        return tuple(tensor_plan(recordings.built()).items())
    except ConfigError:
        return ()


def sequence_fields(batch: Batch) -> tuple[tuple[str, int], ...]:
    """Return the fields of a batch that context parallelism would divide. Empty: not all are sequences."""
    whole = {name: value for name, value in batch.items() if not value.is_floating_point()}
    sequences = {n: value.shape[1] for n, value in whole.items() if value.dim() == 2 and value.shape[1] > 1}
    if len(sequences) != len(batch) or len(set(sequences.values())) != 1:
        return ()
    return tuple((name, 1) for name in sequences)


class UnlikeLayersError(Exception):
    """Two recordings that differ in more than amounts."""


def scaled(one: CapturedModel, other: CapturedModel, rows: int) -> CapturedModel | None:
    """Return the outline for slices of `rows` samples. None: the two outlines differ in their structure.

    Shapes, bytes and arithmetic of a chunk are affine in the samples of a slice, so two recordings give those
    of every size.
    """
    share = (rows - one.rows) / (other.rows - one.rows)
    try:
        chunks = between(one.chunks, other.chunks, share, {})
    except (UnlikeLayersError, ValueError):
        return None
    return replace(one, chunks=tuple(replace(chunk, key="") for chunk in chunks), rows=rows)


def between(one: Any, other: Any, share: float, known: Known) -> Any:  # noqa: ANN401  of one type
    """Return the value that lies at `share` of the way from one to the other; amounts are affine.

    known: tuples that were done. Equal layers share theirs.
    """
    if one is other:
        return one
    if type(one) is not type(other):
        raise UnlikeLayersError
    if isinstance(one, tuple):
        key = (id(one), id(other))
        if key not in known:
            known[key] = tuple(between(a, b, share, known) for a, b in zip(one, other, strict=True))
        return known[key]
    if is_dataclass(one):
        pairs = {each.name: (getattr(one, each.name), getattr(other, each.name)) for each in fields(one)}
        if any(pairs[name][0] != pairs[name][1] for name in SAME & pairs.keys()):
            raise UnlikeLayersError
        changed = {name: between(*pairs[name], share, known) for name in pairs.keys() - DROPPED}
        return replace(one, **changed)  # type: ignore[type-var]
    if one == other:
        return one
    if isinstance(one, Mapping) and one.keys() == other.keys():
        return {key: between(one[key], other[key], share, known) for key in one}
    if isinstance(one, bool) or not isinstance(one, int | float):
        raise UnlikeLayersError
    value = one + (other - one) * share
    return round(value) if isinstance(one, int) else value
