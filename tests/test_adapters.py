"""LoRA with peft: a frozen base, adapters that train as on one device, and both exports."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.check.check import check
from piper.checkpoint.huggingface import import_hf
from piper.cli import main
from piper.run.launch import launcher

peft = pytest.importorskip("peft", reason="needs peft")
RECIPE = """
import peft
import torch
import transformers

import piper


def base():
    sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def model():
    lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return piper.annotate_layers(peft.get_peft_model(base(), lora))


def job(**changes):
    tokens = torch.arange(32).view(4, 8) % 16
    fields = dict(
        model=model,
        loss=piper.losses.huggingface,
        data=lambda: [{"input_ids": tokens, "labels": tokens}],
        strategy=piper.strategies.fsdp(dp=2),
        checkpoint=piper.Checkpoint(folder="checkpoints", every=1),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
        steps=1,
    )
    return piper.Job(**{**fields, **changes})
"""


def run(monkeypatch: pytest.MonkeyPatch, command: str, code: int = 0) -> None:
    monkeypatch.setattr(sys, "argv", ["piper", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code


@pytest.mark.slow  # docs/fine-tuning.md is its short form
@pytest.mark.timeout(180)
def test_only_the_adapters_train_and_both_forms_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(RECIPE)
    scope: dict[str, Any] = {}
    exec(RECIPE, scope)
    run(monkeypatch, "train net.py:job --on inline --out run")
    run(monkeypatch, "export run --format peft adapter")
    run(monkeypatch, "export run --format hf whole")
    assert "Exported PeftModel after 1 step" in (out := capsys.readouterr().out)
    assert "Exported LlamaForCausalLM after 1 step" in out

    run(monkeypatch, "import net.py:job whole", code=2)
    assert capsys.readouterr().err == (
        "error: net.py:job: peft has wrapped the model, and a folder of weights is that of its base\n"
        "  hint: build the base with from_pretrained in the recipe: the run then starts from it\n"
    )

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = scope["base"]()
        return made

    tokens = torch.arange(32).view(4, 8) % 16
    adapted: Any = peft.PeftModel.from_pretrained(seeded(), str(tmp_path / "adapter"))
    merged: Any = type(seeded()).from_pretrained(tmp_path / "whole")  # type: ignore[attr-defined]
    logits = adapted(tokens).logits
    assert torch.allclose(logits, merged(tokens).logits, atol=1e-5)
    expected = one_step(scope, tokens)
    assert torch.allclose(logits, expected(tokens).logits, atol=1e-5)
    assert not torch.allclose(logits, seeded()(tokens).logits, atol=1e-2), "the adapters do something"
    before = seeded().state_dict()
    changed = {n for n, v in import_hf(tmp_path / "whole").items() if not torch.equal(v, before[n])}
    assert changed == {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (0, 1) for p in "qv"}


def one_step(scope: dict[str, Any], tokens: Tensor) -> Any:  # noqa: ANN401
    """Train the same model in plain PyTorch for one step."""
    torch.manual_seed(0)
    model = scope["model"]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return model


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_numbers_of_one_device(checkpointed: bool) -> None:
    """At PP2 x DP2, zero=3, with dropout in the adapters."""
    scope: dict[str, Any] = {}
    exec(RECIPE, scope)

    def model() -> nn.Module:
        base = scope["base"]()
        if checkpointed:
            base.gradient_checkpointing_enable()
            base.enable_input_require_grads()
        lora = peft.LoraConfig(r=2, lora_dropout=0.2, target_modules="all-linear", task_type="CAUSAL_LM")
        return piper.annotate_layers(peft.get_peft_model(base, lora))

    strategy = piper.strategies.pipeline(layers=2, pp=2, dp=2, zero=3, microbatches=2)
    job = scope["job"](model=model, strategy=strategy, precision="fp64")
    program = piper.compile(job)
    report = check(program, lambda started, options: launcher(started, "inline", options), [*job.data()] * 2)
    assert report.ok, report.first_bad
