"""Corrects the type of the sums that attention on a CPU returns: they are as wide as its scores.

Works around: torch 2.11. Its fake kernel says float32 for scores in float64.
Not needed from: torch 2.13.
"""

import torch
from torch import fx


def correct_sums(graph: fx.Graph) -> None:
    """Say what attention on a CPU returns."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for node in graph.find_nodes(op="call_function", target=attention):
        wide = node.args[0].meta["val"].dtype is torch.float64
        output, sums = node.meta["val"]
        if wide and sums.dtype is not torch.float64:
            sums = sums.to(torch.float64)
            node.meta["val"] = (output, sums)
            for user in node.users:
                if user.args[1] == 1:
                    user.meta["val"] = sums
