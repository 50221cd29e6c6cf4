"""Nested state survives JSON exactly, and what cannot is named."""

import json
import math
from collections import Counter
from inspect import cleandoc

import numpy as np
import pytest
import torch

from piper.checkpoint.json_state import Plain, decode, encode
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
