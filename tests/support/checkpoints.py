"""Checkpoints as people host them, with random weights: vocabularies, special tokens and settings are real.

Each has the embedding, the head and the ids of its family, a tokenizer of about 4,000 merges, trained on the spot, and
a few narrow layers in shards of bf16. Templates behave as the family's, or write its markers, one turn after the other;
they are ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from support.families import drawn, tiny_config
from support.templates import (
    DEEPSEEK_R1,
    GEMMA2,
    GEMMA3,
    GLM45,
    GPT_OSS,
    GRANITE33,
    LLAMA31,
    MISTRAL_SMALL,
    MISTRAL_V3,
    PHI3,
    QWEN3,
    QWEN25,
    SMOLLM3,
)

MERGES = 4000
_CORPUS = Path(__file__).with_name("corpus.txt")
"""A frozen text: with one that is edited, the tokenizers of tests would change, and near ties with them."""
_HIDDEN = 32
SafeTokenizer = Literal["bytes", "metaspace"]
"""Words as bytes, as GPT-2 writes them, or with a low line for each space, as SentencePiece does."""


@dataclass(frozen=True)
class Family:
    """What is real of a family's checkpoints."""

    model_type: str
    vocabulary: int
    """Rows of the embedding."""
    specials: Mapping[str, int]
    """Tokens that are written whole, by their ids."""
    bos: str | None
    eos: str
    template: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration, beside its width."""
    spelling: SafeTokenizer = "bytes"
    writes_bos: bool = False
    """Whether the tokenizer puts the first token before every text."""
    read: tuple[str, ...] = ()
    """Tokens that are written whole, and read like words."""


def turns(
    user: tuple[str, str],
    assistant: tuple[str, str],
    system: tuple[str, str] | None = None,
    *,
    start: str = "",
    answer: str | None = None,
) -> str:
    """A template that writes one turn after the other.

    Args:
        user: What stands before and after the words; `assistant` and `system` likewise, whose turns are users' if None.
        start: Before the first turn.
        answer: The header of an answer; by default what stands before the assistant's words.
    """
    shapes = {"user": user, "assistant": assistant, "system": system or user}
    cases = "".join(
        f"{{% {'if' if number == 0 else 'elif'} message['role'] == '{role}' %}}"
        f"{{{{ {before!r} + message['content'] + {after!r} }}}}"
        for number, (role, (before, after)) in enumerate(shapes.items())
    )
    header = assistant[0] if answer is None else answer
    return (
        f"{{{{ {start!r} }}}}{{% for message in messages %}}{cases}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {header!r} }}}}{{% endif %}}"
    )


def chatml(start: str = "", separator: str = "\n", end: str = "<|im_end|>\n") -> str:
    """`<|im_start|>role`, a separator, the words, and the end, with some families' own."""
    user, assistant, system = ((f"<|im_start|>{role}{separator}", end) for role in ("user", "assistant", "system"))
    return turns(user, assistant, system, start=start)


def _headers(role: str) -> tuple[str, str]:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"


def _granite(role: str) -> tuple[str, str]:
    return f"<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n"


def _cohere(role: str) -> tuple[str, str]:
    return f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>", "<|END_OF_TURN_TOKEN|>"


def _qwen(*, thinks: bool) -> dict[str, int]:
    ids = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
    return ids | ({"<think>": 151667, "</think>": 151668} if thinks else {})


_LLAMA3_IDS = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eom_id|>": 128008,
    "<|eot_id|>": 128009,
}
_GPT4_IDS = {"<|endoftext|>": 100257, "<|im_start|>": 100264, "<|im_end|>": 100265}
_GEMMA_IDS = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}
_MISTRAL_IDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "[INST]": 3, "[/INST]": 4}
_GLM_IDS = {
    "<|endoftext|>": 151329,
    "[gMASK]": 151331,
    "<sop>": 151333,
    "<|system|>": 151335,
    "<|user|>": 151336,
    "<|assistant|>": 151337,
    "<|observation|>": 151338,
}
_MISTRAL = turns(("[INST] ", "[/INST]"), (" ", "</s>"), start="<s>", answer="")
_GLM = turns(("<|user|>\n", ""), ("<|assistant|>\n", ""), ("<|system|>\n", ""), start="[gMASK]<sop>")


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}


def _llama3(factor: float) -> dict[str, Any]:
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return _rope(500000.0, rope_type="llama3", factor=factor, **more) | {"max_position_embeddings": 131072}


_GEMMA3 = {
    "query_pre_attn_scalar": 16,
    "sliding_window": 9,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

FAMILIES: Mapping[str, Family] = {
    "Llama 3.1": Family(
        "llama", 128256, _LLAMA3_IDS, "<|begin_of_text|>", "<|eot_id|>", LLAMA31, _llama3(8.0), writes_bos=True
    ),
    "Llama 3.2": Family(
        "llama", 128256, _LLAMA3_IDS, "<|begin_of_text|>", "<|eot_id|>", LLAMA31,
        _llama3(32.0) | {"tie_word_embeddings": True}, writes_bos=True,
    ),
    "Qwen 2.5": Family(
        "qwen2", 151936, _qwen(thinks=False), None, "<|im_end|>", QWEN25,
        _rope(1e6) | {"tie_word_embeddings": True, "max_position_embeddings": 32768},
    ),
    "Qwen 3": Family(
        "qwen3", 151936, _qwen(thinks=True), None, "<|im_end|>", QWEN3,
        _rope(1e6) | {"tie_word_embeddings": True, "max_position_embeddings": 40960},
    ),
    "Qwen 3 2507": Family(
        "qwen3", 151936, _qwen(thinks=True), None, "<|im_end|>", chatml(),
        _rope(5e6) | {"tie_word_embeddings": True, "max_position_embeddings": 262144},
    ),
    "Qwen 3 MoE": Family(
        "qwen3_moe", 151936, _qwen(thinks=True), None, "<|im_end|>", QWEN3,
        _rope(1e6) | _EXPERTS | {"tie_word_embeddings": False, "max_position_embeddings": 40960},
    ),
    "DeepSeek R1 Distill Qwen": Family(
        "qwen2", 151936,
        {"<｜end▁of▁sentence｜>": 151643, "<｜User｜>": 151644, "<｜Assistant｜>": 151645,
         "<｜begin▁of▁sentence｜>": 151646, "<think>": 151648, "</think>": 151649},
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", DEEPSEEK_R1,
        _rope(1e4) | {"tie_word_embeddings": False, "max_position_embeddings": 131072}, writes_bos=True,
    ),
    "DeepSeek R1 Distill Llama": Family(
        "llama", 128256,
        {"<｜begin▁of▁sentence｜>": 128000, "<｜end▁of▁sentence｜>": 128001, "<｜User｜>": 128011,
         "<｜Assistant｜>": 128012, "<think>": 128013, "</think>": 128014},
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", DEEPSEEK_R1, _llama3(8.0), writes_bos=True,
    ),
    "gpt-oss": Family(
        "gpt_oss", 201088,
        {"<|startoftext|>": 199998, "<|endoftext|>": 199999, "<|return|>": 200002, "<|constrain|>": 200003,
         "<|channel|>": 200005, "<|start|>": 200006, "<|end|>": 200007, "<|message|>": 200008, "<|call|>": 200012},
        "<|startoftext|>", "<|return|>",
        GPT_OSS,
        {"num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 9, "max_position_embeddings": 131072,
         "layer_types": ["sliding_attention", "full_attention"] * 2}
        | _rope(150000.0, rope_type="yarn", factor=32.0, original_max_position_embeddings=4096,
                beta_fast=32.0, beta_slow=1.0, truncate=False),
    ),
    "Gemma 2": Family(
        "gemma2", 256000, _GEMMA_IDS | {"<start_of_turn>": 106, "<end_of_turn>": 107}, "<bos>", "<eos>", GEMMA2,
        {"sliding_window": 9, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0, "layer_types": ["sliding_attention", "full_attention"] * 2,
         "max_position_embeddings": 8192, "hidden_activation": "gelu_pytorch_tanh"},
        "metaspace", writes_bos=True,
    ),
    "Gemma 3 1B": Family(
        "gemma3_text", 262144, _GEMMA_IDS | {"<start_of_turn>": 105, "<end_of_turn>": 106}, "<bos>", "<end_of_turn>",
        GEMMA3, _GEMMA3, "metaspace", writes_bos=True,
    ),
    "Gemma 3 4B": Family(
        "gemma3", 262208,
        _GEMMA_IDS
        | {"<start_of_turn>": 105, "<end_of_turn>": 106, "<start_of_image>": 255999, "<end_of_image>": 256000,
           "<image_soft_token>": 262144},
        "<bos>", "<end_of_turn>", GEMMA3, _GEMMA3, "metaspace", writes_bos=True,
    ),
    "Mistral 7B v0.3": Family(
        "mistral", 32768, _MISTRAL_IDS, "<s>", "</s>", MISTRAL_V3,
        _rope(1e6) | {"sliding_window": None, "max_position_embeddings": 32768}, "metaspace", writes_bos=True,
    ),
    "Mistral Nemo": Family(
        "mistral", 131072, _MISTRAL_IDS, "<s>", "</s>", MISTRAL_V3,
        _rope(1e6) | {"sliding_window": None, "max_position_embeddings": 131072, "head_dim": 16}, writes_bos=True,
    ),
    "Mistral Small 3": Family(
        "mistral", 131072, _MISTRAL_IDS | {"[SYSTEM_PROMPT]": 17, "[/SYSTEM_PROMPT]": 18}, "<s>", "</s>",
        MISTRAL_SMALL,
        _rope(1e8) | {"sliding_window": None, "max_position_embeddings": 32768}, writes_bos=True,
    ),
    "Mistral 7B v0.1": Family(
        "mistral", 32000, {"<unk>": 0, "<s>": 1, "</s>": 2}, "<s>", "</s>", _MISTRAL,
        _rope(1e4) | {"sliding_window": 9, "max_position_embeddings": 32768}, "metaspace", writes_bos=True,
    ),
    "Phi-3 mini": Family(
        "phi3", 32064,
        {"<unk>": 0, "<s>": 1, "</s>": 2, "<|endoftext|>": 32000, "<|assistant|>": 32001, "<|system|>": 32006,
         "<|end|>": 32007, "<|user|>": 32010},
        "<s>", "<|endoftext|>",
        PHI3,
        _rope(1e4) | {"sliding_window": 9, "max_position_embeddings": 4096}, "metaspace",
    ),
    "Phi-4": Family(
        "phi3", 100352, _GPT4_IDS | {"<|im_sep|>": 100266}, "<|endoftext|>", "<|im_end|>",
        chatml(separator="<|im_sep|>", end="<|im_end|>"),
        _rope(250000.0) | {"max_position_embeddings": 16384},
    ),
    "GLM-4 0414": Family(
        "glm4", 151552, _GLM_IDS, None, "<|endoftext|>", _GLM,
        _rope(1e4, partial_rotary_factor=0.5) | {"max_position_embeddings": 32768, "attention_bias": True},
    ),
    "GLM-4.5": Family(
        "glm4_moe", 151552, _GLM_IDS | {"<think>": 151350, "</think>": 151351}, None, "<|endoftext|>", GLM45,
        _rope(1e6, partial_rotary_factor=0.5)
        | {"max_position_embeddings": 131072, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
           "moe_intermediate_size": 16, "first_k_dense_replace": 1, "use_qk_norm": True, "n_group": 1, "topk_group": 1},
    ),
    "OLMo 2": Family(
        "olmo2", 100352, _GPT4_IDS | {"<|pad|>": 100277}, "<|endoftext|>", "<|endoftext|>",
        turns(
            ("<|user|>\n", "\n"), ("<|assistant|>\n", "<|endoftext|>\n"), ("<|system|>\n", "\n"), start="<|endoftext|>"
        ),
        _rope(500000.0) | {"max_position_embeddings": 4096},
    ),
    "OLMo 3": Family(
        "olmo3", 100278, _GPT4_IDS | {"<|pad|>": 100277}, None, "<|im_end|>", chatml(),
        {"sliding_window": 9, "layer_types": _SLIDING, "max_position_embeddings": 65536}
        | _rope(500000.0, rope_type="yarn", factor=8.0, original_max_position_embeddings=8192,
                beta_fast=32.0, beta_slow=1.0, attention_factor=1.2079),
    ),
    "Granite 3.3": Family(
        "granite", 49159,
        {"<|end_of_text|>": 0, "<|start_of_role|>": 49152, "<|end_of_role|>": 49153, "<|tool_call|>": 49154},
        "<|end_of_text|>", "<|end_of_text|>",
        GRANITE33,
        _rope(1e7)
        | {"attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
           "logits_scaling": 16.0, "tie_word_embeddings": True, "max_position_embeddings": 131072},
    ),
    "Granite 4 micro": Family(
        "granitemoehybrid", 100352,
        {"<|end_of_text|>": 100257, "<|start_of_role|>": 100264, "<|end_of_role|>": 100265},
        "<|end_of_text|>", "<|end_of_text|>",
        turns(_granite("user"), _granite("assistant"), _granite("system")),
        _rope(1e7)
        | {"layer_types": ["attention"] * 4, "position_embedding_type": "rope", "attention_multiplier": 0.25,
           "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 10.0, "num_local_experts": 0,
           "num_experts_per_tok": 0, "shared_intermediate_size": 64, "mamba_n_heads": 4, "tie_word_embeddings": True,
           "max_position_embeddings": 131072},
    ),
    "SmolLM2": Family(
        "llama", 49152, {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}, "<|im_start|>", "<|im_end|>",
        chatml(), _rope(130000.0) | {"tie_word_embeddings": True, "max_position_embeddings": 8192},
    ),
    "SmolLM3": Family(
        "smollm3", 128256,
        {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<think>": 128002, "</think>": 128003,
         "<|im_start|>": 128011, "<|im_end|>": 128012},
        None, "<|im_end|>", SMOLLM3,
        _rope(5e6) | {"no_rope_layer_interval": 4, "tie_word_embeddings": True, "max_position_embeddings": 65536},
    ),
    "Command R7B": Family(
        "cohere2", 256000,
        {"<PAD>": 0, "<BOS_TOKEN>": 5, "<|START_OF_TURN_TOKEN|>": 255000, "<|END_OF_TURN_TOKEN|>": 255001,
         "<|USER_TOKEN|>": 255006, "<|CHATBOT_TOKEN|>": 255007, "<|SYSTEM_TOKEN|>": 255008},
        "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>",
        turns(_cohere("USER"), _cohere("CHATBOT"), _cohere("SYSTEM"), start="<BOS_TOKEN>"),
        _rope(50000.0)
        | {"sliding_window": 9, "layer_types": _SLIDING, "logit_scale": 0.25, "tie_word_embeddings": True,
           "max_position_embeddings": 132096},
        writes_bos=True,
    ),
    "EXAONE 4": Family(
        "exaone4", 102400,
        {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2, "[|system|]": 375, "[|user|]": 376, "[|assistant|]": 377,
         "[|endofturn|]": 361},
        "[BOS]", "[|endofturn|]",
        turns(
            ("[|user|]\n", "[|endofturn|]\n"), ("[|assistant|]\n", "[|endofturn|]\n"),
            ("[|system|]\n", "[|endofturn|]\n"),
        ),
        _rope(1e6) | {"sliding_window": 9, "layer_types": _SLIDING, "max_position_embeddings": 131072},
    ),
    "Seed-OSS": Family(
        "seed_oss", 155136, {"<seed:bos>": 0, "<seed:pad>": 1, "<seed:eos>": 2}, "<seed:bos>", "<seed:eos>",
        turns(*(((f"<seed:bos>{role}\n", "<seed:eos>")) for role in ("user", "assistant", "system"))),
        _rope(1e7) | {"attention_bias": True, "attention_out_bias": False, "max_position_embeddings": 524288},
    ),
    "ERNIE 4.5": Family(
        "ernie4_5", 103424,
        {"<unk>": 0, "<s>": 1, "</s>": 2, "<|begin_of_sentence|>": 100272, "<|end_of_sentence|>": 100273},
        "<|begin_of_sentence|>", "</s>",
        turns(
            ("User: ", "\n"), ("Assistant: ", "<|end_of_sentence|>"), ("", "\n"), start="<|begin_of_sentence|>"
        ),
        _rope(500000.0) | {"tie_word_embeddings": True, "max_position_embeddings": 131072}, "metaspace",
    ),
}  # fmt: skip
"""Of 2023 to 2026, by what people call them."""


def save_checkpoint(folder: Path, name: str | Family, *, seed: int = 3) -> Path:
    """A family's checkpoint: two shards of bf16, configuration, tokenizer and template."""
    family = FAMILIES[name] if isinstance(name, str) else name
    tokenizer = checkpoint_tokenizer(family)
    model = checkpoint_model(family, tokenizer, seed=seed).bfloat16()
    model.save_pretrained(folder, max_shard_size=max(1, sum(weight.nbytes for weight in model.parameters()) * 2 // 3))
    tokenizer.save_pretrained(folder)
    return folder


def save_small_files(folder: Path, name: str) -> Path:
    """The same without weights."""
    family = FAMILIES[name]
    tokenizer = checkpoint_tokenizer(family)
    config = checkpoint_config(family, tokenizer)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def checkpoint_model(family: Family, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> PreTrainedModel:
    """The model of random weights, in fp32."""
    return drawn(checkpoint_config(family, tokenizer), seed)


def checkpoint_config(family: Family, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """Its configuration."""
    width = {"hidden_size": _HIDDEN, "intermediate_size": 64, "vocab_size": family.vocabulary}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    settings = {**width, **ends, **deepcopy(dict(family.settings))}  # configurations write into what they are given
    if family.model_type != "gemma3":
        return tiny_config(family.model_type, settings)
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return tiny_config("gemma3", {}, text=settings, vision_config=tower | {"image_size": 28, "patch_size": 14})


def checkpoint_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """The trained tokenizer with the family's tokens at their ids, and its template."""
    said = json.loads(_trained(family.spelling))
    taken = set(family.specials.values())
    free = (number for number in range(1 << 20) if number not in taken)
    pieces = sorted(said["model"]["vocab"].items(), key=lambda piece: piece[1])
    said["model"]["vocab"] = {piece: next(free) for piece, _ in pieces if piece not in family.specials} | dict(
        family.specials
    )
    made = Tokenizer.from_str(json.dumps(said))
    added = [AddedToken(token, special=token not in family.read, normalized=False) for token in family.specials]
    made.add_special_tokens([token for token in added if token.special])
    made.add_tokens([token for token in added if not token.special])
    if family.writes_bos and family.bos is not None:
        before = (family.bos, family.specials[family.bos])
        made.post_processor = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=[before])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=family.bos, eos_token=family.eos)
    tokenizer.chat_template = family.template
    return tokenizer


@lru_cache
def _trained(spelling: SafeTokenizer) -> str:
    """A tokenizer without special tokens, as JSON."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=spelling == "metaspace"))
    if spelling == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        first = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        # SentencePiece's: a low line for each space, and bytes for what was never seen.
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        first = []
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if spelling == "metaspace" else []
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES, special_tokens=fallback, initial_alphabet=first, show_progress=False
    )
    tokenizer.train_from_iterator(_lines(), trainer)
    plain = json.loads(tokenizer.to_str())
    plain["added_tokens"] = []
    return json.dumps(plain)


def _lines() -> Iterator[str]:
    """Yield the frozen text, and the letters that templates have in front."""
    yield from _CORPUS.read_text().splitlines(keepends=True)
