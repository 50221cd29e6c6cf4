"""Starts a run from weights that were not made by a run of Piper."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from piper.checkpoint.compatibility import check_model, wanted_model
from piper.checkpoint.folder import begun, commit
from piper.checkpoint.json_state import dtype_named
from piper.checkpoint.metadata import Record, Spec
from piper.checkpoint.storage import TensorRange, write_parts
from piper.checkpoint.target import target_of
from piper.run.checkpointing import whole_parts
from piper.runtime.setup import ProgramLike, initial_tensors

MOST = 2**30  # bytes of values that are held at a time


def write_start(program: ProgramLike, values: Mapping[str, Tensor], path: Path | str) -> None:
    """Write a checkpoint of step 0 that holds these weights: `launch(program, resume=path)` begins with them.

    values: every parameter and persistent buffer by name; a tied one by any of its names. Buffers that a
    model does not save are as it makes them.
    """
    target = target_of(path)
    wanted = wanted_model(program.plans, program.outline)
    names = names_here(program, values)
    unsaved = {b.name for b in program.outline.buffers if not b.persistent and b.name not in names} & set(
        wanted
    )
    initial = initial_tensors(program) if unsaved else {}
    given = {name: wanted.get(name, Spec(shape=())) for name in (*names, *unsaved)}
    check_model(target, Record(step=0, model=given), wanted)

    def value(name: str) -> Tensor:
        tensor = initial[name] if name in unsaved else values[names[name]]
        spec = wanted[name]
        here = {name: Spec(shape=tuple(tensor.shape))}
        check_model(target, Record(step=0, model=here), {name: spec})
        return tensor if spec.dtype is None else tensor.to(dtype_named(spec.dtype))

    with begun(target) as partial:
        written = [
            write_parts(partial, f"values-{number:05}", parts)
            for number, parts in enumerate(batched(wanted, value))
        ]
    commit(target, Record(step=0, model=wanted), written)


def names_here(program: ProgramLike, values: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the given name of each value, by the first name that the value has in the model."""
    first = {alias: p.name for p in program.outline.parameters for alias in p.aliases}
    first |= {alias: b.name for b in program.outline.buffers for alias in b.saved_as}
    return {first.get(name, name): name for name in values}


def batched(names: Mapping[str, object], value: Callable[[str], Tensor]) -> Iterator[list[TensorRange]]:
    """Yield values as parts, as many at a time as memory should hold."""
    ranges: list[TensorRange] = []
    for name in names:
        ranges += whole_parts({name: value(name)})
        if sum(one.tensor.nbytes for one in ranges) > MOST:
            yield ranges
            ranges = []
    if ranges:
        yield ranges
