"""Programs of models: right ones pass, wrong ones fail, and hostile ones do no harm and cannot say that they passed.

Every attack runs under the hook of Python and without it, where the kernel alone must hold.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path

import pytest

from branchwise.bench.execution import sandbox
from branchwise.bench.execution.inside import packed, unpacked
from branchwise.bench.execution.programs import Program, body
from branchwise.bench.execution.sandbox import Limits, Outcome, missing, run_tests
from tests.test_bench_prompts import PUBLISHED, needs_published

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a sandbox needs processes as on Linux and macOS")
needs_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or bool(missing()), reason="the kernel of this machine gives no namespaces"
)

PROMPT = 'def double(number):\n    """Twice the number."""\n'
TESTS = "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(0) == 0\n"
QUICK = Limits(seconds=1)
PROBLEM = Program(PROMPT, "double", TESTS)


def tried(program: str, *, hook: bool = True, limits: Limits | None = None) -> Outcome:
    return run_tests(program, "double", TESTS, limits, hook=hook)


def function(*lines: str, returns: str = "6 if number else 0") -> str:
    """A function that would pass, if what it does besides were allowed."""
    return "\n".join(["def double(number):", *(f"    {line}" for line in lines), f"    return {returns}"])


# ---- right and wrong -----------------------------------------------------------------------------------------------


def test_a_right_answer_passes_and_a_wrong_one_fails() -> None:
    assert PROBLEM("    return 2 * number\n")
    assert not PROBLEM("    return 2 + number\n")
    assert not PROBLEM("    return 2 *\n")
    assert not PROBLEM("")
    assert not PROBLEM("    import nothing_of_this_name\n")


def test_what_stands_behind_the_function_is_not_part_of_the_answer() -> None:
    assert body("    a = [\n1,\n]\n") == "    a = [\n"
    assert body("    return max(\n        1\n)\n\n\ndef other():\n    pass") == "    return max(\n        1\n)\n\n\n"
    assert body("    return 1\nprint(double(1))\n# and so on") == "    return 1\n"
    assert PROBLEM("    return 2 * number\n\nassert False\n")


def test_a_whole_function_in_a_block_of_markdown_counts() -> None:
    assert PROBLEM("Here it is:\n```python\ndef double(number):\n    return number + number\n```\nIt adds.")
    assert not PROBLEM("Here it is:\n```python\nprint(6)\n```\n")


def test_an_answer_may_use_the_standard_library() -> None:
    assert PROBLEM("    import math, re, collections\n    return int(math.fsum([number, number]))\n")


def test_tests_may_call_the_function_and_the_helpers_of_the_prompt_by_name() -> None:
    prompt = "def half(x):\n    return x // 2\n\n\ndef double(number):\n"
    tests = "def check(candidate):\n    assert half(candidate(4)) == 4\n    assert double(1) == 2\n"
    assert Program(prompt, "double", tests)("    return 2 * number\n")
    assert not Program(prompt, "double", tests)("    return number\n")


@pytest.mark.parametrize(
    "value", [None, True, 3, -1.5, float("inf"), "ü", [], [1, (2, "x")], {"a": [1], 2: {3}}, (), frozenset({1}), 10**40]
)
def test_values_travel_with_their_types(value: object) -> None:
    found = unpacked(json.loads(json.dumps(packed(value))))
    assert found == value
    assert type(found) is type(value)


@needs_published
@pytest.mark.parametrize("part", range(16))
def test_every_published_solution_of_humaneval_passes_and_an_empty_one_does_not(part: int) -> None:
    lines = gzip.decompress((PUBLISHED / "humaneval.jsonl.gz").read_bytes()).decode().splitlines()
    for line in lines[part::16]:
        given = json.loads(line)
        program = Program(given["prompt"], given["entry_point"], given["test"])
        assert program(given["canonical_solution"]), given["task_id"]
        assert not program("    pass\n"), given["task_id"]


# ---- attacks -------------------------------------------------------------------------------------------------------

HOOKS = pytest.mark.parametrize("hook", [True, False], ids=["under the hook", "the kernel alone"])


@HOOKS
@pytest.mark.parametrize("where", ["when called", "when defined"])
def test_an_endless_loop_ends_with_its_time(where: str, hook: bool) -> None:
    loop = "while True: pass"
    program = function(loop) if where == "when called" else f"{loop}\n{function()}"
    assert not tried(program, hook=hook, limits=QUICK).passed


@pytest.mark.parametrize("deaf", [False, True])
def test_an_endless_sleep_ends_with_its_time(deaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "GRACE", 3)
    deafness = ["signal.signal(signal.SIGALRM, signal.SIG_IGN)"] if deaf else []
    found = tried("import signal, time\n" + function(*deafness, "time.sleep(1000)"), limits=QUICK)
    assert not found.passed
    assert ("took more than 1 seconds" in found.reason) is deaf


@HOOKS
def test_memory_is_bounded(hook: bool) -> None:
    greedy = function("hoard = bytearray(3 * 2**30)")
    assert "MemoryError" in tried(greedy, hook=hook).reason
    assert not tried(function("hoard = []", "while True: hoard.append(bytearray(2**26))"), hook=hook).passed


FORKS = {
    "a fork": ("import os", "os.fork()"),
    "a fork bomb": ("import os", "while True: os.fork()"),
    "a fork that Python does not see": ("import ctypes", "assert ctypes.CDLL(None).fork() >= 0"),
    "threads": ("import threading", "threading.Thread(target=print).start()"),
    "a program": ("import subprocess", "subprocess.run(['/bin/true'], check=True)"),
    "a shell": ("import os", "assert os.system('true') == 0"),
}


@HOOKS
@pytest.mark.parametrize("attack", FORKS)
def test_no_process_can_be_started(attack: str, hook: bool) -> None:
    assert not tried(function(*FORKS[attack]), hook=hook).passed


@needs_namespaces
@HOOKS
@pytest.mark.parametrize("whom", ["parent", "us", "everybody", "our group"])
def test_nobody_outside_can_be_killed(whom: str, hook: bool) -> None:
    pid = {"parent": "os.getppid()", "us": str(os.getpid()), "everybody": "-1", "our group": "0"}[whom]
    attack = ("import os, signal", "try:", f"    os.kill({pid}, signal.SIGKILL)", "except BaseException: pass")
    found = tried(function(*attack), hook=hook)  # that we are still here to see it is the test
    assert found.passed or (whom == "our group" and not hook), "the judge lives on, and the answer with it"


@needs_namespaces
@HOOKS
@pytest.mark.parametrize("place", ["the temporary folder", "its own folder", "a file that all may write to"])
def test_nothing_outside_is_written(place: str, hook: bool, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    file = tmp_path / "open"
    file.write_text("as it was")
    file.chmod(0o666)
    path = {"the temporary folder": f"{tmp_path}/new", "its own folder": "new"}.get(place, str(file))
    attack = ("try:", f"    open({path!r}, 'a').write('changed')", "except OSError: pass", "else: 1 / 0")
    assert tried(function(*attack), hook=hook).passed
    assert [path.name for path in tmp_path.iterdir()] == ["open"]
    assert file.read_text() == "as it was"


@needs_namespaces
@HOOKS
def test_nothing_outside_is_removed(hook: bool, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "kept").write_text("")
    tried(function("import os", f"os.remove('{tmp_path}/kept')"), hook=hook)
    assert (tmp_path / "kept").exists()


@needs_namespaces
@HOOKS
def test_there_is_no_network(hook: bool) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attack = ("import socket", f"socket.create_connection(('127.0.0.1', {port}), 1)")
        assert not tried(function(*attack), hook=hook).passed
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_nothing_of_the_environment_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "spoken")
    assert not tried(function("import os", "assert 'SECRET' in os.environ")).passed


FORGERIES = {
    "prints": ("print('passed')", "print(0)", "raise SystemExit(0)"),
    "exits": ("import os", "os._exit(0)"),
    "writes to every pipe": (
        "import os",
        "for number in range(64):",
        "    try: os.write(number, b'passed\\n')",
        "    except OSError: pass",
        "os._exit(0)",
    ),
    "makes a test of its own": (
        "import sys",
        "for frame in sys._current_frames().values():",
        "    frame.f_globals['check'] = print",
    ),
}


@HOOKS
@pytest.mark.parametrize("forgery", FORGERIES)
def test_an_answer_cannot_say_that_it_passed(forgery: str, hook: bool) -> None:
    assert not tried(function(*FORGERIES[forgery], returns="7"), hook=hook).passed


def test_an_object_that_equals_everything_is_no_answer() -> None:
    liar = "class Same(int):\n    def __eq__(self, other): return True\n" + function(returns="Same(1)")
    found = tried(liar)
    assert not found.passed
    assert "no plain value" in found.reason


def test_an_endless_or_bottomless_value_is_no_answer() -> None:
    assert "too long" in tried(function(returns="'x' * 2**24")).reason
    nested = function("found = []", "for _ in range(10**5): found = [found]", returns="found")
    assert "no plain value" in tried(nested).reason
    flood = function("import os", "while True: os.write(4, (2**40).to_bytes(8, 'big') + bytes(2**16))")
    assert "too long" in tried(flood).reason


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert not tried(function("import time", "time.sleep(1000)"), limits=QUICK).passed
    assert not list(tmp_path.iterdir())
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(str(sandbox.INSIDE).encode() in words for words in running)


# ---- machines that protect less ------------------------------------------------------------------------------------


def test_what_a_machine_cannot_keep_answers_from_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_enter", lambda job, seconds: (0, '["files", "processes"]', ""))
    found = missing.__wrapped__()
    assert found == ("the network is not cut off", "processes of the same user can be sent signals")
