"""A run goes on from a checkpoint exactly: with the same strategy to the bit, with any other to 1e-9."""

from pathlib import Path

import pytest

from tests.checkpoint.jobs import batches, equal_bits, program, resume, train_and_save

SAME = [
    ("decoder", "pp2-dp2-zero3", "adamw"),  # its embedding is tied across stages
    ("mlp", "pp2-dp2-zero1", "bf16"),
    ("mlp", "dp4-zero2", "nadam"),
    ("mlp", "pp2-dp2-zero0", "sgd"),
    ("dropout", "pp2-dp2-zero3", "adamw"),
]
OTHER = [
    ("decoder", "pp2-dp2-zero3", "dp4", "adamw"),
    ("decoder", "pp2-dp2-zero3", "one", "adamw"),
    ("decoder", "pp2-dp2-zero3", "pp", "adamw"),
    ("decoder", "one", "pp2-dp2-zero3", "adamw"),
    ("mlp", "pp", "dp4-zero2", "sgd"),
    ("mlp", "dp4-zero2", "pp2-dp2-zero1", "nadam"),
    ("frozen", "pp2-dp2-zero3", "dp4-zero1", "adamw"),
    ("moe", "pp2-ep2-zero3", "ep4", "adamw"),
    ("moe", "ep4", "ep2-dp4-zero2", "adamw"),
    ("moe", "ep2-dp4-zero2", "pp2-ep2-zero3", "adamw"),
]


@pytest.mark.parametrize(("case", "strategy", "settings"), SAME)
def test_the_same_strategy_goes_on_to_the_bit(
    case: str, strategy: str, settings: str, tmp_path: Path
) -> None:
    made, given = program(case, strategy, settings), batches(case, 0, 4)
    losses, saved, last = train_and_save(made, given, 2, tmp_path / "checkpoint")
    again, loaded, end = resume(made, given[2:], tmp_path / "checkpoint")
    assert equal_bits(loaded, saved)
    assert again == losses
    assert equal_bits(end, last)


@pytest.mark.parametrize(("case", "before", "after", "settings"), OTHER)
def test_another_strategy_goes_on_from_the_same_numbers(
    case: str, before: str, after: str, settings: str, tmp_path: Path
) -> None:
    given = batches(case, 0, 4)
    losses, saved, _ = train_and_save(program(case, before, settings), given, 2, tmp_path / "checkpoint")
    again, loaded, _ = resume(program(case, after, settings), given[2:], tmp_path / "checkpoint")
    assert equal_bits(loaded, saved)
    assert again == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(("before", "after"), [("dp2", "pp2-dp2-zero3"), ("pp", "dp2")])
def test_buffers_go_on(before: str, after: str, tmp_path: Path) -> None:
    """BatchNorm mixes samples, so the losses of other slices differ: the state is what must be equal."""
    given = batches("convnet", 0, 4)
    _, saved, _ = train_and_save(program("convnet", before), given, 2, tmp_path / "checkpoint")
    _, loaded, _ = resume(program("convnet", after), given[2:3], tmp_path / "checkpoint")
    assert equal_bits(loaded, saved)
    assert any(name.endswith("running_mean") for name in saved)


def test_bf16_keeps_its_exact_weights(tmp_path: Path) -> None:
    given = batches("mlp", 0, 4)
    _, saved, _ = train_and_save(program("mlp", "pp2-dp2-zero1", "bf16"), given, 2, tmp_path / "a")
    _, loaded, _ = resume(program("mlp", "dp4", "bf16"), given[2:3], tmp_path / "a", blank=False)
    assert equal_bits(loaded, saved)
    assert {str(value.dtype) for value in saved.values()} == {"torch.float32"}
