"""Which devices share a machine, of which each has workers for some."""

from inspect import cleandoc

import pytest

from piper.compiler import compile
from piper.directives import protect, replicate
from piper.errors import LaunchError
from piper.ir.select import at
from piper.plan.plan import Plans
from piper.workers.agent import machines_of
from tests.run import test_elastic as elastic


def plans(devices: int, per_machine: int | None) -> Plans:
    """Return the plans of replicas; `per_machine`: how many of them share a machine. None: any number."""
    copies = [] if per_machine is None else [protect(at(), copies=1, devices_per_machine=per_machine)]
    return compile(
        elastic.job(strategy=[replicate(at(), range(devices), zero=1), *copies], elastic=None)
    ).plans


def test_devices_that_may_be_anywhere_fill_machines() -> None:
    free = plans(4, None)
    assert machines_of(free) == ([(0,), (1,), (2,), (3,)], False)
    assert machines_of(free, 1) == machines_of(free)
    assert machines_of(free, 2) == ([(0, 1), (2, 3)], False)
    assert machines_of(plans(2, None), 4) == ([(0, 1)], False)


def test_machines_that_are_apart_stay_as_they_are() -> None:
    assert machines_of(plans(4, 2), 2) == ([(0, 1), (2, 3)], True)
    assert machines_of(plans(2, 1), 2) == ([(0,), (1,)], True)
    with pytest.raises(LaunchError) as caught:
        machines_of(plans(4, 2), 1)
    assert str(caught.value) == cleandoc("""
        launch: machines have too few workers for this number of devices
          needs: 2 devices on a machine, for 4 devices
          has:   1, as the strategy of the most devices says
          hint:  let protect have the same devices_per_machine for every number of devices
    """)
