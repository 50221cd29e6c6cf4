"""Nested state survives JSON exactly, and what cannot is named."""

import json
import math
from collections import Counter, deque
from inspect import cleandoc

import numpy as np
import pytest
import torch

from piper.checkpoint.json_state import Plain, decode, encode, flat_state, nested_state
from piper.errors import ConfigError


def there_and_back(value: object) -> object:
    return decode(json.loads(json.dumps(encode(value, "data"))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1 + 0.2,
        math.inf,
        "text",
        [1, [2.5, None]],
        (1, ("a", [True])),
        {},
        {"tuple": [1], "map": {"a": (1,)}},
        {1: "a", (2, 3): [0.5]},
        Counter({3: 2, 7: 1}),
        deque([1, (2,)]),
        b"\x00\xff",
        torch.bfloat16,
    ],
    ids=repr,
)
def test_plain_values_survive(value: object) -> None:
    found = there_and_back(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_survive(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.rand(shape) * 3).to(dtype)
    found = there_and_back(value)
    assert isinstance(found, torch.Tensor) and found.dtype == dtype and torch.equal(found, value)


def test_a_tensor_of_an_accelerator_goes_back_to_one() -> None:
    value = encode({"n": torch.ones(2), "pairs": {1: (torch.ones(1), [torch.ones(1)])}}, "data")
    there = json.loads(json.dumps(value).replace('"]}', '", "device"]}'))
    for device in (torch.device("meta"), None):
        found = decode(there, device)
        assert isinstance(found, dict)
        tensors = [found["n"], found["pairs"][1][0], found["pairs"][1][1][0]]
        assert {tensor.device.type for tensor in tensors} == {"cpu" if device is None else "meta"}
    kept = decode(value, torch.device("meta"))
    assert isinstance(kept, dict) and kept["n"].device.type == "cpu", "it was on the host"


def test_a_bounded_queue_stays_bounded() -> None:
    found = there_and_back(deque([1, 2], 2))
    assert found == deque([1, 2]) and isinstance(found, deque) and found.maxlen == 2


def test_tensors_inside_of_lists_lie_beside_them_and_come_back() -> None:
    one, two, three = (torch.full((2,), float(number)) for number in range(3))
    state = {"plain": one, "list": [two, {"a": (three, 1)}], "step": 3, 0.5: [one]}
    flat = flat_state(state)  # type: ignore[arg-type]
    assert [key for key, value in flat.items() if isinstance(value, torch.Tensor)] == [
        "plain",
        "list[0]",
        "list[1]",
        "0.5[0]",
    ]
    assert flat_state(flat) == flat
    assert nested_state({key: flat[key] for key in reversed(flat)}) == state


def test_random_states_survive() -> None:
    name, keys, *rest = np.random.RandomState(3).get_state()
    found = there_and_back((name, keys, *rest, np.float32(0.5)))
    assert isinstance(found, tuple) and np.array_equal(found[1], keys) and found[1].dtype == np.uint32
    assert found[0] == name and [*found[2:]] == [*rest, 0.5]


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(ConfigError) as error:
        encode({"epoch": 3, "workers": [{"open": object()}]}, "data")
    assert str(error.value) == cleandoc("""
        save: a part of the state cannot be written down
          at:   data.workers[0].open
          type: builtins.object
          hint: keep numbers, texts, tensors, arrays, lists, tuples and dicts in a state_dict()
    """)


@pytest.mark.parametrize(
    "value", [{"tensor": ["os", [1], "AAAA"]}, {"call": []}, {"a": 1, "b": 2}, {"bytes": "?"}, {}]
)
def test_what_others_wrote_is_refused(value: Plain) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode(value)
