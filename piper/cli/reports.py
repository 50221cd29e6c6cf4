"""What each verb answers to `--json`: the types that the schema is made from. A note says what a field is.

A field keeps its name and meaning as long as SCHEMA does. A new one may come; so may a report of a new verb.
"""

from collections.abc import Mapping
from typing import Annotated as Note
from typing import NotRequired, TypeAlias, TypedDict

SCHEMA = 1  # raised when a field goes, or means something else


class PlanReport(TypedDict):
    """Lists go device by device, in the order of `devices`."""

    devices: list[int]
    nodes: Note[int, "of the training graph"]
    instructions: list[int]
    comm_bytes: Note[list[int], "sent in a step"]
    peak_bytes: list[int]
    survives: NotRequired[Note[dict[str, object], "with protect: what the job survives"]]
    offload_bytes: NotRequired[Note[list[int], "with offload: copied to the host in a step"]]
    host_bytes: NotRequired[Note[list[int], "with offload: of the host's memory, at the peak"]]


class CheckReport(TypedDict):
    """Differences are relative; null: not a finite number."""

    ok: bool
    max_loss_diff: float | None
    max_grad_diff: float | None
    max_param_diff: float | None
    first_bad: Note[str | None, "the first node that differs, else the parameter, else the reason"]
    notes: list[str]
    sliced: Note[str | None, "why it equals the same slices in plain PyTorch, and not the whole batch"]
    groups: Note[int, "that train apart, each as one device"]


class PathReport(TypedDict):
    """A node of the critical path."""

    node: str
    op: str
    device: int
    start_s: float
    end_s: float
    reason: Note[str, "why it began then: first, stream, event or peer"]


class LengthStepReport(TypedDict):
    """A step on batches of one length."""

    length: int
    limit: Note[int | None, "of the strategy that it has"]
    step_s: float
    peak_bytes: Note[float, "of the fullest device"]


class MoveReport(TypedDict):
    """A move of the state before a step of another length."""

    before: Note[int, "a length"]
    after: Note[int, "a length"]
    bytes: Note[int, "that a device sends or gets"]
    seconds: float
    peak_bytes: Note[float, "of the fullest device, meanwhile"]


class SimulateReport(TypedDict):
    """Lists go device by device, as `devices`. With strategies by length: of the first batch."""

    on: str
    step_s: float
    mean_step_s: NotRequired[Note[float, "with average: over steps that do and do not"]]
    bubble: Note[float, "from 0 to 1, over all devices"]
    tokens_per_s: NotRequired[Note[float, "of a model of tokens"]]
    samples_per_s: NotRequired[Note[float, "of any other"]]
    mfu: Note[float | None, "the share of the devices' peak; null: not known"]
    devices: list[int]
    busy_s: list[float]
    bubble_s: list[float]
    bubble_rate: list[float]
    exposed_s: Note[list[dict[str, float]], "communication that nothing hides, by operation"]
    communication_s: list[dict[str, float]]
    contention_s: list[float]
    peak_bytes: list[float]
    usable_bytes: Note[list[float | None], "what a device of the cluster has for them; null: not known"]
    offloaded_bytes: NotRequired[list[int]]
    host_bytes: NotRequired[Note[list[int], "with protect: of each machine"]]
    at_peak: Note[list[dict[str, float]], "the largest values that are live at the peak, in bytes"]
    critical_path: list[PathReport]
    lengths: NotRequired[Note[list[LengthStepReport], "with a strategy for each length"]]
    moves: NotRequired[Note[list[MoveReport], "between strategies that hold the state differently"]]


class TrainReport(TypedDict):
    """How a training ended. Its steps are in the file `metrics`, one object on each line."""

    run: Note[str, "the folder"]
    metrics: Note[str | None, "a file; null: no step was done"]
    step: Note[int, "how far the run is, steps before a resume included"]
    steps: Note[int, "how far it was to go"]
    first_loss: Note[float | None, "of the first step of this call; null: there was none to do"]
    last_loss: float | None
    seconds: Note[float, "of steps"]
    saved: Note[bool, "the last step is in a checkpoint"]
    stopped: Note[str | None, "preempted (exit code 75) or interrupted (130); null: it reached its last step"]


class RankReport(TypedDict):
    """`train --on rank:N`: one device of a job alone."""

    rank: str
    devices: int
    on: str
    step_s: float
    planned_bytes: int
    predicted_bytes: int
    measured_bytes: int | None


class CandidateReport(TypedDict):
    """A candidate that was compiled."""

    label: str
    step_s: float
    measured_s: float | None
    bound_s: float
    peak_bytes: float
    reason: Note[str, "why it was not chosen"]


class BestReport(CandidateReport):
    """The chosen candidate."""

    strategy: Note[list[dict[str, object]], "a JSON strategy, as --out writes it"]


class LoserReport(TypedDict):
    """A candidate, or a group of them, that was not compiled."""

    label: str
    group: Note[bool, "a whole group, of which this is the plainest"]
    reason: str


class TuneReport(TypedDict):
    """The search for a strategy."""

    best: BestReport
    evaluated: Note[int, "candidates compiled"]
    seconds: float
    complete: Note[bool, "the bounds rule out all others"]
    interrupted: bool
    limit_bytes: float
    load: float | None
    margin: float | None
    traced: Note[list[int], "sizes of microbatches"]
    ranked: Note[list[CandidateReport], "in the order of their times"]
    front: Note[list[CandidateReport], "those that none beats in both time and memory"]
    discarded: Note[dict[str, int], "how many, by the reason"]
    losers: list[LoserReport]


class LengthReport(CandidateReport):
    """The strategy of one length of batches."""

    length: int
    share: Note[float, "of the batches that were looked at"]
    evaluated: Note[int, "candidates compiled"]


class TuneLengthsReport(TypedDict):
    """`tune --lengths`: the search for a strategy for each length of batches."""

    step_s: Note[float, "mean of a step over the lengths, with its moves"]
    moves_s: Note[float, "mean of the move of the state before a step"]
    strategy: Note[dict[str, list[dict[str, object]]], "a JSON strategy by length, as --out writes it"]
    lengths: list[LengthReport]


class RowReport(TypedDict):
    """Instructions of one kind, or of one node: of one device in one step, on average."""

    node: Note[str, "all microbatches together; of instructions of one kind, their op"]
    op: str
    calls: float
    total_s: float
    median_s: Note[float, "of one call"]
    waited_s: float
    cpu_s: float
    bytes: float


class ProfileReport(TypedDict):
    """What the recorded steps were made of."""

    recipe: str
    on: str
    model: str
    devices: list[int]
    first_step: int
    step_s: list[float]
    clock_error_s: float
    ops: list[RowReport]
    nodes: list[RowReport]


class MachineReport(TypedDict):
    """`profile --cluster-out` without anything to profile."""

    cluster: Note[str, "the file"]


class SideReport(TypedDict):
    """One of two strategies; times in seconds, or in units where `clock` says so."""

    name: str
    devices: float
    programs: float
    instructions: float
    step: float
    bubble: float
    exposed: float
    comm_bytes: float
    peak_bytes: float
    resident_bytes: float


class SeatReport(TypedDict):
    """Where a node runs."""

    devices: str
    stream: str


class MovedReport(TypedDict):
    """A node on other devices, or another stream."""

    node: str
    a: SeatReport
    b: SeatReport


class ShiftedReport(TypedDict):
    """A node at another place in its device's order, counted among the nodes that it issues in both."""

    node: str
    device: int
    a: int
    b: int


class ChangesReport(TypedDict):
    """The nodes that differ from one strategy to the other."""

    only_a: list[str]
    only_b: list[str]
    moved: list[MovedReport]
    shifted: list[ShiftedReport]


class DiffReport(ChangesReport):
    """Two strategies compared."""

    clock: Note[str, "the cluster, or units"]
    a: SideReport
    b: SideReport


class SelftestPart(TypedDict):
    """One part of a self-test. A row has its name, its own figures, ok (null: measured only) and why."""

    title: str
    ok: bool
    seconds: float
    rows: list[dict[str, object]]


class SelftestReport(TypedDict):
    """What a self-test of a machine found."""

    ok: bool
    verdict: str
    place: str
    compiled: bool
    seconds: float
    cpu_seconds: float
    skipped: list[str]
    parts: list[SelftestPart]


class ScheduleReport(TypedDict):
    """A pipeline schedule."""

    name: str
    ranks: int
    microbatches: int
    rows: Note[list[list[str]], "of each rank, its actions in order, as torch writes them: 0F0, 1B2"]
    summary: Note[str | None, "of a synthesised one: how far it is from the best"]
    svg: Note[str | None, "the file that was written"]


class ViewReport(TypedDict):
    """What was drawn."""

    title: str
    files: Note[dict[str, str], "by kind: page, svg, trace"]


class InitReport(TypedDict):
    """The recipe that was written."""

    file: str
    recipes: Note[list[str], "file.py:function, for the other verbs"]


class ExportReport(TypedDict):
    """A checkpoint that was written for another program."""

    folder: str
    format: str
    model: str
    checkpoint: Note[str, "where it comes from"]
    step: int
    bytes: int


class ImportReport(TypedDict):
    """A run that goes on from another program's checkpoint."""

    run: str
    step: int
    optimizer: Note[bool, "its state was in the checkpoint"]
    train: Note[str, "the command that goes on"]


class ErrorReport(TypedDict):
    """Why there is no answer: exit code 2."""

    kind: Note[str, "the class of the error, such as ScheduleError"]
    message: Note[str, "all of it, as on stderr"]
    what: str
    by: Note[str, "the directive, file or option"]
    facts: dict[str, str]
    hint: str


class FailureReport(TypedDict):
    """What any verb prints when it fails."""

    error: ErrorReport


Report: TypeAlias = Mapping[str, object]  # one of these, as what prints it takes it

REPORTS: dict[str, tuple[type, ...]] = {  # by verb
    "plan": (PlanReport,),
    "check": (CheckReport,),
    "simulate": (SimulateReport,),
    "train": (TrainReport, RankReport),
    "tune": (TuneReport, TuneLengthsReport),
    "profile": (ProfileReport, MachineReport),
    "diff": (DiffReport,),
    "selftest": (SelftestReport,),
    "schedule": (ScheduleReport,),
    "view": (ViewReport,),
    "init": (InitReport,),
    "export": (ExportReport,),
    "import": (ImportReport,),
}
