"""Models from the Hugging Face hub: only the files that are needed, into the hub library's own cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clearway.errors import ClearwayError, RequestError, UnavailableError, one_line

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TIMEOUT_S = 10.0
PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")


class _NotAsked(UnavailableError):
    """The hub library was told to stay offline; not an answer about the model."""


def is_hub_id(source: str) -> bool:
    """Whether a name has the form owner/name."""
    return HUB_ID.fullmatch(source) is not None


def download(hub_id: str, *, half: bool, local_files_only: bool) -> tuple[Path, tuple[str, ...]]:
    """The folder with a hub model's Diffusers files, downloaded where needed; and notes.

    `half` takes the half-precision files where there are both. Where the hub cannot be reached, what was
    downloaded before is taken, with a note. RequestError where the hub has no such model or it holds no
    Diffusers folder; UnavailableError where there is neither hub nor an earlier download.
    """
    import huggingface_hub

    def local() -> Path:
        return Path(_ask(hub_id, lambda: huggingface_hub.snapshot_download(hub_id, local_files_only=True)))

    if local_files_only:
        return local(), ()
    try:
        # not list_repo_files: it tries again for 25 seconds, with a warning each time
        info = _ask(hub_id, lambda: huggingface_hub.HfApi().model_info(hub_id, timeout=TIMEOUT_S))
        wanted = needed([file.rfilename for file in info.siblings or ()], half)
        if not wanted:
            raise RequestError(
                f"{hub_id} on the hub holds no Diffusers folder (no model_index.json); download the "
                "checkpoint file and give its path"
            )
        return Path(
            _ask(hub_id, lambda: huggingface_hub.snapshot_download(hub_id, allow_patterns=wanted))
        ), ()
    except UnavailableError as error:
        try:
            return local(), (f"{error}; the files downloaded earlier were taken.",)
        except UnavailableError as absent:
            raise (absent if isinstance(error, _NotAsked) else error) from None


def needed(names: Sequence[str], half: bool) -> list[str]:
    """The files of a hub repository that a model is loaded from; empty where it is no Diffusers folder.

    A part that has only pickles contributes them, so that what is refused later is named as what it is.
    """
    if "model_index.json" not in names:
        return []
    wanted = [
        name
        for name in names
        if name in ("model_index.json", "clearway.json", "scheduler/scheduler_config.json")
        or re.fullmatch(r"tokenizer(_2)?/[\w.-]+\.(json|txt)", name)
        or (name.endswith("/config.json") and name.partition("/")[0] in PARTS)
    ]
    for part in PARTS:
        own = [name for name in names if name.startswith(f"{part}/")]
        weights = [
            name
            for name in own
            if re.fullmatch(
                r"[\w-]+/(diffusion_pytorch_model|model)[\w.-]*\.safetensors(\.index[\w.]*\.json)?", name
            )
            and ".non_ema" not in name
        ]
        halves = [name for name in weights if re.search(r"\.fp16[.-]", name)]
        plain = [name for name in weights if name not in halves]
        wanted += (halves or plain) if half else (plain or halves)
        if not weights:
            wanted += [name for name in own if name.endswith(".bin") and ".fp16." not in name]
    return wanted


def _ask(hub_id: str, question: Callable[[], Any]) -> Any:
    """The hub library's answer; its many exceptions become one of ours."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return question()
    except ClearwayError:
        raise
    except LocalEntryNotFoundError as error:
        raise UnavailableError(
            f"{hub_id} is not among the downloaded models (nor a path here) and was not fetched (offline, or "
            "only local files allowed); give a path, or go online once"
        ) from error
    except OfflineModeIsEnabled as error:
        raise _NotAsked(f"{hub_id} was not looked for on the hub (offline)") from error
    except GatedRepoError as error:
        raise UnavailableError(
            f"{hub_id} asks for its licence to be accepted on the hub and for a login"
        ) from error
    except RepositoryNotFoundError as error:
        raise RequestError(
            f"{hub_id} is neither a path here nor a model on the hub (or it is private)"
        ) from error
    except Exception as error:  # network, disk and server errors of several libraries: all mean "not fetched"
        raise UnavailableError(
            f"{hub_id} could not be fetched from the hub: {one_line(error)[:200]}"
        ) from error
