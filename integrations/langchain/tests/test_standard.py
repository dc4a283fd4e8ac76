"""LangChain's own suites for chat models, on checkpoints of three families that write calls of tools in three ways.

A script chooses tokens, at the logits of the checkpoint, and writes what the family's models write. What is read of
that, told of it and led to it is the product's.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from langchain_choreo import ChatChoreo
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from support.chat_scripts import family_script
from support.chatty import save_chatty


@lru_cache
def other_model() -> str:
    """Another checkpoint, which says what it likes."""
    return str(save_chatty(Path(mkdtemp(prefix="choreo-other-"))))


class _OnChoreo:
    """What both suites are told."""

    family = "Qwen 3"
    method = "json_schema"

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatChoreo

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": self.method}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return other_model()

    @property
    def returns_usage_metadata(self) -> bool:
        return True


class TestChatChoreoUnit(_OnChoreo, ChatModelUnitTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "embedded"}

    @pytest.fixture(autouse=True)
    def _is_listed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """LangChain reads back, as "all", what it lists. Of others it has to be told by name."""
        loading = import_module("langchain_core.load.load")
        path = ("langchain_choreo", "chat_model", "ChatChoreo")
        monkeypatch.setitem(loading.ALL_SERIALIZABLE_MAPPINGS, path, path)
        monkeypatch.setattr(loading, "_default_class_paths_cache", {})

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"CHOREO_MODEL": "a/folder"}, {}, {"model": "a/folder"}


class _Integration(_OnChoreo, ChatModelIntegrationTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": family_script(self.family).engine, "thinking": False}

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        for _ in range(2):
            if stream:
                *pieces, last = model.stream("Hello")
                said: Any = sum(pieces[1:], start=pieces[0]) + last
            else:
                said = model.invoke("Hello")
        assert said.usage_metadata["input_token_details"]["cache_read"] > 0
        return said


class TestJsonInTags(_Integration):
    """Qwen's and Hermes'."""


@pytest.mark.slow
class TestCallsInAList(_Integration):
    """Command R7B's."""

    family, method = "listed", "function_calling"


@pytest.mark.slow
class TestCallsInHeaders(_Integration):
    """gpt-oss'."""

    family = "gpt-oss"
