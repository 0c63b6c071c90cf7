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


def main():
    """Write both directories."""
    ap = argparse.ArgumentParser()
    for n in ("trained", "tokenizer", "hf", "mlx"):
        ap.add_argument("--" + n, type=Path, required=True)
    a = ap.parse_args()
    import mlx.core as mx
    from mlx_lm import convert

    d = json.loads((a.trained / "dims.json").read_text())
    a.hf.mkdir(parents=True, exist_ok=True)
    weights = mx.load(str(a.trained / "model.safetensors"))
    out = {}
    for k, v in weights.items():
        k = "model.language_model." + k[len("model.") :] if k.startswith("model.") else k
        out[k] = v
    mx.save_safetensors(str(a.hf / "model.safetensors"), out, metadata={"format": "pt"})
    tok = json.loads(a.tokenizer.read_text())
    ids = {t["content"]: t["id"] for t in tok["added_tokens"]}
    shutil.copy(a.tokenizer, a.hf / "tokenizer.json")
    (a.hf / "tokenizer_config.json").write_text(
        json.dumps(
            {
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
            },
            indent=2,
        )
    )
    (a.hf / "chat_template.jinja").write_text(CHAT_TEMPLATE)
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
        "layer_types": [
            "full_attention" if (i + 1) % d["full_attention_interval"] == 0 else "linear_attention"
            for i in range(d["num_hidden_layers"])
        ],
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "rope_type": "default",
            "partial_rotary_factor": d["partial_rotary_factor"],
            "rope_theta": int(d["rope_theta"]),
        },
    }
    text.update({k: v for k, v in d.items() if k not in ("rope_theta",)})
    (a.hf / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3_5MoeForConditionalGeneration"],
                "model_type": "qwen3_5_moe",
                "tie_word_embeddings": False,
                "text_config": dict(sorted(text.items())),
            },
            indent=2,
        )
    )
    (a.hf / "generation_config.json").write_text(
        json.dumps(
            {
                "bos_token_id": ids["<|endoftext|>"],
                "do_sample": True,
                "pad_token_id": ids["<|endoftext|>"],
                "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
                "temperature": 0.7,
                "top_k": 40,
                "top_p": 0.95,
            },
            indent=2,
        )
    )
    if a.mlx.exists():
        shutil.rmtree(a.mlx)
    convert(str(a.hf), str(a.mlx), quantize=True, q_group_size=64, q_bits=4)


if __name__ == "__main__":
    main()
