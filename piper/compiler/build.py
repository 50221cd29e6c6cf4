"""Compiles a job into a proven program. `build` is the whole way, from the model to plans."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from piper.capture.autodiff.differentiate import Captured
from piper.capture.compile.cache import CACHE, Cache, usable_cache
from piper.capture.precision.fp8 import check_machine
from piper.capture.recordings import Capturing, Recordings, fields_of
from piper.capture.shard.axis_sharding import Request
from piper.capture.trace.record import LossFn
from piper.capture.trace.returned import Prediction
from piper.capture.trace.trace import Traced
from piper.compiler.optimizer_probe import OptimizerFacts, facts_of_optimizer
from piper.compiler.shared_state import check_same_state, holder_of, reads_state_of, share_buckets
from piper.compiler.slices import (
    capture_slices,
    check_sums,
    likely_rows,
    requests_of,
    samples_of_group,
    sliced_warnings,
)
from piper.data.feed import begin, call_data, reads_the_same, take
from piper.directives import Directive, Order, Remat, ShardAxis, apply
from piper.errors import CaptureError, CompilerError, ConfigError, LossError, ScheduleError
from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.ir.graph import Graph, start
from piper.job import Batch, Job, job_for, strategy_of
from piper.lower.buckets import make_buckets, with_whole_parameters
from piper.lower.explain import explain, origins
from piper.lower.lower import lower
from piper.lower.state import LoweringState, Settings
from piper.lower.validate import check_axes, validate
from piper.plan.plan import Plans
from piper.plan.prove import ProofError
from piper.process.usercode import defined_at, named
from piper.runtime.accelerator import device_kind
from piper.runtime.batch import (
    COUNTS,
    as_run,
    bucket_batches,
    counted_loss,
    padded,
    read_shapes,
    wanted_batch,
)
from piper.runtime.setup import Forward, Shapes

if TYPE_CHECKING:
    from piper.compiler.notebook import Page
    from piper.simulate.simulate import Simulation

log = logging.getLogger("piper")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A job compiled and proven: the graph, the plans, and the code they call."""

    job: Job
    graph: Graph
    plans: Plans
    work: LoweringState
    codes: Mapping[int, Captured]  # by the samples in a slice: usually one
    recordings: Recordings  # of the model; other strategies use them again: compile(job, captured=program)
    device: str = "cpu"  # the kind of device that it was captured for, and runs on: cpu, or one of `KINDS`
    warnings: tuple[str, ...] = ()  # what the user may not have meant
    cache: Cache | None = None  # of compiled code. None: chunks run operation by operation
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
        from piper.compiler.notebook import line_of  # it draws what this module compiles

        return line_of(self)

    def _repr_html_(self) -> str:
        from piper.compiler.notebook import table_of

        return table_of(self, self.work)

    def simulate(self, cluster: Path | str | None = None) -> "Simulation":
        """Simulate a step on a cluster: a100, h100, h200, b200, cpu, or a TOML file. None: h100."""
        from piper.simulate.measured import prices_of
        from piper.simulate.simulate import simulate

        return simulate(self.plans, self.outline, prices_of(cluster, None).costs)

    def view(self, cluster: Path | str | None = None) -> "Page":
        """Return the page of this program, timed on a cluster: a notebook shows it, and `save` writes it."""
        from piper.compiler.notebook import page_of

        return page_of(self, self.work, cluster)

    def evaluation(self, batch: Batch, forward: Forward | None = None) -> "Program":
        """Compile the forward of this program for batches like `batch`, to evaluate what it trains.

        The model is in eval mode, nothing is saved for a backward, and the parameters are read where this
        program holds them. forward: what it predicts. None: it computes the loss and metrics.
        """
        job, metrics = self.job, None if self.job.evaluate is None else self.job.evaluate.metrics
        loss: LossFn = job.loss if metrics is None else metrics
        loss = loss if forward is None else Prediction(forward)
        compiled = self.cache is not None
        recordings = new_recordings(job, self.device, batch, loss, compiled=compiled, forward_only=True)
        return build(job, Capturing(batch=batch, recordings=recordings, cache=self.cache), trained=self)

    def shaped(self, batch: Batch) -> "Program":
        """Return the program that trains on batches like `batch`; compile and prove it if it is not known.

        It has plans of its own, for the parameters that this program holds, and is kept in `shapes`. A batch
        of the sizes that this program was compiled for gives this program.
        """
        wanted = wanted_batch(self)
        rows, first = as_run(self, batch, wanted)
        key = read_shapes(rows, wanted)
        if first or key in self.shapes:
            return self if first else self.shapes[key]
        loss = counted_loss(self.job.loss) if COUNTS in rows else self.job.loss
        fresh = new_recordings(self.job, self.device, rows, loss, compiled=self.cache is not None)
        known = (program.recordings for program in (self, *self.shapes.values()))
        recordings = next((one for one in known if one.fields == fresh.fields), fresh)
        capturing = Capturing(batch=rows, recordings=recordings, cache=self.cache)
        program = build(job_for(self.job, rows), capturing, first=self)
        check_same_state(self, program, rows)
        self.shapes[key] = program
        return program


def compile(  # the contract's name; `builtins.compile` is of no use to our users
    job: Job,
    *,
    device: str | None = None,
    compile: bool = False,
    cache: Path | str = CACHE,
    captured: "Program | Recordings | None" = None,
) -> Program:
    """Capture a job's model, apply its strategy, lower it to plans and prove them.

    device: the kind of device the job is captured for and runs on, as `cpu` or `cuda`. None: what there is.
    compile: compile the chunks with Inductor, each on first use, unless `cache` already has it. False: chunks
    run operation by operation.
    captured: an earlier program of the same model and loss, or its `recordings`. The model is then traced
    only for microbatch sizes that no compilation before has asked for.
    """
    if not isinstance(job, Job):
        raise ConfigError(
            f"{getattr(job, '__name__', type(job).__name__)} is not a Job",
            by="compile",
            hint="call the recipe: piper.compile(recipe()); it returns a piper.Job",
        )
    batch = first_batch(job)
    job = job_for(job, batch)
    known = known_recordings(job, device_kind(device), batch, captured, compiled=compile)
    usable = usable_cache(Path(cache)) if compile else None
    program = build(job, Capturing(batch=batch, recordings=known, cache=usable))
    for rows in bucket_batches(batch, job.buckets):
        program.shaped(rows)
    return program


def build(
    job: Job,
    capturing: Capturing,
    *,
    optimizer: OptimizerFacts | None = None,
    trained: Program | None = None,
    first: Program | None = None,
) -> Program:
    """Compile a job whose model is captured as `capturing` does.

    optimizer: the facts that an earlier compilation found out. None: the optimizer is tried.
    trained: the program of which this one evaluates the parameters. It has no backward.
    first: the program of which this one trains the parameters too, on batches of other sizes.
    """
    strategy, batch = strategy_of(job), capturing.batch
    samples = len(next(iter(batch.values())))
    with locate_errors(job, strategy, batch):
        traced, requests, graph = directed(capturing, strategy, samples)
        samples = samples_of_group(graph, samples)
        if graph.chosen(lambda options: options.products) and job.precision != "fp64":
            by = next(each.title for each in graph.directives if each.verb == "precision")
            check_machine(capturing.recordings.device, by)
        graph = validate(graph, samples)
        if trained is not None:
            # Without a backward nothing is saved, and nothing is recomputed.
            graph = graph.with_options(graph.options, lambda _, o: replace(o, budget=None, rerun=None))
        else:
            check_sums(graph, samples, capturing)
        codes, outline = capture_slices(graph, samples, capturing, requests)
        graph = replace(graph, outline=outline)
        if trained is not None:
            graph = reads_state_of(trained.graph, trained.plans.buckets, graph)
            buckets = share_buckets(graph, trained.work.buckets)
            settings = replace(trained.work.settings, clip=False, whole=False, trains=False)
        else:
            buckets = make_buckets(graph)
            holder = None
            if first is not None:
                programs = [first.work, *(each.work for each in first.shapes.values())]
                holder = holder_of(first.job, programs, job, graph, buckets, batch)
            if holder is not None:
                buckets = share_buckets(graph, holder.buckets, buckets)
                settings = holder.settings
            else:
                facts = optimizer or facts_of_optimizer(job, graph, buckets)
                buckets = with_whole_parameters(buckets) if facts.whole else buckets
                clips = job.clip_norm is not None
                settings = Settings(clip=clips, state_bytes=facts.state_bytes, whole=facts.whole)
        log.debug("Lowering and proving the plans")
        plans, work = lower(graph, settings, buckets)
    reasons = [] if trained is not None else [reason for code in codes.values() for reason in code.reasons()]
    recomputes = trained is not None or any(isinstance(directive, Remat) for directive in strategy)
    unheeded = () if recomputes else traced.recording.unheeded()
    return Program(
        job=job,
        graph=work.graph,
        plans=replace(plans, why=(*plans.why, *reasons)),
        work=work,
        codes=codes,
        recordings=capturing.recordings,
        device=capturing.recordings.device,
        warnings=() if trained is not None else (*sliced_warnings(work.graph, samples, capturing), *unheeded),
        cache=capturing.cache,
    )


def directed(
    capturing: Capturing, strategy: list[Directive], samples: int
) -> tuple[Traced, list[Request], Graph]:
    """Trace a model and apply a strategy to its graph. Return also what it shards over axes."""
    traced = capturing.traced(likely_rows(strategy, samples))
    shards = any(isinstance(directive, ShardAxis) for directive in strategy)
    graph = apply(start(traced.outline), strategy, orders=not shards)
    requests = requests_of(graph)
    if requests:  # collectives are nodes that directives see
        check_axes(graph)
        traced = capturing.traced(traced.outline.rows, requests)
    if shards:
        graph = apply(start(traced.outline), strategy)
    return traced, requests, graph


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


def first_batch(job: Job) -> Batch:
    """Return the first batch of a job's data, padded as all are: its types stand for all."""
    data = call_data(job.data)
    batch = take(begin(data, job.data), 1, job.data)
    if batch is None:
        raise ConfigError(
            "data() holds no batch", by=named("data", job.data), hint="return at least one batch"
        )
    if isinstance(data, Iterator) and reads_the_same(data, call_data(job.data)):
        raise ConfigError(
            "data() returns the same iterator each time, so its first batch would be lost to compile",
            by=named("data", job.data),
            hint="let each call make the batches: `def data(): yield from ...`, or return a list or a loader",
        )
    return padded(batch, job.buckets)


@contextmanager
def locate_errors(job: Job, strategy: Sequence[Directive], batch: Batch) -> Iterator[None]:
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
