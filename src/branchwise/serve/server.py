"""The process: it opens its socket at once, then loads the model, and cuts no text short at its end if it can."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from branchwise.errors import UsageError, first_line
from branchwise.llm import LLM
from branchwise.serve.runner import Runner, State
from branchwise.serve.settings import Settings
from branchwise.serve.web.app import create_app

LAST_SECONDS = 5
"""seconds in which texts that the server cut short may still reach their clients"""


class Server(uvicorn.Server):
    """uvicorn with another end: after a SIGTERM the socket stays open while texts run, and answers 503."""

    def __init__(self, load: Callable[[], LLM], settings: Settings) -> None:
        self.runner = Runner(load, queue=settings.limits.queue, lanes=settings.lanes)
        self.settings = settings
        app, self.door = create_app(self.runner, settings)
        quiet = {"log_level": "warning", "access_log": False, "server_header": False}
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                timeout_graceful_shutdown=LAST_SECONDS,
                **quiet,  # type: ignore[arg-type]
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.on_loaded: Callable[[], None] = lambda: None
        """called once when the model is loaded, on another thread"""
        self.runner.on_loaded = self._loaded

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.runner.start()
        await super().serve(sockets)

    def _loaded(self) -> None:
        if self.runner.state is State.BROKEN:
            self.should_exit = True
        else:
            self.on_loaded()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets running texts end; the second does not wait for them."""
        if self._draining is not None or self._loop is None:
            self.should_exit, self.force_exit = True, True
        else:
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Begin to end; called on the event loop."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        self.runner.drain()
        if not await self._empty_within(self.settings.grace):
            self.runner.end_all()
            await self._empty_within(LAST_SECONDS)
        self.should_exit = True

    async def _empty_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.door.empty.wait()
        except TimeoutError:
            return False
        return True


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections from now on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        advice = "name another with --host or --port"
        raise UsageError(f"The server cannot listen at {host}:{port}: {reason}; {advice}.") from None


def run(server: Server, listening: socket.socket) -> bool:
    """Serve until a signal ends it, and return whether the engine's thread has ended. Raises the error that kept the
    model from loading."""
    server.run(sockets=[listening])
    stopped = server.runner.stop(timeout=LAST_SECONDS)
    if server.runner.failure is not None:
        raise server.runner.failure
    return stopped
