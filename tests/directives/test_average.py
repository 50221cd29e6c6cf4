"""`average` refuses groups that are no groups, with the facts that collide."""

import pytest

import piper
from piper import at, average, offload, place, protect, replicate, shard
from piper.directives import apply
from piper.directives.json import parse_strategy, show_strategy
from piper.errors import ConfigError, ScheduleError
from piper.ir.graph import start
from tests.chain import chain
from tests.runtime.averaging import data, job, train

EVERYTHING = replicate(at(), devices=[0, 1, 2, 3])
ERRORS: dict[str, tuple[list[piper.Directive], str]] = {
    "alone": (
        [EVERYTHING, average(at(), across=[0])],
        """average #1: there is nothing to average with a single group
  asked: across=[0]
  hint:  name one device of each group: across=[0, 4] for the groups of devices 0 and 4""",
    ),
    "unequal": (
        [replicate(at(), devices=[0, 1, 2]), average(at(), across=[0, 2])],
        """average #1: 3 devices do not make up 2 equal groups
  region:  PP=0
  devices: 0-2
  hint:    place every region on as many devices in each group, and shard it within a group""",
    ),
    "sharded over groups": (
        [
            shard(at(), devices=[0, 1], axis="TP", weights={"first": 0, "second": 1}),
            average(at(), across=[0, 1]),
        ],
        """average #1: 2 devices do not make up 2 equal groups
  region:  PP=0
  devices: 0,1
  sharded: over 2 devices
  hint:    place every region on as many devices in each group, and shard it within a group""",
    ),
    "different groups": (
        [
            replicate(at(PP=0), devices=[0, 1, 2, 3]),
            replicate(at(PP=1), devices=[0, 2, 1, 3]),
            average(at(), across=[0, 2]),
        ],
        """average #2: a device would be in two groups
  hold the same: 0,2; 1,3; 0,1; 2,3
  hint:          list the devices of every region group by group, in the same order of groups""",
    ),
    "in two groups": (
        [
            replicate(at(PP=0), devices=[0, 1]),
            replicate(at(PP=1), devices=[1, 2]),
            average(at(), across=[0, 1]),
        ],
        """average #2: a device would be in two groups
  hold the same: 0,1; 1,2
  hint:          list the devices of every region group by group, in the same order of groups""",
    ),
    "no SGD": (
        [EVERYTHING, average(at(), across=[0, 2], outer={"betas": 0.9})],
        """average #1: the outer optimizer is no SGD
  asked: outer={'betas': 0.9}
  hint:  give lr above 0, momentum from 0 to 1, and nesterov only with momentum: outer={"lr": 0.7}""",
    ),
    "no momentum": (
        [EVERYTHING, average(at(), across=[0, 2], outer={"lr": 0.7, "nesterov": True})],
        """average #1: the outer optimizer is no SGD
  asked: outer={'lr': 0.7, 'nesterov': True}
  hint:  give lr above 0, momentum from 0 to 1, and nesterov only with momentum: outer={"lr": 0.7}""",
    ),
    "steps": (
        [EVERYTHING, average(at(), across=[0, 2], every=2, fragments=3)],
        """average #1: 2 steps are too few from one average to the next
  asked: fragments=3, overlap=0, every=2
  hint:  at most one fragment for each of these steps, and an overlap of fewer steps""",
    ),
    "begins too early": (
        [EVERYTHING, average(at(), across=[0, 2], every=2, overlap=2)],
        """average #1: 2 steps are too few from one average to the next
  asked: fragments=1, overlap=2, every=2
  hint:  at most one fragment for each of these steps, and an overlap of fewer steps""",
    ),
    "keeps": (
        [EVERYTHING, average(at(), across=[0, 2], every=2, keep=0.5)],
        """average #1: a group keeps nothing of its own where the average is merged at once
  asked: keep=0.5, overlap=0
  hint:  leave keep out, or let the average travel during some steps: overlap=1""",
    ),
    "buckets": (
        [EVERYTHING, average(at(), across=[0, 2], every=3, fragments=3)],
        """average #1: there are no 3 fragments of the parameters
  buckets: 2 that train
  hint:    give fewer fragments, or more buckets: replicate(..., bucket_mb=...)""",
    ),
    "offloaded": (
        [EVERYTHING, offload(at(), what="optimizer"), average(at(), across=[0, 2])],
        """average #2: groups do not average parameters whose optimizer state is on the host
  offloaded: offload #1
  hint:      leave offload(what="optimizer") out, or average""",
    ),
    "machines": (
        [
            replicate(at(PP=0), devices=[0, 4]),
            place(at(PP=1), devices=[2, 5]),
            protect(at(), copies=1, devices_per_machine=2),
            average(at(), across=[0, 4]),
        ],
        """average #3: groups lie differently on their machines
  0,2:  machines [0, 1]
  4,5:  [2, 2]
  hint: give each group machines of its own, or protect(copies=0)""",
    ),
    "samples": (
        [replicate(at(), devices=[0, 1, 2]), average(at(), across=[0, 1, 2])],
        """average #1: 16 samples do not divide into 3 groups that train apart
  batch:  16 samples
  groups: 3
  hint:   use a batch that is a multiple of 3""",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_groups_that_are_none_are_refused(case: str) -> None:
    strategy, said = ERRORS[case]
    with pytest.raises(ScheduleError) as raised:
        piper.compile(job(*strategy))
    text = str(raised.value)
    for directive in strategy:
        text = text.replace(f" ({directive.source})", "")
    assert text == said


def test_an_outer_optimizer_is_given_by_its_settings() -> None:
    with pytest.raises(ScheduleError, match=r"outer=0.7 is not a dict"):
        average(at(), across=[0, 1], outer=0.7)  # type: ignore[arg-type]


@pytest.mark.parametrize("outer", [{"lr": "0.7"}, {"lr": 0.5, "momentum": None}, {"lr": 0.5, "rate": 1.0}])
def test_settings_that_sgd_does_not_have_are_refused(outer: dict[str, float]) -> None:
    asked = average(at(), across=[0, 1], outer=outer)
    with pytest.raises(ScheduleError, match="the outer optimizer is no SGD"):
        apply(start(chain(2)), [replicate(at(), [0, 1]), asked])


def test_groups_have_a_json_form() -> None:
    outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    given = average(at(), across=[0, 1], every=4, outer=outer, stream="slow", fragments=2)
    assert parse_strategy(show_strategy([given])) == [given]
    shown = 'outer={"lr": 0.7, "momentum": 0.9, "nesterov": True}, stream="slow", fragments=2'
    assert repr(given) == f"average(at(), across=[0, 1], every=4, {shown})"


def test_a_batch_that_leaves_a_group_without_samples_is_refused() -> None:
    program = piper.compile(job(EVERYTHING, average(at(), across=[0, 2])))
    few = {name: field[:2] for name, field in data()[0].items()}
    with piper.launch(program, on="inline") as run, pytest.raises(ConfigError, match="without any"):
        run.step({name: field[:1] for name, field in few.items()})
    assert train(program, 1)[0]
