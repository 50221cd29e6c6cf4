"""A metric that a directive adds: a sum of the step and its weight, behind those of the loss."""

import math
from dataclasses import replace

from piper.directives import apply, replicate
from piper.ir.graph import start
from piper.ir.ids import SlotId, read_slot, term_slot
from piper.ir.select import at
from piper.ir.step_sums import step_sums
from piper.plan.text import read_plans, show_plans
from piper.runtime.worker import Sums
from piper.workers.results import metric_sums, result_of
from tests.chain import chain
from tests.lower.lowering import lower


def test_it_is_a_sum_of_plans_and_a_metric_of_the_result() -> None:
    graph = apply(start(chain(2)), [replicate(at(), [0, 1])])
    plans, _ = lower(replace(graph, metrics=("hidden", "last")))
    assert list(plans.sums)[-2:] == ["hidden", "last"] and plans.metrics == ("hidden", "last")
    assert plans.places["last"] == slice(sum(plans.sums.values()) - 2, sum(plans.sums.values()))
    assert read_plans(show_plans(plans)) == plans
    outline = replace(graph.outline, metric_names=("accuracy",))
    given = {"squares": (4.0,), "loss": (1.0,), "weight": (0.0,), "metrics": (3.0, 4.0)}
    sums = Sums(numbers={**given, "hidden": (6.0, 4.0), "last": (0.0, 0.0)})
    assert metric_sums(plans, outline, sums) == (
        ("accuracy", "hidden", "last"),
        [3.0, 4.0, 6.0, 4.0, 0.0, 0.0],
    )
    metrics = result_of(plans, outline, sums).metrics
    assert (metrics["accuracy"], metrics["hidden"]) == (0.75, 1.5) and math.isnan(metrics["last"])


def test_no_update_waits_for_it() -> None:
    graph = replace(start(chain(2)), metrics=("hidden",))
    assert [each.name for each in step_sums(graph, clip=False) if each.steers] == []


def test_a_term_belongs_to_the_sum_that_owns_it() -> None:
    term = term_slot("hidden", "PP=0 EP=1").at((("MB", 2),))
    assert (term.sum_name, SlotId("loss").sum_name) == ("hidden", "loss")
    assert read_slot(str(term), ("MB",)) == term and read_slot(str(term), ("MB",)).fields == term.fields
