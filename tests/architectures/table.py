"""Stock architectures of Hugging Face, made small: what each is, how it is built, and a batch for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import transformers as hf
from torch import Tensor, nn

Batch = dict[str, Tensor]
SAMPLES, LENGTH, VOCAB = 8, 12, 96
TEXT = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **TEXT,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
BERT = {
    **TEXT,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 6,
}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture: a model class with a small configuration, and what it trains on."""

    kind: str  # decoder, encoder, encoder-decoder, vision, speech, mixture of experts
    model: str  # its class, which is imported when it is built: all of them take seconds
    config: Callable[[], hf.PretrainedConfig]
    batch: Callable[[int], Batch]
    layers: int = 4  # that `annotate_layers` finds

    def build(self) -> nn.Module:
        """Return the model, in training mode."""
        made: nn.Module = getattr(hf, self.model)(self.config())
        return made


def words(seed: int) -> Batch:
    """Return tokens, and the same tokens as labels."""
    tokens = torch.randint(3, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked(seed: int) -> Batch:
    """Return tokens with labels at some positions only, differently many in each row."""
    batch = words(seed)
    chosen = torch.rand(SAMPLES, LENGTH, generator=torch.Generator().manual_seed(seed + 1)) < 0.3
    chosen[:, 0] = True
    return {**batch, "labels": torch.where(chosen, batch["labels"], -100)}


def pairs(seed: int) -> Batch:
    """Return source tokens and target tokens."""
    return {"input_ids": words(seed)["input_ids"], "labels": words(seed + 7)["labels"]}


def classes(seed: int) -> Batch:
    """Return tokens and one label for each sample."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(6, (SAMPLES,), generator=generator)
    return {"input_ids": words(seed)["input_ids"], "labels": labels}


def images(seed: int) -> Batch:
    """Return images and one label for each."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(6, (SAMPLES,), generator=generator)}


def sounds(seed: int) -> Batch:
    """Return waves and one label for each."""
    generator = torch.Generator().manual_seed(seed)
    waves = torch.randn(SAMPLES, 400, generator=generator)
    return {"input_values": waves, "labels": torch.randint(6, (SAMPLES,), generator=generator)}


def spectra(seed: int) -> Batch:
    """Return spectrograms and target tokens."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(SAMPLES, 8, 40, generator=generator)
    return {"input_features": features, "labels": words(seed)["labels"]}


def decoder(model: str, config: str, **more: object) -> Architecture:
    """Return a decoder-only language model of Llama's form."""
    kind = "mixture of experts" if any("expert" in name for name in more) else "decoder"
    return Architecture(
        kind=kind, model=model, config=lambda: getattr(hf, config)(**{**LLAMA, **more}), batch=words
    )


def wave_config(kind: type[hf.PretrainedConfig]) -> hf.PretrainedConfig:
    """Return a small configuration of a model that reads waves."""
    return kind(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        conv_dim=(16, 16),
        conv_stride=(4, 4),
        conv_kernel=(8, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        classifier_proj_size=16,
        num_labels=6,
        apply_spec_augment=False,
        layerdrop=0.0,  # a plan runs the same layers in every step
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    "Llama": decoder("LlamaForCausalLM", "LlamaConfig"),
    "Mistral": decoder("MistralForCausalLM", "MistralConfig", sliding_window=6),
    "Qwen2": decoder("Qwen2ForCausalLM", "Qwen2Config", tie_word_embeddings=True),
    "Qwen3": decoder("Qwen3ForCausalLM", "Qwen3Config", tie_word_embeddings=True),
    "Gemma 2": decoder("Gemma2ForCausalLM", "Gemma2Config", sliding_window=6),
    "Gemma 3": decoder("Gemma3ForCausalLM", "Gemma3TextConfig", sliding_window=6),
    "SmolLM3": decoder("SmolLM3ForCausalLM", "SmolLM3Config"),
    "Cohere 2": decoder("Cohere2ForCausalLM", "Cohere2Config", sliding_window=6),
    "StableLM": decoder("StableLmForCausalLM", "StableLmConfig"),
    "Granite": decoder("GraniteForCausalLM", "GraniteConfig"),
    "Phi-3": decoder("Phi3ForCausalLM", "Phi3Config"),
    "OLMo 2": decoder("Olmo2ForCausalLM", "Olmo2Config"),
    "GLM-4": decoder("Glm4ForCausalLM", "Glm4Config"),
    "Nemotron": decoder("NemotronForCausalLM", "NemotronConfig"),
    "EXAONE 4": decoder(
        "Exaone4ForCausalLM",
        "Exaone4Config",
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "LFM2": decoder("Lfm2ForCausalLM", "Lfm2Config"),
    "RecurrentGemma": decoder(
        "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", lru_width=32, attention_window_size=6
    ),
    "GPT-2": Architecture(
        kind="decoder",
        model="GPT2LMHeadModel",
        config=lambda: hf.GPT2Config(**TEXT, n_embd=32, n_layer=4, n_head=4, n_positions=64),
        batch=words,
    ),
    "GPT-NeoX": Architecture(
        kind="decoder", model="GPTNeoXForCausalLM", config=lambda: hf.GPTNeoXConfig(**BERT), batch=words
    ),
    "OPT": Architecture(
        kind="decoder",
        model="OPTForCausalLM",
        config=lambda: hf.OPTConfig(
            **TEXT,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        ),
        batch=words,
    ),
    "BLOOM": Architecture(
        kind="decoder",
        model="BloomForCausalLM",
        config=lambda: hf.BloomConfig(**TEXT, hidden_size=32, n_layer=4, n_head=4),
        batch=words,
    ),
    "Falcon": Architecture(
        kind="decoder",
        model="FalconForCausalLM",
        config=lambda: hf.FalconConfig(
            **TEXT, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, new_decoder_architecture=False
        ),
        batch=words,
    ),
    "Mamba": Architecture(
        kind="decoder",
        model="MambaForCausalLM",
        config=lambda: hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, state_size=4),
        batch=words,
    ),
    "Mamba 2": Architecture(
        kind="decoder",
        model="Mamba2ForCausalLM",
        config=lambda: hf.Mamba2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=4,
            state_size=8,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            chunk_size=4,
        ),
        batch=words,
    ),
    "BERT": Architecture(
        kind="encoder", model="BertForMaskedLM", config=lambda: hf.BertConfig(**BERT), batch=masked
    ),
    "RoBERTa": Architecture(
        kind="encoder",
        model="RobertaForSequenceClassification",
        config=lambda: hf.RobertaConfig(**BERT, num_labels=6),
        batch=classes,
    ),
    "DistilBERT": Architecture(
        kind="encoder",
        model="DistilBertForMaskedLM",
        config=lambda: hf.DistilBertConfig(
            vocab_size=VOCAB, dim=32, hidden_dim=48, n_layers=4, n_heads=4, max_position_embeddings=64
        ),
        batch=masked,
    ),
    "ELECTRA": Architecture(
        kind="encoder",
        model="ElectraForSequenceClassification",
        config=lambda: hf.ElectraConfig(**BERT, embedding_size=32, num_labels=6),
        batch=classes,
    ),
    "ModernBERT": Architecture(
        kind="encoder",
        model="ModernBertForMaskedLM",
        config=lambda: hf.ModernBertConfig(
            **{**BERT, "cls_token_id": 1, "sep_token_id": 2}, local_attention=8, global_attn_every_n_layers=2
        ),
        batch=masked,
    ),
    "DeBERTa-v2": Architecture(
        kind="encoder",
        model="DebertaV2ForMaskedLM",
        config=lambda: hf.DebertaV2Config(**BERT, relative_attention=True, pos_att_type=["p2c", "c2p"]),
        batch=masked,
    ),
    "T5": Architecture(
        kind="encoder-decoder",
        model="T5ForConditionalGeneration",
        config=lambda: hf.T5Config(
            **{**TEXT, "decoder_start_token_id": 0},
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
        ),
        batch=pairs,
    ),
    "BART": Architecture(
        kind="encoder-decoder",
        model="BartForConditionalGeneration",
        config=lambda: hf.BartConfig(
            **{**TEXT, "decoder_start_token_id": 1},
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            max_position_embeddings=64,
        ),
        batch=pairs,
    ),
    "ViT": Architecture(
        kind="vision", model="ViTForImageClassification", config=lambda: hf.ViTConfig(**VIT), batch=images
    ),
    "DeiT": Architecture(
        kind="vision", model="DeiTForImageClassification", config=lambda: hf.DeiTConfig(**VIT), batch=images
    ),
    "DINOv2": Architecture(
        kind="vision",
        model="Dinov2ForImageClassification",
        config=lambda: hf.Dinov2Config(**{**VIT, "mlp_ratio": 2}),
        batch=images,
    ),
    "BEiT": Architecture(
        kind="vision", model="BeitForImageClassification", config=lambda: hf.BeitConfig(**VIT), batch=images
    ),
    "ResNet": Architecture(
        kind="vision",
        model="ResNetForImageClassification",
        config=lambda: hf.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], num_labels=6
        ),
        batch=images,
    ),
    "ConvNeXt": Architecture(
        kind="vision",
        model="ConvNextForImageClassification",
        config=lambda: hf.ConvNextConfig(
            hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 2, 1], num_labels=6, image_size=16, patch_size=2
        ),
        batch=images,
    ),
    "wav2vec 2.0": Architecture(
        kind="speech",
        model="Wav2Vec2ForSequenceClassification",
        config=lambda: wave_config(hf.Wav2Vec2Config),
        batch=sounds,
    ),
    "HuBERT": Architecture(
        kind="speech",
        model="HubertForSequenceClassification",
        config=lambda: wave_config(hf.HubertConfig),
        batch=sounds,
    ),
    "Whisper": Architecture(
        kind="speech",
        model="WhisperForConditionalGeneration",
        config=lambda: hf.WhisperConfig(
            **{**TEXT, "decoder_start_token_id": 1},
            num_mel_bins=8,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=20,
            max_target_positions=64,
        ),
        batch=spectra,
    ),
    "Mixtral": decoder("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **EXPERTS),
    "GPT-OSS": decoder(
        "GptOssForCausalLM",
        "GptOssConfig",
        num_local_experts=4,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **EXPERTS,
    ),
    "DeepSeek-V3": decoder(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        num_key_value_heads=4,
        head_dim=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
    "OLMoE": decoder("OlmoeForCausalLM", "OlmoeConfig", num_experts=4, **EXPERTS),
    "Qwen3-MoE": decoder(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", num_experts=4, moe_intermediate_size=16, **EXPERTS
    ),
    "ERNIE 4.5 MoE": decoder(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=16,
        moe_num_shared_experts=1,
    ),
    "Granite 4": decoder(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=4,
        layer_types=["mamba", "attention"] * 2,
        position_embedding_type="rope",
    ),
    "Jamba": decoder(
        "JambaForCausalLM",
        "JambaConfig",
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        attn_layer_period=2,
        attn_layer_offset=1,
    ),
}
