"""Names for parts: loaded when asked for, suggested when mistyped, built from specs."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from branchwise.core.tree import Draw
from branchwise.draft import DRAFTERS, TREES, build_drafter
from branchwise.draft.lookup.ngram import NGram
from branchwise.draft.noisy_target import NoisyTarget
from branchwise.errors import PairingError, UnknownName, UsageError
from branchwise.registry import Registry, split_spec
from branchwise.verify import VERIFIERS, check_pairing
from branchwise.verify.match import Match


@dataclass
class Part:
    """Annotations are strings in this module, as they are in the package."""

    length: int
    rate: float = 0.5
    label: str = "x"
    tool: object = None


class Plain:
    """As in a module without deferred annotations."""

    def __init__(self, size: Any = 1) -> None:
        self.size = size


Plain.__init__.__annotations__["size"] = int


@pytest.fixture
def parts() -> Registry:
    where = __name__
    return Registry("part", {"part": f"{where}:Part", "plain": f"{where}:Plain", "absent": "no_such_module:X"})


def sentence(error: pytest.ExceptionInfo[Exception]) -> str:
    """The message, which must be one line that starts like a sentence and ends like one."""
    message = str(error.value)
    assert "\n" not in message
    assert re.match(r"[A-Z']", message)
    assert message.endswith((".", "?"))
    return message


def test_a_module_is_imported_only_when_its_name_is_asked_for(parts: Registry) -> None:
    assert list(parts) == ["part", "plain", "absent"]
    assert parts.find("part") is Part
    with pytest.raises(UsageError, match=r"needs the package no_such_module.*pip install no_such_module"):
        parts.find("absent")


def test_listing_names_imports_no_part() -> None:
    # json.tool stands for any module nobody has imported: making the registry and listing it leaves it alone.
    sys.modules.pop("json.tool", None)
    registry = Registry("part", {"tool": "json.tool:main"})
    assert list(registry) == ["tool"]
    assert "json.tool" not in sys.modules
    registry.find("tool")
    assert "json.tool" in sys.modules


def test_an_unknown_name_suggests_the_nearest_and_lists_the_known(parts: Registry) -> None:
    with pytest.raises(UnknownName) as error:
        parts.build("prat:3")
    assert sentence(error) == "Unknown part 'prat'. Did you mean 'part'? Known: absent, part, plain."


def test_a_name_like_no_other_gets_no_suggestion(parts: Registry) -> None:
    with pytest.raises(UnknownName) as error:
        parts.find("zzzzzz")
    assert "Did you mean" not in sentence(error)


def test_a_part_of_your_own_joins_the_names(parts: Registry) -> None:
    parts.register("mine", f"{__name__}:Part")
    assert "mine" in list(parts)
    assert parts.build("mine:3").length == 3


@pytest.mark.parametrize(
    ("spec", "split"),
    [
        ("name", ("name", [], {})),
        ("name:", ("name", [], {})),
        (" name : 1 , two ,k = v ", ("name", ["1", "two"], {"k": "v"})),
        ("name:min-size=2", ("name", [], {"min_size": "2"})),
        ("name:k=", ("name", [], {"k": ""})),
        ("name:k=a=b", ("name", [], {"k": "a=b"})),
        ("name:,1,,", ("name", ["1"], {})),
    ],
)
def test_a_spec_is_a_name_with_values_and_options(spec: str, split: tuple[str, list[str], dict[str, str]]) -> None:
    assert split_spec(spec) == split


def test_values_are_converted_to_what_the_part_says_it_takes(parts: Registry) -> None:
    assert parts.build("part:3,0.25,label=5") == Part(3, 0.25, "5")
    assert parts.build("part:length=-2") == Part(-2)


def test_a_type_may_be_written_or_deferred(parts: Registry) -> None:
    assert parts.build("plain:size=7").size == 7


def test_what_the_caller_gives_reaches_only_parts_that_name_it(parts: Registry) -> None:
    assert parts.build("part:3", tool="hammer", nobody=1).tool == "hammer"
    assert parts.build("plain", tool="hammer").size == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("part", "Part 'part' needs 'length', as in part:LENGTH,rate=0.5,label=x,tool=None."),
        ("part:rate=1", "Part 'part' needs 'length', as in part:LENGTH,rate=0.5,label=x,tool=None."),
        ("part:three", "Part 'part' takes length as int, not 'three'."),
        ("part:3.5", "Part 'part' takes length as int, not '3.5'."),
        ("part:length=", "Part 'part' takes length as int, not ''."),
        ("part:3,fast", "Part 'part' takes rate as float, not 'fast'."),
        (
            "part:3,raet=1",
            "Part 'part' has no option 'raet'. Did you mean 'rate'? Use part:LENGTH,rate=0.5,label=x,tool=None.",
        ),
        ("part:3,=1", "Part 'part' has no option ''. Use part:LENGTH,rate=0.5,label=x,tool=None."),
        ("plain:1,2", "Part 'plain' takes at most 1 values, as in plain:size=1."),
        ("part:3,length=4", "'part:3,length=4' gives 'length' twice."),
        ("part:3,rate=1,rate=2", "'part:3,rate=1,rate=2' gives 'rate' twice."),
        ("part:3,tool=saw", "Part 'part' takes 'tool' from Python only, not from a spec."),
    ],
)
def test_a_bad_spec_gets_one_sentence(parts: Registry, spec: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parts.build(spec)
    assert sentence(error) == message


def test_an_option_that_the_caller_gives_cannot_be_set_in_the_spec(parts: Registry) -> None:
    with pytest.raises(UsageError, match="has no option 'tool'"):
        parts.build("part:3,tool=x", tool=None)


@pytest.mark.parametrize("registry", [DRAFTERS, TREES, VERIFIERS])
def test_every_registered_name_can_be_found(registry: Registry) -> None:
    for name in registry:
        assert getattr(registry.find(name), "name", name) == name


def test_a_drafter_is_built_from_its_own_spec_and_that_of_its_tree() -> None:
    drafter = build_drafter("ngram:3,min=1", "chain:5")
    assert isinstance(drafter, NGram)
    assert (list(drafter.sizes), drafter.tree.length) == ([3, 2, 1], 5)


@pytest.mark.parametrize(
    ("spec", "branching"), [("rsd-c:4", (4,)), ("rsd-c:4,2,1", (4, 2, 1)), ("rsd-c: 3 , 1,1,1,1", (3, 1, 1, 1, 1))]
)
def test_a_part_may_take_a_list_of_any_length(spec: str, branching: tuple[int, ...]) -> None:
    assert TREES.build(spec).branching == branching


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rsd-c:4,two", "Tree 'rsd-c' takes branching as int, not 'two'."),
        ("rsd-c:4,1.5", "Tree 'rsd-c' takes branching as int, not '1.5'."),
        ("rsd-c:4,branching=2", "Tree 'rsd-c' has no option 'branching'. Use rsd-c."),
        ("rsd-c:4,width=2", "Tree 'rsd-c' has no option 'width'. Use rsd-c."),
        ("rsd-c", "RSD-C needs how many children each level has, such as rsd-c:4,2,1."),
        ("paths:4", "Paths are given as paths:KxL, such as paths:4x6, not paths:4."),
        ("paths", "Tree 'paths' needs 'shape', as in paths:SHAPE."),
        ("paths:4x6,2", "Tree 'paths' takes at most 1 values, as in paths:SHAPE."),
    ],
)
def test_a_bad_tree_gets_one_sentence(spec: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        TREES.build(spec)
    assert sentence(error) == message


class Listed:
    """A list of values and an option behind it."""

    def __init__(self, *sizes: float, label: str = "x", tool: object = None) -> None:
        self.values = (sizes, label, tool)


def test_a_list_may_stand_beside_options_and_what_the_caller_gives() -> None:
    registry = Registry("part", {"listed": f"{__name__}:Listed"})
    assert registry.build("listed:1,2.5,label=y", tool=7).values == ((1.0, 2.5), "y", 7)
    assert registry.build("listed").values == ((), "x", None)


def test_a_drafter_grows_the_tree_of_a_list() -> None:
    drafter = build_drafter("disturbed:0.5", "rsd-c:3,1")
    assert isinstance(drafter, NoisyTarget)
    assert (drafter.sigma, drafter.tree.branching) == (0.5, (3, 1))  # type: ignore[attr-defined]


def test_a_drafter_without_a_tree_spec_grows_its_default() -> None:
    drafter = build_drafter("ngram")
    assert isinstance(drafter, NGram)
    assert drafter.tree.length == 8


def test_a_drafter_that_grows_no_tree_refuses_one() -> None:
    with pytest.raises(PairingError) as error:
        build_drafter("none", "chain:5")
    assert sentence(error) == "Drafter 'none' grows no tree; leave out --tree chain:5."


@pytest.mark.parametrize("spec", ["ngram:min=3,max=2", "ngram:min=0", "ngram:0"])
def test_ngram_sizes_must_be_in_order(spec: str) -> None:
    with pytest.raises(UsageError) as error:
        build_drafter(spec)
    assert "1 <= min <= max" in sentence(error)


def test_a_chain_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        TREES.build("chain:0")
    assert sentence(error) == "A chain has at least 1 token, not 0."


def test_a_wrong_pairing_names_the_verifiers_that_fit() -> None:
    class Picky(Match):
        name = "picky"
        accepts = frozenset({Draw.PATHS})

    check_pairing(Picky(), Draw.PATHS, "some")
    with pytest.raises(PairingError) as error:
        check_pairing(Picky(), Draw.FIXED, "ngram")
    assert "'picky' is not exact for drafter 'ngram', whose trees are drawn fixed" in sentence(error)
    assert "match" in sentence(error).partition("Verifiers that fit: ")[2]
