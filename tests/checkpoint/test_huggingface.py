"""Trained weights go to transformers and come back, and transformers computes the same with them."""

from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from piper.checkpoint.huggingface import export_hf, import_hf
from piper.checkpoint.load import Values
from piper.compiler import compile
from piper.directives import replicate, shard
from piper.errors import ConfigError
from piper.ir.select import at
from piper.run.driver_checkpoints import write_start
from piper.run.launch import launch
from tests import zoo
from tests.checkpoint.jobs import equal_bits
from tests.runtime.grid import Cell, job

FAMILIES = {"llama_hf": 1, "qwen3_hf": 1, "qwen3_moe_hf": 2}  # with as few stages as show something


@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_goes_to_transformers_and_back(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    case = zoo.case(family, FAMILIES[family])
    batch = case.batch(4, 0)
    strategy = [replicate(at(), [0, 1], zero=1)]
    if case.experts:
        strategy = [*strategy, shard(at(EP="*"), [0, 1], ways=2)]  # type: ignore[list-item]
    program = compile(
        job(
            Cell(case="mlp"),
            model=case.model,
            loss=case.loss,
            data=lambda: [batch],
            strategy=strategy,
            precision="fp32",
        )
    )
    plain: Any = zoo.build(case)
    with launch(program) as run:
        run.step(batch)
        run.save(tmp_path / "checkpoint")
        state = run.state_dict()
        loss = run.step(batch).loss
    export_hf(state, plain.config, tmp_path / "out")
    assert not (tmp_path / ".out.partial").exists()

    plain.load_state_dict(state)
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(read(batch["tokens"]).logits, plain(batch["tokens"]).logits)

    values = import_hf(tmp_path / "out")
    names = dict.fromkeys(name for name in values if name in state)
    assert len(names) == len(values)
    assert equal_bits({name: values[name] for name in names}, {name: state[name] for name in names})

    write_start(program, values, tmp_path / "start")
    with launch(program, resume=tmp_path / "start") as run:
        assert equal_bits(run.state_dict(), state)
        assert run.step(batch).loss == loss  # which depends on the weights alone

    saved = {name: value for name, value in Values(tmp_path / "checkpoint").items() if name in state}
    export_hf(saved, plain.config, tmp_path / "out")
    again = import_hf(tmp_path / "out")
    assert equal_bits({name: again[name] for name in names}, {name: state[name] for name in names})


def small() -> Any:  # noqa: ANN401
    from transformers import LlamaConfig

    return LlamaConfig(**zoo.hf_sizes(1))


def test_a_state_of_another_model_is_not_exported(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    state = LlamaForCausalLM(small()).state_dict()
    norm = state.pop("model.norm.weight")
    state |= {"norm": norm, "lm_head.weight": torch.zeros(2, 32)}
    with pytest.raises(ConfigError) as error:
        export_hf(state, small(), tmp_path / "out")
    assert str(error.value) == cleandoc("""
        export_hf: the state is not that of a LlamaForCausalLM of this config
          missing:    model.norm.weight
          unexpected: norm
          other:      lm_head.weight: [2, 32] given, [64, 32] wanted
          hint:       pass run.state_dict() and the config of the model that the job builds
    """)
    assert [*tmp_path.iterdir()] == []


def test_weights_in_several_files_and_another_type(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(small())
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    values = import_hf(tmp_path)
    assert equal_bits({name: values[name] for name in values}, {n: v for n, v in model.state_dict().items()})
    export_hf(dict(values), small(), tmp_path / "half", dtype=torch.bfloat16)
    assert {value.dtype for value in import_hf(tmp_path / "half").values()} == {torch.bfloat16}


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError) as error:
        import_hf(tmp_path)
    shown = str(error.value).replace(str(tmp_path), "TMP")
    assert shown == cleandoc("""
        TMP: this checkpoint cannot be read
          why:  FileNotFoundError: No such file or directory: TMP/model.safetensors
          hint: give a whole one: a DCP folder, a folder with model.safetensors or model.safetensors.index.json, or a file of torch.save that holds tensors, numbers, text and containers only
    """)


def test_an_index_that_points_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../w.safetensors"}}')
    with pytest.raises(ConfigError) as error:
        import_hf(tmp_path)
    assert str(error.value).replace(str(tmp_path), "TMP") == cleandoc("""
        TMP: this checkpoint cannot be read
          why:  model.safetensors.index.json names '../w.safetensors', which is not a file of the folder
          hint: give a whole one: a DCP folder, a folder with model.safetensors or model.safetensors.index.json, or a file of torch.save that holds tensors, numbers, text and containers only
    """)


def test_weights_of_another_model_start_nothing(tmp_path: Path) -> None:
    made = zoo.case("mlp", 2)
    program = compile(
        job(Cell(case="mlp"), model=made.model, loss=made.loss, data=lambda: [made.batch(4, 0)], strategy=[])
    )
    values = {**made.model().state_dict(), "layers.0.bias": torch.zeros(3)}
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        write_start(program, import_hf(tmp_path), tmp_path / "start")
    assert str(error.value).replace(str(tmp_path), "TMP") == cleandoc("""
        load: this checkpoint is of another model
          path:  TMP/start
          other: layers.0.bias: saved [3] of any type, here [16] float64 trained
          hint:  load it into the model and precision that it was saved from
    """)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_export_deletes_nothing_of_the_users(tmp_path: Path) -> None:
    """A tokenizer that was saved into the folder first, and one that was added to an export."""
    from transformers import LlamaForCausalLM

    state = LlamaForCausalLM(small()).state_dict()
    for name in ("first", "later"):
        if name == "later":
            export_hf(state, small(), tmp_path / name)
            assert "piper-export.json" in {path.name for path in (tmp_path / name).iterdir()}
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "tokenizer.json").write_text("mine")
        before = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        with pytest.raises(ConfigError, match=r"holds (files that are not its own: )?tokenizer\.json"):
            export_hf(state, small(), tmp_path / name)
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "later"]


def test_an_export_that_was_interrupted_is_cleared_away(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    left = tmp_path / ".out.partial"
    left.mkdir()
    (left / "piper-export.json").write_text('{"format": "piper export", "files": []}')
    (left / "model-00001-of-00002.safetensors").write_bytes(b"half")
    export_hf(LlamaForCausalLM(small()).state_dict(), small(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "model.norm.weight" in import_hf(tmp_path / "out")


def mixtral(layers: int) -> Any:  # noqa: ANN401
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2, num_hidden_layers=layers)
    return MixtralForCausalLM(config)


def test_names_that_a_folder_has_otherwise_are_converted(tmp_path: Path) -> None:
    model = mixtral(1)
    state = model.state_dict()
    export_hf(state, model, tmp_path / "out")
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in import_hf(tmp_path / "out")
    found = import_hf(tmp_path / "out", mixtral(1))
    assert equal_bits({name: found[name] for name in found}, state)
    with pytest.raises(ConfigError) as error:
        import_hf(tmp_path / "out", mixtral(2))
    assert str(error.value).replace(str(tmp_path), "TMP") == cleandoc("""
        import_hf: the weights are not all of a MixtralForCausalLM
          path:    TMP/out
          missing: model.layers.1.input_layernorm.weight, model.layers.1.mlp.experts.down_proj, model.layers.1.mlp.experts.gate_up_proj, and 6 more
          hint:    to let the model make what is missing, build it with from_pretrained in the recipe
    """)
