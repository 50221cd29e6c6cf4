"""The calls of a run that move experts between steps, to where the simulator says that steps are shortest."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from piper.plan.expert_table import ExpertTable
from piper.run.sessions import Sessions
from piper.simulate.cluster import known_clusters, load_cluster
from piper.simulate.costs import Costs, Roofline
from piper.simulate.measured import read_costs
from piper.simulate.routing import best_tables, present_step


class MovesExperts:
    """The calls of a run whose strategy has room for clones: `shard(..., clones=n)`."""

    sessions: Sessions

    @property
    def routed(self) -> Mapping[str, Sequence[int]]:
        """Return the rows of each expert in the last step, by regions whose experts can move."""
        return self.sessions.session.rows

    def move_experts(self, tables: Mapping[str, ExpertTable]) -> None:
        """Compute experts where tables say, by region, from the next step on. No state moves."""
        self.sessions.move_experts(tables)

    def expert_places(self) -> dict[str, list[list[list[int]]]]:
        """Return where experts are computed, by regions in which they were moved, for a checkpoint."""
        tables = self.sessions.tables.items()
        return {region: [[*map(list, t.experts)], [*map(list, t.shares)]] for region, t in tables}

    def restore_experts(self, places: Mapping[str, Sequence[Sequence[Sequence[int]]]]) -> None:
        """Compute experts where `expert_places` said, in regions that have as many devices as then."""
        for region, (experts, shares) in places.items():
            table = ExpertTable(experts=tuple(map(tuple, experts)), shares=tuple(map(tuple, shares)))
            self.sessions.tables[region] = table

    def balance_experts(
        self,
        costs: Path | str = "h100",
        rows: Mapping[str, Sequence[int]] | None = None,
        least: float = 0.02,
    ) -> float:
        """Move experts to where the simulator's clock says that a step is shortest.

        costs: the name or the file of a cluster, or the file of measured costs. rows: of each expert, by
        region, if not those of the last step. least: by which part a step must become shorter.
        Return how many times as long a step takes without the move; 1 where nothing moves.
        """
        program, rows = self.sessions.program, self.routed if rows is None else rows
        if not program.plans.cloned or not rows:
            return 1.0
        named = str(costs) in known_clusters() or Path(costs).suffix == ".toml"
        priced: Costs = Roofline(load_cluster(costs)) if named else read_costs(Path(costs))
        given = program.plans, program.outline, priced, rows
        now, best = present_step(*given, self.sessions.tables), best_tables(*given)
        if best.seconds * (1 + least) > now.seconds:
            return 1.0
        self.move_experts(best.tables)
        return now.seconds / best.seconds
