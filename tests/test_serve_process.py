"""The real process: `branchwise serve`, a client of OpenAI, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO

import httpx
import openai
import pytest

from branchwise.cli import main
from branchwise.errors import UsageError
from branchwise.serve.server import listen
from tests.serving import eventually, tiny_llm

SERVE = [sys.executable, "-m", "branchwise", "serve"]
HELLO: list[openai.types.chat.ChatCompletionUserMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder of files."""
    found = tmp_path_factory.mktemp("tiny")
    llm = tiny_llm(context=4096)
    llm.model.save_pretrained(found)
    llm.tokenizer.save_pretrained(found)
    return found


class Process:
    """A running server and what it has printed so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = Thread(target=self._read, args=(process.stderr,))
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append(line.rstrip("\n"))

    @property
    def address(self) -> str:
        eventually(lambda: bool(self.lines))
        return self.lines[0].split("Listening at ")[1].split(";")[0]

    def wait_until_ready(self) -> None:
        eventually(lambda: any(" is ready at " in line for line in self.lines) or self.process.poll() is not None)
        assert httpx.get(f"{self.address}/ready", trust_env=False).status_code == 200, self.lines

    def end(self) -> int:
        code = self.process.wait(60)
        self._reader.join(60)
        return code


@contextmanager
def process(*arguments: str, **env: str) -> Iterator[Process]:
    started = subprocess.Popen(
        [*SERVE, "--port", "0", "--device", "cpu", "--dtype", "float32", "--threads", "1", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1", **env},
    )
    made = Process(started)
    try:
        yield made
    finally:
        if started.poll() is None:
            started.kill()
        made.end()
        assert started.stderr is not None
        started.stderr.close()


def test_the_openai_client_talks_to_the_process_and_sigterm_ends_a_stream_cleanly(folder: Path, tmp_path: Path) -> None:
    state, keys, template = tmp_path / "drafter.state", tmp_path / "keys", tmp_path / "template"
    template.write_text("{% for message in messages %}Somebody says: {{ message.content }}\n{% endfor %}")
    keys.write_text("# those who may ask\nkey\n")
    options = ["--served-model-name", "tiny", "--grace", "1", "--state", str(state), "--draft", "recycle"]
    options += ["--prefix-cache", "1", "--chat-template", str(template)]
    with process("--model", str(folder), "--api-key-file", str(keys), *options) as server:
        server.wait_until_ready()
        stranger = openai.OpenAI(base_url=f"{server.address}/v1", api_key="wrong", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with openai.OpenAI(base_url=f"{server.address}/v1", api_key="key", max_retries=0) as client:
            answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5, seed=1)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 5
            assert answer.usage.prompt_tokens == len("Somebody says: Hello\n")
            stream = client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
            )
            chunks = [next(stream), next(stream)]
            server.process.send_signal(signal.SIGTERM)
            chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.end() == 0
        told = [json.loads(line) for line in server.lines if line.startswith("{")]
        assert [line["status"] for line in told] == [401, 200, 200]
        assert told[-1]["finish_reasons"] == ["abort"]
        assert [line["cached_tokens"] for line in told[1:]] == [0, len("Somebody says: Hello")]
        assert 0 < told[-1]["completion_tokens"] < 4000
    assert state.is_file()  # what the drafter learned


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with process("--model", str(tmp_path)) as server:
        assert server.end() == 2
        assert "Traceback" not in "".join(server.lines)
        assert server.lines[-1].startswith("branchwise: ")


def test_a_misspelt_model_is_refused_before_anything_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["branchwise", "serve", "--model", "smolm2", "--port", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "Did you mean 'smollm2'" in capsys.readouterr().err.partition("\n")[0]


def test_a_port_that_is_taken_is_one_sentence() -> None:
    advice = r"cannot listen .* name another with --host or --port"
    with listen("127.0.0.1", 0) as taken, pytest.raises(UsageError, match=advice):
        listen("127.0.0.1", taken.getsockname()[1])


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(name='uvicorn')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with process("--model", str(tmp_path), PYTHONPATH=path) as server:
        assert server.end() == 2
        assert server.lines == ["branchwise: Serving needs uvicorn; install it with: pip install 'branchwise[serve]'."]


def test_nothing_of_the_extra_is_imported_unless_something_is_served() -> None:
    asked = (
        "import sys, branchwise.cli.serve; sys.exit(bool({'fastapi', 'uvicorn', 'prometheus_client'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", asked], check=True)


def test_a_command_collects_garbage_as_usual_once_its_model_is_loaded(folder: Path) -> None:
    """A method that nobody asks for any more holds the cache of its texts until it is collected."""
    asked = (
        "import gc, sys; usual = gc.get_threshold()\n"
        "from branchwise.cli import main; import branchwise.llm as llm\n"
        "seen = []; own = llm.LLM.stream\n"
        "llm.LLM.stream = lambda *given, **more: seen.append(gc.get_threshold()) or own(*given, **more)\n"
        "sys.argv = ['branchwise', 'generate', 'Hello', '--model', sys.argv[1], '--device', 'cpu', '-n', '2']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert seen == [usual], seen"
    )
    subprocess.run([sys.executable, "-c", asked, str(folder)], check=True, stdout=subprocess.DEVNULL)


def test_a_file_without_keys_is_refused_because_it_would_open_the_server(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none yet\n")
    with process("--api-key-file", str(tmp_path / "keys")) as server:
        assert server.end() == 2
        assert "holds no key" in server.lines[-1]
