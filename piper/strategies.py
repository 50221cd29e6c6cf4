"""Whole strategies: integers in, an ordinary list of directives over LAYER tags out, to print and edit.

`piper.annotate_layers` tags the layers of a model so.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise

from piper.directives import Directive, place, replicate, shard, split
from piper.directives.base import check_value
from piper.directives.replicate import ZERO, ZERO_LEVELS
from piper.errors import ScheduleError
from piper.ir.numbers import is_whole
from piper.ir.select import At, at
from piper.schedules.grid import Grid, grid_for, need_whole, orders
from piper.schedules.pairs import pairs

__all__ = ["boundaries", "ddp", "fsdp", "moe", "pipeline", "tensor"]

Placing = Callable[[At, range], Directive | None]
PER_RANK = 4  # microbatches for each rank of a pipeline, unless asked otherwise: its bubble is then small


def pipeline(
    layers: int,
    pp: int,
    dp: int = 1,
    zero: int = 0,
    schedule: str = "1f1b",
    microbatches: int | None = None,
    *,
    stages_per_rank: int | None = None,
    embedding: int = 1,
    head: int = 1,
    bucket_mb: float | None = None,
    within: int | None = None,
) -> list[Directive]:
    """Run layers as a pipeline over `pp` ranks of `dp` devices each: rank r has devices r * dp and following.

    The devices of a rank divide the samples and keep their parameters equal; `zero` says what they shard, and
    `within` inside groups of how many of them, as in `replicate`.
    schedule: a name that `piper schedule` knows. microbatches: 4 for each rank unless given.
    embedding, head: how many layers each of them costs; see `boundaries`.
    """
    by = "strategies.pipeline"
    check_numbers(by, zero, layers=layers, pp=pp, dp=dp)
    microbatches = PER_RANK * pp if microbatches is None else microbatches
    need_whole(by, microbatches=microbatches)
    grid = grid_for(schedule, pp, microbatches, stages_per_rank)
    stages = boundaries(layers, grid.stages, embedding=embedding, head=head)
    return over_ranks(stages, grid, dp, copies(dp, zero, bucket_mb, within))


def fsdp(
    dp: int,
    zero: int = 3,
    *,
    microbatches: int = 1,
    bucket_mb: float | None = None,
    within: int | None = None,
) -> list[Directive]:
    """Return a strategy that shards training state over `dp` devices.

    zero=3 shards parameters, gradients and optimizer state; 2 and 1 shard fewer of these.
    within: shard inside groups of so many neighbouring devices; the groups hold the same.

    Parameters are gathered layer by layer where the model has LAYER tags, and all at once where it has none.
    """
    return data_parallel("strategies.fsdp", dp, zero, microbatches, bucket_mb, within)


def ddp(dp: int, *, microbatches: int = 1, bucket_mb: float | None = None) -> list[Directive]:
    """Keep all parameters whole on each of `dp` devices, and sum their gradients once a step."""
    return data_parallel("strategies.ddp", dp, 0, microbatches, bucket_mb, None)


def moe(
    layers: int,
    dp: int,
    ep: int | None = None,
    pp: int = 1,
    zero: int = 0,
    schedule: str = "1f1b",
    microbatches: int | None = None,
    *,
    stages_per_rank: int | None = None,
    embedding: int = 1,
    head: int = 1,
    bucket_mb: float | None = None,
    within: int | None = None,
    dense: int = 0,
) -> list[Directive]:
    """Shard the experts of each layer over groups of `ep` devices; do all else as `pipeline` and `fsdp` do.

    ep: all `dp` devices of a rank unless given. microbatches: 4 for each rank of a pipeline unless given, and
    1 without one (pp=1). dense: how many layers at the beginning have no experts.
    """
    by = "strategies.moe"
    ep = dp if ep is None else ep
    check_numbers(by, zero, layers=layers, dp=dp, ep=ep, pp=pp)
    if dp % ep:
        raise ScheduleError(
            f"dp={dp} devices cannot form groups of ep={ep}",
            by=by,
            hint="ep is how many devices shard the experts: a divisor of dp",
        )
    if microbatches is None:
        microbatches = 1 if pp == 1 else PER_RANK * pp
    need_whole(by, microbatches=microbatches)
    grid = grid_for(schedule, pp, microbatches, stages_per_rank)
    if grid.stages == 1:
        everything, *others = data_parallel(by, dp, zero, microbatches, bucket_mb, within)
        return [everything, shard(at(), range(dp), ways=ep), *others]
    stages = boundaries(layers, grid.stages, embedding=embedding, head=head)

    without_experts = {at(LAYER=stage).tags[0] for stage in stages if stage.stop <= dense}

    def sharded(stage: At, devices: range) -> Directive | None:
        return shard(stage, devices, ways=ep) if without_experts.isdisjoint(stage.tags) else None

    return over_ranks(stages, grid, dp, copies(dp, zero, bucket_mb, within), sharded)


def tensor(
    layers: int,
    tp: int,
    dp: int = 1,
    pp: int = 1,
    zero: int = 0,
    schedule: str = "1f1b",
    microbatches: int | None = None,
    *,
    weights: Mapping[str, int],
    sequence: bool = True,
    overlap: bool = False,
    stages_per_rank: int | None = None,
    embedding: int = 1,
    head: int = 1,
    bucket_mb: float | None = None,
    within: int | None = None,
) -> list[Directive]:
    """Shard the named weights of every layer over groups of `tp` neighbouring devices.

    Each of `pp` ranks has `dp` such groups, which divide the samples; `zero` says what they shard.
    weights: which parameters are sharded along which dimension, as `shard` takes them; `piper.tensor_plan`
    has those of a Hugging Face model. sequence: activations between layers are sharded along dimension 1.
    overlap: without a pipeline (pp=1), run two microbatches against each other, so that the collectives of
    one hide behind the compute of the other; 2 microbatches unless given, else 4 for each rank of a pipeline
    and 1 without one.
    """
    by = "strategies.tensor"
    check_numbers(by, zero, layers=layers, tp=tp, dp=dp, pp=pp)
    if microbatches is None:
        microbatches = PER_RANK * pp if pp > 1 else 2 if overlap else 1
    need_whole(by, microbatches=microbatches)
    if overlap and (pp > 1 or microbatches < 2):
        raise ScheduleError(
            "overlap=True pairs microbatches without a pipeline",
            by=by,
            facts={"asked": f"pp={pp}, microbatches={microbatches}"},
            hint='give an even number of microbatches, or none, and pp=1; schedule="dualpipe-v" overlaps the '
            "forwards and backwards of a pipeline",
        )
    between = 1 if sequence else None
    if pp == 1:
        everything = range(tp * dp)
        groups = shard(at(), everything, ways=tp, axis="TP", weights=weights, between=between)
        replicas = (
            [replicate(at(), everything, zero=zero, bucket_mb=bucket_mb, within=within)] if dp > 1 else []
        )
        parts = [split(at(), axis="MB", parts=microbatches)] if microbatches > 1 else []
        return [*replicas, groups, *parts, *(pairs(microbatches) if overlap else [])]
    grid = grid_for(schedule, pp, microbatches, stages_per_rank)
    stages = boundaries(layers, grid.stages, embedding=embedding, head=head)

    def sharded(stage: At, devices: range) -> Directive:
        return shard(stage, devices, ways=tp, axis="TP", weights=weights, between=between)

    replicated = [copies(dp, zero, bucket_mb, within)] if dp > 1 else []
    return over_ranks(stages, grid, tp * dp, *replicated, sharded)


def boundaries(layers: int, stages: int, *, embedding: int = 1, head: int = 1) -> list[range]:
    """Return the layers of each stage, so that the heaviest stage is as light as it can be.

    The first stage also has the embedding and the last one the head. `embedding` and `head` are their cost
    in layers. Stages that could have one layer more come first.

    boundaries(8, 4) --> range(0, 2), range(2, 5), range(5, 7), range(7, 8)
    """
    by = "strategies.boundaries"
    need_whole(by, layers=layers, stages=stages)
    for name, cost in (("embedding", embedding), ("head", head)):
        if not is_whole(cost, 0):
            raise ScheduleError(f"{name}={cost!r}", by=by, hint=f"{name} is a whole number of layers from 0")
    if layers < stages:
        raise ScheduleError(
            f"layers={layers} cannot fill {stages} stages",
            by=by,
            hint="use fewer ranks, or fewer stages on each: every stage needs a layer",
        )
    sizes, loads = [1] * stages, [1] * stages
    loads[0] += embedding
    loads[-1] += head
    for _ in range(layers - stages):
        lightest = loads.index(min(loads))
        sizes[lightest] += 1
        loads[lightest] += 1
    return [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]


def data_parallel(
    by: str, dp: int, zero: int, microbatches: int, bucket_mb: float | None, within: int | None
) -> list[Directive]:
    """Return a strategy in which each of `dp` devices runs the whole model on its samples."""
    check_numbers(by, zero, dp=dp, microbatches=microbatches)
    everything: Directive = replicate(at(), range(dp), zero=zero, bucket_mb=bucket_mb, within=within)
    return [everything, *([split(at(), axis="MB", parts=microbatches)] if microbatches > 1 else [])]


def over_ranks(
    stages: list[range], grid: Grid, width: int, *kinds: Placing, tag: str = "LAYER"
) -> list[Directive]:
    """Return the directives of a pipeline: the stages on their ranks of `width` devices, split and in order.

    kinds: make a directive, or none, of a stage or some of its microbatches, and of the devices of a rank.
    tag: of the regions whose numbers the stages are.
    """
    parts_of: dict[int, dict[int, dict[int, None]]] = {}  # stage -> rank -> its microbatches
    for rank, action in grid.actions():
        parts_of.setdefault(action.stage, {}).setdefault(rank, {})[action.microbatch] = None
    both_ways = any(len(ranks) > 1 for ranks in parts_of.values())
    directives = [
        kind(
            at(None, **{tag: layers}, MB=sorted(parts)) if both_ways else at(None, **{tag: layers}),
            range(rank * width, (rank + 1) * width),
        )
        for kind in kinds
        for stage, layers in enumerate(stages)
        for rank, parts in sorted(parts_of[stage].items(), key=lambda found: min(found[1]))
    ]
    placed = [directive for directive in directives if directive is not None]
    parts = split(at(), axis="MB", parts=grid.microbatches)
    order = orders(grid, stage=[at(None, **{tag: stage}) for stage in stages])
    return [parts, *placed, *order] if both_ways else [*placed, parts, *order]


def copies(dp: int, zero: int, bucket_mb: float | None = None, within: int | None = None) -> Placing:
    """Return what puts a stage on the devices of a rank, of which `dp` share the samples."""

    def placed(stage: At, devices: range) -> Directive:
        if dp == 1 and not zero:
            return place(stage, devices)
        return replicate(stage, devices, zero=zero, bucket_mb=bucket_mb, within=within)

    return placed


def check_numbers(by: str, zero: int, **numbers: int) -> None:
    """Refuse numbers that are not whole or below 1, and a ZeRO level that does not exist."""
    need_whole(by, **numbers)
    check_value("zero", zero, ZERO, ZERO_LEVELS, by)
