"""Explains in sentences why the clocks of the page disagree: units, simulated time, measured time."""

from piper.ir.format import count, seconds
from piper.simulate.account import account_of, mean_seconds
from piper.view.cells import Pipeline
from piper.view.subject import Subject

SHARED = {  # by launcher: what devices share on CPUs, and the plan does not know
    "inline": "Here the devices are threads of one process, which share cores and the interpreter's lock.",
    "local": "Here the devices are processes of one machine, which share its cores.",
}
KINDS = ("computing", "communication that no computing hides", "waiting and gaps")


def two_idles(subject: Subject, pipeline: Pipeline) -> str:
    """Return why devices are idle for another fraction of simulated time than of the schedule's units.

    Empty: one device waits for no other.
    """
    if len(subject.devices) == 1:
        return ""
    simulated = subject.planned
    step = simulated.step or 1.0
    _, exposed, _ = simulated.mean
    return (
        "In units a backward takes twice a forward and transfers take nothing: the schedule alone leaves "
        f"devices idle for {share(pipeline.idle)}. In the simulated time of {subject.clock} they are idle "
        f"for {share(simulated.bubble)}: {share(exposed / step)} in communication that no computing hides, "
        "the rest while they wait for passes of other devices, which are not all equally long."
    )


def planned_and_measured(subject: Subject) -> str:
    """Return how a measured step differs from the planned one, and why. Empty: nothing was measured."""
    if not subject.measured:
        return ""
    planned, took = subject.planned.step, max(line.end for line in subject.measured.values())
    programs = {device: n for n, plan in enumerate(subject.plans) for device in plan.devices}
    before = mean_seconds([subject.planned.accounts[programs[device]] for device in subject.measured])
    after = mean_seconds(
        [account_of(subject.plans.of(device), line, took) for device, line in subject.measured.items()]
    )
    parts = "; ".join(
        f"{kind} {seconds(now)} (planned {seconds(then)})"
        for kind, now, then in zip(KINDS, after, before, strict=True)
    )
    most = max(range(len(KINDS)), key=lambda kind: abs(after[kind] - before[kind]))
    return (
        f"Measured {seconds(took)}, planned {seconds(planned)}: {took / planned:.2g} times. On average over "
        f"{count(len(subject.measured), 'measured device')}: {parts}. Most of the difference is "
        f"{KINDS[most]}. The plan takes its times from {subject.clock} and assumes that each device has its "
        f"processor to itself and that the host is never late. {SHARED.get(subject.on, '')}"
    ).strip()


def share(value: float) -> str:
    """Return a fraction as text, with the digits that the page shows."""
    return f"{100 * value:.{1 if value < 0.0995 else 0}f} %"
