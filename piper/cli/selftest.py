"""`piper selftest`: tries a machine before it is trusted."""

from pathlib import Path
from typing import Annotated

from piper.cli.application import NO, SUCCESS, Answer, Compile, Device, option
from piper.ir.format import wide_console
from piper.process.files import check_output, write_output


def selftest(
    devices: Annotated[
        int | None, option("How many ranks; else one on each GPU, or 4.", min=2, metavar="N")
    ] = None,
    out: Annotated[Path | None, option("Write the page as Markdown too.", metavar="FILE")] = None,
    only: Annotated[
        list[str] | None,
        option(
            "Only this part, or several: versions, links, collectives, compositions, kill, torch.",
            metavar="PART",
        ),
    ] = None,
    device: Device = None,
    compiled: Compile = False,
) -> Answer:
    """Try the links, collectives, compositions and recovery of this machine, and torch beside them.

    Prints one page, which ends with a verdict. The exit code is 1 if anything failed.
    """
    from piper.selftest.selftest import selftest as try_machine
    from piper.selftest.selftest_page import MARK  # torch is paid for only where it is used

    if out is not None:
        check_output(out, MARK)
    console = wide_console(stderr=True)
    page = try_machine(devices, device=device, compiled=compiled, only=only or (), progress=console.print)
    if out is not None:
        write_output(out, page.markdown(), MARK)
    return Answer(
        report=page.report(),
        show=page.markdown(),
        code=SUCCESS if page.ok else NO,
    )
