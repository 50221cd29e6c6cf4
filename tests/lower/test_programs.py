"""Which devices share a program, and how transfers between sets of different sizes pair them up."""

import pytest

from piper.lower.placements import TransferPairs, channels, classes_of
from tests.slots import slot


def test_devices_that_are_always_together_share_a_program() -> None:
    assert classes_of([(0, 1, 2, 3)]) == [(0, 1, 2, 3)]
    assert classes_of([(0, 1, 2, 3), (2, 3), (5, 4)]) == [(0, 1), (2, 3), (4, 5)]
    assert classes_of([(1, 0), (0,)]) == [(0,), (1,)]


def shown(source: tuple[int, ...], target: tuple[int, ...], sliced: bool = True) -> list[str]:
    def show(channel: TransferPairs) -> str:
        pairs = " ".join(f"{a}>{b}" for a, b in zip(channel.senders, channel.receivers, strict=True))
        start, stop, of = channel.rows
        number, pieces = channel.piece
        rows = f" rows {start}:{stop}/{of}" if of > 1 else ""
        piece = f" piece {number}/{pieces}" if pieces > 1 else ""
        return f"{pairs}{rows}{piece}{' stays' if channel.local else ''}"

    return [show(channel) for channel in channels(source, target, "", sliced)]


def test_sets_of_one_size_pair_up() -> None:
    assert shown((0, 1), (2, 3)) == ["0>2 1>3"]


def test_a_value_to_more_devices_is_cut() -> None:
    assert shown((0, 1), (2, 3, 4, 5)) == ["0>2 1>4 rows 0:1/2", "0>3 1>5 rows 1:2/2"]


def test_a_value_to_fewer_devices_comes_in_pieces() -> None:
    assert shown((0, 1, 2, 3), (4, 5)) == ["0>4 2>5 piece 0/2", "1>4 3>5 piece 1/2"]


def test_sizes_that_do_not_divide_each_other() -> None:
    assert shown((0, 1), (2, 3, 4)) == [
        "0>2 rows 0:2/3",
        "0>3 rows 2:3/3 piece 0/2",
        "1>3 rows 0:1/3 piece 1/2",
        "1>4 rows 1:3/3",
    ]


def test_what_is_there_already_stays() -> None:
    assert shown((0, 1, 2, 3), (0, 1)) == [
        "0>0 piece 0/2 stays",
        "1>0 3>1 piece 1/2",
        "2>1 piece 0/2",
    ]


def test_a_value_that_is_the_same_for_all_samples_comes_from_one_sender() -> None:
    assert shown((0, 1, 2, 3), (4, 5), sliced=False) == ["0>4 2>5"]
    assert shown((0, 1), (2, 3, 4), sliced=False) == ["0>2 1>4", "0>3"]


def test_a_device_stands_once_on_each_side_of_a_channel() -> None:
    for n in range(1, 7):
        for m in range(1, 7):
            for sliced in (True, False):
                target = tuple(range(3, 3 + m))
                for channel in channels(tuple(range(n)), target, "", sliced):
                    assert len(set(channel.senders)) == len(channel.senders)
                    assert len(set(channel.receivers)) == len(channel.receivers)


def test_channels_with_other_pairs_have_other_names() -> None:
    sliced = {c.name for c in channels((0, 1), (2, 3, 4), "pp", True)}
    whole = {c.name for c in channels((0, 1), (2, 3, 4), "pp", False)}
    assert sliced == {f"0,1>2-4:pp/{i}" for i in range(4)}
    assert whole == {"0,1>>2-4:pp/0", "0,1>>2-4:pp/1"}


@pytest.mark.parametrize(
    ("value", "prefix"),
    [
        ("PP=0.out0", "PP=0.out0"),
        ("PP=0.out0[MB=1]", "PP=0.out0"),
        ("PP=0/0.whole[F[PP=0 MB=1]]", "PP=0/0.whole"),
        ("PP=0.out0@2,3[MB=0].piece1", "PP=0.out0@2,3"),
        ('batch."odd[name]"@0[MB=0]', 'batch."odd[name]"@0'),
    ],
)
def test_the_name_of_a_value_without_its_part(value: str, prefix: str) -> None:
    assert slot(value).base == prefix
