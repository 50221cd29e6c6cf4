"""Hand-made outlines: a chain of stages to try directives and schedules on without a model."""

from dataclasses import dataclass, field, replace

from piper.ir.chunk import (
    Batch,
    CapturedModel,
    Chunk,
    Output,
    Parameter,
    Phase,
    PhaseSpec,
    Source,
    Tags,
    TensorSpec,
)

UNIT = 10**12  # flops of one unit of cost


def chain(
    stages: int,
    *,
    tag: str = "PP",
    width: int = 1024,
    rows: int = 1,
    layers: int = 1,
    experts: int = 0,
    tied: bool = False,
    split_cost: tuple[int, int, int] = (1, 1, 1),
) -> CapturedModel:
    """Return a chain of `stages`, each with `layers` weight matrices. F, I and W cost `split_cost` units.

    With `experts`, each stage routes to an expert region EP=stage between two dense pieces. With `tied`, the
    first and the last stage share one parameter.
    """
    made = _Chain(width=width, rows=rows, cost=split_cost)
    source: Source = Batch(field="x")
    for stage in range(stages):
        tags = ((tag, stage),)
        name = f"{tag}={stage}"
        own = made.weights(f"stages.{stage}", layers)
        if tied and stage in (0, stages - 1):
            own = (made.weight("shared"), *own)
        out = made.scalar if stage == stages - 1 else made.hidden
        if experts:
            made.dense(name, tags, source, own, (made.hidden, made.counts(experts)))
            source = made.routed(
                name, (*tags, ("EP", stage)), experts, made.weights(f"experts.{stage}", 1, experts)
            )
            name, own = f"{name} #1", made.weights(f"post.{stage}", 1)
        made.dense(name, tags, source, own, (out,))
        source = Output(chunk=name, index=0)
    return CapturedModel(
        chunks=tuple(made.chunks),
        loss=Output(chunk=made.chunks[-1].name, index=0),
        parameters=tuple(made.parameters.values()),
        batch={"x": made.hidden},
        rows=rows,
    )


@dataclass(slots=True, kw_only=True)
class _Chain:
    """A chain under construction."""

    width: int
    rows: int
    cost: tuple[int, int, int]
    chunks: list[Chunk] = field(default_factory=list)
    parameters: dict[str, Parameter] = field(default_factory=dict)

    @property
    def hidden(self) -> TensorSpec:
        return TensorSpec(shape=(self.rows, self.width), dtype="float32", nbytes=4 * self.rows * self.width)

    @property
    def scalar(self) -> TensorSpec:
        return TensorSpec(shape=(), dtype="float32", nbytes=4)

    def counts(self, experts: int) -> TensorSpec:
        return TensorSpec(shape=(experts,), dtype="int64", nbytes=8 * experts)

    def weight(self, name: str, lead: tuple[int, ...] = ()) -> str:
        """Add a square parameter, or one for each expert, and return its name."""
        self.parameters[name] = Parameter(name=name, shape=(*lead, self.width, self.width), dtype="float32")
        return name

    def weights(self, name: str, count: int, experts: int = 0) -> tuple[str, ...]:
        return tuple(self.weight(f"{name}.{i}", (experts,) if experts else ()) for i in range(count))

    def dense(
        self, name: str, tags: Tags, source: Source, params: tuple[str, ...], outputs: tuple[TensorSpec, ...]
    ) -> None:
        """Add a chunk that reads one value and its weights, and saves one value."""
        self.chunks.append(self._matmuls(name, tags, (source,), params, (self.hidden,), outputs))

    def _matmuls(
        self,
        name: str,
        tags: Tags,
        inputs: tuple[Source, ...],
        params: tuple[str, ...],
        specs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
    ) -> Chunk:
        forward, inward, weight = (cost * UNIT for cost in self.cost)
        read = tuple(range(len(inputs)))
        grads = () if isinstance(inputs[0], Batch) else (0,)
        phases: dict[Phase, PhaseSpec] = {
            "F": PhaseSpec(inputs=read, params=params, flops=forward),
            "B": PhaseSpec(
                inputs=read,
                params=params,
                saved=(0,),
                tangents=(0,),
                grad_inputs=grads,
                grad_params=params,
                flops=inward + weight,
            ),
            "BI": PhaseSpec(
                inputs=read[1:], params=params, saved=(0,), tangents=(0,), grad_inputs=grads, flops=inward
            ),
            "BW": PhaseSpec(inputs=read, carried=(0,), grad_params=params, flops=weight),
        }
        return Chunk(
            name=name,
            tags=tags,
            key=f"dense {len(params)} {outputs[0].shape} {grads}",
            inputs=inputs,
            input_specs=specs,
            params=params,
            outputs=outputs,
            saved=specs[:1],
            carried=specs[:1],
            phases=phases,
        )

    def routed(self, owner: str, tags: Tags, experts: int, params: tuple[str, ...]) -> Output:
        """Add a route, an expert chunk and an unroute, as capture cuts them, and return the last output.

        The owner computes the rows and the counts.
        """
        name = f"{owner} {tags[-1][0]}={tags[-1][1]}"
        rows = replace(self.hidden, dynamic_rows=True)
        counts = self.counts(experts)
        moved: dict[Phase, PhaseSpec] = {
            "F": PhaseSpec(inputs=(0, 1)),
            "B": PhaseSpec(tangents=(0,), grad_inputs=(0,)),
        }
        route = Chunk(
            name=f"{name} route",
            tags=tags,
            kind="route",
            inputs=(Output(chunk=owner, index=0), Output(chunk=owner, index=1)),
            input_specs=(self.hidden, counts),
            outputs=(rows, counts),
            phases=moved,
            experts=experts,
        )
        arrived = (Output(chunk=route.name, index=0), Output(chunk=route.name, index=1))
        expert = replace(
            self._matmuls(name, tags, arrived, params, (rows, counts), (rows,)),
            kind="expert",
            key=f"expert {experts}",
            experts=experts,
        )
        unroute = Chunk(
            name=f"{name} unroute",
            tags=tags,
            kind="unroute",
            inputs=(Output(chunk=name, index=0), Output(chunk=route.name, index=1)),
            input_specs=(rows, counts),
            outputs=(self.hidden,),
            phases=moved,
            experts=experts,
        )
        self.chunks += [route, expert, unroute]
        return Output(chunk=unroute.name, index=0)
