"""Programs that run the graphs which a compiler would get, without compiling them."""

import torch
from torch import Tensor, fx

from piper.capture.autodiff.code import GraphCode
from piper.capture.compile.flat_gradients import FlatPhase, write_in_place
from piper.compiler import Program


class Listed:
    """A graph that takes its arguments in a list, as compiled code does."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        return self.boxed(list(arguments))

    def boxed(self, arguments: list[Tensor]) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = self.module(*arguments)
        arguments.clear()
        return results


def as_compiled(program: Program) -> list[FlatPhase]:
    """Let a program run the graphs that a compiler would get; return those that write gradients in place."""
    found = []
    for captured in program.codes.values():
        for key, code in captured.codes.items():
            assert isinstance(code, GraphCode)
            for phase in code.partition.sections:
                built, places = code.build(phase), code.in_place(phase)
                captured.built[key, phase] = built
                if places:
                    gradients = [built.graph.output_node().args[0][i].meta["val"] for i in places]  # type: ignore[index, union-attr]
                    like = [(value.shape, value.dtype) for value in gradients]
                    listed = Listed(write_in_place(built, places))
                    found.append(FlatPhase(listed, places, like, torch.device("cpu")))
                    captured.built[key, phase] = found[-1]
    return found
