"""Keeps the code of every distinct chunk, so that equal chunks and other strategies reuse it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piper.capture.autodiff.code import Code, GraphCode
from piper.capture.autodiff.compose import Joints
from piper.capture.autodiff.eager import EagerCode
from piper.capture.autodiff.joint import Joint, UntraceableError
from piper.capture.autodiff.partition import partition
from piper.capture.autodiff.remat import Choice, choose
from piper.capture.compile.hashing import structural_key
from piper.capture.trace.piece import CapturedChunk
from piper.ir.chunk import TensorSpec
from piper.ir.chunk_options import CodeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledChunk:
    """The code of one distinct chunk."""

    key: str
    code: Code
    fallback: str | None = None  # why it runs under eager autograd
    choice: Choice | None = None  # what is kept between its phases, where some is made again


class CodeCache:
    """The code of one captured model's chunks, made when first asked for."""

    def __init__(self, device: torch.device, *, compiled: bool = False) -> None:
        self.device, self.compiled = device, compiled
        self.joints = Joints(device, decompose=compiled)
        self.codes: dict[str, CompiledChunk] = {}

    def find(
        self,
        piece: CapturedChunk,
        *,
        trained: Sequence[bool],
        tangents: Sequence[int],
        params: Sequence[TensorSpec],
        options: CodeOptions,
    ) -> CompiledChunk:
        """Return the code of a piece. Trace it if no equal piece has been traced.

        trained: for each parameter, whether it has a gradient. tangents: the outputs that have one.
        params: its parameters on one device.
        """
        assert piece.body is not None, "a marker has no code"
        budget, ways = options.budget, options.ways
        variant = f"compiled {self.compiled} budget {budget}" if self.compiled or budget is not None else ""
        variant += " flat" if options.flat and self.compiled else ""
        key = structural_key(piece.body, trained, tangents, ways, self.device, variant)
        if key not in self.codes:
            try:
                joint = self.joints.of_piece(piece, trained, tangents, ways)
                self.codes[key] = self._code_of(key, joint, options)
            except UntraceableError as error:
                code = EagerCode(piece, trained, tangents, params)
                self.codes[key] = CompiledChunk(key=key, code=code, fallback=str(error))
        return self.codes[key]

    def _code_of(self, key: str, joint: Joint, options: CodeOptions) -> CompiledChunk:
        plain = partition(joint)
        if not self.compiled and options.budget is None:
            return CompiledChunk(key=key, code=GraphCode(plain))
        choice = choose(plain, options.budget, compiled=self.compiled)
        cut = partition(joint, choice.keep, choice.writers)
        code = GraphCode(cut, compiled=self.compiled, flat=options.flat)
        return CompiledChunk(key=key, code=code, choice=choice)
