"""Compiles a job into a proven program: capture, directives, lowering, proof."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from piper.capture.autodiff.differentiate import Captured
from piper.capture.compile.cache import CACHE, usable_cache
from piper.capture.divide.request import Request
from piper.capture.fp8 import check_machine
from piper.capture.recordings import Capturing, Recordings, fields_of
from piper.capture.trace.record import LossFn
from piper.capture.trace.trace import Traced
from piper.data.taking import batches_of
from piper.directives import Directive, Order, Remat, ShardAxis, apply
from piper.divisions import requests_of
from piper.errors import CaptureError, CompilerError, ConfigError, LossError, ScheduleError
from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.ir.graph import Graph, start
from piper.job import Batch, Job, strategy_of
from piper.lower.buckets import make_buckets, with_whole_parameters
from piper.lower.explain import explain, origins
from piper.lower.lower import lower
from piper.lower.state import Completed, LoweringState, Settings
from piper.optimizer_probe import Probe, check_streamed, probe_optimizer
from piper.plan.plan import Bucket, Piece, Plans
from piper.plan.prove import ProofError
from piper.runtime.batch import as_run, bucket_batches, padded, read_shapes, wanted_batch
from piper.runtime.setup import Shapes, device_kind, setup_of
from piper.runtime.trainers import empty_optimizer, try_scheduler
from piper.slices import capture_slices, check_sums, likely_rows, outline_by_slice, uneven_slices
from piper.usercode import defined_at, named

if TYPE_CHECKING:
    from piper.notebook import Page
    from piper.simulate.simulate import Simulation

MASTER_BYTES = {"fp32": 0, "bf16": 4, "fp64": 0}  # bf16 trains a float32 copy of each parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A job compiled and proven: the graph, the plans, and the code they call."""

    job: Job
    graph: Graph
    plans: Plans
    work: LoweringState
    codes: Mapping[int, Captured]  # by the samples in a slice: usually one
    recordings: Recordings  # of the model; other strategies use them again: compile(job, captured=program)
    device: str = "cpu"  # the kind of device that it was captured for, and runs on: cpu or cuda
    warnings: tuple[str, ...] = ()  # what the user may not have meant
    cache: Path | None = None  # of compiled code. None: chunks run operation by operation
    shapes: dict[Shapes, "Program"] = field(default_factory=dict, repr=False, compare=False)  # see `shaped`

    @property
    def outline(self) -> CapturedModel:
        """Return the model's chunks, each as captured for its own microbatch size."""
        return self.graph.outline

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Return the tensors that the trace lifted out of the model."""
        return {name: value for code in self.codes.values() for name, value in code.constants.items()}

    def code(self, chunk: Chunk, phase: Phase) -> Callable[..., tuple[Tensor, ...]]:
        """Return the code of one phase of a chunk, called as its `PhaseSpec` says."""
        captured = next(captured for captured in self.codes.values() if chunk.key in captured.codes)
        return captured.phase(chunk.key, phase)

    def build(self, called: Iterable[tuple[Chunk, Phase]], meanwhile: Callable[[], None]) -> None:
        """Build the code of phases. meanwhile: work of the caller, done while other processes compile."""
        wanted = [(chunk.key, phase) for chunk, phase in called]
        for captured in self.codes.values():
            captured.build([pair for pair in wanted if pair[0] in captured.codes], meanwhile)
            meanwhile = lambda: None  # noqa: E731  it is done

    def explain(self, node: str) -> str:
        """Explain a node: what it does, where it runs, which directives shaped it, and what it waits for."""
        return explain(self.work, self.plans, node)

    def origins(self, node: str) -> list[str]:
        """Return the directives that shaped a node, each with its source line."""
        return origins(self.work, node)

    def __repr__(self) -> str:
        from piper.notebook import line_of  # it draws what this module compiles

        return line_of(self)

    def _repr_html_(self) -> str:
        from piper.notebook import table_of

        return table_of(self)

    def simulate(self, cluster: Path | str | None = None) -> "Simulation":
        """Simulate a step on a cluster: h100, h200, a100, cpu, or a TOML file. None: h100."""
        from piper.notebook import simulated

        return simulated(self, cluster)

    def view(self, cluster: Path | str | None = None) -> "Page":
        """Return the page of this program, timed on a cluster: a notebook shows it, and `save` writes it."""
        from piper.notebook import page_of

        return page_of(self, cluster)

    def evaluation(self, batch: Batch) -> "Program":
        """Compile the forward of this program for batches like `batch`, to evaluate what it trains.

        The model is in eval mode, nothing is saved for a backward, and the parameters are read where this
        program holds them.
        """
        from piper.evaluation import compile_evaluation  # it uses this module

        return compile_evaluation(self, batch)

    def shaped(self, batch: Batch) -> "Program":
        """Return the program that trains on batches like `batch`; compile and prove it if it is not known.

        It has plans of its own, for the parameters that this program holds, and is kept in `shapes`. A batch
        of the sizes that this program was compiled for gives this program.
        """
        from piper.shapes import compile_shape  # it uses this module

        wanted = wanted_batch(setup_of(self))
        rows, first = as_run(self, batch, wanted)
        key = read_shapes(rows, wanted)
        if not first and key not in self.shapes:
            self.shapes[key] = compile_shape(self, rows)
        return self if first else self.shapes[key]


def compile(  # the contract's name; `builtins.compile` is of no use to our users
    job: Job,
    *,
    device: str | None = None,
    compile: bool = False,
    cache: Path | str = CACHE,
    captured: "Program | Recordings | None" = None,
) -> Program:
    """Capture a job's model, apply its strategy, lower it to plans and prove them.

    device: the kind of device the job is captured for and runs on, `cpu` or `cuda`. None: CUDA if available.
    compile: compile the chunks with Inductor, each on first use, unless `cache` already has it. False: chunks
    run operation by operation.
    captured: an earlier program of the same model and loss, or its `recordings`. The model is then traced
    only for microbatch sizes that no compilation before has asked for.
    """
    if not isinstance(job, Job):
        raise ConfigError(
            f"{getattr(job, '__name__', type(job).__name__)} is not a Job",
            by="compile",
            hint="call the recipe: piper.compile(recipe())"
            if isfunction(job)
            else "give a Job: piper.compile(piper.Job(model=..., loss=..., data=...))",
        )
    batch = first_batch(job)
    known = known_recordings(job, device_kind(device), batch, captured, compiled=compile)
    program = build(job, capturing_with(batch, known, Path(cache) if compile else None))
    for rows in bucket_batches(batch, job.buckets):
        program.shaped(rows)
    return program


def build(
    job: Job,
    capturing: Capturing,
    *,
    state_bytes: int | None = None,
    whole: bool = False,
) -> Program:
    """Compile a job whose model is captured as `capturing` does.

    state_bytes: the optimizer's state for one element, where an earlier compilation has tried the optimizer.
    None: it is tried. whole: that compilation found that it needs whole parameters.
    """
    strategy, batch = strategy_of(job), capturing.batch
    samples = len(next(iter(batch.values())))
    settings = Settings(
        samples=samples,
        clip=job.clip_norm is not None,
        state_bytes=0,  # known when the optimizer has been tried
        master_bytes=MASTER_BYTES[job.precision],
    )
    codes: dict[int, Captured] = {}
    requests: list[Request] = []

    def completed(graph: Graph) -> Completed:
        check_sums(graph, samples, capturing)
        before = probed(job, graph, settings) if state_bytes is None else None
        codes.update(capture_slices(graph, samples, capturing, requests))
        outline = outline_by_slice(graph, samples, codes)
        if before is None:
            return Completed(outline=outline, state_bytes=state_bytes, whole=whole)
        probe = probed(job, replace(graph, outline=outline), settings, before)
        return Completed(outline=outline, state_bytes=probe.probe.state_bytes, whole=probe.probe.whole)

    with placing(job, strategy, batch):
        applied = directed(capturing, strategy, samples, requests)
        if applied.graph.precisions and job.precision != "fp64":
            by = next(each.title for each in applied.graph.directives if each.verb == "precision")
            check_machine(capturing.recordings.device, by)
        plans, work = lower(applied.graph, settings, completed)
    reasons = [reason for code in codes.values() for reason in code.reasons()]
    return Program(
        job=job,
        graph=work.graph,
        plans=replace(plans, why=(*plans.why, *reasons)),
        work=work,
        codes=codes,
        recordings=capturing.recordings,
        device=capturing.recordings.device,
        warnings=(
            *uneven_slices(applied.traced, work.graph, samples),
            *(() if any(isinstance(d, Remat) for d in strategy) else applied.traced.recording.unheeded()),
        ),
        cache=capturing.folder,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A captured model with a strategy applied to its graph."""

    traced: Traced
    graph: Graph


def directed(
    capturing: Capturing, strategy: list[Directive], samples: int, requests: list[Request]
) -> Applied:
    """Capture a model and apply a strategy to its graph. Add the divisions that it asks for to `requests`."""
    traced = capturing.traced(likely_rows(strategy, samples))
    divides = any(isinstance(directive, ShardAxis) for directive in strategy)
    graph = apply(start(traced.outline), strategy, orders=not divides)
    requests += requests_of(graph, strategy)
    if requests:  # collectives are nodes that directives see
        traced = capturing.traced(traced.rows, requests)
    if divides:
        graph = apply(start(traced.outline), strategy)
    return Applied(traced=traced, graph=graph)


def known_recordings(
    job: Job, kind: str, batch: Batch, captured: Program | Recordings | None, *, compiled: bool
) -> Recordings:
    """Return the recordings that a compilation may use and extend: those given, or new ones."""
    fresh = new_recordings(job, kind, batch, job.loss, compiled=compiled)
    if captured is None:
        return fresh
    if not isinstance(captured, Program | Recordings):
        raise ConfigError(
            f"captured is a {type(captured).__name__}",
            by="compile",
            hint="give an earlier program of the same job: compile(job, captured=program)",
        )
    earlier = captured.recordings if isinstance(captured, Program) else captured
    earlier.check(fresh, "compile")
    return earlier


def new_recordings(
    job: Job, kind: str, batch: Batch, loss: LossFn, *, compiled: bool, forward_only: bool = False
) -> Recordings:
    """Return recordings of a job's model for batches like `batch`, with nothing recorded yet."""
    return Recordings(
        model=job.model,
        loss=loss,
        precision=job.precision,
        device=kind,
        compiled=compiled,
        fields=fields_of(batch),
        forward_only=forward_only,
    )


def capturing_with(batch: Batch, recordings: Recordings, folder: Path | None) -> Capturing:
    """Return what captures a model for a batch. folder: the cache of compiled code. None: no cache."""
    cache = None if folder is None else usable_cache(folder)
    return Capturing(batch=batch, recordings=recordings, cache=cache, folder=folder)


@contextmanager
def placing(job: Job, strategy: Sequence[Directive], batch: Batch) -> Iterator[None]:
    """Name the user's line in errors about the model, the loss and the strategy that have none yet."""
    try:
        yield
    except CaptureError as error:
        blamed = job.model if error.by == "model" or "cannot be built" in error.what else job.loss
        where = defined_at(blamed) if error.by in ("capture", "loss", "model") else None
        fields = ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items())
        facts = {"batch": fields} if isinstance(error, LossError) else {}
        raise error.located(f"{error.by} ({where})" if where else error.by, facts) from error.__cause__
    except ScheduleError as error:
        if error.by != "strategy" or not strategy:
            raise
        raise error.located(f"strategy ({strategy[0].source})") from error.__cause__
    except ProofError as error:
        raise CompilerError(
            "this is a bug in Piper: the plans of this strategy fail their proof",
            by=f"strategy ({strategy[0].source})" if strategy else "strategy",
            facts={
                "strategy": "\n".join(d.title(i) for i, d in enumerate(strategy) if not isinstance(d, Order)),
                "proof": str(error),
            },
            hint="please report it with this message; meanwhile, leave out one of these directives",
        ) from error


def first_batch(job: Job) -> Batch:
    """Return the first batch of a job's data, padded as all are: its types stand for all."""
    batch = next(batches_of(job.data), None)
    if batch is None:
        raise ConfigError(
            "data() holds no batch", by=named("data", job.data), hint="return at least one batch"
        )
    return padded(batch, job.buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """The facts about a job's optimizer, and the buckets they were found for."""

    probe: Probe
    buckets: tuple[Bucket, ...]


def probed(job: Job, graph: Graph, settings: Settings, before: Probed | None = None) -> Probed:
    """Try a job's optimizer and scheduler on what each device holds, unless that was tried before.

    Before chunks are differentiated, every parameter that asks for a gradient counts as trained; afterwards
    only those that a backward reaches, which changes buckets where there are others.
    """
    buckets = trained_buckets(graph, settings, known=before is not None)
    if before is not None and before.buckets == buckets:
        return before
    sizes = {p.name: p.shape for p in graph.outline.parameters if p.trainable}
    policies = {bucket.name: graph.policy(bucket.chunks[0]).origin for bucket in buckets}
    made_by = {name: graph.directives[n].title for name, n in policies.items() if n is not None}
    try:
        probe = probe_optimizer(job.optimizer, sizes, buckets, made_by)
    except ConfigError:
        if not any(bucket.zero for bucket in buckets):
            raise
        cut = trained_buckets(graph, replace(settings, whole=True), known=before is not None)
        probe = replace(probe_optimizer(job.optimizer, sizes, cut, made_by), whole=True)
    check_streamed(probe, graph)
    optimizer = empty_optimizer(job.optimizer, buckets, sizes) if job.scheduler is not None else None
    if optimizer is not None and job.scheduler is not None:
        try_scheduler(job.scheduler, optimizer, job.steps)
    return Probed(probe=probe, buckets=buckets)


def trained_buckets(graph: Graph, settings: Settings, known: bool) -> tuple[Bucket, ...]:
    """Return the buckets that are trained. known: whether chunks say which parameters a backward reaches."""
    buckets = make_buckets(LoweringState(graph=graph, settings=settings)).buckets.values()
    if known:
        return tuple(bucket for bucket in buckets if bucket.trainable)
    asking = {p.name for p in graph.outline.parameters if p.trainable}
    found = []
    for bucket in buckets:
        pieces: list[Piece] = []
        for piece in bucket.pieces:
            if piece.name in asking:
                pieces.append(replace(piece, offset=sum(p.numel for p in pieces)))
        if pieces:
            found.append(replace(bucket, pieces=tuple(pieces), trainable=True))
    if settings.whole:  # those that are trained were not known before
        return tuple(with_whole_parameters({bucket.name: bucket for bucket in found}).values())
    return tuple(found)
