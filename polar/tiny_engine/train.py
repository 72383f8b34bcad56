"""Makes the packaged checkpoint: a tokenizer, then a supervised Qwen3-shaped model of under a million weights.

The only module here that needs torch; nothing in the engine imports it. Inference belongs to `model`, the task's
texts to `lookup`. The same seed, library versions and thread count give the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional

from polar.tiny_engine import lookup

VOCAB = 1024
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 128, 4, 4, 2, 32, 384
CONTEXT = 4096
THETA = 10_000.0
EPS = 1e-6
# At 0.02, the family's usual value, a model this narrow learns no copying in a few hundred steps; at 0.08 it does.
INIT_STD = 0.08
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus(seed: int) -> Iterator[str]:
    """Text for the tokenizer: Python's standard library, and the task's own words."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(stdlib.glob("*.py"))[:90]:
        yield path.read_text(encoding="utf-8", errors="replace")
    rng = random.Random(seed)
    for _ in range(400):
        episode = lookup.draw(rng)
        text = episode.first_prompt() + episode.call() + episode.bridge() + episode.answer()
        for token in SPECIALS + PLAIN:
            text = text.replace(token, " ")
        yield text


def make_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE with Qwen's split rule. No normaliser: every string must come back byte for byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIALS) - len(PLAIN),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    if tokenizer.get_vocab_size() != VOCAB:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} entries, wanted {VOCAB}")
    return tokenizer


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale the last axis to unit mean square, then by the weight."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding over (batch, heads, time, head_dim), halves layout."""
    half = x.shape[-1] // 2
    freqs = THETA ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * freqs
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with a norm on queries and keys, named as in the Qwen3 checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm, self.k_norm = Norm(HEAD_DIM), Norm(HEAD_DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention; padding sits on the right and needs no mask of its own."""
        batch, time_, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, time_, HEADS, HEAD_DIM)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, time_, KV_HEADS, HEAD_DIM)).transpose(1, 2)
        v = self.v_proj(x).view(batch, time_, KV_HEADS, HEAD_DIM).transpose(1, 2)
        out = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, time_, HEADS * HEAD_DIM))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gate, multiply, project back."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(HIDDEN), Norm(HIDDEN)
        self.self_attn, self.mlp = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and feed-forward, each on a normalised residual."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class TorchQwen3(nn.Module):
    """The trainable twin of `model.Qwen3`: same weights under the same names, logits from tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm(HIDDEN)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits for each position of a (batch, time) tensor of ids."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.embed_tokens.weight)


def example(tokenizer: Tokenizer, rng: random.Random, noise: float) -> tuple[list[int], list[bool]]:
    """One episode as ids, and which of them are the model's own; `noise` is the chance of each answer being wrong."""
    episode = lookup.draw(rng)
    call, answer = episode.call(), episode.answer()
    if rng.random() < noise:
        call = lookup.call_text(rng.choice(lookup.KEYS))
    if rng.random() < noise:
        answer = f"{rng.randrange(100):02d}{lookup.END}"
    ids: list[int] = []
    mine: list[bool] = []
    # Encoded piece by piece: the engine, too, sees a prompt and samples from there.
    for text, own in ((episode.first_prompt(), False), (call, True), (episode.bridge(), False), (answer, True)):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        mine += [own] * len(piece)
    return ids, mine


def make_batch(tokenizer: Tokenizer, rng: random.Random, size: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and targets with -100 where the model is not to learn."""
    rows = [example(tokenizer, rng, noise) for _ in range(size)]
    width = max(len(ids) for ids, _ in rows)
    inputs = torch.zeros(size, width, dtype=torch.long)
    targets = torch.full((size, width), -100, dtype=torch.long)
    for i, (ids, mine) in enumerate(rows):
        inputs[i, : len(ids)] = torch.tensor(ids)
        targets[i, : len(ids) - 1] = torch.tensor(
            [token if own else -100 for token, own in zip(ids[1:], mine[1:], strict=True)]
        )
    return inputs, targets


def train(tokenizer: Tokenizer, args: argparse.Namespace) -> TorchQwen3:
    """Supervised training: clean steps first, then a noisy tail so that reward at temperature 1 is below 1."""
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed + 1)
    net = TorchQwen3()
    total = args.steps + args.noisy_steps
    optimiser = torch.optim.AdamW(net.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    start = time.monotonic()
    for step in range(total):
        rate = min(1.0, (step + 1) / 10) * min(1.0, (total - step) / 40 + 0.05)
        for group in optimiser.param_groups:
            group["lr"] = args.lr * rate
        inputs, targets = make_batch(tokenizer, rng, args.batch, args.noise if step >= args.steps else 0.0)
        # Few targets a sequence are uncertain (the key, the digits); the rest is form, learnt in the first steps.
        loss = functional.cross_entropy(net(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        if step % 10 == 0 or step == total - 1:
            print(f"step {step} loss {loss.item():.4f} tokens {inputs.shape[1]} s {time.monotonic() - start:.1f}")
    return net


def save_weights(net: TorchQwen3, out: Path) -> None:
    """Write model.safetensors in half precision, under the names the Qwen3 family uses."""
    arrays = {f"model.{name}": tensor.numpy().astype(np.float16) for name, tensor in net.state_dict().items()}
    path = out / "model.safetensors"
    save_file(arrays, path, metadata={"format": "pt"})
    # The library writes for the owner alone; a packaged file is for everyone.
    path.chmod(0o644)


def save_description(tokenizer: Tokenizer, out: Path) -> None:
    """Write everything but the weights and the chat template, which is kept by hand beside them."""
    eos, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "attention_bias": False,
        "attention_dropout": 0.0, "max_position_embeddings": CONTEXT, "rms_norm_eps": EPS, "rope_theta": THETA,
        "initializer_range": INIT_STD, "tie_word_embeddings": True, "use_cache": True, "torch_dtype": "float16",
        "bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad,
    }  # fmt: skip
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "bos_token": None, "unk_token": None, "add_bos_token": False, "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=170, help="steps on clean labels")
    parser.add_argument("--noisy-steps", type=int, default=50, help="steps after them on partly wrong labels")
    parser.add_argument("--noise", type=float, default=0.14, help="chance that an answer of a noisy step is wrong")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = make_tokenizer(args.seed)
    save_description(tokenizer, args.out)
    save_weights(train(tokenizer, args), args.out)


if __name__ == "__main__":
    main()
