"""Make the random checkpoints of tests/checkpoints: Qwen3.6's architecture at toy widths, in MLX's layout.

    python tools/make_tiny.py tiny tests/checkpoints/tiny

Writes a Hugging Face style source (zero-centred norms, [C, 1, 4] convolutions, fused expert gate and up) and
has mlx_lm.convert quantise it, so that names, layout and rounding are the converter's and not ours.
Needs mlx, mlx-lm and tokenizers.
"""

import argparse
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Preset:
    """The widths of a checkpoint, with the letters of csrc/config.h."""

    hidden: int
    layers: int
    vocab: int
    head_dim: int
    key_dim: int
    value_dim: int
    experts: int
    experts_per_token: int
    shared_width: int
    mrope_section: tuple[int, int, int]
    a_log: str
    expert_width: int = 64
    heads: int = 4
    kv_heads: int = 2
    key_heads: int = 2
    value_heads: int = 4

    @property
    def keys(self) -> int:
        """Width of all key heads of Gated DeltaNet together."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all its value heads together."""
        return self.value_heads * self.value_dim


PRESETS = {
    # One period of the layer pattern, the smallest widths that quantise in groups of 64.
    "tiny": Preset(
        hidden=128, layers=4, vocab=640, head_dim=64, key_dim=64, value_dim=64, experts=8,
        experts_per_token=2, shared_width=64, mrope_section=(3, 3, 2), a_log="bfloat16",
    ),
    # Two periods, the real head widths, a residual of three groups, an expert count that is no power of two,
    # and A_log in float32 as Qwen3.5 ships it.
    "small": Preset(
        hidden=192, layers=8, vocab=1024, head_dim=256, key_dim=128, value_dim=128, experts=12,
        experts_per_token=4, shared_width=128, mrope_section=(11, 11, 10), a_log="float32",
    ),
}  # fmt: skip

# The added tokens of Qwen3.6, in its order. Those in PLAIN stay when special tokens are dropped.
ADDED = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
    "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
]  # fmt: skip
PLAIN = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
]  # fmt: skip
UNUSED = 7  # rows of the vocabulary without a token, as the real one is padded

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<think>\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""

CORPUS = """\
The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.
A model reads tokens and writes tokens. Each layer mixes positions, then each expert mixes channels.
def add(a, b):
    return a + b
for i in range(10):
    print(i, add(i, 1))
int main(void) { return 0; }
One two three four five six seven eight nine ten. 0 1 2 3 4 5 6 7 8 9
Where is the library? The library is next to the school, on the left side of the river.
In the morning the miller walked to the market, and the miller's daughter carried the bread behind him.
Long before the lamps were lit, somebody knocked at the door, softly at first and then not softly at all.
Los gatos duermen; el caf\u00e9 est\u00e1 caliente. \u4f60\u597d\uff0c\u4e16\u754c\u3002
\u041f\u0440\u0438\u0432\u0435\u0442!
"""


def write_tokenizer(directory: Path, vocab: int) -> dict[str, int]:
    """Train a byte-level BPE tokenizer as Qwen3.6's is built, and return the ids of the added tokens."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(ADDED) - UNUSED,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator([CORPUS], trainer=trainer)
    tokenizer.add_tokens([AddedToken(t, special=t not in PLAIN, normalized=False) for t in ADDED])
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "model_max_length": 262144,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": None,
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return {token: tokenizer.token_to_id(token) for token in ADDED}


def write_json(file: Path, value: object) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(value, indent=2), encoding="utf-8")


def attention_layer(p: Preset, layer: int) -> bool:
    """Say whether a layer is full attention: every fourth."""
    return (layer + 1) % 4 == 0


class Source:
    """Random weights under Hugging Face names, scaled so that activations stay near 1."""

    def __init__(self, preset: Preset, seed: int) -> None:
        """Draw every tensor of the text model."""
        self.preset, self.random = preset, np.random.default_rng(seed)
        self.tensors: dict[str, np.ndarray] = {}
        p, root = preset, "model.language_model."
        self.tensors[root + "embed_tokens.weight"] = self.normal(p.vocab, p.hidden)
        self.linear("lm_head.weight", p.vocab, p.hidden, gain=2.0)
        self.norm(root + "norm.weight", p.hidden)
        for layer in range(p.layers):
            prefix = f"{root}layers.{layer}."
            self.norm(prefix + "input_layernorm.weight", p.hidden)
            self.norm(prefix + "post_attention_layernorm.weight", p.hidden)
            if attention_layer(p, layer):
                self.attention(prefix + "self_attn.")
            else:
                self.delta(prefix + "linear_attn.")
            self.mixture(prefix + "mlp.")

    def normal(self, *shape: int) -> np.ndarray:
        """Draw from the standard normal distribution."""
        return self.random.standard_normal(shape, dtype=np.float32)

    def linear(self, name: str, *shape: int, gain: float = 1.0) -> None:
        """Add matrices (..., outputs, inputs)."""
        self.tensors[name] = self.normal(*shape) * np.float32(gain / np.sqrt(shape[-1]))

    def norm(self, name: str, width: int) -> None:
        """Add a zero-centred norm weight: the effective one is 1 more, which the converter adds."""
        self.tensors[name] = self.normal(width) * np.float32(0.1)

    def attention(self, prefix: str) -> None:
        """Add the mixer of a full-attention layer."""
        p = self.preset
        self.linear(prefix + "q_proj.weight", 2 * p.heads * p.head_dim, p.hidden)
        self.linear(prefix + "k_proj.weight", p.kv_heads * p.head_dim, p.hidden)
        self.linear(prefix + "v_proj.weight", p.kv_heads * p.head_dim, p.hidden)
        self.linear(prefix + "o_proj.weight", p.hidden, p.heads * p.head_dim)
        self.norm(prefix + "q_norm.weight", p.head_dim)
        self.norm(prefix + "k_norm.weight", p.head_dim)

    def delta(self, prefix: str) -> None:
        """Add the mixer of a Gated DeltaNet layer, its decay drawn as Mamba initialises it."""
        p, channels = self.preset, 2 * self.preset.keys + self.preset.values
        self.linear(prefix + "in_proj_qkv.weight", channels, p.hidden)
        self.linear(prefix + "in_proj_z.weight", p.values, p.hidden)
        self.linear(prefix + "in_proj_b.weight", p.value_heads, p.hidden)
        self.linear(prefix + "in_proj_a.weight", p.value_heads, p.hidden)
        self.linear(prefix + "out_proj.weight", p.hidden, p.values)
        self.tensors[prefix + "conv1d.weight"] = self.normal(channels, 1, 4) * np.float32(0.5)
        step = np.exp(self.random.uniform(np.log(1e-3), np.log(1e-1), p.value_heads))
        self.tensors[prefix + "A_log"] = np.log(self.random.uniform(1, 16, p.value_heads)).astype(np.float32)
        self.tensors[prefix + "dt_bias"] = (step + np.log(-np.expm1(-step))).astype(np.float32)
        self.tensors[prefix + "norm.weight"] = 1 + self.normal(p.value_dim) * np.float32(0.1)

    def mixture(self, prefix: str) -> None:
        """Add the experts of a layer, gate and up of each fused, and the shared expert."""
        p = self.preset
        self.linear(prefix + "gate.weight", p.experts, p.hidden, gain=2.0)
        self.linear(prefix + "shared_expert_gate.weight", 1, p.hidden)
        self.linear(prefix + "experts.gate_up_proj", p.experts, 2 * p.expert_width, p.hidden)
        self.linear(prefix + "experts.down_proj", p.experts, p.hidden, p.expert_width)
        self.linear(prefix + "shared_expert.gate_proj.weight", p.shared_width, p.hidden)
        self.linear(prefix + "shared_expert.up_proj.weight", p.shared_width, p.hidden)
        self.linear(prefix + "shared_expert.down_proj.weight", p.hidden, p.shared_width)


def text_config(p: Preset, ids: dict[str, int]) -> dict[str, object]:
    """Return the text_config section of config.json, with the keys that the published model has."""
    kinds = ["full_attention" if attention_layer(p, i) else "linear_attention" for i in range(p.layers)]
    return {
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": None,
        "full_attention_interval": 4,
        "head_dim": p.head_dim,
        "hidden_act": "silu",
        "hidden_size": p.hidden,
        "initializer_range": 0.02,
        "layer_types": kinds,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": p.key_dim,
        "linear_num_key_heads": p.key_heads,
        "linear_num_value_heads": p.value_heads,
        "linear_value_head_dim": p.value_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": p.expert_width,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": p.heads,
        "num_experts": p.experts,
        "num_experts_per_tok": p.experts_per_token,
        "num_hidden_layers": p.layers,
        "num_key_value_heads": p.kv_heads,
        "output_gate_type": "swish",
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "router_aux_loss_coef": 0.001,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": p.mrope_section,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": p.shared_width,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": p.vocab,
    }


def write_source(directory: Path, p: Preset, seed: int) -> None:
    """Write the Hugging Face style checkpoint that is then converted."""
    import mlx.core as mx

    ids = write_tokenizer(directory, p.vocab)
    tensors = {name: mx.array(value) for name, value in Source(p, seed).tensors.items()}
    for name, value in tensors.items():
        if p.a_log == "bfloat16" or not name.endswith("A_log"):
            tensors[name] = value.astype(mx.bfloat16)
    mx.save_safetensors(str(directory / "model.safetensors"), tensors, metadata={"format": "pt"})
    write_json(
        directory / "config.json",
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "tie_word_embeddings": False,
            "text_config": text_config(p, ids),
        },
    )
    write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": ids["<|endoftext|>"],
            "do_sample": True,
            "pad_token_id": ids["<|endoftext|>"],
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "temperature": 1.0,
            "top_k": 20,
            "top_p": 0.95,
        },
    )


def main() -> None:
    """Make one checkpoint."""
    from mlx_lm import convert

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.out.exists():
        shutil.rmtree(arguments.out)
    with tempfile.TemporaryDirectory() as source:
        write_source(Path(source), PRESETS[arguments.preset], arguments.seed)
        convert(source, str(arguments.out), quantize=True, q_group_size=64, q_bits=4)
    (arguments.out / "README.md").unlink()  # the converter's model card


if __name__ == "__main__":
    main()
