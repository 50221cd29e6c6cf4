"""Checks that a checkpoint fits a program: the same parameters and buffers, trained in the same way.

Which parameters are trained may differ: a part that is frozen for a while, or two that take turns.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from piper.checkpoint.metadata import Record, Spec, Trainer
from piper.errors import ConfigError
from piper.ir.chunk import CapturedModel
from piper.ir.format import listed
from piper.plan.plan import Plans


def wanted_model(plans: Plans, outline: CapturedModel) -> dict[str, Spec]:
    """Return the parameters and buffers that a program's checkpoint holds, whatever its strategy."""
    buckets = {piece.name: bucket for bucket in plans.buckets.values() for piece in bucket.pieces}
    specs: dict[str, Spec] = {}
    for parameter in outline.parameters:
        spec = Spec(shape=parameter.shape)
        if (bucket := buckets.get(parameter.name)) is not None:
            exact = bucket.precision.sum_dtype if bucket.trainable else bucket.dtype  # of the master copy
            spec = replace(spec, dtype=exact, trainable=bucket.trainable)
        specs[parameter.name] = spec
    read_by_chunks = {name for chunk in outline.chunks for name in chunk.buffers}
    for buffer in outline.buffers:
        if buffer.persistent or buffer.name in read_by_chunks:
            dtype = buffer.dtype if buffer.name in read_by_chunks else None
            specs[buffer.name] = Spec(shape=buffer.shape, dtype=dtype)
    return specs


def check_model(path: Path, record: Record, wanted: Mapping[str, Spec]) -> None:
    """Refuse a checkpoint of another model."""
    missing = [name for name in wanted if name not in record.model]
    unexpected = [name for name in record.values if name not in wanted]
    differ = [
        f"{name}: saved {record.model[name]}, here {spec}"
        for name, spec in wanted.items()
        if name in record.model and not alike(record.model[name], spec)
    ]
    if facts := differences_in(missing, unexpected, differ):
        raise ConfigError(
            "this checkpoint is of another model",
            by="load",
            facts={"path": str(path), **facts},
            hint="load it into the model and precision that it was saved from",
        )


def alike(saved: Spec, here: Spec) -> bool:
    """Return whether a saved value can be loaded: its shape is the same, and its type as far as it must be.

    A parameter has the type of its master copy where it is trained and that of the computation where it is
    frozen, so types are compared only where both train it or neither does.
    """
    turned = {saved.trainable, here.trainable} == {True, False}
    known = saved.dtype is not None and here.dtype is not None
    return saved.shape == here.shape and (turned or not known or saved.dtype == here.dtype)


def can_keep(record: Record, name: str) -> bool:
    """Return whether any layout can hold the optimizer's state of a frozen parameter: it goes by element."""
    return not any(record.moments.get(name, {}).values())  # shapes of tensors that go with whole parameters


def changes_in_training(record: Record, wanted: Mapping[str, Spec]) -> str | None:
    """Return in one line what becomes of the optimizer's state where other parameters are trained now.

    None: the same parameters are trained, or the checkpoint holds values only.
    """
    before = {name for name, spec in record.values.items() if spec.trainable}
    trained = {name for name, spec in wanted.items() if spec.trainable}
    if record.seed is None or before == trained:
        return None
    saved = record.moments.keys() | record.numbers.keys()
    unused = [name for name in wanted if name in saved and name not in trained]
    held = [name for name in unused if wanted[name].trainable is not None and can_keep(record, name)]
    lines = {
        "begin with a fresh state of the optimizer": [n for n in wanted if n in trained - before - saved],
        "go on with the state they had when they were frozen": [
            name for name in wanted if name in (trained - before) & saved
        ],
        "are frozen, and later checkpoints keep their state": held,
        "are frozen, and their state is dropped": [name for name in unused if name not in held],
    }
    return "; ".join(f"{len(names)} {what} ({listed(names)})" for what, names in lines.items() if names)


def differences_in(missing: Iterable[str], unexpected: Iterable[str], other: Iterable[str]) -> dict[str, str]:
    """Return the facts of an error about names that differ. Empty: none do."""
    facts = {"missing": listed(missing), "unexpected": listed(unexpected), "other": listed(other, "\n")}
    return {key: text for key, text in facts.items() if text}


def check_trainer(path: Path, record: Record, trainer: Trainer, seed: int) -> None:
    """Refuse a checkpoint that another optimizer, scheduler or seed would not go on from exactly."""
    if record.seed is None:  # values only: every run may start from them
        return
    was = record.trainer
    saved = {"optimizer": was.optimizer, "scheduler": was.scheduler, "seed": record.seed}
    here = {"optimizer": trainer.optimizer, "scheduler": trainer.scheduler, "seed": seed}
    differ = {name: (value, here[name]) for name, value in saved.items() if value != here[name]}
    if differ:
        raise ConfigError(
            "this checkpoint comes from a job that trains in another way",
            by="load",
            facts={
                "path": str(path),
                **{name: f"saved {said(old)}, here {said(new)}" for name, (old, new) in differ.items()},
            },
            hint="go on with the same " + ", ".join(differ) + "; begin a new run from exported weights",
        )


def said(value: object) -> str:
    """Return a value as text."""
    return "none" if value is None else str(value)
