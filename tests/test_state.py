"""State files: what was learned comes back, and whatever is wrong with a file is one sentence."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import branchwise
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.cli import app
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter, state
from branchwise.draft.base import Budget, LearningDrafter
from branchwise.draft.lookup.trigram import Trigram
from branchwise.draft.state import check_state, load_state, parts_of, save_state
from branchwise.errors import UsageError
from tests.test_model_drafter import byte_level, tiny

WORDS = ["Ġthe", "Ġcat", "Ġsat", "Ġon", "Ġa", "Ġmat", ".", "the", "Ċ", "user"]
SIZE = len(WORDS) + 1


def target(seed: int = 0, layers: int = 1, vocabulary: int = SIZE, words: list[str] | None = None) -> Any:
    tokenizer = byte_level(words or WORDS)
    return TransformersTarget(tiny(seed, layers, vocabulary), slots=1, tokenizer=tokenizer).info


@pytest.fixture(scope="module")
def model() -> Any:
    return target()


def learned(texts: list[list[int]]) -> Trigram:
    drafter = Trigram()
    for tokens in texts:
        drafter.locate(SequenceState(tokens))
    return drafter


class Numbers(LearningDrafter):
    """A part that learns one tensor, and drafts nothing."""

    def __init__(self, name: str, *values: float) -> None:
        self.name = name
        self.values = torch.tensor(values)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [DraftTree.root(sequence.root) for sequence in sequences]

    def save(self) -> dict[str, Tensor]:
        return {"values": self.values, "count": torch.tensor(len(self.values))}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        assert set(tensors) == {"values", "count"}
        if tensors["values"].shape != self.values.shape:
            raise UsageError("It has another size.")
        self.values = tensors["values"]
        assert int(tensors["count"]) == len(self.values)


class Several(Numbers):
    """Speaks for others, and one of them learns nothing."""

    def __init__(self, *members: Any) -> None:
        super().__init__("several", 0.5)
        self.members = [*members, build_drafter("ngram")]


def sentence(error: pytest.ExceptionInfo[UsageError], *words: str) -> str:
    said = str(error.value)
    assert "\n" not in said
    assert said.endswith(".")
    for word in words:
        assert word in said
    return said


# Round trips


def test_a_restored_drafter_drafts_what_the_saved_one_did(tmp_path: Path, model: Any) -> None:
    rng = random.Random(1)
    before = learned([[rng.randrange(SIZE) for _ in range(200)] for _ in range(3)])
    save_state(before, tmp_path / "one", model)
    after = Trigram()
    assert load_state(after, tmp_path / "one", model)
    for _ in range(50):
        text = [rng.randrange(SIZE) for _ in range(5)]
        [one], [other] = (d.draft([SequenceState(list(text))], [Budget(30, 9)]) for d in (before, after))
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.parents == other.parents
    assert list(after._rows.items()) == list(before._rows.items())


def test_a_drafter_that_speaks_for_several_keeps_the_state_of_each(tmp_path: Path, model: Any) -> None:
    save_state(Several(Numbers("a", 1, 2), Numbers("ab", 3)), tmp_path / "state", model)
    fresh = Several(Numbers("ab", 0), Numbers("a", 0, 0))
    assert load_state(fresh, tmp_path / "state", model)
    assert [member.values.tolist() for member in fresh.members[:2]] == [[3.0], [1.0, 2.0]]
    stored = load_file(tmp_path / "state")
    assert set(stored) == {f"{name}.{key}" for name in ("a", "ab", "several") for key in ("values", "count")}


def test_an_empty_memory_makes_a_round_trip_too(tmp_path: Path, model: Any) -> None:
    save_state(Trigram(), tmp_path / "state", model)
    drafter = learned([[1, 2, 3]])
    assert load_state(drafter, tmp_path / "state", model)
    assert not drafter._rows


@pytest.mark.parametrize("draft", ["stand", "memories", "trigram"])
def test_whoever_has_learned_nothing_yet_can_be_saved(draft: str, tmp_path: Path, model: Any) -> None:
    saved, fresh = build_drafter(draft), build_drafter(draft)
    for drafter in (saved, fresh):
        drafter.bind(model)
    parts = parts_of(saved)
    save_state(saved, tmp_path / "state", model)
    assert load_state(fresh, tmp_path / "state", model)
    for name, part in parts_of(fresh).items():
        assert all(torch.equal(value, parts[name].save()[key]) for key, value in part.save().items())


def test_what_is_restored_is_no_longer_tied_to_the_file(tmp_path: Path, model: Any) -> None:
    save_state(Numbers("a", 1, 2), tmp_path / "state", model)
    drafter = Numbers("a", 0, 0)
    load_state(drafter, tmp_path / "state", model)
    bytes_before = (tmp_path / "state").read_bytes()
    drafter.values += 1
    assert (tmp_path / "state").read_bytes() == bytes_before
    (tmp_path / "state").unlink()
    assert drafter.values.tolist() == [2, 3]


def test_a_file_that_is_not_there_yet_is_fine_and_a_folder_is_not(tmp_path: Path, model: Any) -> None:
    assert not load_state(Trigram(), tmp_path / "new", model)
    assert not (tmp_path / "new").exists()
    for use in (load_state, save_state):
        with pytest.raises(UsageError) as error:
            use(Trigram(), tmp_path / "none" / "new", model)
        sentence(error, "no folder", str(tmp_path / "none"), "make it first")


def test_paths_may_be_texts_links_and_at_home(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_state(Numbers("a", 4), "~/link", model)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").is_file()
    drafter = Numbers("a", 0)
    assert load_state(drafter, str(tmp_path / "link"), model)
    assert drafter.values.tolist() == [4]


# What a file is not


@pytest.mark.parametrize("draft", ["ngram", "none", "suffix"])
def test_a_drafter_that_learns_nothing_refuses_a_state(draft: str, tmp_path: Path, model: Any) -> None:
    for use in (
        lambda: check_state(build_drafter(draft), tmp_path / "state"),
        lambda: save_state(build_drafter(draft), tmp_path / "state", model),
        lambda: load_state(build_drafter(draft), tmp_path / "state", model),
    ):
        with pytest.raises(UsageError) as error:
            use()
        sentence(error, repr(draft), "keeps nothing", "leave out the state")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def saved(tmp_path: Path, model: Any) -> Path:
    save_state(learned([[1, 2, 3, 1, 2, 4, 1, 2, 3, 5]]), tmp_path / "state", model)
    return tmp_path / "state"


def refused(file: Path, model: Any, *words: str, drafter: Any = None) -> str:
    """Loading is a sentence, and leaves the drafter as it was."""
    memory = learned([[7, 7, 7]]) if drafter is None else drafter
    with pytest.raises(UsageError) as error:
        load_state(memory, file, model)
    if drafter is None:
        assert memory._rows == {(7, 7): {7: 1}}
    return sentence(error, str(file), *words)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"layers": 2}, "another model or tokenizer"),
        ({"words": [*WORDS[:-1], "dog"]}, "another model or tokenizer"),
        ({"vocabulary": SIZE + 5}, f"{SIZE} tokens, and this one has {SIZE + 5}"),
    ],
)
def test_the_state_of_another_model_is_refused(saved: Path, other: dict[str, Any], words: str) -> None:
    refused(saved, target(**other), words, "name another file")


def test_the_same_model_in_other_weights_is_the_same(saved: Path) -> None:
    # Known by shape and vocabulary: what one fine-tune wrote is a good hint for the next.
    assert load_state(Trigram(), saved, target(seed=5))


def test_the_state_of_another_drafter_is_refused(saved: Path, model: Any) -> None:
    refused(saved, model, "is of trigram", "drafts here is a and several", drafter=Several(Numbers("a", 1)))


def test_a_part_that_cannot_use_its_tensors_says_why(tmp_path: Path, model: Any) -> None:
    save_state(Numbers("a", 1, 2), tmp_path / "state", model)
    refused(tmp_path / "state", model, "does not fit", "It has another size.", drafter=Numbers("a", 1))


def test_a_file_cut_short_anywhere_is_refused(saved: Path, model: Any) -> None:
    whole = saved.read_bytes()
    for length in [*range(16), *range(16, len(whole), 37), len(whole) - 1]:
        saved.write_bytes(whole[:length])
        refused(saved, model, "is damaged", "remove it")
    saved.write_bytes(whole + b"\0")
    refused(saved, model, "is damaged")
    saved.write_bytes(whole)
    assert load_state(Trigram(), saved, model)


def test_no_changed_byte_goes_unnoticed(saved: Path, model: Any) -> None:
    whole = saved.read_bytes()
    rng, kinds = random.Random(2), set()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << rng.randrange(8)
        if changed[place : place + 1].isspace() and whole[place : place + 1].isspace():
            continue
        saved.write_bytes(changed)
        said = refused(saved, model)
        kinds |= {word for word in ("damaged", "is no state", "newer") if word in said}
    assert "damaged" in kinds


def test_a_file_of_another_kind_is_refused(tmp_path: Path, model: Any) -> None:
    file = tmp_path / "state"
    for contents in (b"", b"hello", b"# Notes\n" * 99, bytes(999), os.urandom(4096)):
        file.write_bytes(contents)
        refused(file, model, "is damaged")
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.zeros(3)}, file, metadata=metadata)
        refused(file, model, "is no state", "name another file")
    for known in ("", "[]", "7", "{}", '{"version": "x"}', '{"version": 1}', '{"version": 1, "digest": null}'):
        save_file({"weight": torch.zeros(3)}, file, metadata={state.FORMAT.key: known})
        refused(file, model, "is damaged")


def test_a_file_of_a_newer_version_says_so(saved: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "FORMAT", replace(state.FORMAT, version=state.FORMAT.version + 1))
    save_state(Trigram(), saved, model)
    monkeypatch.undo()
    refused(saved, model, "newer Branchwise", "update")


def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path: Path, model: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        for use in (save_state, load_state):
            with pytest.raises(UsageError) as error:
                use(Trigram(), place, model)
            sentence(error, "is no file")
        with pytest.raises(UsageError):
            check_state(Trigram(), place)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


def test_a_folder_or_file_without_permission_is_a_sentence(
    saved: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # whoever runs as root may write anywhere
        with pytest.raises(UsageError) as error:
            check_state(Trigram(), saved)
        sentence(error, "not writable")

    def denied(*arguments: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", denied)
        with pytest.raises(UsageError) as error:
            save_state(Trigram(), saved, model)
        sentence(error, "cannot be written", "Permission denied")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", denied)
        refused(saved, model, "cannot be read", "Permission denied")


# Whole or not there


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_in_the_middle_leaves_the_old_file(
    saved: Path, model: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(UsageError) as error:
        save_state(learned([[1, 1, 1]]), saved, model)
    sentence(error, "cannot be written", "No space left on device")
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == ["state"]


def test_an_interrupt_in_the_middle_leaves_the_old_file(
    saved: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def stopped(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        save_state(learned([[1, 1, 1]]), saved, model)
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == ["state"]


TARGET = """
from branchwise.testing import ToyTarget
target = ToyTarget(11).info
"""
WRITER = """
import sys
from branchwise.draft.state import save_state
from branchwise.draft.lookup.trigram import Trigram
from branchwise.core.sequence import SequenceState
for size in range(100):
    drafter = Trigram()
    drafter.locate(SequenceState([int(sys.argv[2])] * 50 + list(range(size % 7))))
    save_state(drafter, sys.argv[1], target)
"""


def test_of_writers_at_once_one_wins_and_readers_find_whole_files(tmp_path: Path) -> None:
    # Also catches a reader that opens the file twice, and finds the header of one and the contents of another.
    names: dict[str, Any] = {}
    exec(TARGET, names)
    file = tmp_path / "state"
    save_state(learned([[1, 1, 1]]), file, names["target"])
    writers = [subprocess.Popen([sys.executable, "-c", TARGET + WRITER, str(file), str(token)]) for token in (7, 8)]
    seen: set[tuple[int, int]] = set()
    try:
        while any(writer.poll() is None for writer in writers):
            drafter = Trigram()
            assert load_state(drafter, file, names["target"])
            seen.add(next(iter(drafter._rows)))
            time.sleep(0.001)
    finally:
        for writer in writers:
            writer.wait(60)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert load_state(Trigram(), file, names["target"])
    assert seen <= {(1, 1), (7, 7), (8, 8)}
    assert len(seen) > 1, "they were read while they were written"
    assert [left.name for left in tmp_path.iterdir()] == ["state"]


# A model with a drafter, from Python and from the command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tiny(3, 1, SIZE).save_pretrained(place)
    tokenizer = byte_level(WORDS)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(place)
    return place


def load(folder: Path, **options: Any) -> branchwise.LLM:
    return branchwise.load(folder, dtype="float32", device="cpu", max_batch=1, progress=False, **options)


def test_a_model_goes_on_with_the_state_it_was_loaded_with(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "state"
    cold = load(folder, draft="trigram", state=file)
    first = cold.generate("the cat sat", max_new_tokens=40, ignore_eos=True)
    assert not file.exists()
    cold.save_state()
    warm = load(folder, draft="trigram", state=file)
    again = warm.generate("the cat sat", max_new_tokens=40, ignore_eos=True)
    assert again.token_ids == first.token_ids
    assert again.stats.steps < first.stats.steps
    warm.save_state(tmp_path / "other")
    assert file.read_bytes() != (tmp_path / "other").read_bytes()


def test_a_state_without_a_place_is_a_sentence(folder: Path) -> None:
    with pytest.raises(UsageError) as error:
        load(folder, draft="trigram").save_state()
    sentence(error, "no file for the state")


def test_a_state_that_cannot_be_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    for options in ({"draft": "ngram", "state": tmp_path / "x"}, {"draft": "trigram", "state": tmp_path / "no" / "x"}):
        with pytest.raises(UsageError) as error:
            branchwise.load("no/such-model", **options)
        assert "such-model" not in sentence(error)


def test_generate_keeps_its_state_in_a_file(folder: Path, tmp_path: Path) -> None:
    words = ["generate", "the cat sat", "--model", str(folder), "--draft", "trigram", "--dtype", "float32"]
    words += ["-n", "30", "--state", str(tmp_path / "state")]
    plain = CliRunner().invoke(app, [*words, "--json"])
    assert plain.exit_code == 0, plain.output
    kept = (tmp_path / "state").read_bytes()
    streamed = CliRunner().invoke(app, words)
    assert streamed.exit_code == 0, streamed.output
    assert (tmp_path / "state").read_bytes() != kept
    (tmp_path / "state").write_bytes(kept[:-1])
    damaged = CliRunner().invoke(app, words)
    assert isinstance(damaged.exception, UsageError)
    assert "is damaged" in str(damaged.exception)
    assert (tmp_path / "state").read_bytes() == kept[:-1], "what is damaged is not replaced unasked"


def test_chat_keeps_its_state_in_a_file(folder: Path, tmp_path: Path, model: Any) -> None:
    words = ["chat", "--model", str(folder), "--draft", "trigram", "--dtype", "float32", "-n", "5"]
    done = CliRunner().invoke(app, [*words, "--state", str(tmp_path / "state")], input="the cat\nthe mat\n/exit\n")
    assert done.exit_code == 0, done.output
    drafter = Trigram()
    assert load_state(drafter, tmp_path / "state", model)
    assert drafter._rows


def test_ctrl_c_is_an_end_too(folder: Path, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("branchwise.cli.console.show_pieces", interrupted)
    words = ["generate", "the cat sat on the cat sat", "--model", str(folder), "--draft", "trigram"]
    done = CliRunner().invoke(app, [*words, "--dtype", "float32", "--state", str(tmp_path / "state")])
    assert done.exit_code != 0
    drafter = Trigram()
    assert load_state(drafter, tmp_path / "state", model)
    assert drafter._rows


def test_the_command_line_says_one_sentence(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "branchwise",
        "generate",
        "Hi",
        "--draft",
        "ngram",
        "--state",
        str(tmp_path / "state"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("branchwise: Drafter 'ngram' keeps nothing")
    assert done.stderr.count("\n") == 1
