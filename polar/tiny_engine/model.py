"""Numpy inference for Qwen3-architecture checkpoints: weights, key-value cache and the forward pass.

Everything runs in float32 whatever the checkpoint holds. Choosing tokens belongs to `sampling`, deciding which
sequences run together to `batcher`; nothing here knows about requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import deserialize

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.integer[Any]]

PREFILL_CHUNK = 256
"""A prompt runs in pieces of this many tokens, which bounds the attention matrix of a long one."""


class CheckpointError(ValueError):
    """The directory does not hold a checkpoint that this engine can run."""


@dataclass(frozen=True)
class ModelConfig:
    """The parts of config.json that shape the computation."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    tied: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, model_dir: Path) -> ModelConfig:
        """Read config.json, refusing what would silently be computed wrongly."""
        path = model_dir / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if raw.get("model_type") != "qwen3":
            raise CheckpointError(f"model_type is {raw.get('model_type')!r}; this engine runs qwen3 only")
        # transformers 5 moved theta into rope_parameters; older checkpoints keep it at the top.
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise CheckpointError("scaled rotary embeddings are not supported")
        if raw.get("attention_bias") or raw.get("use_sliding_window"):
            raise CheckpointError("attention_bias and use_sliding_window are not supported")
        eos = raw.get("eos_token_id")
        try:
            return cls(
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                layers=raw["num_hidden_layers"],
                heads=raw["num_attention_heads"],
                kv_heads=raw["num_key_value_heads"],
                head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
                ffn=raw["intermediate_size"],
                context_length=raw["max_position_embeddings"],
                rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
                rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
                tied=raw.get("tie_word_embeddings", False),
                eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            )
        except KeyError as error:
            raise CheckpointError(f"{path} lacks {error}") from error


def read_weights(path: Path) -> dict[str, Floats]:
    """All tensors of a safetensors file as float32; numpy has no bfloat16, so those are widened by hand."""
    try:
        entries = deserialize(path.read_bytes())
    except Exception as error:  # noqa: BLE001 - the library's own error type derives straight from Exception
        raise CheckpointError(f"cannot read {path}: {error}") from error
    weights: dict[str, Floats] = {}
    for name, entry in entries:
        kind, data = entry["dtype"], entry["data"]
        if kind == "BF16":
            flat = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif kind in ("F16", "F32"):
            flat = np.frombuffer(data, np.float16 if kind == "F16" else np.float32).astype(np.float32)
        else:
            raise CheckpointError(f"{path}: {name} has type {kind}; wanted F32, F16 or BF16")
        weights[name] = flat.reshape(entry["shape"])
    return weights


@dataclass(frozen=True)
class Layer:
    """One decoder layer; the projections of one input are joined so that each needs a single product."""

    input_norm: Floats
    qkv: Floats
    q_norm: Floats
    k_norm: Floats
    out: Floats
    ffn_norm: Floats
    gate_up: Floats
    down: Floats


class KVCache:
    """Keys and values of the sequences in flight, one slot each; running slots are kept contiguous from zero."""

    def __init__(self, config: ModelConfig, slots: int = 4, capacity: int = 128) -> None:
        self._limit = config.context_length
        shape = (config.layers, slots, config.kv_heads, capacity, config.head_dim)
        self.keys = np.zeros(shape, np.float32)
        self.values = np.zeros(shape, np.float32)

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for that many slots of that many positions, at least doubling whichever is short."""
        layers, have_slots, kv_heads, have, dim = self.keys.shape
        if slots <= have_slots and capacity <= have:
            return
        new_slots = have_slots if slots <= have_slots else max(slots, 2 * have_slots)
        new = have if capacity <= have else max(capacity, min(2 * have, self._limit))
        for name in ("keys", "values"):
            grown = np.zeros((layers, new_slots, kv_heads, new, dim), np.float32)
            grown[:, :have_slots, :, :have] = getattr(self, name)
            setattr(self, name, grown)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one slot over another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


def log_softmax(logits: Floats) -> Floats:
    """Log-probabilities over the last axis, summed in double precision."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))


class Qwen3:
    """A loaded checkpoint. Stateless but for its weights: callers own the cache."""

    def __init__(self, config: ModelConfig, weights: dict[str, Floats]) -> None:
        self.config = config
        self.parameter_count = sum(array.size for array in weights.values())
        try:
            self._build(weights)
        except KeyError as error:
            raise CheckpointError(f"the checkpoint lacks the tensor {error}") from error
        if self.embed.shape != (config.vocab_size, config.hidden_size):
            raise CheckpointError(f"embed_tokens has shape {self.embed.shape}, which config.json contradicts")
        half = config.head_dim // 2
        freqs = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
        angles = np.arange(config.context_length)[:, None] * freqs
        self._cos, self._sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    @classmethod
    def load(cls, model_dir: Path) -> Qwen3:
        """Read config.json and model.safetensors of a directory."""
        return cls(ModelConfig.load(model_dir), read_weights(model_dir / "model.safetensors"))

    def _build(self, weights: dict[str, Floats]) -> None:
        def joined(*names: str) -> Floats:
            return np.ascontiguousarray(np.concatenate([weights[f"{name}.weight"] for name in names]).T)

        self.embed = weights["model.embed_tokens.weight"]
        self.head = np.ascontiguousarray((self.embed if self.config.tied else weights["lm_head.weight"]).T)
        self.norm = weights["model.norm.weight"]
        self.layers: list[Layer] = []
        for i in range(self.config.layers):
            at = f"model.layers.{i}"
            attn, mlp = f"{at}.self_attn", f"{at}.mlp"
            self.layers.append(
                Layer(
                    input_norm=weights[f"{at}.input_layernorm.weight"],
                    qkv=joined(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
                    q_norm=weights[f"{attn}.q_norm.weight"],
                    k_norm=weights[f"{attn}.k_norm.weight"],
                    out=joined(f"{attn}.o_proj"),
                    ffn_norm=weights[f"{at}.post_attention_layernorm.weight"],
                    gate_up=joined(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                    down=joined(f"{mlp}.down_proj"),
                )
            )

    def forward(self, ids: Ints, starts: Ints, cache: KVCache, first_slot: int = 0) -> Floats:
        """Run new tokens through the model and the cache; gives the normalised hidden states.

        `ids` is (sequences, new tokens); row i extends slot `first_slot + i`, which holds `starts[i]` positions.
        """
        positions = starts[:, None] + np.arange(ids.shape[1])
        end = int(positions.max()) + 1
        cache.reserve(first_slot + len(ids), end)
        # Slots shorter than the longest, and tokens later in the same chunk, are masked alike: key after query.
        mask = np.where(np.arange(end) > positions[:, :, None], np.float32(-1e30), np.float32(0.0))
        x = self.embed[ids]
        for index, layer in enumerate(self.layers):
            attended = self._attend(self._rms(x, layer.input_norm), index, positions, mask, cache, first_slot)
            x = x + attended @ layer.out
            gate, up = np.split(self._rms(x, layer.ffn_norm) @ layer.gate_up, 2, axis=-1)
            # The clip keeps exp from overflowing; beyond it the gate is zero in float32 anyway.
            x = x + (gate / (1.0 + np.exp(-np.maximum(gate, -80.0))) * up) @ layer.down
        return self._rms(x, self.norm)

    def prefill(self, ids: list[int], cache: KVCache, slot: int, every: bool = False) -> Floats:
        """Fill an empty slot with a prompt; gives hidden states of its last token, or of every token."""
        tokens = np.asarray(ids)
        parts: list[Floats] = []
        for start in range(0, len(ids), PREFILL_CHUNK):
            hidden = self.forward(tokens[None, start : start + PREFILL_CHUNK], np.asarray([start]), cache, slot)[0]
            parts.append(hidden if every else hidden[-1:])
        return np.concatenate(parts) if every else parts[-1]

    def logits(self, hidden: Floats) -> Floats:
        """Scores over the vocabulary."""
        return np.asarray(hidden @ self.head)

    def score(self, ids: list[int]) -> list[float]:
        """Teacher forcing: the log-probability of each token but the first, given those before it."""
        hidden = self.prefill(ids, KVCache(self.config, slots=1, capacity=len(ids)), 0, every=True)
        return self.token_logprobs(hidden, ids)

    def token_logprobs(self, hidden: Floats, ids: list[int]) -> list[float]:
        """Log-probabilities of ids[1:] from the hidden states of a whole prompt."""
        table = log_softmax(self.logits(hidden[:-1]))
        return [float(value) for value in table[np.arange(len(ids) - 1), ids[1:]]]

    def _rms(self, x: Floats, weight: Floats) -> Floats:
        square = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
        return np.asarray(x * (weight / np.sqrt(square + np.float32(self.config.rms_norm_eps))))

    def _rope(self, x: Floats, positions: Ints) -> Floats:
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def _attend(self, x: Floats, index: int, positions: Ints, mask: Floats, cache: KVCache, first_slot: int) -> Floats:
        c, layer = self.config, self.layers[index]
        batch, new = positions.shape
        group, q_width, kv_width = c.heads // c.kv_heads, c.heads * c.head_dim, c.kv_heads * c.head_dim
        q: Floats
        k: Floats
        q, k, v = np.split(x @ layer.qkv, [q_width, q_width + kv_width], axis=-1)
        q = self._rope(self._rms(q.reshape(batch, new, c.heads, c.head_dim), layer.q_norm), positions)
        k = self._rope(self._rms(k.reshape(batch, new, c.kv_heads, c.head_dim), layer.k_norm), positions)
        slots = np.arange(first_slot, first_slot + batch)
        cache.keys[index][slots[:, None], :, positions] = k
        cache.values[index][slots[:, None], :, positions] = v.reshape(batch, new, c.kv_heads, c.head_dim)
        end = mask.shape[-1]
        keys = cache.keys[index, first_slot : first_slot + batch, :, :end]
        values = cache.values[index, first_slot : first_slot + batch, :, :end]
        # Query heads that share a key head are stacked as extra rows of one product.
        q = q.transpose(0, 2, 1, 3).reshape(batch, c.kv_heads, group * new, c.head_dim)
        scores: Floats = (q @ keys.transpose(0, 1, 3, 2)) * np.float32(c.head_dim**-0.5)
        scores = scores.reshape(batch, c.kv_heads, group, new, end) + mask[:, None, None]
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        out = scores.reshape(batch, c.kv_heads, group * new, end) @ values
        heads_last = out.reshape(batch, c.heads, new, c.head_dim).transpose(0, 2, 1, 3)
        return heads_last.reshape(batch, new, q_width)
