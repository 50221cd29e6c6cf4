"""Builds a model of fake tensors on the device type that it will run on, so nothing is allocated."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from piper.capture.quirks.grouped_experts import choose_experts
from piper.capture.quirks.output_recorders import install_recorders
from piper.capture.quirks.safetensors_files import reading_safetensors
from piper.capture.quirks.swapped_tensors import assign, converting_fakes
from piper.capture.trace.sizes import dtype_name
from piper.capture.trace_errors import quiet, refused
from piper.errors import CaptureError, PiperError
from piper.ir.chunk import Buffer, Parameter
from piper.ir.grouping import grouped


def build_fake(
    model_fn: Callable[[], nn.Module],
    mode: FakeTensorMode,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """Build the model with fake tensors, with its floating-point state in type `dtype`."""
    # A constructor that reads values, as that of `orthogonal` does, or how many there are, gets real tensors.
    with quiet():
        shapes, mode.shape_env = mode.shape_env, None  # without symbols, to read a value is an error
        try:
            model = _built(model_fn, mode, device)
        except PiperError:  # such as one of `annotate_layers`, which says all there is to say
            raise
        except Exception as error:
            hint = "build the model alone, without Piper, to see the whole traceback"
            raise refused("the model cannot be built", error, hint=hint) from error
        finally:
            mode.shape_env = shapes
        if not isinstance(model, nn.Module):
            raise CaptureError(
                "the model is not a module",
                by="model",
                facts={"got": type(model).__name__},
                hint="model is a function that returns an nn.Module: model=lambda: Decoder(config)",
            )
        _check_types(model)
        _cast(model, dtype, device)
    choose_experts(model, dtype)
    install_recorders(model)
    return model


def _built(model_fn: Callable[[], nn.Module], mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Call the user's function: with fakes, or with memory, on the CPU, if its constructor reads values."""
    try:
        with mode, device, converting_fakes(), reading_safetensors():
            return model_fn()
    except RuntimeError as error:
        if not _reads_values(error):
            raise
        # The driver's random state stays as it is.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return model_fn()


def _reads_values(error: RuntimeError) -> bool:
    """Return whether a constructor asked a fake tensor for what only a real one has."""
    # torch has no class of its own for the last.
    asked = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    return asked or ".numpy() is not supported" in str(error)


def _check_types(model: nn.Module) -> None:
    """Refuse complex parameters: norms, sums over devices and optimizers here are of real numbers."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise CaptureError(
                f"the parameter {name} is complex",
                by="model",
                facts={
                    "type": dtype_name(parameter.dtype),
                    "but": "complex parameters cannot be trained here",
                },
                hint="hold it as real numbers: nn.Parameter(torch.view_as_real(w)), and use "
                "torch.view_as_complex(self.w) in the forward; a complex buffer may stay",
            )


def _cast(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Cast floating-point parameters and buffers in place: hooks, ties and lists of parameters keep them."""
    # Fakes stay fakes, and values that a constructor has read, as `from_pretrained` does, stay values. A
    # buffer that is a view, as `pe.unsqueeze(0)` is, cannot have another type than its base: it is replaced.
    replaced: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        if tensor.dtype != wanted or tensor.device.type != device.type:
            value = tensor.data.to(device, wanted)
            if tensor._is_view():
                replaced[id(tensor)] = value
            else:
                assign(tensor, value)
    for module in model.modules() if replaced else ():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, replaced.get(id(buffer), buffer))


def parameters_of(model: nn.Module) -> tuple[Parameter, ...]:
    """Return every parameter once, with the other names of a tied one."""
    names = grouped((id(tensor), name) for name, tensor in model.named_parameters(remove_duplicate=False))
    return tuple(
        Parameter(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            trainable=tensor.requires_grad,
            aliases=tuple(names[id(tensor)][1:]),
        )
        for name, tensor in model.named_parameters()
    )


def buffers_of(model: nn.Module) -> tuple[Buffer, ...]:
    """Return every buffer once, with the names a state_dict has for a tied one."""
    passing = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    names = grouped((id(tensor), name) for name, tensor in model.named_buffers(remove_duplicate=False))
    saved = {key: [name for name in tied if name not in passing] for key, tied in names.items()}
    return tuple(
        Buffer(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            nbytes=tensor.numel() * tensor.element_size(),
            persistent=bool(saved[id(tensor)]),
            names=tuple(saved[id(tensor)]) if len(names[id(tensor)]) > 1 else (),
        )
        for name, tensor in model.named_buffers()
    )
