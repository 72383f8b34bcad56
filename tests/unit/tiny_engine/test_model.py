"""The arithmetic: caching, batching and scoring must not change a probability."""

from __future__ import annotations

import numpy as np
import pytest

from polar.tiny_engine import MODEL_DIR
from polar.tiny_engine.lookup import Episode
from polar.tiny_engine.model import CheckpointError, KVCache, ModelConfig, Qwen3, log_softmax, read_weights

IDS = [1016, 84, 416, 198, 280, 75, 320, 1017, 198, 1016, 64, 309, 584, 198, 70, 24, 24]


def reference(weights, config, ids):
    """Log-probabilities by the plainest forward pass: one sequence, no cache, one head at a time, in float64."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    half, n = config.head_dim // 2, len(ids)
    angles = np.arange(n)[:, None] * config.rope_theta ** (-np.arange(half) / half)

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    def rope(x):
        a, b = x[:, :half], x[:, half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(config.layers):
        at = f"model.layers.{i}."
        h = norm(x, w[at + "input_layernorm.weight"])
        heads = []
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            mine = slice(head * config.head_dim, (head + 1) * config.head_dim)
            theirs = slice(shared * config.head_dim, (shared + 1) * config.head_dim)
            q = rope(norm(h @ w[at + "self_attn.q_proj.weight"][mine].T, w[at + "self_attn.q_norm.weight"]))
            k = rope(norm(h @ w[at + "self_attn.k_proj.weight"][theirs].T, w[at + "self_attn.k_norm.weight"]))
            v = h @ w[at + "self_attn.v_proj.weight"][theirs].T
            scores = np.where(np.tri(n, dtype=bool), q @ k.T / np.sqrt(config.head_dim), -np.inf)
            heads.append(np.exp(log_softmax(scores)) @ v)
        x = x + np.concatenate(heads, -1) @ w[at + "self_attn.o_proj.weight"].T
        h = norm(x, w[at + "post_attention_layernorm.weight"])
        gate = h @ w[at + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
    return log_softmax(norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T)


def decode(model: Qwen3, ids: list[int], prompt: int) -> list[float]:
    """Log-probabilities of ids[prompt:], fed one at a time behind a prefilled prompt."""
    cache = KVCache(model.config, slots=1, capacity=4)
    hidden = model.prefill(ids[:prompt], cache, 0)
    out = []
    for position, token in enumerate(ids[prompt:], start=prompt):
        out.append(float(log_softmax(model.logits(hidden[-1]))[token]))
        hidden = model.forward(np.asarray([[token]]), np.asarray([position]), cache)[0]
    return out


def test_agrees_with_a_plain_float64_forward_pass(model: Qwen3) -> None:
    """The fast float32 path gives the log-probabilities of a naive double-precision one."""
    table = reference(read_weights(MODEL_DIR / "model.safetensors"), model.config, IDS)
    expected = table[np.arange(len(IDS) - 1), IDS[1:]]
    np.testing.assert_allclose(model.score(IDS), expected, atol=1e-4)


def test_incremental_decode_equals_full_forward(model: Qwen3) -> None:
    """Tokens fed one by one through the cache score as they do in one pass."""
    np.testing.assert_allclose(decode(model, IDS, 5), model.score(IDS)[4:], atol=1e-4)


def test_long_prompt_in_chunks_equals_decode(model: Qwen3) -> None:
    """A prompt longer than a prefill chunk scores as it does token by token."""
    ids = (IDS * 20)[:300]
    np.testing.assert_allclose(decode(model, ids, 250), model.score(ids)[249:], atol=1e-4)


def test_batch_does_not_change_a_row(model: Qwen3) -> None:
    """A sequence decoded beside others of other lengths gets the logits it gets alone."""
    prompts = [IDS, IDS[:3], IDS * 3]
    together = KVCache(model.config, slots=1, capacity=8)
    for slot, ids in enumerate(prompts):
        model.prefill(ids, together, slot)
    lengths = np.asarray([len(ids) for ids in prompts])
    batched = model.forward(np.full((3, 1), 70), lengths, together)[:, 0]
    for row, ids in zip(batched, prompts, strict=True):
        alone = KVCache(model.config)
        model.prefill(ids, alone, 0)
        single = model.forward(np.asarray([[70]]), np.asarray([len(ids)]), alone)[0, 0]
        np.testing.assert_allclose(model.logits(row), model.logits(single), atol=1e-4)


def test_knows_the_task(model: Qwen3, tokenizer) -> None:
    """The packaged weights put the right call and the right answer well above even odds."""
    episode = Episode("c", "47")
    first = tokenizer.encode(episode.first_prompt(), add_special_tokens=False).ids
    call = tokenizer.encode(episode.call(), add_special_tokens=False).ids
    rest = tokenizer.encode(episode.bridge(), add_special_tokens=False).ids
    answer = tokenizer.encode(episode.answer(), add_special_tokens=False).ids
    scores = model.score(first + call + rest + answer)
    assert np.exp(sum(scores[len(first) - 1 : len(first) + len(call) - 1])) > 0.5
    assert np.exp(sum(scores[-len(answer) :])) > 0.5


def test_checkpoint_is_small(model: Qwen3) -> None:
    """The packaged checkpoint stays under a million parameters and two megabytes."""
    assert model.parameter_count < 1_000_000
    assert (MODEL_DIR / "model.safetensors").stat().st_size < 2_000_000


def test_refuses_another_architecture(tmp_path) -> None:
    """A config of another model family is refused by name instead of being run wrongly."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="llama"):
        ModelConfig.load(tmp_path)
