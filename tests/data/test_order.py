"""Which samples a step gets: a function of seed and step, with none lost and none repeated."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from piper.data import Samples, Stream
from piper.data.batches import Shuffle
from piper.data.feed import Feed


class Numbers:
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"x": index}


def taken(batches: Iterable[Mapping[str, Tensor]]) -> list[int]:
    return [int(x) for batch in batches for x in batch["x"]]


class Resumable:
    """Counts, from the number that its state holds."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            self.next += 1
            yield {"x": torch.tensor([self.next - 1])}

    def state_dict(self) -> dict[str, object]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.next = int(str(state["next"]))


def test_a_feed_that_has_begun_seeks_too() -> None:
    feed = Feed(Resumable, seed=0)
    assert taken(islice(feed, 3)) == [0, 1, 2]
    state = feed.state_dict()
    assert taken(islice(feed, 3)) == [3, 4, 5]
    feed.seek(3, state)
    assert (taken([next(feed)]), feed.step) == ([3], 4)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_a_shuffle_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    shuffled = Shuffle(size, seed, epoch)(np.arange(size))
    assert np.array_equal(np.sort(shuffled), np.arange(size))


def test_a_shuffle_in_numbers() -> None:
    """A run that was begun with an older version goes on with the same order: these may never change."""
    assert Shuffle(8, 3, 2)(np.arange(8)).tolist() == [2, 4, 0, 7, 3, 1, 5, 6]
    assert Shuffle(8, 2, 3)(np.arange(8)).tolist() == [2, 3, 0, 1, 6, 5, 7, 4]
    assert Shuffle(10**14, 5, 1)(np.arange(3)).tolist() == [82072766942829, 2636889754545, 99321876749706]


def test_seeds_do_not_share_their_epochs() -> None:
    """Epoch 1 of seed 0 is not epoch 0 of seed 1, nor are any two of one sum."""
    orders = {(s, e): tuple(Shuffle(50, s, e)(np.arange(50)).tolist()) for s in range(4) for e in range(4)}
    assert len(set(orders.values())) == 16


def test_a_shuffle_does_not_store_what_it_permutes() -> None:
    shuffle = Shuffle(10**14, 0, 0)
    places = np.arange(1000, dtype=np.int64)
    found = shuffle(places)
    assert len(set(found.tolist())) == 1000 and found.max() < 10**14
    assert np.array_equal(shuffle(places[500:]), found[500:])


def test_every_permutation_of_few_comes_about_as_often() -> None:
    seen: dict[tuple[int, ...], int] = {}
    for epoch in range(2400):
        order = tuple(Shuffle(4, 0, epoch)(np.arange(4)).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24 and min(seen.values()) > 60 and max(seen.values()) < 145


@given(size=st.integers(1, 50), steps=st.integers(1, 40), data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_sample_is_lost_or_repeated(size: int, steps: int, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, size))
    batches = Samples(Numbers(size), batch, seed=3)
    ledger = [int(i) for step in range(steps) for i in batches.samples_of(step)]
    for first in range(0, len(ledger) - size + 1, size):
        assert sorted(ledger[first : first + size]) == [*range(size)]
    stop = data.draw(st.integers(0, steps))
    again = Samples(Numbers(size), batch, seed=3)
    before = taken([*islice(again, stop)])
    resumed = Samples(Numbers(size), batch, seed=3)
    resumed.load_state_dict(again.state_dict())
    assert before + taken([*islice(resumed, steps - stop)]) == ledger


def test_the_order_depends_on_seed_and_epoch() -> None:
    first, other = (Samples(Numbers(40), 40, seed=seed) for seed in (0, 1))
    epochs = [taken([first.at(step)]) for step in (0, 1)]
    assert epochs[0] != epochs[1] and epochs[0] != taken([other.at(0)])
    assert taken([Samples(Numbers(40), 40, shuffle=False).at(1)]) == [*range(40)]


def test_a_state_is_for_the_next_iteration_only() -> None:
    """A job may hand out the same object each time; compiling looks at its first batch."""
    batches = Samples(Numbers(8), 2)
    batches.load_state_dict({"step": 3})
    assert torch.equal(next(iter(batches))["x"], batches.at(3)["x"])
    assert batches.state_dict() == {"step": 4}
    assert torch.equal(next(iter(batches))["x"], batches.at(0)["x"])


def test_a_stream_reaches_over_its_end() -> None:
    stream = Stream([{"x": i} for i in range(5)], batch=3)
    assert taken([*islice(stream, 4)]) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 7])
def test_a_loader_that_shuffles_goes_on_where_it_was(stop: int) -> None:
    def made() -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Numbers(12), batch_size=4, shuffle=True)  # type: ignore[arg-type]

    whole = taken(islice(Feed(made, seed=5), 9))
    torch.manual_seed(stop)  # what else draws random numbers does not matter
    feed = Feed(made, seed=5)
    before = taken(islice(feed, stop))
    resumed = Feed(made, seed=5)
    resumed.seek(stop, feed.state_dict())
    assert before + taken(islice(resumed, 9 - stop)) == whole
    assert sorted(whole[:12]) == sorted(whole[12:24]) == [*range(12)] and whole[:12] != whole[12:24]


def test_a_feed_does_not_touch_the_random_numbers_of_others() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    next(Feed(lambda: DataLoader(Numbers(4), shuffle=True), seed=1))  # type: ignore[arg-type]
    assert torch.equal(torch.rand(1), wanted)


class Counted(Numbers):
    """Knows which of its samples were read."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> dict[str, object]:
        self.read.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 6])
def test_a_stateful_loader_is_put_where_it_was(stop: int) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    numbers = Counted(12)

    def make() -> Iterable[dict[str, Tensor]]:
        made: Iterable[dict[str, Tensor]] = loaders.StatefulDataLoader(numbers, batch_size=3, shuffle=True)
        return made

    whole = taken(islice(Feed(make, seed=5), 9))
    feed = Feed(make, seed=5)
    before = taken(islice(feed, stop))
    numbers.read.clear()
    resumed = Feed(make, seed=5)
    resumed.seek(stop, feed.state_dict())
    assert numbers.read == [], "what came before is not read again"
    after = taken(islice(resumed, 9 - stop))
    assert before + after == whole
    assert sorted(whole[:12]) == sorted(whole[12:24]) == [*range(12)] and whole[:12] != whole[12:24]


def test_samplers_are_told_the_epoch() -> None:
    told: list[int] = []

    class ByEpoch(list[dict[str, Tensor]]):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    feed = Feed(lambda: ByEpoch([{"x": torch.zeros(1)}]), seed=0)
    [*islice(feed, 3)]
    assert told == [0, 1, 2]
