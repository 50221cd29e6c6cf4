"""Checks that a checkpoint fits a program: the same parameters and buffers, trained in the same way."""

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
    """Return whether two specs agree in every field that both know."""
    pairs = ((saved.dtype, here.dtype), (saved.trainable, here.trainable))
    return saved.shape == here.shape and all(a == b for a, b in pairs if a is not None and b is not None)


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
