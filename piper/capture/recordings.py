"""The recordings of one model, by microbatch size, shared by several compilations.

Tracing takes 99 % of a compilation. A recording depends on the model, the loss and the samples in a slice,
and on nothing else of a strategy, so other strategies of the same job use it again.
"""

import itertools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from piper.capture.autodiff.differentiate import Captured, CodeCache, differentiate
from piper.capture.compile.cache import Cache
from piper.capture.compile.servers import CompileServers, start_kernel_compilers
from piper.capture.shard.axis_sharding import Request
from piper.capture.shard.request import merged, sharded
from piper.capture.trace.annotate import listed_regions
from piper.capture.trace.build_model import buffers_of, build_fake, parameters_of
from piper.capture.trace.record import LossFn
from piper.capture.trace.sizes import dtype_name
from piper.capture.trace.trace import Traced, trace
from piper.errors import ConfigError
from piper.ir.chunk_options import CodeOptions
from piper.ir.dtypes import DTYPES, JobPrecision
from piper.process.usercode import named_function

log = logging.getLogger("piper")
RequestKey = tuple[object, ...]  # what requests ask, as a key
LARGE = 64  # parameters of a model whose graphs take long to compile
HINT = "compile the same job with another strategy: compile(replace(job, strategy=...), captured=program)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recordings:
    """The traces of one model and loss, and the code made from them, by microbatch size. Grows on request."""

    model: Callable[[], nn.Module]
    loss: LossFn
    precision: JobPrecision
    device: str  # the kind of device that it is recorded for
    compiled: bool  # traced into operations for the compiler
    fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # of the batch: shape of one sample, and type
    forward_only: bool = False  # in eval mode, with nothing to train
    recorded: dict[int, Traced] = field(default_factory=dict, repr=False)  # by samples in a slice
    sharded: dict[tuple[int, RequestKey], Traced] = field(default_factory=dict, repr=False)
    differentiated: dict[tuple[object, ...], Captured] = field(default_factory=dict, repr=False)
    code: CodeCache = field(init=False, repr=False)  # of all chunks: equal ones have the same code

    def __post_init__(self) -> None:
        code = CodeCache(torch.device(self.device), compiled=self.compiled)
        object.__setattr__(self, "code", code)

    def check(self, other: "Recordings", by: str) -> None:
        """Refuse to use these recordings for another model, loss, batch, precision or device."""
        settings = (
            ("precision", self.precision, other.precision),
            ("device", self.device, other.device),
            ("compile", self.compiled, other.compiled),
            ("batch", shown_fields(self.fields), shown_fields(other.fields)),
        )
        unlike = [(what, str(mine), str(theirs)) for what, mine, theirs in settings if mine != theirs]
        if identity_of(self.loss) != identity_of(other.loss):
            unlike.append(("loss", named_function(self.loss), named_function(other.loss)))
        if not unlike and self.model is not other.model:
            lines = itertools.zip_longest(self.described(), other.described(), fillvalue="nothing more")
            unlike += [("model", here.strip(), there.strip()) for here, there in lines if here != there]
        for what, mine, theirs in unlike:
            raise ConfigError(
                f"what was captured has another {what}",
                by=by,
                facts={"captured": mine, "job": theirs},
                hint=HINT,
            )

    def built(self) -> nn.Module:
        """Build the model with fake tensors."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        return build_fake(self.model, mode, getattr(torch, DTYPES[self.precision]), torch.device(self.device))

    def described(self) -> list[str]:
        """Return lines that describe the model: its modules, annotations, parameters and buffers."""
        model = self.built()
        regions = [f"region {region.tag} of {region.where}" for region in listed_regions(model)]
        parameters = [
            f"parameter {p.name} {list(p.shape)} {p.dtype}{'' if p.trainable else ' frozen'}{p.aliases or ''}"
            for p in parameters_of(model)
        ]
        buffers = [f"buffer {b.name} {list(b.shape)} {b.dtype}" for b in buffers_of(model)]
        return [*parameters, *buffers, *regions, *repr(model).splitlines()]


def fields_of(batch: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape of one sample and the type of each field of a batch."""
    return {name: (tuple(value.shape[1:]), value.dtype) for name, value in batch.items()}


def shown_fields(fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    """Return the fields of a batch as text: `tokens [32] int64`."""
    return ", ".join(f"{name} {list(shape)} {dtype_name(dtype)}" for name, (shape, dtype) in fields.items())


def request_key(requests: Sequence[Request]) -> RequestKey:
    """Return what requests ask as a key: which regions are arranged alike, not how many devices they have."""
    meshes: dict[object, int] = {}
    return tuple(
        (
            repr(request.meaning),
            tuple(  # in an order that does not depend on the directives
                (tags, meshes.setdefault(request.regions[tags], len(meshes)))
                for tags in sorted(request.regions)
            ),
        )
        for request in requests
    )


def identity_of(function: Any) -> Hashable:  # noqa: ANN401 (a function of the user's)
    """Return what equal functions share: code, and the values that it closes over or has as defaults."""
    if not hasattr(function, "__code__"):
        return id(function)
    closed_over = (cell.cell_contents for cell in function.__closure__ or ())
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    owner = getattr(function, "__self__", None)  # of a method
    return function.__code__, *(id(value) for value in (*closed_over, *defaults, owner))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capturing:
    """Captures a model for the microbatch sizes that are asked for, each once."""

    batch: Mapping[str, Tensor]
    recordings: Recordings
    cache: Cache | None = None  # stores compiled code; None: code is not compiled
    servers: CompileServers = field(default_factory=CompileServers)

    @property
    def complete(self) -> Recordings:
        """Return recordings of the whole model, from which programs that run can be compiled."""
        return self.recordings

    def traced(self, rows: int, requests: Sequence[Request] = ()) -> Traced:
        """Return the model for slices of `rows` samples, sharded as `requests` ask."""
        known = self.recordings
        if rows not in known.recorded:
            log.debug("Tracing the model")
            known.recorded[rows] = trace(
                known.model,
                known.loss,
                self.batch,
                rows,
                known.precision,
                known.device,
                compiled=known.compiled,
                forward_only=known.forward_only,
                built=self._start_compilers,
            )
        if not requests:
            return known.recorded[rows]
        requests = merged(requests)
        key = (rows, request_key(requests))
        if key not in known.sharded:
            known.sharded[key] = sharded(known.recorded[rows], requests)
        return known.sharded[key]

    def differentiated(
        self, rows: int, requests: Sequence[Request], options: Mapping[str, CodeOptions]
    ) -> Captured:
        """Return the model's code for slices of `rows` samples. options: by chunk."""
        requests = merged(requests)
        # The code remembers its cache: one without compiles nothing, as where strategies are only simulated.
        key = (rows, request_key(requests), tuple(options.items()), self.cache)
        if key not in self.recordings.differentiated:
            log.debug("Tracing its backward")
            traced, code = self.traced(rows, requests), self.recordings.code
            captured = differentiate(traced, options, self.cache, code)
            self.recordings.differentiated[key] = replace(captured, servers=self.servers)
        return self.recordings.differentiated[key]

    def _start_compilers(self, model: nn.Module) -> None:
        """Start the processes that compile, so that they are ready when the model has been traced."""
        # With an empty cache these compile kernels and, for a large model, graphs. Code that is in the cache
        # needs none of them, but the names of its files contain a digest of Triton.
        if self.cache is None or self.recordings.device == "cpu":
            return
        from piper.capture.compile.inductor import read_triton  # with the compiler, which takes a second

        read_triton(self.recordings.device)
        if self.cache.empty():
            start_kernel_compilers()
            if len(list(model.parameters())) >= LARGE:
                self.servers.start(self.recordings.device)
