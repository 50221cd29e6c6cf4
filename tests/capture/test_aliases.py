"""What costs nothing to make again, and what may not be made again: read off single operations."""

import pytest
import torch
from torch import fx

from piper.capture.cost.aliases import recomputable
from piper.capture.trace.effects import draws

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default


def call(target: object, *arguments: object, **named: object) -> fx.Node:
    """A call of three tensors and some numbers."""
    graph = fx.Graph()
    tensors = [graph.placeholder(name) for name in "qkv"]
    return graph.call_function(target, (*tensors, *arguments), named)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("node", "wanted"),
    [
        (call(FLASH), False),
        (call(FLASH, 0.0), False),
        (call(FLASH, 0.1), True),
        (call(FLASH, dropout_p=0.1), True),
        (call(EFFICIENT, None, True, 0.0), False),
        (call(EFFICIENT, None, True, 0.5), True),
        (call(aten.bernoulli.default), True),
        (call(aten.add.Tensor), False),
    ],
    ids=lambda value: str(value),
)
def test_attention_draws_only_where_it_drops(node: fx.Node, wanted: bool) -> None:
    assert draws(node) is wanted


def test_a_random_fill_is_not_made_again() -> None:
    graph = fx.Graph()
    assert recomputable(graph.call_function(aten.ones.default, ([4],)))
    assert not recomputable(graph.call_function(aten.rand.default, ([4],)))


@pytest.mark.parametrize(
    ("node", "wanted"),
    [
        (call(torch.nn.functional.scaled_dot_product_attention), False),
        (call(torch.nn.functional.scaled_dot_product_attention, None, 0.1), True),
        (call(torch.nn.functional.scaled_dot_product_attention, dropout_p=0.1), True),
        (call(torch.nn.functional.dropout, p=0.5), True),
        (call(torch.nn.functional.dropout, p=0.0), False),
        (call(torch.nn.functional.dropout, p=0.5, training=False), False),
        (call(torch.nn.functional.relu), False),
        (call(torch.rand_like), True),
    ],
    ids=lambda value: str(value),
)
def test_calls_of_the_model_that_draw(node: fx.Node, wanted: bool) -> None:
    assert draws(node) is wanted
