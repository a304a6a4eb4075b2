"""The settings of a server: its names, its keys, and how much a client may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field

from branchwise.constrain import Limits as GrammarLimits
from branchwise.methods import Method

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one request, and all requests together, may take. A request for more is refused, never cut."""

    body_bytes: int = 4 * MIB
    body_seconds: float = 60.0
    """seconds within which the body of a request must arrive"""
    prompt_tokens: int | None = None
    """most tokens of a prompt; None: as many as the context holds"""
    new_tokens: int | None = None
    """most tokens of an answer; None: as many as the context holds"""
    prompts: int = 128
    """most prompts in the list of one request"""
    choices: int = 128
    """the largest `n` of a request"""
    stops: int = 16
    stop_letters: int = 256
    biases: int = 1024
    grammar: GrammarLimits = field(default_factory=GrammarLimits)
    """how large the grammar of an answer may be"""
    requests: int = 256
    """requests at the same time, waiting ones included"""
    queue: int = 256
    """texts that may wait for a slot"""


@dataclass(frozen=True)
class Settings:
    names: tuple[str, ...]
    """the names by which requests may call the model; answers use the first"""
    limits: Limits = field(default_factory=Limits)
    keys: tuple[str, ...] = ()
    """API keys; without any the server is open to all"""
    origins: tuple[str, ...] = ()
    """origins whose pages may ask from a browser"""
    share_prefixes: bool = False
    """whether prompts may begin with cached rows of texts of other keys"""
    playground: bool = True
    """whether the server has a page at /"""
    lanes: int = 2
    """how many methods besides the server's own requests may use at a time"""
    method: Method | None = None
    """the server's own method; None if the drafter was given as an object"""
    head: str | None = None
    """the file of the trained head that methods of requests may draft with"""
    grace: float = 30.0
    """seconds that running texts have to end after a SIGTERM"""
