"""Which optimizers train the same on the job's devices as in plain PyTorch, and what is said of the others."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import piper
from piper.compiler.optimizer_probe import probe_optimizer
from piper.errors import ConfigError
from piper.ir.sharding import Sharding
from piper.plan.bucket import Bucket
from piper.plan.updates import Piece

Make = Callable[[Iterable[Tensor]], Optimizer]
SIZES = {"a.weight": (6, 4), "a.bias": (6,), "b.weight": (4, 6), "b.bias": (4,)}


class Plain(Optimizer):
    """What the optimizers below share: each says how far one step goes."""

    def __init__(self, params: object, lr: float = 0.1, **defaults: object) -> None:
        super().__init__(params, {"lr": lr, **defaults})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        held = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = self.scale([p.grad for _, p in held])
        for group, p in held:
            p.sub_(self.direction(p), alpha=group["lr"] * scale)

    def scale(self, gradients: list[Tensor]) -> float:
        return 1.0

    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad


class GlobalNorm(Plain):
    def scale(self, gradients: list[Tensor]) -> float:
        return 1.0 / max(1.0, math.sqrt(sum(float(g.square().sum()) for g in gradients)))


class Largest(Plain):
    """Only the tensor with the largest gradient sets the pace, and only now and then."""

    def scale(self, gradients: list[Tensor]) -> float:
        return min(1.0, 50.0 / max(float(g.abs().max()) for g in gradients))


class SlightDecay(Plain):
    """Like AdamS: weight decay, less of it where gradients are large in all tensors together."""

    def scale(self, gradients: list[Tensor]) -> float:
        self.decay = [1e-7 / (1e-8 + float(torch.cat([g.reshape(-1) for g in gradients]).norm()))]
        return 1.0

    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        return 1.0 + self.decay[0] * p


class Lars(Plain):
    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        moved: Tensor = p.grad * (p.norm() / (p.grad.norm() + 1e-8))
        return moved


class Lamb(Plain):
    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        state = self.state[p]
        first, second = (state.setdefault(key, torch.zeros_like(p)) for key in ("first", "second"))
        first.mul_(0.9).add_(p.grad, alpha=0.1)
        second.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        wanted: Tensor = first / (second.sqrt() + 1e-6) + 0.1 * p
        wanted *= p.norm() / wanted.norm()
        return wanted


class Lion(Plain):
    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        kept = self.state[p].setdefault("momentum", torch.zeros_like(p))
        moved = (kept * 0.9 + p.grad * 0.1).sign()
        kept.mul_(0.99).add_(p.grad, alpha=0.01)
        decayed: Tensor = moved + 0.1 * p
        return decayed


class Noisy(Plain):
    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad + torch.randn_like(p)


def by_position(params: Iterable[Tensor]) -> Optimizer:
    first, *rest = params
    groups: list[dict[str, object]] = [{"params": [first], "lr": 0.5}, {"params": rest}]
    return torch.optim.SGD(groups, lr=0.1)


def by_axes(params: Iterable[Tensor]) -> Optimizer:
    params = list(params)
    matrices, others = ([p for p in params if (p.ndim >= 2) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1)


def by_size(params: Iterable[Tensor]) -> Optimizer:
    """Asks for true sizes: a miniature has none of 4000."""
    return torch.optim.SGD([{"params": [p], "lr": 0.5 if p.shape[0] == 4000 else 0.1} for p in params])


def large_only(params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD([p for p in params if p.numel() >= 24], lr=0.1)


def matrices_only(params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.1)


def bucket(name: str, names: Iterable[str], devices: tuple[int, ...], zero: int = 0) -> Bucket:
    pieces: list[Piece] = []
    for piece in names:
        offset = sum(p.numel for p in pieces)
        pieces.append(Piece(name=piece, shape=SIZES[piece], offset=offset))
    return Bucket(
        name=name,
        pieces=tuple(pieces),
        devices=devices,
        groups=(devices,),
        dtype="float32",
        itemsize=4,
        chunks=(),
        zero=zero,
    )


A, B = ("a.weight", "a.bias"), ("b.weight", "b.bias")
LAYOUTS = {
    "one": [bucket("all", SIZES, (0,))],
    "ddp": [bucket("all", SIZES, (0, 1))],
    "turned": [bucket("b", B, (0,)), bucket("a", A, (0,))],
    "pp": [bucket("a", A, (0,)), bucket("b", B, (1,))],
    "zero1": [bucket("all", SIZES, (0, 1), 1)],
    "zero3": [bucket("all", SIZES, tuple(range(8)), 3)],
    "pp x zero3": [bucket("a", A, (0, 1), 3), bucket("b", B, (2, 3), 3)],
}
ACROSS = "looks at more than one tensor"
SHARD = "is updated in another way"
REFUSES = "it refuses what a device holds"
NOISE = "Noisy draws random numbers, and each device would draw its own"
ELEMENTWISE: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "AdamW tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1)),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD at rest": lambda params: torch.optim.SGD(params, lr=0.0, momentum=0.9),
    "SGD nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adagrad by size": lambda params: torch.optim.Adagrad([p for p in params if p.numel() > 20], lr=0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "by values": lambda params: torch.optim.SGD(
        [p for p in params if float(p.detach().abs().max()) < 1e9], lr=0.1
    ),
    "Lion": Lion,
    "Plain": Plain,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_pass_everywhere(name: str) -> None:
    for buckets in LAYOUTS.values():
        probe_optimizer(ELEMENTWISE[name], SIZES, buckets)


@pytest.mark.parametrize(
    ("make", "verdicts"),
    [
        (GlobalNorm, {"turned": "", "pp": ACROSS, "zero1": ACROSS, "zero3": ACROSS, "pp x zero3": ACROSS}),
        (Largest, {"turned": "", "pp": ACROSS, "zero1": ACROSS, "zero3": ACROSS, "pp x zero3": ACROSS}),
        (SlightDecay, {"turned": "", "pp": ACROSS, "zero1": ACROSS, "zero3": ACROSS, "pp x zero3": ACROSS}),
        (by_position, {}),
        (by_axes, {}),
        (Lars, {"turned": "", "pp": "", "zero1": SHARD, "zero3": SHARD, "pp x zero3": SHARD}),
        (Lamb, {"turned": "", "pp": "", "zero1": SHARD, "zero3": SHARD, "pp x zero3": SHARD}),
        (
            lambda params: torch.optim.Adafactor(params, lr=0.1),
            {"turned": "", "pp": "", "zero1": SHARD, "zero3": SHARD, "pp x zero3": SHARD},
        ),
        (
            matrices_only,
            {"turned": "", "pp": "", "zero1": REFUSES, "zero3": REFUSES, "pp x zero3": REFUSES},
        ),
        (
            Noisy,
            {
                "ddp": NOISE,
                "pp": NOISE,
                "zero1": NOISE,
                "zero3": NOISE,
                "pp x zero3": NOISE,
            },
        ),
        (large_only, {}),
    ],
    ids=[
        "global norm",
        "largest",
        "slight decay",
        "position",
        "axes",
        "LARS",
        "LAMB",
        "Adafactor",
        "Muon",
        "noise",
        "large only",
    ],
)
def test_the_others_pass_where_they_see_what_plain_pytorch_shows(
    make: Make, verdicts: dict[str, str]
) -> None:
    for layout, buckets in LAYOUTS.items():
        why = verdicts.get(layout, "")  # with one device, and with DDP, each sees what plain PyTorch shows
        if not why:
            probe_optimizer(make, SIZES, buckets)
            continue
        with pytest.raises(ConfigError) as refused:
            probe_optimizer(make, SIZES, buckets)
        assert why in str(refused.value), layout


def test_groups_by_true_sizes_are_seen_though_parameters_are_tried_small() -> None:
    sizes = {"a": (4000, 1000), "b": (1000, 4000)}

    def at(devices: tuple[int, ...], zero: int) -> Bucket:
        pieces = (
            Piece(name="a", shape=sizes["a"], offset=0),
            Piece(name="b", shape=sizes["b"], offset=4000000),
        )
        return Bucket(
            name="all",
            pieces=pieces,
            devices=devices,
            groups=(devices,),
            dtype="float32",
            itemsize=4,
            chunks=(),
            zero=zero,
        )

    probe_optimizer(by_size, sizes, [at((0, 1), 0)])
    probe_optimizer(by_size, sizes, [at((0, 1), 1)])


@pytest.mark.parametrize(("make", "fine"), [(ELEMENTWISE["AdamW"], True), (Lars, False), (GlobalNorm, False)])
def test_divided_experts_are_parts_of_a_parameter(make: Make, fine: bool) -> None:
    experts = Bucket(
        name="experts",
        pieces=(Piece(name="w", shape=(4, 3, 5), offset=0, shardings=(Sharding(dim=0, degree=2),)),),
        devices=(0, 1),
        groups=((0,), (1,)),
        dtype="float32",
        itemsize=4,
        chunks=(),
    )
    if fine:
        probe_optimizer(make, {"w": (8, 3, 5)}, [experts])
        return
    with pytest.raises(ConfigError, match="w is updated in another way"):
        probe_optimizer(make, {"w": (8, 3, 5)}, [experts])


class ByRows(Plain):
    """Makes every row of a matrix as long as the others."""

    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        moved: Tensor = p.grad / (p.grad.norm(dim=-1, keepdim=True) + 1e-8)
        return moved


def tensor_parallel(shape: tuple[int, ...], *shardings: Sharding) -> Bucket:
    """Return a bucket whose devices compute gradients of their own, whether they shard its parameter or not."""
    return Bucket(
        name="w",
        pieces=(Piece(name="w", shape=shape, offset=0, shardings=shardings),),
        devices=(0, 1),
        groups=((0,), (1,)),
        dtype="float32",
        itemsize=4,
        chunks=(),
    )


def test_a_slice_is_tried_along_the_dimension_that_is_sharded() -> None:
    probe_optimizer(ByRows, {"w": (8, 6)}, [tensor_parallel((4, 6), Sharding(dim=0, degree=2))])
    with pytest.raises(ConfigError, match="w is updated in another way"):
        probe_optimizer(ByRows, {"w": (8, 6)}, [tensor_parallel((8, 3), Sharding(dim=1, degree=2))])


@pytest.mark.parametrize("shape", [(8, 6), (7,), ()])
def test_a_parameter_that_every_device_holds_whole_is_tried_whole(shape: tuple[int, ...]) -> None:
    probe_optimizer(Lars, {"w": shape}, [tensor_parallel(shape)])


@pytest.mark.parametrize(
    ("make", "bytes_an_element"),
    [
        (ELEMENTWISE["AdamW"], 8),
        (ELEMENTWISE["Adam amsgrad"], 12),
        (ELEMENTWISE["SGD"], 0),
        (ELEMENTWISE["SGD nesterov"], 4),
        (Lion, 4),
    ],
)
def test_what_an_optimizer_keeps(make: Make, bytes_an_element: int) -> None:
    assert probe_optimizer(make, SIZES, LAYOUTS["pp"]).state_bytes == bytes_an_element


def test_parameters_that_no_chunk_reads_count_for_positions() -> None:
    """Plain PyTorch gives an optimizer the unused parameter too, as the first."""
    sizes = {"unused": (2, 2), **SIZES}
    probe_optimizer(ELEMENTWISE["AdamW"], sizes, LAYOUTS["one"])
    probe_optimizer(by_position, sizes, LAYOUTS["one"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((5, 7, 3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = torch.tanh(layer(x))
        return x


def batches() -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, 5, generator=rng, dtype=torch.float64)} for _ in range(4)]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out: Tensor = model(batch["x"])
    return (out - 0.5).square().mean()


def job(optimizer: Make, zero: int) -> piper.Job:
    stages = [piper.replicate(piper.at(PP=s), [2 * s, 2 * s + 1], zero=zero) for s in range(2)]
    return piper.Job(
        model=Net,
        loss=loss,  # type: ignore[arg-type]
        data=batches,
        strategy=[*stages, piper.split(piper.at(), parts=2), *piper.schedules.one_f_one_b(2, 2)],
        optimizer=optimizer,
        precision="fp64",
    )


class OwnList(Plain):
    """Steps the parameters of a list of its own."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.own = [*params]
        super().__init__(self.own)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.own:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


class RateById(Plain):
    """Knows the rate of each parameter by its `id`."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        given = [*params]
        self.rates = {id(p): 3.0 for p in given}
        super().__init__(given)

    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad * self.rates.get(id(p), 1.0)


@torch.no_grad()
def clamp(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.clamp_(-0.2, 0.2)


def clamped(params: Iterable[Tensor]) -> Optimizer:
    """Clamp every parameter after each step."""
    given = [*params]
    optimizer = torch.optim.SGD(given, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: clamp(given))
    return optimizer


def clamped_at_once(params: Iterable[Tensor]) -> Optimizer:
    """Make state at once, and clamp every parameter after each step."""
    given = [*params]
    optimizer = torch.optim.Adagrad(given, lr=0.1)
    optimizer.register_step_post_hook(partial(clamp_after, given))
    return optimizer


def clamp_after(given: list[Tensor], *_: object) -> None:
    clamp(given)


REFERRING = [OwnList, RateById, clamped, clamped_at_once]


@pytest.mark.parametrize(
    "make",
    [Lion, ELEMENTWISE["Adam amsgrad"], *REFERRING],
    ids=["Lion", "Adam", *(each.__name__ for each in REFERRING)],
)
def test_an_accepted_optimizer_trains_as_in_plain_pytorch(make: Make) -> None:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = make(model.parameters())
    for batch in batches():
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    with piper.launch(piper.compile(job(make, zero=3))) as run:
        for batch in batches():
            run.step(batch)
        state = run.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


def hooked_gradient(params: Iterable[Tensor]) -> Optimizer:
    given = [*params]
    given[0].register_hook(lambda gradient: gradient * 2)
    return torch.optim.SGD(given, lr=0.1)


def test_a_hook_on_a_gradient_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"registers a hook on the gradient of a\.weight"):
        probe_optimizer(hooked_gradient, SIZES, LAYOUTS["ddp"])


def line_of(begin: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.startswith(begin))


def test_the_message_of_one_that_looks_across_tensors() -> None:
    with pytest.raises(ConfigError) as refused:
        piper.compile(job(GlobalNorm, zero=0))
    line = line_of("class GlobalNorm")
    assert str(refused.value) == cleandoc(f"""
        optimizer (test_optimizer_probe.py:{line}): GlobalNorm cannot work where a device does not hold all parameters in order
          devices: 0,1 hold 2 parameters
          but:     layers.0.weight is updated in another way where only some parameters are held: it looks at more than one tensor, or at the order of them
          hint:    let every device hold all: zero=0 and no pipeline; or clip with the job's clip_norm, and give each parameter the same options wherever it is: by its shape, not by its place in the list
    """)


def by_values_and_axes(params: Iterable[Tensor]) -> Optimizer:
    """Looks at values: it cannot be called with parameters that take no memory."""
    return by_axes(p for p in params if float(p.detach().abs().max()) < 1e9)


def test_a_function_that_looks_at_values_sees_whole_parameters() -> None:
    for buckets in LAYOUTS.values():
        probe_optimizer(by_values_and_axes, SIZES, buckets)


def test_an_optimizer_is_tried_on_one_thread() -> None:
    seen: set[int] = set()

    class Watching(Plain):
        def direction(self, p: Tensor) -> Tensor:
            seen.add(torch.get_num_threads())
            return super().direction(p)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        probe_optimizer(Watching, SIZES, [bucket("all", SIZES, (0,))])
        assert seen == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
