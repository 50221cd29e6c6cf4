"""Regions are numbered in the order they are made, and cost nothing when nobody captures."""

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn

from piper.capture.trace.annotate import annotate, annotate_modules
from piper.capture.trace.trace import trace
from piper.directives import apply, place
from piper.errors import ConfigError, ScheduleError
from piper.ir.chunk import Tags
from piper.ir.graph import start
from piper.ir.select import at
from tests import zoo


class Loop(nn.Module):
    """Three turns of a loop, each with a region inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("stage"):
                x = layer(x)
                with annotate("inner"):
                    x = x.tanh()
        result: Tensor = self.head(x)
        return result


class Gaps(nn.Module):
    """Five regions, of which PP=1 is empty and no result of PP=3 is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused, self.b = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
        with annotate("PP"):
            pass
        with annotate("PP"):
            x = x.tanh()
        with annotate("PP"):
            self.unused(x)
        with annotate("PP"):
            result: Tensor = self.b(x)
        return result


class Plain(nn.Module):
    """Nested modules without a region."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def tags_of(model: nn.Module) -> list[Tags]:
    traced = trace(lambda: model, zoo.regression, zoo.vectors(2, 0), 2)
    return [chunk.tags for chunk in traced.outline.chunks]


def params_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    traced = trace(lambda: model, zoo.regression, zoo.vectors(2, 0), 2)
    return {chunk.name: chunk.params for chunk in traced.outline.chunks}


def test_regions_count_from_zero_in_the_order_entered() -> None:
    stage = [(("stage", i), ("inner", i)) for i in range(3)]
    assert tags_of(Loop()) == [tags for both in stage for tags in (both[:1], both)]


def test_a_second_capture_counts_from_zero_again() -> None:
    model = Loop()
    assert tags_of(model) == tags_of(model)


def test_empty_regions_count() -> None:
    assert tags_of(Gaps()) == [(("PP", 0),), (("PP", 2),), (("PP", 4),)]


def test_empty_regions_are_named_when_they_are_selected() -> None:
    traced = trace(Gaps, zoo.regression, zoo.vectors(2, 0), 2)
    first = inspect.getsourcelines(Gaps.forward)[1]
    lines = {1: first + 3, 3: first + 7}
    assert traced.outline.empty == {
        ("PP", index): f"test_annotate.py:{line}" for index, line in lines.items()
    }
    with pytest.raises(ScheduleError) as raised:
        apply(start(traced.outline), [place(at(), [0]), place(at(PP=1), [1])])
    assert str(raised.value).splitlines()[1:4] == [
        "  asked: at(PP=1)",
        "  known: PP=0..4",
        f"  empty: PP=1 (test_annotate.py:{lines[1]}) holds no operation",
    ]


def test_modules_that_run_nothing_count() -> None:
    model = Plain()
    model.idle, model.layers[1] = nn.Linear(2, 2), nn.Identity()
    annotate_modules(model, {"PP": ["layers.0", "layers.1", "idle", ["layers.2", "layers.3"], "head"]})
    traced = trace(lambda: model, zoo.regression, zoo.vectors(2, 0), 2)
    assert [chunk.name for chunk in traced.outline.chunks] == ["PP=0", "PP=3", "PP=4"]
    assert traced.outline.empty == {("PP", 1): "layers.1", ("PP", 2): "idle"}


def test_regions_of_a_trace_that_begins_again_count_once() -> None:
    """Dynamo gives an attempt up and begins again where it meets an exception that the model handles."""

    class Retried(Loop):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                with annotate("stage"):
                    try:
                        x = layer(x)
                        if len(self.layers) == 3:
                            raise KeyError
                    except KeyError:
                        x = x.tanh()
            result: Tensor = self.head(x)
            return result

    assert tags_of(Retried()) == [(("stage", i),) for i in range(3)]


def test_annotate_does_nothing_outside_a_capture() -> None:
    entered = []
    with annotate("PP"), annotate("any name at all"):
        entered.append(torch.fx.traceback.current_meta.get("custom"))
    assert entered == [None]


def test_annotate_passes_exceptions_on() -> None:
    with pytest.raises(KeyError), annotate("PP"):
        raise KeyError


def test_annotate_modules_makes_an_entry_a_region() -> None:
    model = annotate_modules(Plain(), {"PP": [["layers.0", "layers.1"], "layers.2", ["layers.3", "head"]]})
    assert params_of(model) == {
        "PP=0": ("layers.0.0.weight", "layers.0.0.bias", "layers.1.0.weight", "layers.1.0.bias"),
        "PP=1": ("layers.2.0.weight", "layers.2.0.bias"),
        "PP=2": ("layers.3.0.weight", "layers.3.0.bias", "head.weight", "head.bias"),
    }


def test_annotate_modules_makes_each_match_of_a_pattern_a_region() -> None:
    model = annotate_modules(
        Plain(), {"PP": [["layers.0", "layers.1"], ["layers.2", "layers.3"]], "T": ["layers.*.1"]}
    )
    assert [name for name in params_of(model) if "T" in name] == [
        "PP=0 T=0",
        "PP=0 T=1",
        "PP=1 T=2",
        "PP=1 T=3",
    ]


def test_annotate_modules_changes_no_result() -> None:
    x = torch.randn(2, 16)
    torch.manual_seed(0)
    wanted = Plain()
    torch.manual_seed(0)
    marked = annotate_modules(Plain(), {"PP": ["layers.*"]})
    assert torch.equal(marked(x), wanted(x))
    assert marked.state_dict().keys() == wanted.state_dict().keys()


@pytest.mark.parametrize(
    "regions", [{"PP": ["0"]}, {"PP": ["0", "1"], "LAYER": ["0"]}], ids=["once", "twice"]
)
def test_a_copy_of_an_annotated_model_has_its_own_parameters(regions: dict[str, list[str]]) -> None:
    model = annotate_modules(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), regions)
    copied, x = copy.deepcopy(model), torch.ones(1, 2)
    with torch.no_grad():
        before = model(x)
        for parameter in copied.parameters():
            parameter.zero_()
        assert torch.equal(model(x), before) and not copied(x).any()
    copied(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in copied.parameters())


def test_an_unknown_path_names_what_is_close() -> None:
    with pytest.raises(ConfigError) as raised:
        annotate_modules(Plain(), {"PP": [["layers.0"], ["layer.1"]]})
    assert str(raised.value) == (
        "annotate_modules, PP: the model has no module 'layer.1'\n"
        "  close: layers.1, layers.3.1, layers.2.1\n"
        "  hint:  name modules as model.named_modules() does; * stands for one part of a path"
    )


def test_a_second_name_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.append(model[0])
    with pytest.raises(ConfigError) as raised:
        annotate_modules(model, {"PP": ["0", ["1", "2"]]})
    assert str(raised.value) == (
        "annotate_modules, PP: '2' is the module that is called '0' too\n"
        "  hint: name '0' once: all calls of a module are one region. For a region of each, write "
        "`with piper.annotate(...)` in the forward"
    )


def test_regions_without_tags() -> None:
    with pytest.raises(ConfigError) as raised:
        annotate_modules(Plain(), ["layers.0"])  # type: ignore[arg-type]
    assert str(raised.value) == (
        "annotate_modules: regions is not a dict that has a list of regions for each tag\n"
        "  regions: ['layers.0']\n"
        '  hint:    name the regions of each tag: annotate_modules(model, {"PP": ["layers.0", "layers.1"]})'
    )


def test_a_bare_string_is_not_a_list_of_regions() -> None:
    with pytest.raises(ConfigError) as raised:
        annotate_modules(Plain(), {"PP": "layers.*"})
    assert str(raised.value) == (
        "annotate_modules: regions is not a dict that has a list of regions for each tag\n"
        "  regions: {'PP': 'layers.*'}\n"
        '  hint:    name the regions of each tag: annotate_modules(model, {"PP": ["layers.0", "layers.1"]})'
    )
