"""What the engine is measured against. Each is used as its own documentation says; none is a dependency."""

from choreo_agents.lab.rivals.base import Absent, Levels, Rival, Timer
from choreo_agents.lab.rivals.chat_hugging_face import ChatHuggingFaceDebate, ChatRun
from choreo_agents.lab.rivals.continuous import ContinuousBatching
from choreo_agents.lab.rivals.forced_chat import ForcedChatHuggingFace
from choreo_agents.lab.rivals.hugging_face import HuggingFace
from choreo_agents.lab.rivals.llama_cpp import LlamaCpp
from choreo_agents.lab.rivals.ours import Ours
from choreo_agents.lab.rivals.plain_generate import PlainGenerate
from choreo_agents.lab.rivals.vllm import Vllm

__all__ = [
    "Absent",
    "ChatHuggingFaceDebate",
    "ChatRun",
    "ContinuousBatching",
    "ForcedChatHuggingFace",
    "HuggingFace",
    "Levels",
    "LlamaCpp",
    "Ours",
    "PlainGenerate",
    "Rival",
    "Timer",
    "Vllm",
]
