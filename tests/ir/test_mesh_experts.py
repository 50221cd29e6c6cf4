"""Experts over devices that other axes shard too: which axes they cover, and which groups cannot be formed."""

import pytest

from piper.ir.chunk_options import AxisPolicy, Policy


def policy(ways: int, own_rows: tuple[str, ...], **degrees: int) -> Policy:
    axes = tuple(
        AxisPolicy(axis=axis, degree=degree, stream=axis, origin=0) for axis, degree in degrees.items()
    )
    return Policy(ways=ways, own_rows=own_rows, axes=axes)


def axes_of(made: Policy, devices: int) -> list[tuple[str, int, int]]:
    mesh = made.mesh(tuple(range(devices))).by_expert
    return [(axis.name, axis.degree, axis.stride) for axis in mesh.axes]


def test_experts_over_groups_with_whole_rows_stride_over_them() -> None:
    assert axes_of(policy(2, (), TP=2), 8) == [("TP", 2, 1), ("by expert", 2, 2), ("by sample", 2, 4)]


def test_experts_as_wide_as_an_axis_with_own_rows_take_its_place() -> None:
    assert axes_of(policy(2, ("CP",), CP=2), 4) == [("by expert", 2, 1), ("by sample", 2, 2)]


def test_wider_experts_take_several_groups_of_it() -> None:
    assert axes_of(policy(4, ("CP",), TP=2, CP=2), 8) == [
        ("TP", 2, 1),
        ("by expert", 4, 2),
        ("by sample", 1, 8),
    ]


def test_narrower_experts_leave_copies_along_it() -> None:
    assert axes_of(policy(2, ("CP",), CP=4), 8) == [("by expert", 2, 1), ("CP", 2, 2), ("by sample", 2, 4)]
    assert policy(2, ("CP",), CP=4).mesh(tuple(range(8))).slices == 2


@pytest.mark.parametrize(
    ("ways", "degrees", "fits"),
    [
        (2, {"CP": 2, "TP": 2}, True),
        (4, {"CP": 2, "TP": 2}, False),
        (4, {"TP": 2, "CP": 2}, True),
        (3, {"CP": 2}, False),
        (4, {"CP": 6}, False),
    ],
)
def test_groups_that_begin_and_end_with_others(ways: int, degrees: dict[str, int], fits: bool) -> None:
    assert policy(ways, ("CP",), **degrees).splits_experts == fits
