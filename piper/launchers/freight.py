"""Objects as bytes, on their way from one process to another: tensors, lambdas and captured code included."""

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import cast

import cloudpickle
import torch
from torch import Tensor, fx, nn
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from piper.errors import LaunchError
from piper.ir.chunk import Chunk, Outline, Phase
from piper.launchers.transport.serialize import Codec
from piper.plan.plan import Plans
from piper.runtime.compute import subject
from piper.runtime.setup import Code, Setup

Reduced = tuple[Callable[..., object], tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledCode:
    """The code that plans call, and nothing else of the capture it comes from."""

    built: Mapping[tuple[str, Phase], Code]

    def __call__(self, chunk: Chunk, phase: Phase) -> Code:
        return self.built[chunk.key, phase]


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """What of a setup is code: it can only travel as a pickle, over a channel of the driver's own workers."""

    code: CalledCode
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    scheduler: Callable[[Optimizer], LRScheduler] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """A setup as a message: its data in typed form, and its functions as a pickle."""

    plans: Plans
    outline: Outline
    constants: Mapping[str, Tensor]
    precision: str
    clip_norm: float | None
    seed: int
    device: str
    functions: bytes


SHIPMENT = Codec((Shipment,))


def called_code(setup: Setup) -> CalledCode:
    """Return the code that the plans of a setup call."""
    chunks = {chunk.name: chunk for chunk in setup.outline.chunks}
    called = {ins.arg for plan in setup.plans for ins in plan.instrs if ins.op == "compute"}
    built: dict[tuple[str, Phase], Code] = {}
    for arg in sorted(called):
        phase, chunk = subject(chunks, arg)
        built[chunk.key, phase] = setup.code(chunk, phase)
    return CalledCode(built=built)


def pack_setup(setup: Setup) -> bytes:
    """Return a setup as bytes that a worker can read, wherever the job's functions come from."""
    functions = Functions(code=called_code(setup), optimizer=setup.optimizer, scheduler=setup.scheduler)
    try:
        with by_value(stray_modules(setup)):
            code = pack(functions)
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise LaunchError(
            "the job cannot be sent to its workers",
            by="launch",
            facts={"why": f"{type(error).__name__}: {error}"},
            hint="define operators in a module, keep locks and files out of optimizers, or use on='inline'",
        ) from error
    return SHIPMENT.encode(
        Shipment(
            plans=setup.plans,
            outline=setup.outline,
            constants=setup.constants,
            precision=setup.precision,
            clip_norm=setup.clip_norm,
            seed=setup.seed,
            device=str(setup.device),
            functions=code,
        )
    )


def unpack_setup(data: bytes) -> Setup:
    """Return the setup that bytes hold. They come from the driver, after both sides have proved their key."""
    sent = cast(Shipment, SHIPMENT.decode(data))
    functions = cast(Functions, unpack(sent.functions))
    return Setup(
        plans=sent.plans,
        outline=sent.outline,
        code=functions.code,
        constants=sent.constants,
        optimizer=functions.optimizer,
        scheduler=functions.scheduler,
        precision=sent.precision,
        clip_norm=sent.clip_norm,
        seed=sent.seed,
        device=torch.device(sent.device),
    )


def stray_modules(setup: Setup) -> list[ModuleType]:
    """The modules of a job's functions that a worker could not import, as they were found by a path."""
    names = {getattr(made_by, "__module__", None) for made_by in (setup.optimizer, setup.scheduler)}
    loaded = [(name, sys.modules.get(name)) for name in sorted(filter(None, names)) if name != "__main__"]
    return [module for name, module in loaded if module is not None and not importable(name)]


@contextmanager
def by_value(modules: list[ModuleType]) -> Iterator[None]:
    """Let what these modules define travel whole, as what `__main__` defines does anyway."""
    new = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def pack(value: object) -> bytes:
    """A value as bytes."""
    target = io.BytesIO()
    FunctionPickler(target, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return target.getvalue()


def unpack(data: bytes) -> object:
    """Return the value that a pickle holds. The only place that unpickles: see docs/security.md."""
    return pickle.loads(data)


class FunctionPickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no annotations
    """Packs tensors as their own elements, not their whole storage, and captured code as its source."""

    def reducer_override(self, obj: object) -> object:
        if type(obj) is Tensor:
            return reduce_tensor(obj)
        if isinstance(obj, fx.GraphModule):
            return reduce_module(obj)
        return super().reducer_override(obj)


def reduce_tensor(tensor: Tensor) -> Reduced:
    """How to make a plain tensor again."""
    here = tensor.detach().cpu().contiguous()
    raw = here.view(-1).view(torch.uint8).numpy().tobytes() if here.numel() else b""
    return restore_tensor, (bytearray(raw), here.dtype, tuple(here.shape), tensor.requires_grad)


def restore_tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...], grad: bool) -> Tensor:
    """A tensor over the bytes that came."""
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(shape).requires_grad_(grad)


def reduce_module(module: fx.GraphModule) -> Reduced:
    """How to make captured code again: its source, what the source names, and what the module holds.

    A module's own way to be pickled traces the code anew when it is read, which takes long and may change it.
    """
    code = module.graph.python_code("self")
    held = {
        str(node.target): attribute(module, str(node.target))
        for node in module.graph.nodes
        if node.op in ("get_attr", "call_module")
    }
    return CapturedSource, (code.src, dict(code.globals), held, modules_of(module.graph))


def modules_of(graph: fx.Graph) -> list[str]:
    """The modules that define the user's operators in a graph: whoever calls them must import them first."""
    called = {
        node.target.name().partition(".")[0] for node in graph.nodes if isinstance(node.target, OpOverload)
    }
    found = {name: OPDEFS[name]._init_fn.__module__ for name in called if name in OPDEFS}
    for name, module in found.items():
        if not importable(module):
            raise pickle.PicklingError(f"{name} is defined in {module}, which a worker cannot import")
    return sorted(set(found.values()))


def importable(module: str) -> bool:
    """Whether another process finds a module by its name."""
    top = module.partition(".")[0]
    # not importlib.util.find_spec: it answers for what is loaded here, such as a recipe, however it was found
    return top != "__main__" and any(finder.find_spec(top, None) for finder in sys.meta_path)


def attribute(module: nn.Module, path: str) -> object:
    """What a dotted path leads to."""
    found: object = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


class AttributePath:
    """What a dotted path may lead through."""


class CapturedSource:
    """Captured code, made from its source."""

    def __init__(
        self, source: str, names: Mapping[str, object], held: Mapping[str, object], modules: Sequence[str]
    ) -> None:
        for name in modules:
            importlib.import_module(name)
        space: dict[str, object] = dict(names)
        exec(compile(source, "<chunk>", "exec"), space)  # what fx itself does with the code of a graph
        root = AttributePath()
        for path, value in held.items():
            *way, last = path.split(".")
            place = root
            for name in way:
                place = place.__dict__.setdefault(name, AttributePath())
            setattr(place, last, value)
        self.forward = cast(Callable[..., tuple[Tensor, ...]], space["forward"])
        self.root = root

    def __call__(self, *arguments: object) -> tuple[Tensor, ...]:
        return self.forward(self.root, *arguments)
