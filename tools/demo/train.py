"""Train the demo checkpoint: the Qwen3.6 hybrid mixture-of-experts architecture at toy width, on stories.

    python tools/demo/train.py --corpus corpus.txt.xz --heldout tests/golden/heldout.txt \\
        --tokenizer tokenizer.json --out OUT --minutes 14.5

Needs one CUDA GPU, PyTorch, tokenizers and safetensors. Writes OUT/model.safetensors (bfloat16, Hugging Face
names of the text model), OUT/dims.json and OUT/log.json. package.py makes the 4-bit checkpoint of them.
Shapes: B sequences, T tokens, H heads, Dk and Dv their widths, E experts.
"""

import argparse
import json
import lzma
import math
import random
import re
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

CFG = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000_000.0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "rms_norm_eps": 1e-6,
}


class ZeroCentredRMSNorm(nn.Module):
    """RMSNorm whose effective weight is 1 more than the one stored."""

    def __init__(self, dim, eps):
        """Start at an effective weight of 1."""
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x):
        """Normalise x (..., dim)."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


def l2norm(x, eps=1e-6):
    """Scale each last axis of x to length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def gated_delta_chunked(q, k, v, g, beta, C=64):
    """q,k [B,H,T,Dk]; v [B,H,T,Dv]; g log-decay, beta [B,H,T]; float32; T % C == 0. Returns [B,H,T,Dv]."""
    B, H, T, Dk = q.shape
    Dv = v.shape[-1]
    n = T // C
    q, k = q.view(B, H, n, C, Dk), k.view(B, H, n, C, Dk)
    v = v.view(B, H, n, C, Dv)
    G = g.view(B, H, n, C).cumsum(-1)
    beta = beta.view(B, H, n, C, 1)
    tri = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    L = torch.where(tri, (G[..., :, None] - G[..., None, :]).clamp(max=0), 0.0).exp() * tri
    kb = k * beta
    A = (kb @ k.transpose(-1, -2) * L).tril(-1)
    eye = torch.eye(C, device=q.device, dtype=q.dtype)
    rhs = torch.cat([v * beta, kb * G[..., None].exp()], -1)
    sol = torch.linalg.solve_triangular(A + eye, rhs, upper=False, unitriangular=True)
    U, W = sol[..., :Dv], sol[..., Dv:]
    attn = (q @ k.transpose(-1, -2)) * L
    S = torch.zeros(B, H, Dk, Dv, device=q.device, dtype=q.dtype)
    outs = []
    for i in range(n):
        eG = G[:, :, i, :, None].exp()
        vn = U[:, :, i] - W[:, :, i] @ S
        outs.append((q[:, :, i] * eG) @ S + attn[:, :, i] @ vn)
        last = G[:, :, i, -1:, None]
        S = S * last.exp() + (k[:, :, i] * (last - G[:, :, i, :, None]).exp()).transpose(-1, -2) @ vn
    return torch.stack(outs, 2).view(B, H, T, Dv)


class GatedDeltaNet(nn.Module):
    """The mixer of three layers in four."""

    def __init__(self, c):
        """Set up the projections; the decay starts as Mamba initialises it."""
        super().__init__()
        self.Hk, self.Hv = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.Dk, self.Dv, self.K = (
            c["linear_key_head_dim"],
            c["linear_value_head_dim"],
            c["linear_conv_kernel_dim"],
        )
        d, kd, vd = c["hidden_size"], self.Hk * self.Dk, self.Hv * self.Dv
        self.in_proj_qkv = nn.Linear(d, 2 * kd + vd, bias=False)
        self.in_proj_z = nn.Linear(d, vd, bias=False)
        self.in_proj_b = nn.Linear(d, self.Hv, bias=False)
        self.in_proj_a = nn.Linear(d, self.Hv, bias=False)
        self.conv1d = nn.Conv1d(2 * kd + vd, 2 * kd + vd, self.K, groups=2 * kd + vd, bias=False)
        self.A_log = nn.Parameter(torch.log(torch.empty(self.Hv).uniform_(1, 16)))
        dt = torch.exp(torch.rand(self.Hv) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(self.Dv))
        self.out_proj = nn.Linear(vd, d, bias=False)
        self.eps = c["rms_norm_eps"]

    def forward(self, x):
        """Mix x (B, T, D) over time."""
        B, T, _ = x.shape
        kd, vd = self.Hk * self.Dk, self.Hv * self.Dv
        qkv = self.in_proj_qkv(x).transpose(1, 2)
        qkv = functional.silu(self.conv1d(functional.pad(qkv, (self.K - 1, 0)))).transpose(1, 2)
        q, k, v = qkv.split([kd, kd, vd], -1)
        z, b, a = self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)

        def heads(t, h, d):
            return t.view(B, T, h, d).transpose(1, 2).float()

        q, k = l2norm(heads(q, self.Hk, self.Dk)), l2norm(heads(k, self.Hk, self.Dk))
        v = heads(v, self.Hv, self.Dv)
        rep = self.Hv // self.Hk
        q, k = q.repeat_interleave(rep, 1) / math.sqrt(self.Dk), k.repeat_interleave(rep, 1)
        beta = b.float().sigmoid().transpose(1, 2)
        step = functional.softplus(a.float() + self.dt_bias.float())
        g = (-self.A_log.float().exp() * step).transpose(1, 2)
        with torch.autocast("cuda", enabled=False):
            o = gated_delta_chunked(q, k, v, g, beta)
        o = o.transpose(1, 2)
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm.weight.float()
        o = o * functional.silu(z.view(B, T, self.Hv, self.Dv).float())
        return self.out_proj(o.reshape(B, T, vd).to(x.dtype))


class GatedAttention(nn.Module):
    """The mixer of every fourth layer: grouped-query attention with a sigmoid gate."""

    def __init__(self, c):
        """Set up the projections and the RoPE frequencies."""
        super().__init__()
        d, self.D = c["hidden_size"], c["head_dim"]
        self.H, self.Hkv = c["num_attention_heads"], c["num_key_value_heads"]
        self.q_proj = nn.Linear(d, self.H * self.D * 2, bias=False)
        self.k_proj = nn.Linear(d, self.Hkv * self.D, bias=False)
        self.v_proj = nn.Linear(d, self.Hkv * self.D, bias=False)
        self.o_proj = nn.Linear(self.H * self.D, d, bias=False)
        self.q_norm = ZeroCentredRMSNorm(self.D, c["rms_norm_eps"])
        self.k_norm = ZeroCentredRMSNorm(self.D, c["rms_norm_eps"])
        self.rot = int(self.D * c["partial_rotary_factor"])
        self.register_buffer(
            "inv", c["rope_theta"] ** (-torch.arange(0, self.rot, 2).float() / self.rot), persistent=False
        )

    def rope(self, x):
        """Rotate the leading dimensions of x (B, H, T, Dh)."""
        T = x.shape[-2]
        f = torch.outer(torch.arange(T, device=x.device).float(), self.inv)
        cos, sin = f.cos(), f.sin()
        r, p = x[..., : self.rot].float(), x[..., self.rot :]
        r1, r2 = r.chunk(2, -1)
        return torch.cat([torch.cat([r1 * cos - r2 * sin, r2 * cos + r1 * sin], -1).to(x.dtype), p], -1)

    def forward(self, x):
        """Mix x (B, T, D) over time."""
        B, T, _ = x.shape
        q, gate = self.q_proj(x).view(B, T, self.H, 2 * self.D).chunk(2, -1)
        k = self.k_proj(x).view(B, T, self.Hkv, self.D)
        v = self.v_proj(x).view(B, T, self.Hkv, self.D).transpose(1, 2)
        q, k = self.rope(self.q_norm(q).transpose(1, 2)), self.rope(self.k_norm(k).transpose(1, 2))
        k, v = k.to(q.dtype), v.to(q.dtype)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        o = o.transpose(1, 2).reshape(B, T, -1) * gate.reshape(B, T, -1).sigmoid()
        return self.o_proj(o)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, d, i):
        """Set up the three matrices."""
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(d, i, bias=False), nn.Linear(d, i, bias=False)
        self.down_proj = nn.Linear(i, d, bias=False)

    def forward(self, x):
        """Transform x (..., D)."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoE(nn.Module):
    """All experts are computed densely (they are tiny here) and weighted by the sparse routing."""

    def __init__(self, c):
        """Set up router, experts and shared expert."""
        super().__init__()
        d, i, E = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
        self.E, self.K = E, c["num_experts_per_tok"]
        self.gate = nn.Linear(d, E, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * i, d) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(E, d, i) * 0.02 / math.sqrt(2 * c["num_hidden_layers"]))
        self.shared_expert = MLP(d, c["shared_expert_intermediate_size"])
        self.shared_expert_gate = nn.Linear(d, 1, bias=False)

    def forward(self, x):
        """Return the mixture of x (B, T, D) and the loss that balances the experts."""
        B, T, d = x.shape
        x = x.reshape(-1, d)
        probs = self.gate(x).float().softmax(-1)
        w, idx = probs.topk(self.K, -1)
        w = w / w.sum(-1, keepdim=True)
        dense_w = torch.zeros_like(probs).scatter(-1, idx, w)
        load = (dense_w > 0).float().mean(0)
        aux = self.E * (load * probs.mean(0)).sum() / self.K
        i = self.down_proj.shape[-1]
        h = (x @ self.gate_up_proj.reshape(-1, d).t().to(x.dtype)).view(-1, self.E, 2 * i)
        h = functional.silu(h[..., :i]) * h[..., i:] * dense_w[..., None].to(x.dtype)
        y = h.reshape(-1, self.E * i) @ self.down_proj.permute(0, 2, 1).reshape(-1, d).to(x.dtype)
        y = y + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return y.view(B, T, d), aux


class Layer(nn.Module):
    """A mixer and a mixture, each on the residual."""

    def __init__(self, c, i):
        """Choose the mixer by the position of the layer."""
        super().__init__()
        self.full = (i + 1) % c["full_attention_interval"] == 0
        if self.full:
            self.self_attn = GatedAttention(c)
        else:
            self.linear_attn = GatedDeltaNet(c)
        self.mlp = SparseMoE(c)
        self.input_layernorm = ZeroCentredRMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = ZeroCentredRMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x, drop):
        """Return x (B, T, D) and the balance loss."""
        h = self.input_layernorm(x)
        h = self.self_attn(h) if self.full else self.linear_attn(h)
        x = x + functional.dropout(h, drop, self.training)
        h, aux = self.mlp(self.post_attention_layernorm(x))
        return x + functional.dropout(h, drop, self.training), aux


class Model(nn.Module):
    """The text model."""

    def __init__(self, c):
        """Set up the layers with small weights, smaller still where they add to the residual."""
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c["num_hidden_layers"]))
        self.norm = ZeroCentredRMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)
        for n, p in self.named_parameters():
            if n.endswith(("o_proj.weight", "out_proj.weight", "shared_expert.down_proj.weight")):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * c["num_hidden_layers"]))

    def forward(self, ids, drop=0.0):
        """Return logits (B, T, V) and the mean balance loss."""
        x = self.embed_tokens(ids)
        aux = 0.0
        for layer in self.layers:
            x, a = layer(x, drop)
            aux = aux + a
        return self.lm_head(self.norm(x)), aux / len(self.layers)


def newton_schulz(G, steps=5):
    """Move the singular values of G towards 1. The coefficients are those of Muon's authors."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.bfloat16()
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    flip = X.size(-2) > X.size(-1)
    if flip:
        X = X.mT
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if flip else X


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal, for matrices. Source: Jordan et al., "Muon", 2024."""

    def __init__(self, params, lr, momentum=0.95, wd=0.05):
        """Take parameters of two or more dimensions."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "wd": wd})

    @torch.no_grad()
    def step(self):
        """Update every parameter from its gradient."""
        for grp in self.param_groups:
            for p in grp["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if "m" not in st:
                    st["m"] = torch.zeros_like(p)
                st["m"].lerp_(p.grad, 1 - grp["momentum"])
                u = p.grad.lerp(st["m"], grp["momentum"])
                u = newton_schulz(u).to(p.dtype) * max(1, p.size(-2) / p.size(-1)) ** 0.5
                p.mul_(1 - grp["lr"] * grp["wd"]).add_(u, alpha=-grp["lr"])


STOP = {
    "the", "a", "an", "and", "or", "but", "of", "to", "in", "on", "at", "it", "he", "she", "they", "was",
    "were", "is", "be", "had", "have", "has", "that", "this", "with", "for", "as", "his", "her", "him",
    "them", "you", "i", "we", "my", "me", "so", "not", "no", "said", "all", "there", "when", "then",
    "out", "up", "down", "into", "from", "by", "if", "would", "could", "one", "very", "what", "who",
    "which", "did", "do", "your", "their", "our", "are", "been", "will", "shall", "came", "went", "come",
    "go", "little", "some", "more",
}  # fmt: skip


def chat_wrap(doc, rng):
    """Make a request for a story, out of words that are frequent in it."""
    words = [w for w in re.findall(r"[a-z]{4,}", doc[:3000].lower()) if w not in STOP]
    count = {}
    for w in words:
        count[w] = count.get(w, 0) + 1
    top = sorted(count, key=lambda w: (-count[w], w))[:6]
    rng.shuffle(top)
    pick = top[: rng.choice([1, 1, 2, 2, 3])] or ["story"]
    what = pick[0] if len(pick) == 1 else ", ".join(pick[:-1]) + " and " + pick[-1]
    ask = rng.choice(
        [
            "Tell me a story about {}.",
            "Please tell me a story about {}.",
            "Write a story about {}.",
            "I would like to hear a story about {}.",
            "Can you tell me a story with {} in it?",
            "A story about {}, please.",
        ]
    ).format(what)
    return ask


def arguments():
    """Read the command line."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--corpus", required=True, type=Path)
    ap.add_argument("--heldout", required=True, type=Path)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--out", required=True, type=Path)
    ap.add_argument("--minutes", type=float, default=8)
    ap.add_argument("--seq", type=int, default=512)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--muon-lr", type=float, default=0.02)
    ap.add_argument("--drop", type=float, default=0.05)
    ap.add_argument("--no-compile", action="store_true")
    return ap.parse_args()


@torch.no_grad()
def evaluate(model, data, T):
    """Return the mean loss in nats of the held-out tokens, in windows of T."""
    model.eval()
    n = (len(data) - 1) // T
    total, count = 0.0, 0
    for i in range(0, n, 64):
        rows = torch.stack([data[j * T : j * T + T + 1] for j in range(i, min(n, i + 64))]).long()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits, _ = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        total += loss.item()
        count += rows[:, 1:].numel()
    model.train()
    return total / count


def split_parameters(model):
    """Return the parameters for Muon (matrices inside layers) and those for AdamW (all others)."""
    names = ("embed", "lm_head", "conv1d", ".gate.", "shared_expert_gate")
    muon, adam = [], []
    for n, p in model.named_parameters():
        (muon if p.ndim >= 2 and not any(name in n for name in names) else adam).append(p)
    return muon, adam


def save(model, file):
    """Write the weights under their Hugging Face names: bfloat16, except A_log."""
    tensors = {}
    for n, p in model.state_dict().items():
        n = "lm_head.weight" if n.startswith("lm_head") else "model." + n
        n = n.replace(".mlp.gate_up_proj", ".mlp.experts.gate_up_proj")
        n = n.replace(".mlp.down_proj", ".mlp.experts.down_proj")
        dtype = torch.float32 if n.endswith("A_log") else torch.bfloat16
        tensors[n] = p.detach().to(dtype).contiguous().cpu()
    save_file(tensors, str(file), metadata={"format": "pt"})


@torch.no_grad()
def write_story(model, x, stop):
    """Return token ids x followed by up to 220 drawn ones, temperature 0.7 and top-k 40."""
    model.eval()
    torch.manual_seed(1)
    for _ in range(220):
        context = x[-448:]
        padding = [0] * (-len(context) % 64)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(torch.tensor([context + padding], device="cuda"))[0][0, len(context) - 1]
        top = (logits.float() / 0.7).topk(40)
        token = top.indices[torch.multinomial(top.values.softmax(-1), 1)].item()
        if token in stop:
            break
        x = [*x, token]
    return x


def documents(text):
    """Split a text at <|endoftext|>."""
    return [d.strip() for d in text.split("<|endoftext|>") if d.strip()]


class Data:
    """The training stream, half plain stories and half answers to a request, and the held-out one."""

    def __init__(self, a):
        """Read and tokenise both texts."""
        self.tokenizer = Tokenizer.from_file(a.tokenizer)
        self.special = {
            t: self.tokenizer.token_to_id(t)
            for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
        }
        assert all(v is not None for v in self.special.values()), self.special
        with lzma.open(a.corpus, "rt", encoding="utf-8") as file:
            stories = documents(file.read())
        rng = random.Random(0)
        rng.shuffle(stories)
        bodies = self.encode(stories)
        asks = self.encode([chat_wrap(d, rng) for d in stories])
        stream = []
        for n, (ask, body) in enumerate(zip(asks, bodies, strict=True)):
            stream += self.chat(ask, body) if n % 2 else [*body, self.special["<|endoftext|>"]]
        self.train = torch.from_numpy(np.array(stream, dtype=np.int32)).cuda()
        held = documents(a.heldout.read_text(encoding="utf-8"))
        stream = [t for body in self.encode(held) for t in [*body, self.special["<|endoftext|>"]]]
        self.held_bytes = sum(len(d.encode()) for d in held)
        self.held = torch.from_numpy(np.array(stream, dtype=np.int32)).cuda()

    def encode(self, texts):
        """Return the token ids of each text."""
        return [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def prompt(self, ask):
        """Return the ids of a request, up to where the answer begins."""
        user, assistant, line, lines = self.encode(["user\n", "assistant\n", "\n", "\n\n"])
        start, end = self.special["<|im_start|>"], self.special["<|im_end|>"]
        thought = [self.special["<think>"], *lines, self.special["</think>"], *lines]
        return [start, *user, *ask, end, *line, start, *assistant, *thought]

    def chat(self, ask, body):
        """Return the ids of a request and its answer."""
        end = [self.special["<|im_end|>"], *self.encode(["\n"])[0], self.special["<|endoftext|>"]]
        return [*self.prompt(ask), *body, *end]


def train(a, data, model, log):
    """Train for a.minutes, appending to log, and return the number of tokens seen."""
    step_model = model if a.no_compile else torch.compile(model)
    muon, adam = split_parameters(model)
    optimisers = [
        torch.optim.AdamW(adam, lr=a.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        Muon(muon, lr=a.muon_lr),
    ]
    groups = [(group, group["lr"]) for o in optimisers for group in o.param_groups]
    T, B = a.seq, a.batch
    start, step, seen = None, 0, 0
    while True:
        done = 0.0 if start is None else (time.time() - start) / (a.minutes * 60)
        if done >= 1:
            return seen
        warm = min(1.0, (step + 1) / 100)
        cool = min(1.0, max(0.0, (1 - done) / 0.45))
        for group, lr in groups:
            group["lr"] = lr * warm * (0.02 + 0.98 * cool)
        first = torch.randint(0, len(data.train) - T - 1, (B,), device="cuda")
        rows = data.train[first[:, None] + torch.arange(T + 1, device="cuda")].long()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits, aux = step_model(rows[:, :-1], a.drop)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        (loss + 0.01 * aux).backward()
        torch.nn.utils.clip_grad_norm_(adam, 1.0)
        for o in optimisers:
            o.step()
            o.zero_grad(set_to_none=True)
        step += 1
        seen += B * T
        if step == 3:  # compiled by now
            torch.cuda.synchronize()
            start = time.time()
        if step % 200 == 0:
            log.append(
                {
                    "step": step,
                    "tokens": seen,
                    "seconds": round(time.time() - start, 1),
                    "train": round(loss.item(), 4),
                    "heldout": round(evaluate(model, data.held, T), 4),
                    "aux": round(float(aux), 3),
                }
            )
            print(log[-1], flush=True)


def main():
    """Train, save, and show two stories."""
    a = arguments()
    a.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    data = Data(a)
    model = Model(CFG).cuda()
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"train tokens {len(data.train):,}; held-out {len(data.held):,}; parameters {parameters:,}",
        flush=True,
    )
    log = []
    seen = train(a, data, model, log)
    loss = evaluate(model, data.held, a.seq)
    bits = loss * (len(data.held) / data.held_bytes) / math.log(2)
    log.append({"final_heldout": loss, "bits_per_byte": bits, "tokens": seen, "parameters": parameters})
    print(log[-1], flush=True)
    (a.out / "log.json").write_text(json.dumps(log, indent=1))
    (a.out / "dims.json").write_text(json.dumps(CFG, indent=1))
    save(model, a.out / "model.safetensors")
    stop = (data.special["<|im_end|>"], data.special["<|endoftext|>"])
    ask = data.encode(["Tell me a story about the king and the fox."])[0]
    for prompt in (data.encode(["Once upon a time"])[0], data.prompt(ask)):
        print("-----\n", data.tokenizer.decode(write_story(model, prompt, stop)), flush=True)


if __name__ == "__main__":
    main()
