"""Tokenizers of real families, made here: the tiny model's byte pairs with the family's own added tokens.

Real vocabularies are a model's to ship. What a layout does with its control tokens shows just as well on these.
"""

from __future__ import annotations

import json
from pathlib import Path

MODEL = Path(__file__).parents[2] / "polar" / "tiny_engine" / "model"
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>")
ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
KIMI = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>") + tuple(
    f"<|{name}|>"
    for name in (
        "tool_calls_section_begin",
        "tool_calls_section_end",
        "tool_call_begin",
        "tool_call_argument_begin",
        "tool_call_end",
    )
)
DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        "begin▁of▁sentence",
        "end▁of▁sentence",
        "User",
        "Assistant",
        "tool▁calls▁begin",
        "tool▁calls▁end",
        "tool▁call▁begin",
        "tool▁call▁end",
        "tool▁sep",
        "tool▁outputs▁begin",
        "tool▁outputs▁end",
        "tool▁output▁begin",
        "tool▁output▁end",
    )
)
HARMONY = tuple(
    f"<|{name}|>" for name in ("start", "end", "return", "call", "channel", "message", "constrain", "endoftext")
)
FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen3": CHATML + TAGS,
    "prime-qwen3": CHATML + TAGS,
    "qwen3.5": CHATML + TAGS + VISION,
    "qwen3.6": CHATML + TAGS + VISION,
    "qwen3.8": CHATML + TAGS + VISION,
    "qwen3-vl": CHATML + TAGS + VISION,
    "nemotron-3": CHATML + TAGS + VISION,
    "glm-4.5": GLM + TAGS + ARGUMENTS,
    "glm-5": GLM + TAGS + ARGUMENTS,
    "glm-5.1": GLM + TAGS + ARGUMENTS,
    "minimax-m2": ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
    "kimi-k2": KIMI,
    "deepseek-v3": DEEPSEEK,
    "llama-3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
    ),
}
"""Families whose tokenizer can be made from their added tokens alone."""


def family_folder(folder: Path, added: tuple[str, ...]) -> Path:
    """A tokenizer's folder with the tiny model's merges and these added tokens, control tokens all."""
    data = json.loads((MODEL / "tokenizer.json").read_text())
    data["model"]["vocab"] = {text: token for text, token in data["model"]["vocab"].items() if token < 1015}
    data["added_tokens"] = [
        {
            "id": len(data["model"]["vocab"]) + index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": not text.startswith(("<t", "</t", "<a", "</a")),
        }
        for index, text in enumerate(added)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder
