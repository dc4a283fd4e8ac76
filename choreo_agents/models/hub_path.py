"""Resolves a model's path or hub name, and fails fast if it cannot be reached."""

from __future__ import annotations

from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from choreo_agents.errors import ModelNotFoundError, UnsupportedModelError
from choreo_agents.models.lines import first_line

ANSWER_S = 5.0
"""Timeout of the hub in seconds."""
_LIKE_A_PATH = ("/", "./", "../", "~")
_UNKNOWN, _BROKEN = (401, 404), 500
"""HTTP statuses for a missing or private model; the lowest status of a hub that is out of order."""


def hub_path(name: str | Path, *, weights: bool = True) -> str | Path:
    """Return what `from_pretrained` takes for a model: a folder, or the name of one that the hub has.

    Without a connection, a name becomes its folder in the local hub cache, so that nothing waits for retries.

    Args:
        name: A folder in Hugging Face's layout, or a hub name.
        weights: Whether the weights are needed, too, and not only the small files.

    Raises:
        UnsupportedModelError: It is in GGUF.
        ModelNotFoundError: There is no such folder, no such model in the local hub cache, and none on the hub, or the
            hub cannot be reached.
    """
    _require_no_gguf(Path(name))
    if Path(name).is_dir():
        return name
    if isinstance(name, Path) or name.startswith(_LIKE_A_PATH):
        raise ModelNotFoundError(f"there is no folder {str(name)!r}: pass one in Hugging Face's layout, or a hub name")
    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ModelNotFoundError(f"there is no folder {name!r}, and it is not a valid hub name") from error
    failure = _failure(name)
    if failure is None:
        return name
    if isinstance(config, str):
        folder = Path(config).parent
        if weights and not any(folder.glob("*.safetensors")):
            raise ModelNotFoundError(
                f"the local hub cache has only a part of {name!r}, and {constants.ENDPOINT} is unreachable "
                f"({first_line(failure)}): run hf download {name} with a network connection"
            ) from failure
        return folder
    nowhere = f"there is no folder {name!r}, no model of that name in the local hub cache ({constants.HF_HUB_CACHE})"
    if isinstance(failure, HfHubHTTPError) and failure.response.status_code in _UNKNOWN:
        raise ModelNotFoundError(
            f"{nowhere}, and no public one on {constants.ENDPOINT}: check the name, or log in with hf auth login"
        ) from failure
    raise ModelNotFoundError(
        f"{nowhere}, and {constants.ENDPOINT} is unreachable ({first_line(failure)}): pass a folder, or run hf "
        f"download {name} with a network connection"
    ) from failure


def _require_no_gguf(path: Path) -> None:
    """Raise `UnsupportedModelError` for a GGUF file, and for a folder that has nothing else."""
    if path.suffix.lower() == ".gguf" or (not any(path.glob("*.safetensors")) and any(path.glob("*.gguf"))):
        raise UnsupportedModelError(
            f"{str(path)!r} is in GGUF format, which is not supported: pass the folder or hub name of the same model "
            "in safetensors; for quantised models, pip install 'choreo-agents[quantized]' supports compressed-tensors "
            "and torchao"
        )


def _failure(name: str) -> Exception | None:
    """Return why the hub cannot serve a model; None if it can, or gives another error, which loading reports."""
    answer: SimpleQueue[Exception | None] = SimpleQueue()

    def ask() -> None:
        try:
            HfApi(endpoint=constants.ENDPOINT).model_info(name, timeout=ANSWER_S)
            answer.put(None)
        except HfHubHTTPError as error:
            status = error.response.status_code
            answer.put(error if status in _UNKNOWN or status >= _BROKEN else None)
        except Exception as error:  # depends on the HTTP library that is installed
            answer.put(error)

    # In a thread, as the request's own timeout does not include a dead name server.
    Thread(target=ask, name="choreo-hub", daemon=True).start()
    try:
        return answer.get(timeout=ANSWER_S)
    except Empty:
        return TimeoutError(f"no response within {ANSWER_S:g} s")
