"""Engines that ours is measured against. Each is used as its own documentation says; none is a dependency."""

from choreo_bench.rivals.base import Absent, Levels, Rival, Timer
from choreo_bench.rivals.chat_hugging_face import ChatHuggingFaceDebate, ChatRun
from choreo_bench.rivals.continuous import ContinuousBatching
from choreo_bench.rivals.hugging_face import HuggingFace
from choreo_bench.rivals.llama_cpp import LlamaCpp
from choreo_bench.rivals.ours import Ours
from choreo_bench.rivals.plain_generate import PlainGenerate
from choreo_bench.rivals.vllm import Vllm

__all__ = [
    "Absent",
    "ChatHuggingFaceDebate",
    "ChatRun",
    "ContinuousBatching",
    "HuggingFace",
    "Levels",
    "LlamaCpp",
    "Ours",
    "PlainGenerate",
    "Rival",
    "Timer",
    "Vllm",
]
