"""Define tiny Hugging Face models of random weights, one of each family, as data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 64
ROWS = 4
"""Rows of a global batch: two for each of two ranks."""
LENGTH = 8
FAR = 32_767
"""The last position that models with rotary embeddings see."""
SEED = 11

Batch = dict[str, Tensor]

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROTARY: dict[str, Any] = {**TEXT, "max_position_embeddings": FAR + 1}
MIXTURE: dict[str, Any] = {
    **ROTARY,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "experts_implementation": "eager",  # the grouped one has no float64
}
EXPERTS = 4
# an encoder's dropout
DRY: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER: dict[str, Any] = {**TEXT, **DRY}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_labels": 3,
    **DRY,
}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SPEECH: dict[str, Any] = {
    **TOWER,
    "vocab_size": VOCABULARY,
    "conv_dim": (8, 8),
    "conv_stride": (2, 2),
    "conv_kernel": (4, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "apply_spec_augment": False,
}


# -- inputs of a step, the whole global batch


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(5000 + step)


def text(step: int) -> Batch:
    """Give tokens without padding."""
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=_generator(step))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def far_text(step: int) -> Batch:
    """Give tokens at positions from 0 to 32767: rounded rotary embeddings go wrong at the far ones."""
    near, middle, end = (
        torch.arange(2),
        torch.tensor([90, 1_200, 9_001]),
        torch.tensor([20_011, FAR - 1, FAR]),
    )
    positions = torch.cat([near, middle, end]).expand(ROWS, LENGTH).contiguous()
    return {**text(step), "position_ids": positions}


def bare_text(step: int) -> Batch:
    """Give tokens alone."""
    return {"input_ids": text(step)["input_ids"]}


def pairs(step: int) -> Batch:
    """Give an encoder's and a decoder's tokens."""
    decoder = torch.randint(3, VOCABULARY, (ROWS, LENGTH - 2), generator=_generator(100 + step))
    return {**text(step), "decoder_input_ids": decoder}


def images(step: int, size: int = 8) -> Batch:
    """Give images."""
    return {"pixel_values": torch.randn(ROWS, 3, size, size, generator=_generator(step), dtype=torch.float64)}


def large_images(step: int) -> Batch:
    """Give images for networks that shrink them 32 times."""
    return images(step, 32)


def waves(step: int) -> Batch:
    """Give sound as samples."""
    return {"input_values": torch.randn(ROWS, 60, generator=_generator(step), dtype=torch.float64)}


def spectrograms(step: int) -> Batch:
    """Give sound as (time, frequency)."""
    return {"input_values": torch.randn(ROWS, 16, 8, generator=_generator(step), dtype=torch.float64)}


def speech_pairs(step: int) -> Batch:
    """Give Mel features, (frequency, time), and a decoder's tokens."""
    features = torch.randn(ROWS, 8, 20, generator=_generator(step), dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": text(step)["input_ids"]}


def speech_rows(step: int) -> Batch:
    """Give Mel features, (time, frequency), and a decoder's tokens."""
    features = torch.randn(ROWS, 20, 8, generator=_generator(step), dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": text(step)["input_ids"]}


def text_and_images(step: int) -> Batch:
    """Give a text and an image for each row."""
    return {**text(step), **images(step)}


def text_for_images(step: int) -> Batch:
    """Give texts in which four tokens (number 3) stand for an image."""
    batch = text_and_images(step)
    batch["input_ids"] = batch["input_ids"].clamp_min(4)
    batch["input_ids"][:, 1:5] = 3
    return batch


def patches(step: int) -> Batch:
    """Give texts in which one token stands for an image of 2 x 2 patches, which are the rows."""
    batch = text(step)
    batch["input_ids"] = batch["input_ids"].clamp_min(6)
    batch["input_ids"][:, 1] = 4
    batch["input_ids"][:, 2] = 3
    batch["input_ids"][:, 3] = 5
    kinds = torch.zeros_like(batch["input_ids"])
    kinds[:, 2] = 1
    values = torch.randn(ROWS * 4, 3 * 2 * 4 * 4, generator=_generator(step), dtype=torch.float64)
    grid = torch.tensor([[1, 2, 2]]).repeat(ROWS, 1)
    return {**batch, "mm_token_type_ids": kinds, "pixel_values": values, "image_grid_thw": grid}


# -- losses; in fp32 at least, as the families' own are


def wide(value: Tensor) -> Tensor:
    """Give values in fp32; those in float64 stay."""
    return value if value.dtype == torch.float64 else value.float()


def next_token(out: Any, batch: Batch) -> Tensor:
    """Give the cross entropy of each row's next token."""
    labels = batch["decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"]
    return nn.functional.cross_entropy(wide(out.logits)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def same_token(out: Any, batch: Batch) -> Tensor:
    """Give the cross entropy of each row's tokens, as an encoder learns them."""
    return nn.functional.cross_entropy(wide(out.logits).flatten(0, 1), batch["input_ids"].flatten())


def classes(out: Any, batch: Batch) -> Tensor:
    """Give the cross entropy of each row's class."""
    logits = wide(out.logits)
    return nn.functional.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[-1])


def squares(out: Any, batch: Batch) -> Tensor:
    """Give a loss of the last hidden states, or of the logits."""
    value = wide(out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state)
    return (value - 0.3).square().mean() + value.sin().mean()


def contrast(out: Any, batch: Batch) -> Tensor:
    """Give the loss of texts and images of this micro-batch that belong together."""
    logits = wide(out.logits_per_text)
    return nn.functional.cross_entropy(logits, torch.arange(len(logits)))


def each_pair(out: Any, batch: Batch) -> Tensor:
    """Give the loss of each text with each image, as SigLIP has it."""
    logits = wide(out.logits_per_text)
    signs = 2 * torch.eye(len(logits), dtype=logits.dtype) - 1
    return -nn.functional.logsigmoid(signs * logits).mean()


@dataclass(frozen=True)
class Family:
    """A model's configuration, what it takes and its loss."""

    kind: str
    """The name of its configuration: ``LlamaConfig``."""
    model: str
    """The name of its class, or of an ``Auto...`` class."""
    sizes: Mapping[str, Any]
    batch: Callable[[int], Batch] = text
    loss: Callable[[Any, Batch], Tensor] = next_token
    targets: str | None = None
    """The layers that LoRA adapts, as a regular expression; None where PEFT has nothing to do."""
    towers: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Configurations within the configuration."""
    rounds_buffers: bool = False
    """Whether its own code needs buffers in the parameters' dtype."""
    frozen: str | None = None
    """Parameters that its constructor freezes, as a regular expression. transformers thaws them where it
    loads a model, but not at stage 3.
    """
    refused: Mapping[str, str] = field(default_factory=dict)
    """Maps ways that fail at stage 3 to a pattern of the expected error."""
    not_in: tuple[str, ...] = ()
    """Precisions in which the model fails in plain torch as well."""

    @property
    def is_rotary(self) -> bool:
        """Whether it sees positions up to 32767."""
        return self.batch is far_text


def configuration(family: Family) -> Any:
    """Make the configuration of a family."""
    import transformers

    towers = {
        name: getattr(transformers, kind)(**sizes).to_dict() for name, (kind, sizes) in family.towers.items()
    }
    return getattr(transformers, family.kind)(**{**family.sizes, **towers})


def build(family: Family) -> Any:
    """Build the model of a family, always with the same values."""
    import transformers

    torch.manual_seed(SEED)
    maker = getattr(transformers, family.model)
    settings = configuration(family)
    model = maker.from_config(settings) if family.model.startswith("Auto") else maker(settings)
    return model.train()


def load(family: Family, folder: str) -> Any:
    """Load a model of the family by ``from_pretrained``."""
    import transformers

    # how experts are computed is no part of a saved configuration
    computed = {name: family.sizes[name] for name in ("experts_implementation",) if name in family.sizes}
    model = getattr(transformers, family.model).from_pretrained(folder, **computed)
    for name, parameter in model.named_parameters():
        if family.frozen is not None and re.fullmatch(family.frozen, name):
            parameter.requires_grad_(False)
    return model.train()


def _decoder(kind: str, targets: str = r".*(q_proj|v_proj)", **sizes: Any) -> Family:
    return Family(f"{kind}Config", "AutoModelForCausalLM", {**ROTARY, **sizes}, far_text, targets=targets)


def _mixture(kind: str, targets: str = r".*(q_proj|o_proj)", **sizes: Any) -> Family:
    return Family(f"{kind}Config", "AutoModelForCausalLM", {**MIXTURE, **sizes}, far_text, targets=targets)


def _plain(kind: str, targets: str | None, batch: Callable[[int], Batch] = text, **sizes: Any) -> Family:
    return Family(f"{kind}Config", "AutoModelForCausalLM", {**TEXT, **sizes}, batch, targets=targets)


# transformers initializes loaded modules once more, which changes nothing but reads the shapes of parameters
# that are sharded by then. It fails in the same way under DeepSpeed 0.19.8.
FAN = {"pretrained": "Fan in and fan out"}
SINUSOIDS = {"pretrained": r"sinusoids\(\) missing"}
POSITIONS = {"pretrained": "not enough values to unpack"}
GAIN = {"pretrained": "tuple index out of range"}
KERNEL = {"pretrained": "Dimension out of range"}
# an eps of 1e-12 is zero in fp16: plain torch's gradients are NaN
TINY_EPS = ("fp16",)


def _encoder(
    kind: str,
    targets: str | None = r".*(query|value)",
    not_in: tuple[str, ...] = (),
    **sizes: Any,
) -> Family:
    return Family(
        *(f"{kind}Config", "AutoModelForMaskedLM", {**ENCODER, **sizes}, text, same_token),
        targets=targets,
        not_in=not_in,
    )


def _vision(
    kind: str,
    targets: str | None,
    batch: Callable[[int], Batch] = images,
    refused: Mapping[str, str] = MappingProxyType({}),
    not_in: tuple[str, ...] = (),
    **sizes: Any,
) -> Family:
    return Family(
        *(f"{kind}Config", f"{kind}ForImageClassification", {**VISION, **sizes}, batch, classes),
        targets=targets,
        refused=refused,
        not_in=not_in,
    )


GPT2: dict[str, Any] = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
NAMED: dict[str, Any] = {"n_positions": FAR + 1, "n_ctx": FAR + 1, "n_embd": 16, "n_layer": 2}
DRY_GPT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "num_key_value_heads": 4,
}

FAMILIES: dict[str, Family] = {
    # decoders
    "gpt2": _plain("GPT2", r".*(c_attn|c_fc)", **GPT2, **DRY_GPT),
    "gpt_neo": _plain(
        "GPTNeo",
        r".*(q_proj|v_proj)",
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
    ),
    "gpt_neox": _decoder("GPTNeoX", r".*query_key_value", hidden_dropout=0.0, attention_dropout=0.0),
    "gptj": _decoder("GPTJ", **NAMED, **DRY_GPT, rotary_dim=4, n_head=2),
    "codegen": _decoder("CodeGen", r".*qkv_proj", **NAMED, **DRY_GPT, rotary_dim=4, n_head=4),
    "opt": _plain("OPT", r".*(q_proj|v_proj)", ffn_dim=24, dropout=0.0, word_embed_proj_dim=8),
    "bloom": _plain(
        "Bloom", r".*query_key_value", n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0
    ),
    "falcon": _decoder("Falcon", r".*query_key_value", hidden_dropout=0.0, attention_dropout=0.0),
    "mpt": _plain("Mpt", r".*Wqkv", d_model=16, n_heads=4, n_layers=2, max_seq_len=32, expansion_ratio=2),
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=4),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gemma": _decoder("Gemma", head_dim=8),
    "gemma2": _decoder("Gemma2", head_dim=8, sliding_window=4),
    "gemma3": _decoder(
        "Gemma3Text", head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi": _decoder("Phi", resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0),
    "phi3": _decoder("Phi3", r".*qkv_proj", original_max_position_embeddings=FAR + 1),
    "stablelm": _decoder("StableLm"),
    "starcoder2": _decoder("Starcoder2", residual_dropout=0.0, embedding_dropout=0.0, sliding_window=None),
    "cohere": _decoder("Cohere"),
    "olmo2": _decoder("Olmo2"),
    "granite": _decoder("Granite"),
    "smollm3": _decoder("SmolLM3"),
    "glm4": _decoder("Glm4", head_dim=8),
    "nemotron": _decoder("Nemotron"),
    # mixtures of experts
    "mixtral": _mixture("Mixtral", num_local_experts=EXPERTS),
    "qwen3_moe": _mixture("Qwen3Moe", num_experts=EXPERTS, head_dim=8),
    "olmoe": _mixture("Olmoe", num_experts=EXPERTS),
    "deepseek_v2": _mixture(
        "DeepseekV2",
        r".*(q_b_proj|o_proj)",
        **LATENT,
        n_routed_experts=EXPERTS,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
    "deepseek_v3": _mixture(
        "DeepseekV3",
        r".*(q_b_proj|o_proj)",
        **LATENT,
        n_routed_experts=EXPERTS,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
    "gpt_oss": _mixture("GptOss", num_local_experts=EXPERTS, head_dim=8, sliding_window=4),
    "granitemoe": _mixture("GraniteMoe", num_local_experts=EXPERTS),
    "llama4": _mixture(
        "Llama4Text",
        num_local_experts=EXPERTS,
        num_experts_per_tok=1,
        intermediate_size_mlp=24,
        head_dim=8,
    ),
    # state-space and recurrent models
    "mamba": _plain("Mamba", r".*(in_proj|x_proj)", bare_text, state_size=4, time_step_rank=4),
    "mamba2": _plain(
        "Mamba2", r".*in_proj", bare_text, state_size=4, num_heads=4, head_dim=8, n_groups=2, chunk_size=4
    ),
    "falcon_mamba": _plain("FalconMamba", r".*(in_proj|x_proj)", bare_text, state_size=4, time_step_rank=4),
    "rwkv": replace(
        _plain("Rwkv", r".*(key|value)", bare_text, context_length=32, attention_hidden_size=16),
        refused=GAIN,
        not_in=("fp16",),  # plain torch's weights are NaN after the first step
    ),
    "jamba": _plain(
        "Jamba",
        r".*(q_proj|in_proj)",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        experts_implementation="eager",
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "lfm2": _decoder("Lfm2", layer_types=["conv", "full_attention"], full_attn_idxs=[1]),
    "recurrent_gemma": _decoder(
        "RecurrentGemma",
        lru_width=16,
        attention_window_size=8,
        head_dim=4,
        block_types=("recurrent", "attention"),
    ),
    "qwen3_next": _mixture(
        "Qwen3Next",
        num_experts=EXPERTS,
        head_dim=8,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    # encoders
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta"),
    "distilbert": _encoder(
        "DistilBert",
        r".*(q_lin|v_lin)",
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=24,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    "albert": _encoder("Albert", embedding_size=8, classifier_dropout_prob=0.0),
    "electra": _encoder("Electra", embedding_size=8),
    "deberta": _encoder(
        *("Deberta", r".*(in_proj|pos_proj)"),
        not_in=("autocast",),  # it masks scores in bf16 by the least number of fp32
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
    ),
    "deberta_v2": _encoder(
        "DebertaV2", r".*(query_proj|value_proj)", relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    "mpnet": _encoder("MPNet", r".*attn\.(q|v)"),
    "modernbert": _encoder(
        "ModernBert", r".*Wqkv", num_attention_heads=2, local_attention=4, global_attn_every_n_layers=2
    ),
    # encoders with a decoder
    "t5": Family("T5Config", "T5ForConditionalGeneration", T5, pairs, targets=r".*(\.q|\.v)"),
    "mt5": Family("MT5Config", "MT5ForConditionalGeneration", T5, pairs, targets=r".*(\.q|\.v)"),
    "bart": Family(
        "BartConfig", "BartForConditionalGeneration", SEQ2SEQ, pairs, targets=r".*(q_proj|v_proj)"
    ),
    "pegasus": Family(
        "PegasusConfig",
        "PegasusForConditionalGeneration",
        SEQ2SEQ,
        pairs,
        targets=r".*(q_proj|v_proj)",
        frozen=r".*embed_positions.weight",
        refused=POSITIONS,
    ),
    "marian": Family(
        "MarianConfig",
        "MarianMTModel",
        SEQ2SEQ,
        pairs,
        targets=r".*(q_proj|v_proj)",
        frozen=r".*embed_positions.weight",
    ),
    # images
    "vit": _vision("ViT", r".*(query|value|q_proj|v_proj)"),
    "deit": _vision("DeiT", r".*(query|value|q_proj|v_proj)", not_in=TINY_EPS),
    "beit": _vision("Beit", r".*(query|value|q_proj|v_proj)", not_in=TINY_EPS, drop_path_rate=0.0),
    "dinov2": _vision("Dinov2", r".*(query|value|q_proj|v_proj)", mlp_ratio=2),
    "swin": _vision(
        "Swin",
        r".*(query|value|q_proj|v_proj)",
        embed_dim=8,
        depths=[1, 1],
        num_attention_heads=[2, 2],
        window_size=2,
        patch_size=2,
        drop_path_rate=0.0,
    ),
    "convnext": _vision(
        "ConvNext", None, large_images, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.0
    ),
    "resnet": _vision(
        "ResNet", None, large_images, FAN, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]
    ),
    "segformer": _vision(
        "Segformer",
        r".*(query|value|q_proj|v_proj)",
        large_images,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    ),
    # sound
    "whisper": Family(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16},
        speech_pairs,
        targets=r".*(q_proj|v_proj)",
        frozen=r".*encoder.embed_positions.weight",
        refused=SINUSOIDS,
    ),
    "speech_to_text": Family(
        "Speech2TextConfig",
        "Speech2TextForConditionalGeneration",
        {
            **SEQ2SEQ,
            "input_feat_per_channel": 8,
            "max_source_positions": 32,
            "max_target_positions": 16,
            "conv_channels": 8,
        },
        speech_rows,
        targets=r".*(q_proj|v_proj)",
        rounds_buffers=True,
    ),
    "wav2vec2": Family(
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        SPEECH,
        waves,
        squares,
        targets=r".*(q_proj|v_proj)",
        refused=KERNEL,
    ),
    "hubert": Family(
        "HubertConfig",
        "HubertForCTC",
        SPEECH,
        waves,
        squares,
        targets=r".*(q_proj|v_proj)",
        refused=KERNEL,
    ),
    "audio_spectrogram_transformer": Family(
        "ASTConfig",
        "ASTForAudioClassification",
        {**VISION, "num_mel_bins": 8, "max_length": 16, "frequency_stride": 4, "time_stride": 4},
        spectrograms,
        classes,
        targets=r".*(query|value|q_proj|v_proj)",
        not_in=TINY_EPS,
    ),
    # texts with images
    "clip": Family(
        "CLIPConfig",
        "CLIPModel",
        {"projection_dim": 8},
        text_and_images,
        contrast,
        targets=r".*(q_proj|v_proj)",
        towers={
            "text_config": ("CLIPTextConfig", {**TEXT, "num_attention_heads": 2, "projection_dim": 8}),
            "vision_config": (
                "CLIPVisionConfig",
                {**TOWER, "image_size": 8, "patch_size": 4, "projection_dim": 8},
            ),
        },
    ),
    "siglip": Family(
        "SiglipConfig",
        "SiglipModel",
        {},
        text_and_images,
        each_pair,
        targets=r".*(q_proj|v_proj)",
        towers={
            "text_config": ("SiglipTextConfig", {**TEXT, "num_attention_heads": 2, "projection_size": 16}),
            "vision_config": ("SiglipVisionConfig", {**TOWER, "image_size": 8, "patch_size": 4}),
        },
    ),
    "blip": Family(
        "BlipConfig",
        "BlipModel",
        {"projection_dim": 8},
        text_and_images,
        contrast,
        not_in=TINY_EPS,
        towers={
            "text_config": (
                "BlipTextConfig",
                {**ENCODER, "num_attention_heads": 2, "encoder_hidden_size": 16, "is_decoder": False},
            ),
            "vision_config": ("BlipVisionConfig", {**TOWER, "image_size": 8, "patch_size": 4}),
        },
    ),
    "llava": Family(
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {"image_token_index": 3, "vision_feature_select_strategy": "default"},
        text_for_images,
        targets=r".*(q_proj|v_proj)",
        towers={
            "text_config": ("LlamaConfig", TEXT),
            "vision_config": ("CLIPVisionConfig", {**TOWER, "image_size": 8, "patch_size": 4}),
        },
    ),
    "paligemma": Family(
        "PaliGemmaConfig",
        "PaliGemmaForConditionalGeneration",
        {"image_token_index": 3, "projection_dim": 16},
        text_for_images,
        targets=r".*(q_proj|v_proj)",
        towers={
            "text_config": ("GemmaConfig", {**TEXT, "head_dim": 8, "num_image_tokens": 4}),
            "vision_config": ("SiglipVisionConfig", {**TOWER, "image_size": 8, "patch_size": 4}),
        },
    ),
    "qwen2_vl": Family(
        "Qwen2VLConfig",
        "Qwen2VLForConditionalGeneration",
        {"image_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5, "video_token_id": 63},
        patches,
        targets=r".*(q_proj|v_proj)",
        towers={
            "text_config": (
                "Qwen2VLTextConfig",
                {
                    **TEXT,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 1e4,
                        "mrope_section": [1, 1, 0],
                    },
                },
            ),
            "vision_config": (
                "Qwen2VLVisionConfig",
                {
                    "depth": 2,
                    "embed_dim": 16,
                    "hidden_size": 16,
                    "num_heads": 2,
                    "mlp_ratio": 2,
                    "patch_size": 4,
                },
            ),
        },
    ),
}
