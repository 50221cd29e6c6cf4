"""Adds the user's own lines to errors of compilation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from piper.directives import Directive, Order
from piper.errors import CaptureError, CompilerError, LossError, ScheduleError
from piper.job import Batch, Job
from piper.plan.prove import ProofError
from piper.process.usercode import defined_at


@contextmanager
def locate_errors(job: Job, strategy: Sequence[Directive], batch: Batch) -> Iterator[None]:
    """Name the user's line in errors about the model, the loss and the strategy that have none yet."""
    try:
        yield
    except CaptureError as error:
        blamed = job.model if error.by == "model" or "cannot be built" in error.what else job.loss
        where = defined_at(blamed) if error.by in ("capture", "loss", "model") else None
        fields = ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items())
        facts = {"batch": fields} if isinstance(error, LossError) else {}
        raise error.located(f"{error.by} ({where})" if where else error.by, facts) from error.__cause__
    except ScheduleError as error:
        if error.by != "strategy" or not strategy:
            raise
        raise error.located(f"strategy ({strategy[0].source})") from error.__cause__
    except ProofError as error:
        raise CompilerError(
            "this is a bug in Piper: the plans of this strategy fail their proof",
            by=f"strategy ({strategy[0].source})" if strategy else "strategy",
            facts={
                "strategy": "\n".join(d.title(i) for i, d in enumerate(strategy) if not isinstance(d, Order)),
                "proof": str(error),
            },
            hint="please report it with this message; meanwhile, leave out one of these directives",
        ) from error
