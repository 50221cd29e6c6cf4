"""What the outline says of each phase: what it reads, keeps, writes and costs."""

import copy

import torch
from torch import Tensor, nn

from piper.capture.autodiff.differentiate import CodeCache, differentiate
from piper.capture.trace.annotate import annotate
from piper.capture.trace.trace import trace
from piper.ir.chunk import Chunk, PhaseSpec, TensorSpec
from piper.ir.chunk_options import CodeOptions
from tests import zoo
from tests.capture.capturing import captured, case, check, difference, traced

WIDE = 8  # bytes of a float64


def chunks_of(name: str, ways: int = 1) -> dict[str, Chunk]:
    return {chunk.name: chunk for chunk in captured(name, ways).outline.chunks}


class Linears(nn.Module):
    """One linear layer in each stage."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("PP"):
                x = layer(x)
        return x[:, :4]


def test_phases_of_a_linear_layer() -> None:
    code = check(lambda: Linears(3), zoo.regression, zoo.vectors(4, 0))
    chunk = code.outline.chunks[1]
    weight, bias = "layers.1.weight", "layers.1.bias"
    product = 2 * 4 * 16 * 16
    rows, square = 4 * 16 * WIDE, 16 * 16 * WIDE
    assert (chunk.saved, chunk.carried, chunk.storages, chunk.kept_inputs) == ((), (), (), {})
    assert chunk.phases == {
        "F": PhaseSpec(
            inputs=(0,), params=(weight, bias), flops=product, bytes_moved=2 * rows + square + 16 * WIDE
        ),
        "B": PhaseSpec(
            inputs=(0,),
            params=(weight,),
            tangents=(0,),
            grad_inputs=(0,),
            grad_params=(weight, bias),
            flops=2 * product,
            bytes_moved=5 * rows + 2 * square + 16 * WIDE,
        ),
        "BI": PhaseSpec(
            params=(weight,), tangents=(0,), grad_inputs=(0,), flops=product, bytes_moved=2 * rows + square
        ),
        "BW": PhaseSpec(
            inputs=(0,),
            tangents=(0,),  # read again rather than carried
            grad_params=(weight, bias),
            flops=product,
            bytes_moved=3 * rows + square + 16 * WIDE,
        ),
    }


def test_equal_stages_share_their_code() -> None:
    code = differentiate(trace(lambda: Linears(5), zoo.regression, zoo.vectors(4, 0), 4))
    first, *middle, last = (chunk.key for chunk in code.outline.chunks)
    assert len(set(middle)) == 1
    assert len({first, last, *middle}) == len(code.codes) == 3
    assert code.phase(middle[0], "F") is code.phase(middle[1], "F")


def test_a_first_stage_does_all_its_backward_in_bw() -> None:
    phases = chunks_of("decoder")["PP=0"].phases
    empty = PhaseSpec()
    assert phases["BI"] == empty
    assert phases["BW"] == phases["B"] != empty


def test_split_backward_costs_what_the_whole_one_costs() -> None:
    for name in ("decoder", "moe", "convnet"):
        for chunk in chunks_of(name).values():
            if chunk.kind in ("compute", "expert"):
                parts = chunk.phases["BI"].flops + chunk.phases["BW"].flops
                assert parts == chunk.phases["B"].flops


def test_forward_flops_of_a_decoder() -> None:
    rows, length, dim, hidden, heads = 2, zoo.LENGTH, 32, 64, 4 * 8
    linear = 2 * rows * length * (dim * heads * 2 + dim * heads + 3 * dim * hidden)
    attention = 2 * 2 * rows * (length * (length + 1) // 2) * heads  # causal
    head = 2 * rows * length * dim * zoo.VOCAB
    chunks = chunks_of("decoder")
    assert chunks["PP=0"].phases["F"].flops == linear + attention
    assert chunks["PP=1"].phases["F"].flops == linear + attention + head


def test_tied_parameters_are_one_with_two_names() -> None:
    outline = captured("decoder").outline
    tied = next(parameter for parameter in outline.parameters if parameter.aliases)
    assert (tied.name, tied.aliases) == ("embedding.weight", ("head.weight",))
    assert [tied.name in chunk.params for chunk in outline.chunks] == [True, True]
    assert [tied.name in chunk.phases["B"].grad_params for chunk in outline.chunks] == [True, True]
    assert "head.weight" not in {parameter.name for parameter in outline.parameters}


def test_frozen_parameters_have_no_gradient() -> None:
    outline = captured("frozen").outline
    frozen = {parameter.name for parameter in outline.parameters if not parameter.trainable}
    assert frozen
    for chunk in outline.chunks:
        assert set(chunk.phases["B"].grad_params) == set(chunk.params) - frozen


def test_a_stage_without_anything_to_train_has_only_a_forward() -> None:
    chunks = chunks_of("frozen_stage")
    assert list(chunks["PP=0"].phases) == ["F"]
    assert chunks["PP=0"].saved == ()
    assert chunks["PP=1"].phases["B"].grad_inputs == ()


def test_only_the_sum_of_a_weighted_loss_is_differentiated() -> None:
    outline = captured("sum_weight").outline
    assert outline.weight is not None
    last = outline.chunks[-1]
    assert len(last.outputs) == 2
    assert last.phases["B"].tangents == (outline.loss.index,)


class Undifferentiated(nn.Module):
    """A stage with outputs that nobody differentiates: one is detached, of one only the order matters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h = self.a(x)
            scale, score, shape = h * 2, h * 3, h * 4
        with annotate("PP"):
            order = score.argsort(-1)
            result: Tensor = self.b(h.gather(-1, order) * scale.detach().mean() + torch.zeros_like(shape))
        return result


def test_outputs_that_nobody_differentiates_have_no_tangent() -> None:
    chunks = check(Undifferentiated, zoo.regression, zoo.vectors(4, 0)).outline.chunks
    assert len(chunks[0].outputs) == 3  # of `shape` only the shape is used
    assert chunks[0].phases["B"].tangents == (0,)
    assert chunks[1].phases["B"].grad_inputs == (1,)
    assert chunks[0].saved == ()


class Sharing(nn.Module):
    """Outputs and saved values in one memory: a value, a view of it, and a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h = self.a(x).sigmoid()
            flat, first = h.view(-1), h[:2]
        with annotate("PP"):
            result: Tensor = self.b(flat.view(4, 32)[:, :16] + first.mean())
        return result


def test_values_in_one_memory_say_so() -> None:
    chunk = check(Sharing, zoo.regression, zoo.vectors(4, 0)).outline.chunks[0]
    size = 4 * 32 * WIDE
    assert chunk.storages == (size,)
    assert [(spec.shape, spec.storage) for spec in chunk.outputs] == [((128,), 0), ((2, 32), 0)]
    assert [(spec.shape, spec.storage, spec.nbytes) for spec in chunk.saved] == [((4, 32), 0, size)]


def test_workspace_is_what_lives_at_once_and_goes() -> None:
    chunk = check(Sharing, zoo.regression, zoo.vectors(4, 0)).outline.chunks[0]
    assert (
        chunk.phases["F"].workspace == 4 * 32 * WIDE
    )  # the linear layer's result, until the sigmoid is made


def test_compiled_code_lets_go_of_what_was_kept_before_its_results_are_all_there() -> None:
    sample = zoo.vectors(4, 0)

    def workspaces(*, compiled: bool) -> dict[str, int]:
        found = trace(Tower, zoo.regression, sample, 4, "fp32", torch.device("cpu"), compiled=compiled)
        chunk = differentiate(found).outline.chunks[0]
        assert len(chunk.saved) >= 3
        return {name: spec.workspace for name, spec in chunk.phases.items()}

    plain, compiled = workspaces(compiled=False), workspaces(compiled=True)
    assert min(plain.values()) >= 0
    assert compiled["B"] < 0  # the first layers' gradients are made when the last layers' inputs are gone
    assert compiled["F"] >= 0


class Gated(nn.Module):
    """A gated layer: in its backward three results are made of the same three values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        with annotate("PP"):
            return torch.sin(h)


def test_what_compiled_code_makes_in_one_go_is_there_at_once() -> None:
    rows = 512
    found = trace(
        Gated, zoo.regression, zoo.vectors(rows, 0), rows, "fp32", torch.device("cpu"), compiled=True
    )
    chunk = differentiate(found, {"PP=0": CodeOptions(budget=0.0)}).outline.chunks[0]
    assert chunk.saved == ()
    wide = rows * 64 * 4
    # The gate, what it lets through and their product's gradient; from these the product and two gradients.
    assert 5.9 * wide < chunk.phases["B"].workspace < 6.1 * wide


class Exponents(nn.Module):
    """An operation with two results ends a region."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            mantissa, _ = torch.frexp(self.a(x))
        with annotate("PP"):
            y: Tensor = self.b(mantissa)
        return y


def test_an_operation_with_several_results_is_compiled_beside_others() -> None:
    found = trace(Exponents, zoo.regression, zoo.vectors(4, 0), 4, "fp32", torch.device("cpu"), compiled=True)
    chunks = differentiate(found).outline.chunks
    assert [chunk.phases["F"].workspace >= 0 for chunk in chunks] == [True, True]


def test_a_compiled_loss_makes_neither_its_log_probabilities_nor_its_one_hot_labels() -> None:
    rows, classes = 256, 512

    def loss(model: nn.Module, batch: zoo.Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"])

    sample = {"x": torch.randn(rows, 16), "y": torch.randint(classes, (rows,))}
    found = trace(
        lambda: nn.Linear(16, classes), loss, sample, rows, "bf16", torch.device("cpu"), compiled=True
    )
    chunk = differentiate(found).outline.chunks[-1]
    logits = rows * classes * 2
    assert [spec.nbytes for spec in chunk.saved].count(logits) == 1
    assert chunk.phases["F"].workspace < 0.1 * logits
    assert 0.9 * logits < chunk.phases["B"].workspace < logits  # their gradient, which products read


class Tower(nn.Module):
    """Wide layers one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), *(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Weights(nn.Module):
    """Weights that are cast before they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.b(self.a(x).tanh())
        return x.float()


def test_copies_of_weights_are_not_saved() -> None:
    chunk = check(Weights, zoo.regression, zoo.vectors(4, 0), "fp32").outline.chunks[0]
    assert chunk.saved
    assert all(spec.shape[0] == 4 for spec in chunk.saved)  # rows of activations, and no [16, 16]


def test_mutated_buffers_are_results_of_the_forward() -> None:
    chunk = chunks_of("convnet")["PP=0"]
    names = ("num_batches_tracked", "running_mean", "running_var")
    assert chunk.mutated == tuple(f"layers.0.1.{name}" for name in names)
    assert traced("convnet").outline.chunks[0].mutated == chunk.mutated


def test_a_buffer_that_the_forward_overwrites_is_saved_for_its_backward() -> None:
    """BatchNorm's backward takes the running mean and variance: those that its forward was given."""
    chunk = chunks_of("convnet")["PP=0"]
    assert [chunk.phases[phase].buffers for phase in ("B", "BI", "BW")] == [(), (), ()]
    assert [spec.shape for spec in chunk.saved].count((8,)) == 4  # of the batch, and before it


def test_experts_are_divided_by_the_asked_number_of_ways() -> None:
    whole, divided = chunks_of("moe"), chunks_of("moe", 4)
    experts = case("moe").experts
    for chunks, count in ((whole, experts), (divided, experts // 4)):
        assert chunks["PP=0 EP=0 route"].input_specs[1].shape == (experts,)
        assert chunks["PP=0 EP=0 route"].outputs[1].shape == (count,)
        assert chunks["PP=0 EP=0"].input_specs[1] == TensorSpec(
            shape=(count,), dtype="int64", nbytes=8 * count
        )
        assert chunks["PP=0 EP=0 unroute"].input_specs[1].shape == (count,)
    assert whole["PP=0 EP=0"].key != divided["PP=0 EP=0"].key
    assert whole["PP=0"].key == divided["PP=0"].key
    rows, dim, hidden = 2 * zoo.LENGTH * 2, 32, 16
    assert whole["PP=0 EP=0"].phases["F"].flops == 2 * rows * (dim * 2 * hidden + hidden * dim)
    marker = {"F": PhaseSpec(inputs=(0, 1)), "B": PhaseSpec(tangents=(0,), grad_inputs=(0,))}
    assert whole["PP=0 EP=0 route"].phases == whole["PP=0 EP=0 unroute"].phases == marker


class Deep(nn.Module):
    """Many equal layers in one region; the first and the last share a weight."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(layers))
        self.head = nn.Linear(16, 4)
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nn.functional.dropout(torch.tanh(norm(layer(x))) * 2 + 1, 0.1) * 0.5
        result: Tensor = self.head(x)
        return result


def test_equal_layers_of_one_chunk_are_traced_once() -> None:
    layers = 12
    found = trace(lambda: Deep(layers), zoo.regression, zoo.vectors(4, 0), 4, "fp64")
    known = CodeCache(found.device)
    code = differentiate(found, known=known)
    chunk = code.outline.chunks[0]
    assert len(found.pieces[0].segments) == 5  # three layers each, and the head
    assert len(known.joints) == 3  # the first needs no input gradient; the next ones; the head
    assert chunk.random
    assert len(chunk.phases["B"].grad_params) == 2 * 2 * layers + 2 - 1
    assert len(chunk.mutated) == 3 * layers
    torch.manual_seed(0)
    whole = Deep(layers).double()
    parts = copy.deepcopy(whole)
    assert difference(code, zoo.regression, whole, parts, zoo.vectors(4, 1), "whole") == 0.0


def test_bf16_halves_the_bytes() -> None:
    found = case("mlp")
    batch = found.batch(2, 0)
    wide, narrow = (trace(found.model, found.loss, batch, 2, precision) for precision in ("fp32", "bf16"))
    for a, b in zip(wide.outline.chunks, narrow.outline.chunks, strict=True):
        assert [spec.nbytes for spec in a.outputs][:1] == [2 * spec.nbytes for spec in b.outputs][:1]
    assert {parameter.dtype for parameter in narrow.outline.parameters} == {"bfloat16"}
    assert narrow.outline.batch["x"].dtype == "bfloat16"
