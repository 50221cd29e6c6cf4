"""The kernel that steps Adam on parameters in two halves is as close to float64 as torch's own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.runtime.bucket_state import join, split

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
SIZES = {"aligned": 2**21, "odd": 2**21 + 3}  # elements
MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params, **kw: torch.optim.AdamW(params, lr=1e-2, **kw),
    "Adam, decay": lambda params, **kw: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, **kw),
    "maximize": lambda params, **kw: torch.optim.AdamW(
        params, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, maximize=True, weight_decay=0, **kw
    ),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("divisor", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "summed"])
@pytest.mark.parametrize("kind", MAKERS)
def test_several_steps_are_as_close_to_float64_as_those_of_torch(
    kind: str, dtype: torch.dtype, divisor: float | None, size: int
) -> None:
    from piper.runtime.cuda.adam import SplitAdam

    torch.manual_seed(0)
    values = torch.randn(size, device="cuda")
    trained, exact = values.clone().requires_grad_(), values.double().requires_grad_()
    plain = values.clone().requires_grad_()
    other = torch.ones(16, device="cuda", requires_grad=True)  # not split
    high, low = split(values)
    optimizer, wanted = MAKERS[kind]([trained, other], fused=True), MAKERS[kind]([exact])
    of_torch = MAKERS[kind]([plain], fused=True)
    kernel = SplitAdam(optimizer, {trained: high}, {trained: low})
    taken = []
    for _ in range(5):
        gradient = torch.randn(size, device="cuda").to(dtype)
        exact.grad = gradient.double() / (divisor or 1)
        wanted.step()
        plain.grad = gradient.float() / (divisor or 1)
        of_torch.step()
        by = None if divisor is None else torch.tensor(divisor, dtype=torch.float64, device="cuda")
        with torch.no_grad():
            left = kernel.step([(trained, gradient), (other, torch.ones_like(other))], by)
        taken.append(len(left))
        if len(left) == 2:
            trained.grad = gradient.float() / (divisor or 1)
            optimizer.step()
            trained.grad = None
            for half, updated in zip((high, low), split(trained.detach()), strict=True):
                half.copy_(updated)
    assert taken == [2, 1, 1, 1, 1]  # torch makes the state in the first step, and steps what is not split
    # Adam divides by what may be nearly nothing, so that single elements are far off with either.
    ours, theirs = ((found.double() - exact).abs() for found in (join(high, low), plain))
    assert ours.mean() <= 1.5 * theirs.mean()
    assert ours.max() <= 4 * theirs.max()
    assert all(map(torch.equal, split(join(high, low)), (high, low)))  # the kernel rounds as `split` does
    assert optimizer.state[trained]["step"].item() == 5


def test_a_step_that_is_skipped_changes_nothing() -> None:
    from piper.runtime.cuda.adam import SplitAdam

    torch.manual_seed(0)
    trained = torch.randn(2**21, device="cuda", requires_grad=True)
    gradient, (high, low) = torch.randn(2**21, device="cuda"), split(trained.detach())
    optimizer = torch.optim.AdamW([trained], lr=1e-2, fused=True)
    kernel = SplitAdam(optimizer, {trained: high}, {trained: low})
    trained.grad = gradient
    optimizer.step()
    trained.grad = None

    def step(skip: float | None) -> list[Tensor]:
        given = None if skip is None else torch.tensor(skip, dtype=torch.float64, device="cuda")
        with torch.no_grad():
            assert kernel.step([(trained, gradient)], None, given) == []
        state = optimizer.state[trained]
        return [value.clone() for value in (high, low, state["exp_avg"], state["exp_avg_sq"], state["step"])]

    before = step(None)
    for skip in (1.0, 3.0):
        assert all(map(torch.equal, step(skip), before))
    after = step(0.0)
    assert not any(map(torch.equal, after, before))
    assert after[-1].item() == 3


def test_a_nan_stays_one() -> None:
    from piper.runtime.cuda.adam import SplitAdam

    trained = torch.ones(64, device="cuda", requires_grad=True)
    high, low = split(trained.detach())
    optimizer = torch.optim.AdamW([trained], lr=1e-2, fused=True)
    trained.grad = torch.ones_like(trained)
    optimizer.step()
    gradient = torch.ones(64, device="cuda")
    gradient[3] = torch.nan
    with torch.no_grad():
        assert SplitAdam(optimizer, {trained: high}, {trained: low}).step([(trained, gradient)], None) == []
    assert high.isnan().nonzero().tolist() == join(high, low).isnan().nonzero().tolist() == [[3]]


class Wide(nn.Module):
    """Large parameters, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 2048), nn.Linear(2048, 1024)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.relu(self.up(x)))
        return made


def wide_job(optimizer: Callable[..., torch.optim.Optimizer]) -> piper.Job:
    return piper.Job(
        model=Wide,
        loss=lambda model, batch: ((model(batch["x"]) - batch["x"]) ** 2).float().mean(),
        data=lambda: [{"x": torch.randn(8, 1024)}],
        strategy=[],
        optimizer=optimizer,
        precision="bf16",
    )


@pytest.mark.parametrize("graphs", [False, True])
def test_a_job_trains_as_with_kernels_of_torch(graphs: bool) -> None:
    def with_hook(params: object) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(params, lr=1e-3, fused=True)  # type: ignore[arg-type]
        made.register_step_post_hook(lambda *_: None)  # so that torch takes every step
        return made

    batches = [{"x": torch.randn(8, 1024)} for _ in range(5)]
    states = []
    for optimizer in (lambda params: torch.optim.AdamW(params, lr=1e-3), with_hook):
        program = piper.compile(wide_job(optimizer), device="cuda")
        with piper.launch(program, on="inline", graphs=graphs) as run:
            losses = [run.step(batch).loss for batch in batches]
            states.append((losses, run.state_dict()))
    (ours, state), (theirs, wanted) = states
    assert ours == pytest.approx(theirs, rel=2e-3)  # an ulp of the masters may turn one of bf16
    for name, value in state.items():
        # Such a turn changes the next gradients, and Adam follows the sign of one that is nearly nothing.
        apart = (value - wanted[name]).abs() > 2e-4
        assert apart.double().mean() <= 1e-3, name
