"""A mesh: groups of devices along its axes, nested data axes, and axes that only some stages have."""

import pytest

from piper.ir.chunk_options import AxisPolicy, Policy
from piper.ir.mesh import DATA, EXPERTS, Axis, Mesh, groups_apart, mesh_of

EIGHT = tuple(range(8, 16))


def axes(**degrees: int) -> tuple[AxisPolicy, ...]:
    return tuple(AxisPolicy(axis=axis, degree=n, stream="s", origin=0) for axis, n in degrees.items())


def coordinates(mesh: Mesh, device: int) -> dict[str, int]:
    return {axis.name: axis.coordinate(mesh.devices.index(device)) for axis in mesh.axes}


def distinct_along(mesh: Mesh, *names: str) -> tuple[tuple[int, ...], ...]:
    """The groups that hold one part each of what is distinct along some axes."""
    return groups_apart(mesh.devices, tuple(map(mesh.axis, names)))


def test_devices_lie_along_axes_the_innermost_first() -> None:
    mesh = Policy(axes=axes(TP=2, CP=2)).mesh(EIGHT)
    assert coordinates(mesh, 8) == {"TP": 0, "CP": 0, DATA: 0}
    assert coordinates(mesh, 13) == {"TP": 1, "CP": 0, DATA: 1}
    assert (mesh.degree, mesh.slices) == (4, 2)
    assert mesh.groups("TP") == ((8, 9), (10, 11), (12, 13), (14, 15))
    assert mesh.groups("CP") == ((8, 10), (9, 11), (12, 14), (13, 15))
    assert mesh.groups(DATA) == ((8, 12), (9, 13), (10, 14), (11, 15))
    assert mesh.groups("TP", "CP") == ((8, 9, 10, 11), (12, 13, 14, 15))


def test_what_is_distinct_along_an_axis_is_held_by_one_group_for_each_part() -> None:
    mesh = Policy(axes=axes(TP=2, CP=2)).mesh(EIGHT)
    assert distinct_along(mesh, "TP") == ((8, 10, 12, 14), (9, 11, 13, 15))
    assert distinct_along(mesh) == (EIGHT,)
    for some, others in ((("TP",), ("CP", DATA)), (("TP", "CP"), (DATA,)), ((DATA,), ("TP", "CP"))):
        assert distinct_along(mesh, *some) == mesh.groups(*others)


def test_experts_lie_between_axes_and_samples() -> None:
    mesh = Policy(axes=axes(TP=2), ways=2).mesh(EIGHT)
    assert (mesh.degree, mesh.slices) == (2, 4)
    assert mesh.groups(EXPERTS) == ((8, 10), (9, 11), (12, 14), (13, 15))
    assert distinct_along(mesh, "TP", EXPERTS) == ((8, 12), (9, 13), (10, 14), (11, 15))


def test_replicas_of_groups_that_shard_their_state() -> None:
    """An axis of replicas over an axis of shards: gathers stay in a group, sums of shards go across."""
    shards, replicas = (
        Axis(name=name, degree=n, samples=True) for name, n in (("shards", 2), ("replicas", 2))
    )
    mesh = mesh_of(EIGHT, [Axis(name="TP", degree=2), shards, replicas])
    assert (mesh.degree, mesh.slices) == (2, 4)
    assert mesh.groups("shards") == ((8, 10), (9, 11), (12, 14), (13, 15))
    assert mesh.groups("replicas") == ((8, 12), (9, 13), (10, 14), (11, 15))
    # all devices that hold a slice of a weight, whose gradients are summed over both axes
    assert (
        distinct_along(mesh, "TP") == mesh.groups("shards", "replicas") == ((8, 10, 12, 14), (9, 11, 13, 15))
    )
    # after the sums of each group, those that hold the same shard
    assert distinct_along(mesh, "TP", "shards") == mesh.groups("replicas")


def test_an_axis_that_only_one_stage_has() -> None:
    first, second = Policy(axes=axes(TP=2)).mesh((0, 1, 2, 3)), Policy().mesh((4, 5))
    assert first.groups("TP") == ((0, 1), (2, 3))
    assert first.slices == second.slices == 2
    assert second.groups(DATA) == ((4, 5),)
    with pytest.raises(KeyError):
        second.groups("TP")


def test_devices_keep_the_order_in_which_they_are_given() -> None:
    mesh = Mesh(devices=(3, 1, 2, 0), axes=(Axis(name="TP", degree=2), Axis(name="CP", degree=2, stride=2)))
    assert mesh.groups("TP") == ((3, 1), (2, 0))
    assert coordinates(mesh, 0) == {"TP": 1, "CP": 1}
