"""Proves that the blocks of a model all do the same, by running the model once on fakes.

A run on fakes takes a fraction of a trace. It is cut behind each block. Two blocks are equal if they run the
same operations on values of the same shapes, which come from the same places: from the same block, from the
result of the block before, or from one of the first blocks.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from piper.capture.trace.record import LossFn

EARLY = 2  # blocks that all later ones may read
Place = tuple[object, ...]


class _Journal(TorchDispatchMode):
    """Notes each operation: its arguments by where they come from, and the shapes of its results."""

    def __init__(self, tensors: Mapping[str, Tensor], blocks: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = blocks
        self.operations: list[list[Place]] = [[]]
        self.results: list[Place] = []  # of each block
        self.plain = True  # blocks give a tensor like the one they are given, and only that is read later
        self.kept: list[object] = list(tensors.values())  # so that no id is used twice
        self.names = {id(tensor): name for name, tensor in tensors.items()}
        self.origins: dict[int, tuple[int, int, int]] = {}  # block, operation and number of a result

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        read = tree_map(self._read, (args, kwargs or {}))
        block = self.operations[-1]
        results = tree_leaves(out)
        for number, result in enumerate(results):
            if isinstance(result, Tensor):
                self.origins[id(result)] = (len(self.operations) - 1, len(block), number)
                self.kept.append(result)
        block.append((str(func), str(read), str([_described(result) for result in results])))
        return out

    def _read(self, value: object) -> object:
        """Return where an argument comes from, as seen from the present block."""
        if not isinstance(value, Tensor):
            return _described(value)
        here = len(self.operations) - 1
        if id(value) not in self.origins:
            return self._named(self.names.get(id(value), ""), here), _described(value)
        block, operation, number = self.origins[id(value)]
        if block == here:
            return "here", operation, number
        if block == here - 1 and self.results and (operation, number) == self.results[-1]:
            return "block before"
        self.plain = self.plain and block < EARLY
        return block, operation, number

    def _named(self, name: str, here: int) -> str:
        """Return the name of a parameter, relative to the present block."""
        block = self.blocks[here] if here < len(self.blocks) else ""
        return f"*{name.removeprefix(block)}" if block and name.startswith(f"{block}.") else name

    def ends(self, module: nn.Module, args: tuple[object, ...], out: object) -> None:
        """Note the end of a block: a hook of its forward."""
        first = args[0] if args else None
        same = isinstance(out, Tensor) and isinstance(first, Tensor) and _described(out) == _described(first)
        block, *place = self.origins.get(id(out), (-1, -1, -1))
        self.plain = self.plain and same and block == len(self.operations) - 1
        self.results.append(tuple(place))
        self.operations.append([])


def _described(value: object) -> object:
    """Return a value without what differs from run to run: sizes that depend on data have no number."""
    if isinstance(value, Tensor):
        return str(value.dtype), [size if isinstance(size, int) else "?" for size in value.shape]
    return "?" if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else repr(value)


def equal_blocks(
    model: nn.Module, blocks: Sequence[str], loss: LossFn, batch: Mapping[str, Tensor], mode: FakeTensorMode
) -> bool:
    """Return whether a model runs its blocks in order, each once, and all from the third on do the same.

    blocks: their paths. model, batch: of fakes of `mode`. Hooks are left on the model.
    """
    called: list[str] = []
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    journal = _Journal(tensors, blocks)
    for path in blocks:
        block = model.get_submodule(path)
        block.register_forward_pre_hook(lambda module, args, path=path: called.append(path))
        block.register_forward_hook(journal.ends)
    try:
        with torch.no_grad(), mode, journal:
            loss(model, dict(batch))
    except Exception:  # noqa: BLE001  the model's own code, which a fake cannot run; a trace says what fails
        return False
    operations = journal.operations[EARLY : len(blocks)]
    return called == list(blocks) and journal.plain and all(each == operations[0] for each in operations)
