"""Outlines made by hand: a chain of stages to try directives and schedules on without a model."""

from piper.ir.chunk import (
    Batch,
    Chunk,
    Outline,
    Output,
    Parameter,
    PhaseSpec,
    Source,
    TensorSpec,
)


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
) -> Outline:
    """A chain of `stages`, each with `layers` weight matrices; F, I and W cost `split_cost` units.

    With `experts`, each stage routes to an expert region EP=stage between two dense pieces. With `tied`, the first
    and the last stage share one parameter.
    """
    hidden = TensorSpec(shape=(rows, width), dtype="float32", nbytes=4 * rows * width)
    scalar = TensorSpec(shape=(), dtype="float32", nbytes=4)
    parameters: dict[str, Parameter] = {}
    chunks: list[Chunk] = []

    def weights(name: str, count: int, lead: tuple[int, ...] = ()) -> tuple[str, ...]:
        names = tuple(f"{name}.{i}" for i in range(count))
        for param in names:
            parameters[param] = Parameter(name=param, shape=(*lead, width, width), dtype="float32")
        return names

    def dense(
        name: str, stage: int, source: Source, params: tuple[str, ...], output: TensorSpec, first: bool = False
    ) -> Chunk:
        return _matmuls(name, ((tag, stage),), source, params, hidden, output, not first, split_cost)

    source: Source = Batch(field="x")
    for stage in range(stages):
        own = weights(f"stages.{stage}", layers)
        last = stage == stages - 1
        if tied and stage in (0, stages - 1):
            own = ("shared", *own)
            parameters["shared"] = Parameter(name="shared", shape=(width, width), dtype="float32")
        name = f"{tag}={stage}"
        if experts:
            chunks += [
                dense(name, stage, source, own, hidden, first=stage == 0),
                *_expert_region(name, ((tag, stage), ("EP", stage)), hidden, experts, weights(f"experts.{stage}", 1, (experts,))),
            ]
            parameters[f"experts.{stage}.0"] = Parameter(
                name=f"experts.{stage}.0", shape=(experts, width, width), dtype="float32"
            )
            source = Output(chunk=f"{name} EP={stage} unroute", index=0)
            own, name = weights(f"post.{stage}", 1), f"{name} #1"
            chunks.append(dense(name, stage, source, own, scalar if last else hidden))
        else:
            chunks.append(dense(name, stage, source, own, scalar if last else hidden, first=stage == 0))
        source = Output(chunk=name, index=0)
    return Outline(
        chunks=tuple(chunks),
        loss=Output(chunk=chunks[-1].name, index=0),
        parameters=tuple(parameters.values()),
        batch={"x": hidden},
        rows=rows,
    )


def _matmuls(
    name: str,
    tags: tuple[tuple[str, int], ...],
    source: Source,
    params: tuple[str, ...],
    hidden: TensorSpec,
    output: TensorSpec,
    differentiable: bool,
    cost: tuple[int, int, int],
) -> Chunk:
    """A dense chunk: reads one value and its weights, saves one value, writes one."""
    unit = 10**12
    forward, inward, weight = (c * unit for c in cost)
    grads = (0,) if differentiable else ()
    return Chunk(
        name=name,
        tags=tags,
        key=f"dense {len(params)} {output.shape} {differentiable}",
        inputs=(source,),
        input_specs=(hidden,),
        params=params,
        outputs=(output,),
        saved=(hidden,),
        carried=(hidden,),
        phases={
            "F": PhaseSpec(inputs=(0,), params=params, flops=forward),
            "B": PhaseSpec(
                inputs=(0,), params=params, saved=(0,), tangents=(0,), grad_inputs=grads, grad_params=params,
                flops=inward + weight,
            ),
            "BI": PhaseSpec(params=params, saved=(0,), tangents=(0,), grad_inputs=grads, flops=inward),
            "BW": PhaseSpec(inputs=(0,), carried=(0,), grad_params=params, flops=weight),
        },
    )


def _expert_region(
    owner: str, tags: tuple[tuple[str, int], ...], rows: TensorSpec, experts: int, params: tuple[str, ...]
) -> tuple[Chunk, Chunk, Chunk]:
    """A route, an expert chunk and an unroute, as capture cuts them. The owner's output 0 also gives the counts."""
    name = f"{owner} {tags[-1][0]}={tags[-1][1]}"
    routed = TensorSpec(shape=rows.shape, dtype=rows.dtype, nbytes=rows.nbytes, dynamic_rows=True)
    counts = TensorSpec(shape=(experts,), dtype="int64", nbytes=8 * experts)
    moved = {
        "F": PhaseSpec(inputs=(0, 1)),
        "B": PhaseSpec(tangents=(0,), grad_inputs=(0,)),
    }
    out = Output(chunk=owner, index=0)
    route = Chunk(
        name=f"{name} route", tags=tags, kind="route", inputs=(out, out), input_specs=(rows, counts),
        outputs=(routed, counts), phases=moved, experts=experts,
    )
    expert = _matmuls(name, tags, Output(chunk=route.name, index=0), params, routed, routed, True, (1, 1, 1))
    expert = Chunk(
        name=name, tags=tags, kind="expert", key=f"expert {experts}",
        inputs=(*expert.inputs, Output(chunk=route.name, index=1)), input_specs=(routed, counts),
        params=params, outputs=(routed,), saved=(routed,), carried=(routed,),
        phases={
            phase: PhaseSpec(
                inputs=(*spec.inputs, 1), params=spec.params, saved=spec.saved, carried=spec.carried,
                tangents=spec.tangents, grad_inputs=spec.grad_inputs, grad_params=spec.grad_params, flops=spec.flops,
            )
            for phase, spec in expert.phases.items()
        },
        experts=experts,
    )  # fmt: skip
    unroute = Chunk(
        name=f"{name} unroute", tags=tags, kind="unroute",
        inputs=(Output(chunk=name, index=0), Output(chunk=route.name, index=1)), input_specs=(routed, counts),
        outputs=(rows,), phases=moved, experts=experts,
    )  # fmt: skip
    return route, expert, unroute
