"""What the verbs that simulate take for the price of a step: measured costs, a cluster, or both."""

from dataclasses import dataclass
from pathlib import Path

from piper.ir.chunk import CapturedModel
from piper.plan.plan import Plans
from piper.simulate.cluster import Cluster, load_cluster
from piper.simulate.costs import Costs, Roofline
from piper.simulate.measured import Measured, MeasuredOn, check_model, read_costs
from piper.simulate.memory import communicators_of

CLUSTER = "h100"  # where nothing is named


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Costs, and the cluster or run that they come from."""

    costs: Costs
    name: str
    cluster: Cluster | None = None  # None: only costs are known
    measured: Measured | None = None

    def usable(self, plans: Plans) -> tuple[float, ...]:
        """Return the bytes of a device that each program may use. Empty: its memory is not known."""
        if self.cluster is None:
            return ()
        return tuple(self.cluster.usable(communicators_of(plan)) for plan in plans)

    def check(self, outline: CapturedModel) -> None:
        """Refuse what was measured on another model."""
        if self.measured is not None:
            check_model(self.measured, outline)


def prices_of(cluster: str | Path | None, costs: Path | None, *, default: str = CLUSTER) -> Prices:
    """Read measured costs, a cluster, or both. Refuse what cannot be read before anything costly.

    Both: computing takes as long as it was measured, communication as long as the cluster's links take.
    default: the cluster where neither is named.
    """
    if costs is None:
        machine = load_cluster(cluster or default)
        return Prices(costs=Roofline(machine), name=machine.name, cluster=machine)
    measured = read_costs(costs)
    if cluster is None:
        return Prices(costs=measured, name=measured.source, measured=measured)
    machine = load_cluster(cluster)
    return Prices(
        costs=MeasuredOn(measured, machine),
        name=f"{measured.source} with the links of {machine.name}",
        cluster=machine,
        measured=measured,
    )
