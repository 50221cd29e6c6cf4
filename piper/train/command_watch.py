"""What `piper train` adds to the training loop: measures, evaluations, signals, the file `devices`."""

import signal
from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter

from piper.callbacks import Numbers, Running, StepNumbers
from piper.run.run import Run, Watch
from piper.train.elastic_programs import SizeFile
from piper.train.interrupt import Interrupts
from piper.train.measure import Measure, Rate, Reporter, counted
from piper.train.run_folder import LinesFile
from piper.workers.results import Batch, EvaluationResult


class CommandWatch(Watch):
    """Reports each step before it is saved: a run that ends between the two repeats and reports it again."""

    def __init__(
        self,
        tell: Reporter,
        say: Callable[[str], None],
        rate: Rate,
        evaluations: LinesFile,
        devices: SizeFile,
        interrupted: Interrupts,
    ) -> None:
        self.tell, self.say, self.rate, self.evaluations = tell, say, rate, evaluations
        self.devices, self.interrupted = devices, interrupted
        self.lr = self.began = self.seconds = 0.0
        self.counted = 0

    def begin(self, step: int) -> None:
        """Note the rate of a step, and when it begins."""
        self.lr = self.rate.now
        self.rate.advance(step)  # first: a schedule that is too short is named here, not by a worker
        self.began = perf_counter()

    def end(self, batch: Batch) -> None:
        """Note how long a step took, and what it counts."""
        self.seconds, self.counted = perf_counter() - self.began, counted(batch)

    def on_step(self, run: Running, step: int, result: StepNumbers) -> None:
        """Report the measures of a step."""
        self.tell(
            Measure(
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=self.lr,
                tokens_per_s=self.counted / self.seconds,
                step_s=self.seconds,
            )
        )

    def on_evaluate(self, run: Running, step: int, result: Numbers) -> None:
        """Write and show an evaluation."""
        assert isinstance(result, EvaluationResult)
        self.evaluations.write({"step": step, **asdict(result)})
        metrics = "".join(f"   {name} {value:.4f}" for name, value in result.metrics.items())
        numbers = f"loss {result.loss:.4f}{metrics}   {result.samples} samples"
        self.say(f"evaluation after step {step}   {numbers}")

    def between(self, run: Run) -> bool:
        """Return whether the run is to end after this step: a signal came to this process, or to a worker."""
        self.devices.obey(run)
        if run.leaving() and not self.interrupted.preempted:
            self.interrupted.handle(signal.SIGTERM, None)
        return self.interrupted()
