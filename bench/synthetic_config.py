"""The 35B's dimensions, and the files that stand beside a synthetic checkpoint's weights.

Owns config.json, generation_config.json, the tokenizer and the chat template. What does not depend on the
sizes of a synthetic checkpoint has the value of the published files.
"""

import json
from pathlib import Path
from typing import Any

HIDDEN = 2048
VOCAB = 248320
HEADS, KV_HEADS, HEAD_DIM = 16, 2, 256
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CONV_TAPS = 16, 32, 128, 128, 4
EXPERTS_PER_TOKEN, EXPERT_WIDTH, SHARED_WIDTH = 8, 512, 512
ATTENTION_INTERVAL = 4
VISION_DEPTH, VISION_HIDDEN, VISION_WIDTH, VISION_POSITIONS = 27, 1152, 4304, 2304

# The added tokens of the published tokenizer in the order of their ids; after them come only unused rows.
# fmt: off
ADDED_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>",
    "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>",
    "</tool_response>", "<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>",
    "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>",
)
# fmt: on
# These mark up text that a reader should see, so decoding keeps them.
VISIBLE_TOKENS = {
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
}
UNUSED_ROWS = 243
SMALLEST_VOCAB = 256 + len(ADDED_TOKENS) + UNUSED_ROWS

CHAT_TEMPLATE = r"""
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- elif message.role == 'system' and not loop.first %}
        {{- raise_exception('A system message must come first.') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
""".strip()


def is_attention(layer: int) -> bool:
    """Return whether a layer has full attention rather than a Gated DeltaNet."""
    return layer % ATTENTION_INTERVAL == ATTENTION_INTERVAL - 1


def added_token_ids(vocab: int) -> dict[str, int]:
    """Return the ids of the added tokens: the published ones, counted from the end of the vocabulary."""
    first = vocab - UNUSED_ROWS - len(ADDED_TOKENS)
    return {token: first + k for k, token in enumerate(ADDED_TOKENS)}


def _text_config(layers: int, experts: int, vocab: int) -> dict[str, Any]:
    end = added_token_ids(vocab)["<|endoftext|>"]
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": end,
        "dtype": "bfloat16",
        "eos_token_id": end,
        "full_attention_interval": ATTENTION_INTERVAL,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "layer_types": [f"{'full' if is_attention(k) else 'linear'}_attention" for k in range(layers)],
        "linear_conv_kernel_dim": CONV_TAPS,
        "linear_key_head_dim": KEY_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_value_head_dim": VALUE_DIM,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": EXPERT_WIDTH,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": HEADS,
        "num_experts": experts,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "output_gate_type": "swish",
        "output_router_logits": False,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": SHARED_WIDTH,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": vocab,
    }


def config(layers: int, experts: int, vocab: int) -> dict[str, Any]:
    """Return config.json: 4-bit weights, with two modules of every layer in 8 bits."""
    ids = added_token_ids(vocab)
    quantisation: dict[str, Any] = {"group_size": 64, "bits": 4, "mode": "affine"}
    for layer in range(layers):
        for module in ("gate", "shared_expert_gate"):
            quantisation[f"language_model.model.layers.{layer}.mlp.{module}"] = {"group_size": 64, "bits": 8}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": ids["<|image_pad|>"],
        "language_model_only": False,
        "model_type": "qwen3_5_moe",
        "quantization": quantisation,
        "quantization_config": quantisation,
        "text_config": _text_config(layers, experts, vocab),
        "tie_word_embeddings": False,
        "transformers_version": "4.57.1",
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": VISION_DEPTH,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": VISION_WIDTH,
            "model_type": "qwen3_5_moe",
            "num_heads": 16,
            "num_position_embeddings": VISION_POSITIONS,
            "out_hidden_size": HIDDEN,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def generation_config(vocab: int) -> dict[str, Any]:
    """Return generation_config.json."""
    ids = added_token_ids(vocab)
    return {
        "bos_token_id": ids["<|endoftext|>"],
        "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }


def tokenizer(vocab: int) -> dict[str, Any]:
    """Return tokenizer.json: a token for each byte, names for those no text reaches, the added tokens."""
    ids = added_token_ids(vocab)
    # What stands for a byte in byte-level BPE: printable Latin-1 for itself, U+0100 and up for the rest.
    characters = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144)]
    base = [chr(c) for c in characters]
    base += [f"[{k}]" for k in range(len(base), ids[ADDED_TOKENS[0]])]
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": k, "content": token, **plain, "special": token not in VISIBLE_TOKENS}
            for token, k in ids.items()
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: k for k, token in enumerate(base)},
            "merges": [],
        },
    }


def describe(directory: Path) -> dict[str, int]:
    """Return the sizes in which checkpoints that are measured differ, for records."""
    text = json.loads((directory / "config.json").read_text(encoding="utf-8"))["text_config"]
    keys = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "experts": "num_experts",
        "vocab": "vocab_size",
    }
    return {name: int(text[key]) for name, key in keys.items()}


def write_companions(directory: Path, layers: int, experts: int, vocab: int) -> None:
    """Write all that a checkpoint has besides weights and their index."""
    files = {
        "config.json": config(layers, experts, vocab),
        "generation_config.json": generation_config(vocab),
        "tokenizer.json": tokenizer(vocab),
        "tokenizer_config.json": {
            "add_bos_token": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "model_max_length": 262144,
            "pad_token": "<|endoftext|>",
            "unk_token": None,
        },
    }
    for name, content in files.items():
        text = json.dumps(content, indent=4, ensure_ascii=False) + "\n"
        (directory / name).write_text(text, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
