"""What a script asks of a run besides training: to evaluate, to predict, other options, experts elsewhere."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from piper.data.feed import check_fields, one_epoch
from piper.errors import ConfigError
from piper.ir.json_fields import from_json, to_json
from piper.ir.numbers import is_number
from piper.plan.expert_table import ExpertTable, fits
from piper.run.session import Sessions, asking
from piper.runtime.expert_exchange import TABLES, field_of_tables
from piper.runtime.setup import Forward
from piper.simulate.cluster import known_clusters, load_cluster
from piper.simulate.costs import Costs, Roofline
from piper.simulate.measured import read_costs
from piper.simulate.routing import best_tables, present_step
from piper.workers.results import Batch, EvaluationResult, Means
from piper.workers.serve import WorkerAnswers


class RunCalls:
    """The calls of a run that train nothing."""

    sessions: Sessions
    tables: dict[str, ExpertTable]  # of experts, by region. Others are as the plan has them

    def evaluate(self, batches: Iterable[Batch] | None = None) -> EvaluationResult:
        """Evaluate on global batches, by default those of the job's `evaluate`; nothing is trained.

        The model is in eval mode. A mean loss counts each batch by its samples, a (sum, weight) by its
        weight, and so do metrics.
        """
        means, job = Means(), self.sessions.program.job
        if batches is None:
            if job.evaluate is None:
                some = "let the job have some: piper.Job(..., evaluate=piper.Evaluate(data=...))"
                hint = f"give them: run.evaluate(batches); or {some}"
                raise ConfigError("there are no batches to evaluate on", by="evaluate", hint=hint)
            batches = one_epoch(job.evaluate.data, job.seed)
        for batch in batches:
            check_fields(batch, "evaluate")
            means = self._evaluate(batch, means)
        return means.result()

    @asking
    def _evaluate(self, batch: Batch, means: Means) -> Means:
        return self.sessions.session.evaluate(batch, means)

    def predict(self, batch: Batch, forward: Forward) -> Tensor:
        """Return `forward(model, batch)` for a global batch, in eval mode, on the host; nothing is trained.

        forward: returns one tensor with a row for each sample; the rows come back in the order of the batch.
        It runs under the job's strategy, on one slice of the samples at a time. It is compiled once for each
        shape of batches: give the same function each time.
        """
        check_fields(batch, "predict")
        return self.sessions.call(lambda: self.sessions.session.predict(batch, forward))

    @property
    def optimizer(self) -> "list[OptimizerGroup]":
        """Return the options of the optimizer's groups: `run.optimizer[0]["lr"] = 1e-4`."""
        return [OptimizerGroup(self, number) for number in range(len(self.optimizer_groups()))]

    @asking
    def optimizer_groups(self) -> list[dict[str, object]]:
        """Return the options of each group of parameters, as a device has them that trains some of it."""
        answers = self.sessions.session.ask_all(WorkerAnswers.optimizer_options, None)
        groups = zip(*(each for each in answers.values() if each), strict=True)
        return [max(said, key=itemgetter(0))[1] for said in groups]

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group of parameters on all devices."""
        self.sessions.set_optimizer_option(group, key, value)

    @property
    def routed(self) -> Mapping[str, Sequence[int]]:
        """Return the rows of each expert in the last step, by regions whose experts can move."""
        return self.sessions.call(lambda: self.sessions.session.rows)

    def move_experts(self, tables: Mapping[str, ExpertTable]) -> None:
        """Compute experts where tables say, by region, from the next step on. No state moves."""
        for region, table in tables.items():
            bucket = self.sessions.program.plans.cloned.get(region)
            if bucket is None:
                raise ConfigError(
                    f"{region!r} has no experts that could move",
                    by="move_experts",
                    facts={"regions": ", ".join(self.sessions.program.plans.cloned) or "none"},
                    hint="name one of these regions; shard(..., clones=n) makes one",
                )
            devices, own, clones = bucket.table_sizes
            if not fits(table, devices, own, clones):
                sizes = f"{devices} devices, {own} own slots, {clones} for clones"
                raise ConfigError(
                    "the table of experts does not fit its region",
                    by="move_experts",
                    facts={"region": region, "sizes": sizes},
                    hint="own experts come first; each expert has a share somewhere; -1 is an unused slot",
                )
        self.tables |= tables

    def with_tables(self, batch: Batch) -> Batch:
        """Return a batch with the tables of experts that its step needs: those that fit the program."""
        if not self.tables:
            return batch
        cloned = self.sessions.program.plans.cloned  # another one where the number of devices has changed
        here = ((cloned[region], region, table) for region, table in self.tables.items() if region in cloned)
        fitting = {region: table for bucket, region, table in here if fits(table, *bucket.table_sizes)}
        return {**batch, TABLES: field_of_tables(fitting, cloned)} if fitting else batch

    def expert_places(self) -> dict[str, list[list[list[int]]]]:
        """Return where experts are computed, by regions in which they were moved, for a checkpoint."""
        return {region: [to_json(t.experts), to_json(t.shares)] for region, t in self.tables.items()}

    def restore_experts(self, places: Mapping[str, Sequence[Sequence[Sequence[int]]]]) -> None:
        """Compute experts where `expert_places` said, in regions that have as many devices as then."""
        self.tables |= {region: from_json(ExpertTable, [*tables]) for region, tables in places.items()}

    def balance_experts(
        self, costs: Path | str = "h100", rows: Mapping[str, Sequence[int]] | None = None, least: float = 0.02
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
        now, best = present_step(*given, self.tables), best_tables(*given)
        if best.seconds * (1 + least) > now.seconds:
            return 1.0
        self.move_experts(best.tables)
        return now.seconds / best.seconds


class OptimizerGroup(Mapping[str, object]):
    """The options of one group of parameters. Those that are numbers can be set, between steps."""

    def __init__(self, run: RunCalls, number: int) -> None:
        self.run, self.number = run, number

    @property
    def options(self) -> dict[str, Any]:
        """Return the options as they are now."""
        return self.run.optimizer_groups()[self.number]

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401  an optimizer may have any options
        return self.options[key]

    def __setitem__(self, key: str, value: float) -> None:
        known = self.options
        if key not in known or not is_number(value):
            raise ConfigError(
                f"the option {key!r} of an optimizer cannot be set to {value!r}",
                by="run.optimizer",
                facts={"options": ", ".join(known)},
                hint='set one of these to a number: run.optimizer[0]["lr"] = 1e-4',
            )
        self.run.set_optimizer_option(self.number, key, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self.options)

    def __len__(self) -> int:
        return len(self.options)

    def __repr__(self) -> str:
        return repr(self.options)
