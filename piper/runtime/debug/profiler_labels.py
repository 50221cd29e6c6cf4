"""Labels for torch's own profiler: its trace shows the calls of an instruction under the plan's node."""

from torch.autograd import profiler

from piper.runtime.context import Bound


def labelled(node: str, run: Bound) -> Bound:
    """Wrap an instruction so that it has a label while a torch profiler runs.

    The label is an annotation of the user's, which Kineto also draws on the streams of an accelerator, around
    the kernels that were launched within it. It costs some 10 µs, so it is only made while a profiler runs.
    """

    def named() -> None:
        if profiler._is_profiler_enabled:  # of the process: threads do not know of a profiler themselves
            with profiler.record_function(node):
                run()
        else:
            run()

    return named
