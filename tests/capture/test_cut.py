"""How a captured graph becomes chunks: their names, their edges, and what each makes for itself."""

from collections.abc import Callable
from inspect import cleandoc

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.capture.trace.annotate import annotate
from piper.capture.trace.trace import trace
from piper.experts import grouped_mm, route, unroute
from piper.ir.chunk import AxisPosition, Batch, CapturedModel, Constant, Output, Source
from tests import zoo
from tests.capture.capturing import check, traced


def show(outline: CapturedModel) -> str:
    """One line for each chunk: what it reads and how much it returns."""

    def text(source: Source) -> str:
        match source:
            case Batch(field=name):
                return name
            case Constant(name=name):
                return f"constant {name}"
            case Output(chunk=chunk, index=index):
                return f"{chunk}.{index}"
            case AxisPosition(axis=axis):
                return f"place in {axis}"

    return "\n".join(
        f"{chunk.name}: {', '.join(map(text, chunk.inputs))} -> {len(chunk.outputs)}"
        for chunk in outline.chunks
    )


def outline_of(model: Callable[[], nn.Module]) -> CapturedModel:
    return trace(model, zoo.regression, zoo.vectors(4, 0), 4).outline


def assert_runs_in_order(outline: CapturedModel) -> None:
    done: set[str] = set()
    for chunk in outline.chunks:
        assert all(source.chunk in done for source in chunk.inputs if isinstance(source, Output))
        done.add(chunk.name)


class Three(nn.Module):
    """Three layers for a forward to combine."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)


class Interrupted(Three):
    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h = self.a(x)
            with annotate("Q"):
                y = self.b(h)
            z = y + h
            with annotate("Q"):
                y = self.c(z)
            result: Tensor = self.head(y * h)
        return result


def test_an_inner_region_cuts_the_outer_into_pieces() -> None:
    code = check(Interrupted, zoo.regression, zoo.vectors(4, 0))
    assert show(code.outline) == cleandoc("""
        PP=0: x -> 1
        PP=0 Q=0: PP=0.0 -> 1
        PP=0 #1: PP=0 Q=0.0, PP=0.0 -> 1
        PP=0 Q=1: PP=0 #1.0 -> 1
        PP=0 #2: PP=0 Q=1.0, PP=0.0, y -> 1
    """)


class Independent(Three):
    """Work that follows an inner region in the text, but does not depend on it."""

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h = self.a(x)
            with annotate("Q"):
                y = self.b(h)
            g = self.c(h)
            result: Tensor = self.head(y * g)
        return result


def test_work_that_does_not_wait_for_the_inner_region_stays_before_it() -> None:
    code = check(Independent, zoo.regression, zoo.vectors(4, 0))
    assert show(code.outline) == cleandoc("""
        PP=0: x -> 2
        PP=0 Q=0: PP=0.0 -> 1
        PP=0 #1: PP=0 Q=0.0, PP=0.1, y -> 1
    """)


class Outside(Three):
    """Nodes before, between and after the regions."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        with annotate("PP"):
            h = self.a(x)
        h = h.relu()
        with annotate("PP"):
            y = self.b(h)
        result: Tensor = self.head(self.c(y) + h)
        return result


def test_nodes_outside_join_their_producers_else_their_users() -> None:
    outline = check(Outside, zoo.regression, zoo.vectors(4, 0)).outline
    assert show(outline) == cleandoc("""
        PP=0: x -> 1
        PP=1: PP=0.0, y -> 1
    """)
    assert outline.chunks[1].params == (
        *("b.weight", "b.bias", "c.weight", "c.bias"),
        *("head.weight", "head.bias"),
    )


class Tables(Three):
    """A mask and a table made once, used in both stages."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.rand(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(2, device=x.device)[:, None] * self.frequencies
        table = torch.cat([angles.cos(), angles.sin()], -1).flatten()[:16]
        mask = x.new_zeros(16)
        mask[3:5] = 1
        with annotate("PP"):
            h = self.a(x) * table + mask
        with annotate("PP"):
            result: Tensor = self.head(self.b(h) * table + mask)
        return result


def test_what_needs_no_batch_is_made_again_not_sent() -> None:
    outline = check(Tables, zoo.regression, zoo.vectors(4, 0)).outline
    assert show(outline) == cleandoc("""
        PP=0: x -> 1
        PP=1: PP=0.0, y -> 1
    """)
    assert [chunk.buffers for chunk in outline.chunks] == [("frequencies",)] * 2
    assert [buffer.persistent for buffer in outline.buffers] == [False]


def test_skip_edges_go_straight_to_each_consumer() -> None:
    outline = traced("encoder_decoder").outline
    assert show(outline) == cleandoc("""
        PP=0: source -> 1
        PP=1: tokens, PP=0.0 -> 1
        PP=2: PP=1.0, PP=0.0, labels -> 1
    """)


def test_markers_are_chunks_between_which_rows_are_dynamic() -> None:
    outline = traced("moe").outline
    assert_runs_in_order(outline)
    region = [chunk for chunk in outline.chunks if chunk.tags == (("PP", 0), ("EP", 0))]
    assert [(chunk.name, chunk.kind, chunk.experts) for chunk in region] == [
        ("PP=0 EP=0 route", "route", 8),
        ("PP=0 EP=0", "expert", 8),
        ("PP=0 EP=0 unroute", "unroute", 8),
    ]
    routed = [[spec.dynamic_rows for spec in (*chunk.input_specs, *chunk.outputs)] for chunk in region]
    assert routed == [[False, False, True, False], [True, False, True], [True, False, False]]
    sent, back = region[0].input_specs[0], region[2].outputs[0]
    assert region[1].input_specs[0].shape == sent.shape == back.shape


class TwoRoutes(nn.Module):
    """Two routed layers in one region, with routing and weights' own work inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(16, 4), nn.Linear(16, 4)
        self.first, self.second = (nn.Parameter(torch.randn(4, 16, 16) * 0.1) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        with annotate("E"):
            for weight in (self.first, self.second):
                score, chosen = self.router(x).softmax(-1).max(-1)
                order = chosen.argsort(stable=True)
                counts = F.one_hot(chosen, 4).sum(0)
                rows, received = route(x[order], counts)
                expert = torch.repeat_interleave(
                    torch.arange(received.shape[0]), received, output_size=rows.shape[0]
                )
                y = grouped_mm(rows, weight.transpose(1, 2) * 2, received) + self.bias[expert]
                y = unroute(y.tanh(), received, x.shape[0])
                x = x.index_add(0, order, y * score[order][:, None])
        result: Tensor = self.head(x)
        return result


def test_a_region_may_hold_several_routes_and_work_around_them() -> None:
    outline = check(TwoRoutes, zoo.regression, zoo.vectors(4, 0)).outline
    assert_runs_in_order(outline)
    assert [(chunk.name, chunk.kind) for chunk in outline.chunks] == [
        ("E=0", "compute"),
        ("E=0 route", "route"),
        ("E=0 #1", "expert"),
        ("E=0 unroute", "unroute"),
        ("E=0 #2", "compute"),
        ("E=0 route #1", "route"),
        ("E=0 #3", "expert"),
        ("E=0 unroute #1", "unroute"),
        ("E=0 #4", "compute"),
    ]
    experts = [chunk for chunk in outline.chunks if chunk.kind == "expert"]
    # What is made of weights alone is made inside, or it could not be divided by expert.
    assert [chunk.params for chunk in experts] == [("first", "bias"), ("second", "bias")]


class InPlace(Three):
    """Values of one region that another changes in place."""

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
            before = x * 2
        with annotate("PP"):
            z = self.b(F.relu(x, inplace=True))
        with annotate("PP"):
            z += before
            z.mul_(x.mean())
            result: Tensor = self.head(z)
        return result


def test_a_value_that_another_region_changes_is_copied_first() -> None:
    outline = check(InPlace, zoo.regression, zoo.vectors(4, 0)).outline
    assert show(outline) == cleandoc("""
        PP=0: x -> 2
        PP=1: PP=0.0 -> 2
        PP=2: PP=1.1, PP=0.1, PP=1.0, y -> 1
    """)


class Counting(Three):
    """A buffer that is changed through a view of it, and read by nobody."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, 16))

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
        with annotate("PP"):
            self.seen[0].add_(1)
            self.seen[1] = x.detach().mean(0)
            result: Tensor = self.head(x)
        return result


def test_a_buffer_may_be_changed_through_a_view() -> None:
    outline = check(Counting, zoo.regression, zoo.vectors(4, 0)).outline
    assert [chunk.mutated for chunk in outline.chunks] == [(), ("seen",)]


class Modes(Three):
    """vmap, autocast, no_grad and a checkpoint, each across or next to a border."""

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
            with torch.no_grad():
                scale = self.c(x).mean()
        with annotate("PP"):
            x = torch.func.vmap(lambda row: row * row.sum())(x) * scale
        with torch.autocast("cpu", torch.bfloat16):
            with annotate("PP"):
                x = torch.utils.checkpoint.checkpoint(self.b, x, use_reentrant=False)
            with annotate("PP"):
                x = self.head(x)
        return x.float()


def test_modes_follow_the_operations_they_hold_for() -> None:
    outline = check(Modes, zoo.regression, zoo.vectors(4, 0), "fp32").outline
    assert_runs_in_order(outline)
    assert [chunk.name for chunk in outline.chunks] == ["PP=0", "PP=1", "PP=2", "PP=3"]


class Inferring(Three):
    """inference_mode, alone, with gradients inside of it, and ended for a while."""

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
            with torch.inference_mode():
                fixed = self.c(x)
                with torch.enable_grad():
                    fixed = fixed + self.b(x)
                with torch.inference_mode(False):
                    x = self.b(x)
                fixed = fixed + self.c(x)
        with annotate("PP"), torch.no_grad():
            with torch.inference_mode():
                fixed = fixed + self.a(x)
            fixed = fixed + self.b(x)
        with annotate("PP"):
            result: Tensor = self.head(self.c(x) + fixed)
        return result


def test_no_gradient_passes_through_inference_mode() -> None:
    check(Inferring, zoo.regression, zoo.vectors(4, 0))


def test_a_result_that_only_passes_through_is_still_a_result() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return zoo.regression(model, batch), torch.tensor(3.0)

    outline = check(lambda: nn.Linear(16, 4), loss, zoo.vectors(4, 0)).outline  # type: ignore[arg-type]
    assert (outline.loss, outline.weight) == (Output(chunk="all", index=0), Output(chunk="all", index=1))


def test_capture_draws_no_random_numbers_and_is_repeatable() -> None:
    before = torch.get_rng_state()
    first, second = (trace(lambda: zoo.MLP(2, 0.5), zoo.regression, zoo.vectors(4, 0), 2) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.outline == second.outline
    assert first.outline.rows == first.outline.batch["x"].shape[0] == 2
