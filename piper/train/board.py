"""TensorBoard, where it is installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from piper.train.measure import Measure, Reporter


@contextmanager
def board(folder: Path, done: int) -> Iterator[Reporter | None]:
    """Yield a function that writes a run's measures for TensorBoard. None: TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield None
        return
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def tell(measure: Measure) -> None:
        for name, value in asdict(measure).items():
            if name != "step":
                writer.add_scalar(f"train/{name}", value, measure.step)

    try:
        yield tell
    finally:
        writer.close()
