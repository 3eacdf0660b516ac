"""Define Hugging Face models of random weights, one of each family, and what people do with them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.registry import feature
from tests.matrix.sides import Side
from tests.matrix.train import VOCABULARY, images, tokens, train

STEPS = 3
Data = Callable[[int], tuple[Any, ...]]
Loss = Callable[..., Tensor]


def language_loss(call: Any, x: Tensor) -> Tensor:
    """Give the loss of a language model, in the model's own precision: theirs is in fp32."""
    return _cross_entropy(call(input_ids=x, labels=x).logits, x)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def causal(name: str, **sizes: Any) -> Any:
    """Build a causal language model of a family by the name of its configuration."""
    import transformers

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, name)(**{**common, **sizes})
    return transformers.AutoModelForCausalLM.from_config(config)


def gpt2(**sizes: Any) -> Any:
    """Build a GPT-2 without dropout."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=24,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **sizes,
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """Build a masked language model."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    """Build an encoder and decoder."""
    import transformers

    config = transformers.T5Config(  # type: ignore[call-arg]  # taken by its base
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    """Build a classifier of images."""
    import transformers

    config = transformers.ViTConfig(  # type: ignore[call-arg]  # taken by its base
        image_size=8,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config)


def whisper() -> nn.Module:
    """Build a model of speech."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=10,
        max_target_positions=16,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(config)


def perceiver() -> nn.Module:
    """Build a Perceiver with a masked language head."""
    import transformers

    config = transformers.PerceiverConfig(
        num_latents=4,
        d_latents=32,
        d_model=24,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        qk_channels=16,
        v_channels=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=8,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.PerceiverForMaskedLM(config)


def clip() -> nn.Module:
    """Build a model of texts and images, whose loss compares a whole batch."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "projection_dim": 16,
    }
    text = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY, max_position_embeddings=16, eos_token_id=2, **sizes
    )
    vision = transformers.CLIPVisionConfig(image_size=8, patch_size=4, **sizes)
    config = transformers.CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16
    )
    return transformers.CLIPModel(config)


def _image_labels(step: int) -> tuple[Tensor, Tensor]:
    return images(step)[0], torch.arange(4) % 3


def _speech(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(4, 8, 20, generator=generator, dtype=torch.float64)
    return features, tokens(step)[0]


def _image_loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(call(pixel_values=x).logits, y)


def _speech_loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
    return _cross_entropy(call(input_features=x, labels=y).logits, y)


def _clip_loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
    out = call(input_ids=x, pixel_values=y)
    scale = out.logits_per_text.diagonal() / (out.text_embeds * out.image_embeds).sum(-1)
    return (out.text_embeds - out.image_embeds).square().mean() + 0.01 * scale.mean()


def _perceiver_loss(call: Any, x: Tensor) -> Tensor:
    return _cross_entropy(call(inputs=x).logits, x)


_eight = functools.partial(tokens, length=8)
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Data, Loss]] = {
    "gpt2": (gpt2, tokens, language_loss),
    "llama": (lambda: causal("LlamaConfig"), tokens, language_loss),
    "llama_tied": (lambda: causal("LlamaConfig", tie_word_embeddings=True), tokens, language_loss),
    "qwen3": (lambda: causal("Qwen3Config", head_dim=8), tokens, language_loss),
    "gemma2": (lambda: causal("Gemma2Config", head_dim=8), tokens, language_loss),
    "mistral": (lambda: causal("MistralConfig", sliding_window=4), tokens, language_loss),
    "opt": (
        lambda: causal("OPTConfig", ffn_dim=48, dropout=0.0, word_embed_proj_dim=16),
        tokens,
        language_loss,
    ),
    "bloom": (
        lambda: causal("BloomConfig", n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
        tokens,
        language_loss,
    ),
    "mixtral": (lambda: causal("MixtralConfig", **MIXTURE), tokens, language_loss),
    "mamba": (lambda: causal("MambaConfig", state_size=4, time_step_rank=4), tokens, language_loss),
    "bert": (bert, tokens, language_loss),
    "t5": (t5, tokens, language_loss),
    "vit": (vit, _image_labels, _image_loss),
    "whisper": (whisper, _speech, _speech_loss),
    "perceiver": (perceiver, _eight, _perceiver_loss),
    "clip": (clip, lambda step: (tokens(step)[0], images(step)[0]), _clip_loss),
}
for _name, (_build, _data, _loss) in FAMILIES.items():
    # Gemma's norm computes in fp32, its weight included; Mamba gives its logits in fp32
    feature("hugging_face", _name, tolerance=1e-6 if _name in ("gemma2", "mamba") else 1e-9)(
        lambda side, build=_build, data=_data, loss=_loss: train(
            side, build(), data=data, loss=loss, steps=STEPS
        )
    )


def _lora(net: nn.Module, **options: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, init_lora_weights=False, **options)
    return peft.get_peft_model(net, config)


@feature("hugging_face", "lora")
def lora(side: Side) -> None:
    net = _lora(gpt2(), target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    train(side, net, data=tokens, loss=language_loss, steps=STEPS)


@feature("hugging_face", "lora_of_llama_with_saved_modules")
def lora_saved(side: Side) -> None:
    net = _lora(causal("LlamaConfig"), target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"])
    train(side, net, data=tokens, loss=language_loss, steps=STEPS)


@feature("hugging_face", "lora_switched_off_for_a_reference")
def lora_reference(side: Side) -> None:
    """Compare with the model without its adapter, as preference training does."""
    net = _lora(causal("LlamaConfig"), target_modules=["q_proj", "up_proj"])

    def loss(call: Any, x: Tensor) -> Tensor:
        with torch.no_grad(), net.disable_adapter():
            reference = call(input_ids=x).logits
        return language_loss(call, x) + (call(input_ids=x).logits - reference).square().mean()

    train(side, net, data=tokens, loss=loss, steps=STEPS)


@feature("hugging_face", "gradient_checkpointing")
def gradient_checkpointing(side: Side) -> None:
    net = causal("LlamaConfig", use_cache=False)
    net.gradient_checkpointing_enable()
    train(side, net, data=tokens, loss=language_loss, steps=STEPS)


@feature("hugging_face", "gradient_checkpointing_reentrant")
def gradient_checkpointing_reentrant(side: Side) -> None:
    net = gpt2(use_cache=False)
    net.gradient_checkpointing_enable({"use_reentrant": True})
    net.enable_input_require_grads()
    train(side, net, data=tokens, loss=language_loss, steps=STEPS)


@feature("hugging_face", "eager_attention_and_all_outputs")
def all_outputs(side: Side) -> None:
    net = gpt2(attn_implementation="eager", output_attentions=True, output_hidden_states=True)

    def loss(call: Any, x: Tensor) -> Tensor:
        out = call(input_ids=x, labels=x)
        return (
            _cross_entropy(out.logits, x)
            + 0.1 * out.hidden_states[1].square().mean()
            + out.attentions[0].square().mean()
        )

    train(side, net, data=tokens, loss=loss, steps=STEPS)


@feature("hugging_face", "tuples_instead_of_outputs")
def tuples(side: Side) -> None:
    def loss(call: Any, x: Tensor) -> Tensor:
        return _cross_entropy(call(input_ids=x, return_dict=False)[0], x)

    train(side, causal("LlamaConfig"), data=tokens, loss=loss, steps=STEPS)


@feature("hugging_face", "generation_between_steps")
def generation(side: Side) -> None:
    trainer = train(side, causal("LlamaConfig"), data=tokens, loss=language_loss, steps=2)
    trainer.call.eval()
    x = side.share(tokens(9)[0])
    with torch.no_grad():
        made = trainer.module.generate(x, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    side.record_share("made", made)


@feature("hugging_face", "loss_of_the_model_itself", tolerance=1e-6)
def own_loss(side: Side) -> None:
    train(side, gpt2(), data=tokens, loss=lambda call, x: call(input_ids=x, labels=x).loss, steps=STEPS)


@feature("hugging_face", "embeddings_resized_before")
def resized(side: Side) -> None:
    net = gpt2()
    net.resize_token_embeddings(VOCABULARY + 9)
    train(side, net, data=tokens, loss=language_loss, steps=STEPS)


@feature("hugging_face", "frozen_encoder")
def frozen_encoder(side: Side) -> None:
    net = t5()
    net.encoder.requires_grad_(False)
    net.shared.requires_grad_(True)
    train(side, net, data=tokens, loss=language_loss, steps=STEPS)


@feature("hugging_face", "accumulation_and_clipping")
def accumulated(side: Side) -> None:
    train(
        side,
        causal("LlamaConfig"),
        data=tokens,
        loss=language_loss,
        steps=STEPS,
        accumulation=2,
        clip=0.1,
    )
