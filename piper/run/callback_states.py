"""The states of callbacks among the data of a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import cast

from piper.callbacks import Callback, named_callbacks

CALLBACKS, DATA = "piper callbacks", "data"  # keys of the data of a checkpoint that has both


def states_of(callbacks: Sequence[Callback]) -> dict[str, dict[str, object]]:
    """Return the states of callbacks by their names, of those that have any."""
    states = {name: callback.state_dict() for name, callback in named_callbacks(callbacks).items()}
    return {name: state for name, state in states.items() if state}


def with_states(states: Mapping[str, object], data: object) -> object:
    """Return the data of a checkpoint, with the states of callbacks if they have any."""
    return {CALLBACKS: states, DATA: data} if states else data


def split_states(data: object) -> tuple[object, Mapping[str, object]]:
    """Return the data of a checkpoint, and the states of callbacks by their names."""
    if isinstance(data, Mapping) and CALLBACKS in data:
        return data[DATA], cast("Mapping[str, object]", data[CALLBACKS])
    return data, {}
