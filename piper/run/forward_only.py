"""What a run does forward only, in eval mode: it evaluates and predicts. Nothing is trained."""

from collections.abc import Iterable

from torch import Tensor

from piper.data.feed import one_epoch
from piper.errors import ConfigError
from piper.run.session import check_samples
from piper.run.sessions import Sessions, asking
from piper.runtime.setup import Forward
from piper.workers.results import Batch, EvaluationResult, Means


class ForwardOnly:
    """The calls of a run that train nothing."""

    sessions: Sessions

    def evaluate(self, batches: Iterable[Batch] | None = None) -> EvaluationResult:
        """Evaluate on global batches, by default those of the job's `evaluate`; nothing is trained.

        The model is in eval mode. A mean loss counts each batch by its samples, a (sum, weight) by its
        weight, and so do metrics.
        """
        means, job = Means(), self.sessions.program.job
        if batches is None:
            if job.evaluate is None:
                raise ConfigError(
                    "there are no batches to evaluate on",
                    by="evaluate",
                    hint="give them: run.evaluate(batches); or let the job have some: "
                    "piper.Job(..., evaluate=piper.Evaluate(data=...))",
                )
            batches = one_epoch(job.evaluate.data, job.seed)
        for batch in batches:
            check_samples(batch)
            means = self._evaluate(batch, means)
        return means.result()

    @asking
    def _evaluate(self, batch: Batch, means: Means) -> Means:
        return self.sessions.session.evaluate(batch, means)

    def predict(self, batch: Batch, forward: Forward) -> Tensor:
        """Return `forward(model, batch)` for a global batch, in eval mode, on the host; nothing is trained.

        forward: returns one tensor with a row for each sample; the rows come back in the order of the batch.
        It runs under the job's strategy, on one slice of the samples at a time. It is compiled once for each
        shape of batches: give the same function each time.
        """
        check_samples(batch)
        return self._predict(batch, forward)

    @asking
    def _predict(self, batch: Batch, forward: Forward) -> Tensor:
        return self.sessions.session.predict(batch, forward)
