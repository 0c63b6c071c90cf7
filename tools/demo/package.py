"""Turn train.py's output into a 4-bit checkpoint laid out like mlx-community/Qwen3.6-35B-A3B-4bit.

    python tools/demo/package.py --trained OUT --tokenizer tokenizer.json --hf HF_DIR --mlx MLX_DIR

Writes HF_DIR (Hugging Face names: zero-centred norms, [C, 1, 4] convolutions, fused expert gate and up,
bfloat16) and converts it with mlx_lm.convert to MLX_DIR: affine, groups of 64, 4 bits, but 8 for the router
and the gate of the shared expert. Needs mlx and mlx-lm.
"""

import argparse
import json
import shutil
from pathlib import Path

CHAT_TEMPLATE = """\
{%- set thinking = enable_thinking is not defined or enable_thinking -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content | trim -}}
{%- else -%}{%- for part in message.content -%}{{- part.text | trim -}}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
"""


def write_json(file, value):
    """Write a JSON file."""
    file.write_text(json.dumps(value, indent=2))


def text_config(d, ids):
    """Return the text_config section of config.json, for these dimensions and added tokens."""
    kinds = [
        "full_attention" if (i + 1) % d["full_attention_interval"] == 0 else "linear_attention"
        for i in range(d["num_hidden_layers"])
    ]
    text = {
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "layer_types": kinds,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "rope_type": "default",
            "partial_rotary_factor": d["partial_rotary_factor"],
            "rope_theta": int(d["rope_theta"]),
        },
    }
    text.update({k: v for k, v in d.items() if k != "rope_theta"})
    return dict(sorted(text.items()))


def write_tokenizer(source, hf):
    """Copy the tokenizer with its configuration and the chat template; return the ids of the added tokens."""
    shutil.copy(source, hf / "tokenizer.json")
    settings = {
        "add_bos_token": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    write_json(hf / "tokenizer_config.json", settings)
    (hf / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return {t["content"]: t["id"] for t in json.loads(source.read_text())["added_tokens"]}


def write_source(trained, tokenizer, hf):
    """Write the Hugging Face style checkpoint."""
    import mlx.core as mx

    hf.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in mx.load(str(trained / "model.safetensors")).items():
        text = name.startswith("model.")
        tensors["model.language_model." + name.removeprefix("model.") if text else name] = value
    mx.save_safetensors(str(hf / "model.safetensors"), tensors, metadata={"format": "pt"})
    ids = write_tokenizer(tokenizer, hf)
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": text_config(json.loads((trained / "dims.json").read_text()), ids),
    }
    write_json(hf / "config.json", config)
    generation = {
        "bos_token_id": ids["<|endoftext|>"],
        "do_sample": True,
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.95,
    }
    write_json(hf / "generation_config.json", generation)


def main():
    """Write both directories."""
    from mlx_lm import convert

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("trained", "tokenizer", "hf", "mlx"):
        parser.add_argument("--" + name, type=Path, required=True)
    a = parser.parse_args()
    write_source(a.trained, a.tokenizer, a.hf)
    if a.mlx.exists():
        shutil.rmtree(a.mlx)
    convert(str(a.hf), str(a.mlx), quantize=True, q_group_size=64, q_bits=4)


if __name__ == "__main__":
    main()
