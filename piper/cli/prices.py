"""The assumed costs of work: from a cluster's data sheet, or as a run has measured them."""

from dataclasses import dataclass
from pathlib import Path

from piper.ir.chunk import CapturedModel
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Costs, Roofline
from piper.simulate.measured import Measured, check_model, read_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Costs, and the cluster or run that they come from."""

    costs: Costs
    name: str
    memory: float = 0.0  # bytes of a device; 0: not known

    def check(self, outline: CapturedModel) -> None:
        """Refuse what was measured on another model."""
        if isinstance(self.costs, Measured):
            check_model(self.costs, outline)


def prices_of(cluster: str, costs: Path | None) -> Prices:
    """Read measured costs where a file is named, else a cluster's; refused before anything costly."""
    if costs is not None:
        measured = read_costs(costs)
        return Prices(costs=measured, name=measured.source)
    machine = load_cluster(cluster)
    return Prices(costs=Roofline(machine), name=machine.name, memory=machine.memory)
