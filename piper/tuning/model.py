"""The model that is tuned: its layers, what can be divided, and tables of costs for every microbatch size."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from piper.capture.layers.annotate_layers import TAG
from piper.capture.recordings import Capturing
from piper.compiler.build import Program, build
from piper.compiler.optimizer_facts import OptimizerFacts
from piper.directives import Directive
from piper.errors import ConfigError
from piper.ir.chunk import CapturedModel, Chunk
from piper.ir.chunk_options import CodeOptions
from piper.ir.dtypes import job_precision
from piper.job import Job
from piper.simulate.costs import Costs
from piper.tuning.bounds import State
from piper.tuning.choice import Divide, Recompute, StrategyChoice
from piper.tuning.model_layers import ModelLayers
from piper.tuning.scaling import scaled

BY = "tune"
Key = tuple[int, Recompute, int, int, int, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A captured model, with the costs of its layers."""

    job: Job
    capturing: Capturing
    costs: Costs
    tag: str  # numbers the layers
    count: int  # of layers
    experts: int  # of each expert region; 0: there are none
    divide: Divide
    state: State
    samples: int  # in a global batch
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

    def layers(
        self,
        rows: int,
        recompute: Recompute,
        experts: int = 1,
        tensor: int = 1,
        context: int = 1,
        *,
        several: bool = False,
    ) -> ModelLayers:
        """Return the costs of the layers for one microbatch size.

        experts: devices that divide the experts. tensor, context: devices that divide every layer.
        several: a device has several microbatches. Compiled backwards then add up their gradients.
        """
        flat = several and self.compiled
        key = (rows, recompute, experts, tensor, context, flat)
        if key not in self.tables and tensor * context > 1:
            whole = self.layers(rows, recompute, experts, several=several)
            self.tables[key] = whole.divided(tensor, context)
        elif key not in self.tables:
            # Fewer experts on a device have less weights to read, and the same rows: the fewest give a bound.
            outline = self.outline(rows, recompute, self.experts if experts > 1 else 1, flat=flat)
            shares = {chunk.name: experts for chunk in outline.chunks if chunk.kind == "expert"}
            self.tables[key] = ModelLayers(
                outline, self.costs, self.tag, across=recompute.across, shares=shares
            )
        return self.tables[key]

    def outline(self, rows: int, recompute: Recompute, experts: int, *, flat: bool = False) -> CapturedModel:
        """Return the differentiated model: as recorded, or from two sizes that were.

        flat: its compiled backwards write gradients into given memory, and can add to it.
        """
        if rows not in self.recorded and len(self.recorded) > 1:
            one, other = (
                self._differentiated(size, recompute, experts, lambda chunk: flat)
                for size in self.recorded[:2]
            )
            made = scaled(one, other, rows)
            if made is not None:
                return made
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
        state = self.state.optimizer - job_precision(self.job.precision).master_bytes
        return build(
            replace(self.job, strategy=strategy),
            self.capturing,
            optimizer=OptimizerFacts(state_bytes=state) if tried else None,
        )


def layers_of(outline: CapturedModel) -> tuple[str, int]:
    """Return the tag that numbers a model's layers, and how many there are.

    That is LAYER, or else the tag that every chunk has with the most indices.
    """
    tags: dict[str, set[int]] = {}
    for chunk in outline.chunks:
        for tag, index in chunk.tags:
            tags.setdefault(tag, set()).add(index)
    everywhere = [
        tag for tag in tags if all(tag in dict(chunk.tags) for chunk in outline.chunks) and len(tags[tag]) > 1
    ]
    if TAG in everywhere:
        return TAG, len(tags[TAG])
    if not everywhere:
        raise ConfigError(
            "the model has no repeated layers to divide into stages",
            by=BY,
            facts={"regions": ", ".join(f"{tag} {len(found)}" for tag, found in tags.items()) or "none"},
            hint="annotate them: model=lambda: piper.annotate_layers(Model()), or annotate_modules(...)",
        )
    tag = max(everywhere, key=lambda name: (len(tags[name]), name))
    return tag, len(tags[tag])
