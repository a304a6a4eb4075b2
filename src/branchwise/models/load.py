"""Reads a model with transformers, from a folder or from the hub, and explains failures in one sentence."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branchwise.errors import ModelError, UnsupportedModel, first_line

if TYPE_CHECKING:
    import torch


def local_first(load: Callable[..., Any], source: Path | str, trust_remote_code: bool) -> Any:
    """The result of `load` for a folder or a hub id. For a hub id, the copy in the hub's own cache is tried first."""
    if isinstance(source, str):
        try:
            return load(source, trust_remote_code=trust_remote_code, local_files_only=True)
        except (OSError, ValueError):
            # The copy is absent or incomplete. One request tells at once if the hub cannot be reached; a download would
            # be retried for half a minute.
            _ask_hub(source)
    return load(source, trust_remote_code=trust_remote_code)


def read_model(source: Path | str, *, dtype: torch.dtype, **options: bool) -> Any:
    """The model and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(source, **options)
        _require_causal(str(source), config)
        tokenizer = AutoTokenizer.from_pretrained(source, config=config, **options)
        model, info = auto.from_pretrained(
            source, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ModelError(
            f"{source} brings its own code, which is not run unless you trust it. "
            "If you do, allow remote code explicitly (trust_remote_code=True)."
        ) from error
    if missing := sorted(info["missing_keys"]):
        # transformers fills missing tensors with noise and only warns.
        raise ModelError(f"The weights of {source} lack {len(missing)} tensors, such as {missing[0]}.")
    return model, tokenizer


def read_skeleton(source: Path | str, *, trust_remote_code: bool = False, **options: bool) -> Any:
    """The model and its tokenizer as `read_model` returns them, but in float32 and with uninitialised weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.initialization import no_init_weights

    auto: Any = AutoModelForCausalLM
    generation: Any = GenerationConfig
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    tokenizer = AutoTokenizer.from_pretrained(source, config=config, trust_remote_code=trust_remote_code, **options)
    with no_init_weights():
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    with contextlib.suppress(OSError):  # not every model has one
        model.generation_config = generation.from_pretrained(source, **options)
    return model.eval(), tokenizer


def _require_causal(name: str, config: Any) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model. Only causal language models are served.")
    if AutoModelForCausalLM.__name__ in (getattr(config, "auto_map", None) or {}):
        return
    # A BERT could be loaded as a causal model too, so the class that the checkpoint was saved as decides.
    classes = getattr(config, "architectures", None) or []
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    causal = {name for value in known.values() for name in ((value,) if isinstance(value, str) else value)}
    if config.model_type not in known or (classes and not causal & set(classes)):
        kind = classes[0] if classes else config.model_type
        raise UnsupportedModel(f"{name} is a {kind}, which is not a causal language model.")


def _ask_hub(repo: str) -> None:
    """Raise an error in one sentence if a download of `repo` would fail."""
    import huggingface_hub.errors as hub
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(repo, timeout=10)
    except hub.GatedRepoError as error:
        raise _gated(repo) from error
    except hub.RepositoryNotFoundError as error:
        raise ModelError(
            f"The hub has no model {repo!r}, or it is private. Check the name, or log in with: hf auth login"
        ) from error
    except hub.OfflineModeIsEnabled as error:
        raise ModelError(
            f"{repo!r} is not (wholly) in the local hub cache, and HF_HUB_OFFLINE forbids to fetch it. "
            "Unset HF_HUB_OFFLINE, or give a local folder."
        ) from error
    except hub.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        raise ModelError(f"The hub answered {status} when asked for {repo!r}. Try again later.") from error
    except Exception as error:
        raise _unreachable(repo) from error
    files = [sibling.rfilename for sibling in info.siblings or []]
    if "config.json" not in files:
        has_gguf = any(file.endswith(".gguf") for file in files)
        hint = " It holds GGUF files: download one and give its path." if has_gguf else ""
        raise ModelError(f"{repo!r} on the hub is not a transformers model: it has no config.json.{hint}")
    # Otherwise transformers would ask a service to convert the pickle, and wait for it.
    if not any(file.endswith(".safetensors") for file in files):
        raise _pickle_only(repo)


def _gated(repo: str) -> ModelError:
    return ModelError(f"{repo!r} is gated. Accept its terms on the hub, then log in with: hf auth login")


def _unreachable(repo: str) -> ModelError:
    return ModelError(
        f"{repo!r} is not (wholly) in the local hub cache, and the hub cannot be reached. "
        "Check the network, or give a local folder."
    )


def _pickle_only(name: str) -> ModelError:
    return ModelError(f"{name!r} has no model.safetensors. Nothing else is read, since a pickle can run code.")


@contextlib.contextmanager
def explained(name: str, source: Path | str) -> Iterator[None]:
    """Turn errors of transformers and its libraries into one sentence that says what to do."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise _explain(error, name, source) from error


def _explain(error: BaseException, name: str, source: Path | str) -> ModelError:
    import huggingface_hub.errors as hub
    from safetensors import SafetensorError

    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__

    def any_is(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    text = str(error)
    if any_is(hub.GatedRepoError):
        return _gated(name)
    if any_is(hub.LocalEntryNotFoundError):
        return _unreachable(name)
    if any_is(SafetensorError) or "not a valid JSON" in text or any_is(json.JSONDecodeError):
        if isinstance(source, Path) and (source / "branchwise.json").is_file():
            return ModelError(f"The converted copy {source} is damaged. Delete that folder and run again.")
        return ModelError(f"The files of {name!r} are damaged ({first_line(error)}). Get the model again.")
    if "safetensors" in text and ("named" in text or "no file" in text):
        return _pickle_only(name)
    if "out of memory" in text.lower() or any_is(MemoryError):
        return ModelError(f"There is not enough memory for {name!r}. Try a smaller model or dtype.")
    return ModelError(f"Could not load {name!r}: {first_line(error)}.")
