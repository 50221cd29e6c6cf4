"""Lets `make_fx` trace without replacing methods of `nn.Module`.

Works around: torch 2.11. Every tracer replaces `__getattr__` and `__call__` of `nn.Module` for a while, and
Python then updates all of its subclasses, of which each graph module is one. In a process that has traced
much this is a sixth of the time of a trace. The tracer of `make_fx` only passes on what these are asked.
Not needed from: no version yet.
"""

from contextlib import AbstractContextManager

from torch.fx._symbolic_trace import _Patcher

from piper.process.attributes import replaced


def leaving_modules() -> AbstractContextManager[None]:
    """Let traces by `make_fx` inside the block leave the methods of `nn.Module` as they are."""
    return replaced(_Patcher, "patch_method", lambda *given, **options: None)
