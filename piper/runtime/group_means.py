"""Averages of what devices train, over groups that train apart."""

from piper.plan.instr import Instr
from piper.runtime.context import Bound, Env


def average(env: Env, ins: Instr) -> Bound:
    """Average what this device trains of a bucket with its counterparts, in steps where that is due."""
    group, holding, asked = env.group(ins), env.state.holdings[ins.writes[0].owner], env.setup.plans.averaging
    assert asked is not None, "the plans say which groups train apart"

    def run() -> None:
        if asked.due(env.step):
            mean = group.all_reduce(holding.trained.clone()).div_(
                group.size
            )  # no peer may read what is written
            holding.trained.copy_(mean)
            if holding.master is not None:
                holding.own.copy_(mean)

    return run
