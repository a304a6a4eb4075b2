"""What a server is told when it starts: its name, its keys, and how much of everything a client may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field

from branchwise.constrain import Limits as GrammarLimits
from branchwise.methods import Method

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one request and all of them together may take. What is beyond is refused, never cut."""

    body_bytes: int = 4 * MIB
    body_seconds: float = 60.0
    """for the body of a request to arrive in"""
    prompt_tokens: int | None = None
    """None: as many as the context holds"""
    new_tokens: int | None = None
    """None: as many as the context holds"""
    prompts: int = 128
    """in the list of one request"""
    choices: int = 128
    """`n`"""
    stops: int = 16
    stop_letters: int = 256
    biases: int = 1024
    grammar: GrammarLimits = field(default_factory=GrammarLimits)
    """of the form that an answer must have"""
    requests: int = 256
    """at once, those that wait included"""
    queue: int = 256
    """texts that wait for a slot"""


@dataclass(frozen=True)
class Settings:
    names: tuple[str, ...]
    """by which requests may call the model; answers use the first"""
    limits: Limits = field(default_factory=Limits)
    keys: tuple[str, ...] = ()
    """without any the server is open"""
    origins: tuple[str, ...] = ()
    """whose pages may ask from a browser"""
    share_prefixes: bool = False
    """let prompts begin with cached rows of texts of other keys"""
    playground: bool = True
    """whether there is a page at /"""
    lanes: int = 2
    """methods besides the server's own that requests may use at a time"""
    method: Method | None = None
    """the server's own, where it is known by name"""
    head: str | None = None
    """the file of the trained head that methods of requests may draft with"""
    grace: float = 30.0
    """seconds that running texts have after a SIGTERM"""
