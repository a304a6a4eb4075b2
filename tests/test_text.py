"""Text while it arrives: whole characters, nothing held back for long, stop strings across token borders."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders

from branchwise.core.text import TextStream

BROKEN = "\ufffd"
LONGEST = 4
"""bytes of a character in UTF-8, and so the most tokens that one may span"""


class ByteLevel:
    """As GPT-2, Llama 3, Qwen, SmolLM2: every token is some bytes; a text is their bytes joined."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", errors="replace")


class ByteFallback:
    """As Llama 2, Mistral, Gemma: tokens are words, where ▁ is a space, or single bytes.

    The first space of a text is dropped, and a run of bytes that is not valid as a whole is shown as one U+FFFD for
    each of its bytes, so that a later byte can change how earlier ones look. None is a special token without text.
    """

    def __init__(self, pieces: Sequence[str | int | None]) -> None:
        self.pieces = pieces

    def decode(self, tokens: Sequence[int]) -> str:
        text, run = "", b""
        for piece in [*(self.pieces[token] for token in tokens if self.pieces[token] is not None), ""]:
            if isinstance(piece, int):
                run += bytes([piece])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += BROKEN * len(run)
            run = b""
            text += (piece or "").replace("▁", " ")
        return text.removeprefix(" ")


def test_the_doubles_decode_as_the_real_decoders_do() -> None:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    pieces = [b"a", b"\xe2\x82", b"\xac\xf0", b"\x80", b"\xe2", b"\xff", b"\x9f\x98\x80", b" b", b"\xf0\x9f\x98"]
    words = ["▁a", "▁", "b", *"é😀".encode(), 0xE2, "▁c", 0xF0, 0x9F, 0x98]
    real_byte_level = decoders.ByteLevel()
    real_fallback = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for tokens in itertools.permutations(range(9), 4):
        written = ["".join(alphabet[byte] for byte in pieces[token]) for token in tokens]
        assert ByteLevel(pieces).decode(tokens) == real_byte_level.decode(written)
    for start, end in itertools.combinations(range(len(words) + 1), 2):
        written = [word if isinstance(word, str) else f"<0x{word:02X}>" for word in words[start:end]]
        assert ByteFallback(words).decode(range(start, end)) == real_fallback.decode(written)


def write(tokenizer: ByteLevel | ByteFallback, stop: Sequence[str] = ()) -> tuple[TextStream, list[str]]:
    """Push every token, finish, and return what came out each time."""
    stream = TextStream(tokenizer.decode, stop)
    shown = []
    for token in range(len(tokenizer.pieces)):
        shown.append(stream.push(token))
        assert stream.text == "".join(shown)
        if stream.stopped:
            break
    shown.append(stream.finish())
    assert stream.text == "".join(shown)
    assert stream.finish() == ""
    return stream, shown


@st.composite
def split(draw: st.DrawFn, whole: bytes) -> list[bytes]:
    """Bytes cut into tokens anywhere, also inside a character."""
    cuts = draw(st.sets(st.integers(1, max(len(whole) - 1, 1)), max_size=len(whole)))
    borders = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(borders) if a < b]


characters = st.one_of(st.sampled_from("ab é€→漢😀👩\u200d\ufe0f" + BROKEN), st.characters(exclude_categories=["Cs"]))
valid_bytes = st.text(characters, max_size=12).map(str.encode)
# Lead bytes without their rest, rests without a lead, overlong forms, surrogates, bytes that never occur.
broken_bytes = st.lists(
    st.one_of(
        st.sampled_from([b"\xe2", b"\x82", b"\xac", b"\xe2\x82", b"\xf0\x9f", b"\x98\x80", b"\xc0\x80", b"\xed\xa0"]),
        st.sampled_from([b"\xff", b"\xf5", b"a", b"\xef\xbf\xbd", "€".encode(), "😀".encode()]),
        st.binary(max_size=3),
    ),
    max_size=10,
).map(b"".join)
any_pieces = st.one_of(valid_bytes, broken_bytes).flatmap(split)


@given(any_pieces)
@example([b"a", b"\xe2", b"\x82", b"\xac"])
@example([b"\xe2", b"\x82\xac\xe2", b"\x82\xac\xe2", b"\x82\xac\xe2", b"\x82\xac\xe2", b"\x82"])
@example([b"\x80"] * 9 + [b"\xe2", b"\x82", b"\xac"])
@example([b"\xf0\x9f", b"\x98", b"\xf0", b"\x9f", b"\x98", b"\x80"])
def test_what_is_shown_adds_up_to_the_whole_text(pieces: list[bytes]) -> None:
    stream, _ = write(ByteLevel(pieces))
    assert stream.text == b"".join(pieces).decode("utf-8", errors="replace")
    assert not stream.stopped


@given(any_pieces)
def test_what_is_shown_is_never_taken_back(pieces: list[bytes]) -> None:
    tokenizer = ByteLevel(pieces)
    stream = TextStream(tokenizer.decode)
    whole = tokenizer.decode(range(len(pieces)))
    for token in range(len(pieces)):
        stream.push(token)
        assert whole.startswith(stream.text)


@given(valid_bytes.flatmap(split))
def test_a_character_is_never_split(pieces: list[bytes]) -> None:
    _, shown = write(ByteLevel(pieces))
    genuine = b"".join(pieces).decode().count(BROKEN)
    assert "".join(shown).count(BROKEN) == genuine


@given(any_pieces)
def test_nothing_is_held_back_longer_than_a_character_can_take(pieces: list[bytes]) -> None:
    tokenizer = ByteLevel(pieces)
    stream = TextStream(tokenizer.decode)
    for token in range(len(pieces)):
        stream.push(token)
        settled = tokenizer.decode(range(token + 2 - LONGEST)).removesuffix(BROKEN)
        assert stream.text.startswith(settled)
        # And whole characters before a broken end never wait at all.
        assert len(stream.text) >= len(tokenizer.decode(range(token + 1)).rstrip(BROKEN))


def test_characters_that_straddle_tokens_are_shown_as_they_are_completed() -> None:
    # Every token ends inside a character; catches waiting for a token that ends on a border.
    _, shown = write(ByteLevel([b"\xe2", *[b"\x82\xac\xe2"] * 6, b"\x82\xac"]))
    assert shown == ["", *["€"] * 7, ""]


def test_an_endless_run_of_broken_bytes_is_shown_and_costs_no_more_than_text() -> None:
    longest = 0
    tokenizer = ByteLevel([b"\x80"] * 200)

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return tokenizer.decode(tokens)

    stream = TextStream(decode)
    for token in range(200):
        stream.push(token)
        assert len(stream.text) > token + 1 - LONGEST
    assert longest <= 2 * LONGEST


def test_a_genuine_replacement_character_is_shown_with_the_next_character() -> None:
    _, shown = write(ByteLevel([b"a", BROKEN.encode(), b"b", BROKEN.encode()]))
    assert shown == ["a", "", BROKEN + "b", "", BROKEN]


def test_an_unfinished_character_comes_out_broken_at_the_end() -> None:
    _, shown = write(ByteLevel([b"a", b"\xf0\x9f", b"\x98"]))
    assert shown == ["a", "", "", BROKEN]


words = st.one_of(st.sampled_from(["▁the", "▁", "a", "▁▁x", "."]), st.sampled_from(["é", "😀", "漢"]).map(str.encode))


@given(st.lists(words, max_size=12))
@example(["▁a", "😀".encode(), "😀".encode(), "▁b"])
@example(["▁", "▁a"])
def test_byte_fallback_adds_up_and_never_splits_a_character(parts: list[str | bytes]) -> None:
    pieces: list[str | int | None] = []
    for part in parts:
        pieces += list(part) if isinstance(part, bytes) else [part]
    tokenizer = ByteFallback(pieces)
    stream, shown = write(tokenizer)
    assert stream.text == tokenizer.decode(range(len(pieces)))
    assert BROKEN not in "".join(shown)


@given(st.lists(st.sampled_from(["▁the", "a", None]), max_size=10))
@example(["▁a", None, "▁b"])
@example(["▁a", None, None, None, None, None, "▁b"])
def test_special_tokens_without_text_do_not_swallow_a_space(pieces: list[str | int | None]) -> None:
    tokenizer = ByteFallback(pieces)
    assert write(tokenizer)[0].text == tokenizer.decode(range(len(pieces)))


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    # Catches forgetting the first byte when nothing new was decoded for a while.
    stream, _ = write(ByteLevel([b"a", b"\xe2", *[b""] * 12, b"\x82\xac"]))
    assert stream.text == "a€"


# Stop strings


def stopped_by_hand(text: str, stops: Sequence[str]) -> tuple[str, int | None]:
    """The slow truth, letter by letter: what is shown, and how many letters were read until the stop."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], end
    return text, None


def letters(text: str) -> ByteLevel:
    return ByteLevel([letter.encode() for letter in text])


ab = st.text("ab", max_size=14)
stops_of_ab = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(ab.map(str.encode).flatmap(split), stops_of_ab)
@example([b"abc"], ["abc", "b"])
@example([b"aab"], ["ab"])
@example([b"aa", b"b"], ["ab", "aab"])
def test_stops_are_found_as_if_the_text_came_letter_by_letter(pieces: list[bytes], stops: list[str]) -> None:
    text = b"".join(pieces).decode()
    expected, end = stopped_by_hand(text, stops)
    stream, shown = write(ByteLevel(pieces), stops)
    assert stream.text == expected
    assert stream.stopped == (end is not None)
    if end is not None:
        # It stops with the very token that completes the stop string, however the text is cut into tokens.
        read = b"".join(pieces[: len(shown) - 1])
        assert len(read) >= end > len(read) - len(pieces[len(shown) - 2])


@given(ab, stops_of_ab)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    text, _ = stopped_by_hand(text, stops)
    stream = TextStream(letters(text).decode, stops)
    for token in range(len(text)):
        stream.push(token)
        if stream.stopped:
            return
        held = text[len(stream.text) : token + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        beginnings = [stop[:n] for stop in stops for n in range(len(held) + 1, len(stop))]
        assert not any(text[: token + 1].endswith(longer) for longer in beginnings)


def test_a_stop_string_across_tokens_is_never_shown() -> None:
    _, shown = write(letters("hello\n\nworld"), ["\n\n"])
    assert "".join(shown) == "hello"
    assert len(shown) == len("hello\n\n") + 1


def test_a_stop_string_inside_one_token_cuts_it() -> None:
    stream, shown = write(ByteLevel([b"one STOP two", b"three"]), ["STOP"])
    assert shown == ["one ", ""]
    assert stream.stopped


def test_the_first_of_two_stops_in_one_token_wins() -> None:
    assert write(ByteLevel([b"a<y>b<x>c"]), ["<x>", "<y>"])[0].text == "a"


def test_the_longer_of_two_stops_that_end_together_is_cut_whole() -> None:
    assert write(letters("xxab"), ["b", "xab"])[0].text == "x"


@pytest.mark.parametrize("stops", [["ab", "abc"], ["abc", "ab"]])
def test_a_stop_does_not_wait_for_a_longer_one(stops: list[str]) -> None:
    _, shown = write(letters("xabc"), stops)
    assert shown == ["x", "", "", ""]


def test_text_held_back_is_released_when_it_is_no_stop() -> None:
    _, shown = write(letters("a\nb"), ["\n\n"])
    assert shown == ["a", "", "\nb", ""]


def test_text_held_back_is_released_at_the_end() -> None:
    stream, shown = write(letters("a\n"), ["\n\n"])
    assert shown == ["a", "", "\n"]
    assert not stream.stopped


def test_a_stop_of_many_bytes_may_be_cut_anywhere() -> None:
    assert write(ByteLevel([b"fin ", b"\xe2", b"\x82\xac", "€ more".encode()]), ["€€"])[0].text == "fin "


def test_a_stop_before_an_unfinished_character_counts_at_once() -> None:
    stream, shown = write(ByteLevel([b"a", b"STOP\xe2", b"\x82\xac"]), ["STOP"])
    assert shown == ["a", "", ""]
    assert stream.stopped


def test_no_token_may_follow_a_stop() -> None:
    stream = TextStream(letters("ab").decode, ["a"])
    stream.push(0)
    with pytest.raises(AssertionError, match="after a stop"):
        stream.push(1)
