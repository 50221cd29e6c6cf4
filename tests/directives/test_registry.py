"""A directive is known by its own definition: to the JSON form, to hints, to `piper` and to the documentation."""

import inspect
from pathlib import Path

import pytest

import piper
from piper.directives.base import Directive, known_directives
from piper.directives.json import keys_of

PAGES = Path(__file__).parents[2] / "docs" / "directives"


def test_every_directive_is_known_by_its_name() -> None:
    assert list(known_directives()) == [
        "place",
        "replicate",
        "shard",
        "split",
        "order",
        "remat",
        "precision",
        "protect",
        "offload",
        "average",
    ]
    assert [verb for verb, kind in known_directives().items() if kind.places] == [
        "place",
        "replicate",
        "shard",
    ]


def test_every_directive_has_a_function_and_a_page() -> None:
    for verb in known_directives():
        assert verb in dir(piper) and callable(getattr(piper, verb))
        assert (PAGES / f"{verb}.md").read_text(encoding="utf-8").startswith("# ")


def test_the_json_form_follows_the_fields() -> None:
    keys = {
        verb: {key: spelling.needed for key, spelling in keys_of(kind).items()}
        for verb, kind in known_directives().items()
    }
    assert keys == {
        "place": {"filter": True, "devices": True, "stream": False},
        "replicate": {
            "filter": True, "devices": True, "shard_optimizer": False, "shard_grads": False, "shard_params": False,
            "bucket_size": False, "reduce_stream": False, "gather_stream": False, "reduce": False,
            "keep": False,
            "within": False, "optimizer_within": False,
        },
        "shard": {
            "filter": True, "devices": True, "ways": False, "clones": False, "stream": False, "capacity": False,
        },
        "split": {"filter": True, "num_microbatches": True, "dim_name": False},
        "order": {"filters": True},
        "remat": {"filter": True, "budget": True, "across": False},
        "precision": {"filter": True, "products": True, "gather": False},
        "protect": {
            "filter": True, "copies": False, "apart": False, "every": False, "devices_per_machine": False,
            "stream": False,
        },
        "offload": {
            "filter": True, "what": False, "to": False, "stream": False, "least_mb": False, "ahead": False,
        },
        "average": {
            "filter": True, "across": True, "every": False, "outer": False, "stream": False, "fragments": False,
            "overlap": False, "keep": False,
        },
    }  # fmt: skip


@pytest.mark.parametrize("kind", known_directives().values())
def test_a_signature_has_the_arguments_of_users_alone(kind: type[Directive]) -> None:
    made = inspect.signature(kind)
    assert "source" not in made.parameters
    assert made.return_annotation is kind
