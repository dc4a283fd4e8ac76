"""Engines that ours is measured against. Each is used as its own documentation says; none is a dependency."""

from choreo_bench.competitors.base import Absent, Competitor, Levels, Timer
from choreo_bench.competitors.chat_hugging_face import ChatHuggingFaceDebate, ChatRun
from choreo_bench.competitors.continuous import ContinuousBatching
from choreo_bench.competitors.hugging_face import HuggingFace
from choreo_bench.competitors.llama_cpp import LlamaCpp
from choreo_bench.competitors.ours import Ours
from choreo_bench.competitors.plain_generate import PlainGenerate
from choreo_bench.competitors.vllm import Vllm

__all__ = [
    "Absent",
    "ChatHuggingFaceDebate",
    "ChatRun",
    "Competitor",
    "ContinuousBatching",
    "HuggingFace",
    "Levels",
    "LlamaCpp",
    "Ours",
    "PlainGenerate",
    "Timer",
    "Vllm",
]
