"""A strategy that the user has: the search starts from it, and divides layers as it does."""

from collections.abc import Sequence

from piper.directives import Directive
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.shard_axis import ShardAxis
from piper.directives.split import Split
from piper.errors import ConfigError
from piper.ir.select import At
from piper.job import Job, directives_for, strategy_of
from piper.tuning.choice import GIVEN, Divide, StrategyChoice

BY = "tune"


def own_strategy(job: Job, devices: int) -> list[Directive] | None:
    """Return the strategy that a job has. None: it has none, or one for more devices."""
    if job.elastic is not None:
        fewest, most = job.elastic
        return list(directives_for(job, devices)) if fewest <= devices <= most else None
    strategy = strategy_of(job)
    used = {device for group in placed_on(strategy) for device in group}
    return strategy if used and max(used) < devices else None


def placed_on(strategy: Sequence[Directive]) -> set[tuple[int, ...]]:
    """Return the sets of devices on which a strategy places regions."""
    return {directive.devices for directive in strategy if isinstance(directive, Place | Replicate)}


def given_choice(strategy: Sequence[Directive], devices: int, samples: int, layers: int) -> StrategyChoice:
    """Return the entry of a given strategy among the candidates. Refuse one for more devices."""
    placed = placed_on(strategy)
    used = {device for group in placed for device in group}
    if not used or max(used) >= devices:
        raise ConfigError(
            "the strategy to start from does not fit the devices",
            by=BY,
            facts={"it uses": f"devices up to {max(used)}" if used else "none", "there are": str(devices)},
            hint=f"place its regions on devices 0 to {devices - 1}, or search for more devices",
        )
    split = split_of(strategy)
    parts = 1 if split is None else split.parts
    replicas = max(1, devices // len(placed))
    return StrategyChoice(
        ranks=len(placed),
        replicas=replicas,
        rows=max(1, samples // (parts * replicas)),
        microbatches=parts,
        sizes=(layers,),
        schedule=GIVEN,
    )


def split_of(strategy: Sequence[Directive]) -> Split | None:
    """Return the directive that cuts the whole batch into microbatches. None: there is none, or several."""
    splits = [directive for directive in strategy if isinstance(directive, Split)]
    return splits[0] if len(splits) == 1 and splits[0].at == At() else None


def divided_as(strategy: Sequence[Directive], known: Divide) -> Divide:
    """Return how a strategy divides layers for tensor and context parallelism; `known` where it does not."""
    axes = [directive for directive in strategy if isinstance(directive, ShardAxis)]
    weights = next((axis.weights for axis in axes if axis.weights), known.weights)
    sliced = next((axis for axis in axes if axis.batch), None)
    if sliced is None:
        return Divide(weights=weights, fields=known.fields)
    return Divide(weights=weights, fields=sliced.batch, attention=sliced.attention, balance=sliced.balance)
