"""Packed documents are put into an order in which every device sees as many keys."""

import pytest
import torch
from torch import Tensor

from piper.data import balance_documents
from piper.errors import ConfigError


def rows(*packings: list[int]) -> Tensor:
    """Return the document of each token of some rows."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in packings])


def work(documents: Tensor, places: Tensor, ways: int) -> list[int]:
    """Count, pair by pair, the keys that the tokens of each device see."""
    sums = []
    for own in places.chunk(ways):
        sums.append(sum(int((documents[: place + 1] == documents[place]).sum()) for place in own.tolist()))
    return sums


def test_fields_stay_together_and_no_token_is_lost() -> None:
    documents = rows([5, 1, 10], [16])
    tokens = torch.randn(2, 16, 3)
    given = {"documents": documents, "tokens": tokens, "weights": torch.ones(2)}
    balanced = balance_documents(given, ways=2, piece=2)
    places = balanced["places"]
    assert torch.equal(places.sort(1).values, torch.arange(16).expand(2, 16))
    assert torch.equal(balanced["tokens"], torch.stack([tokens[i, places[i]] for i in range(2)]))
    assert torch.equal(balanced["documents"], documents.gather(1, places))
    assert balanced["weights"] is given["weights"]
    assert (places.view(2, 8, 2).diff(dim=-1) == 1).all()  # pieces stay whole


def test_one_document_is_dealt_as_a_zigzag() -> None:
    """Of eight pieces each device gets the i-th and the i-th last."""
    balanced = balance_documents({"documents": rows([16])}, ways=4, piece=2)
    pieces = (balanced["places"][0, ::2] // 2).view(4, 2)
    assert sorted(map(tuple, pieces.tolist())) == [(0, 7), (1, 6), (2, 5), (3, 4)]


@pytest.mark.parametrize("packing", [[40, 1, 7, 16], [3, 61], [16, 16, 16, 16], [60, 1, 1, 1, 1]])
def test_devices_see_as_many_keys(packing: list[int]) -> None:
    documents = rows(packing)
    places = balance_documents({"documents": documents}, ways=4, piece=2)["places"][0]
    balanced, in_order = (work(documents[0], each, 4) for each in (places, torch.arange(64)))
    assert sum(balanced) == sum(in_order)
    assert max(balanced) <= 1.05 * sum(balanced) / 4
    assert max(balanced) <= max(in_order)


def test_a_document_may_lie_in_several_runs() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 0]])
    places = balance_documents({"documents": documents}, ways=2, piece=1)["places"][0]
    sums = work(documents[0], places, 2)
    assert sum(sums) == 1 + 2 + 1 + 2 + 3 + 4 + 5 + 6 and max(sums) == 12


def test_what_cannot_be_balanced_is_refused() -> None:
    with pytest.raises(ConfigError, match="16 tokens do not make pieces of 3 for 2 devices"):
        balance_documents({"documents": rows([16])}, ways=2, piece=3)
    with pytest.raises(ConfigError, match="the batch cannot be balanced by its field 'ids'"):
        balance_documents({"documents": rows([16])}, ways=2, documents="ids")
