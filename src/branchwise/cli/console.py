"""What commands print with: the console, answers as they are written, and errors as one sentence."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from branchwise.errors import BranchwiseError, CutWarning, LargeDraftWarning, LossyWarning, ModelError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from branchwise.engine import Piece
    from branchwise.llm import LLM, Completion, Options

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the errors of a disk without room
SLOW_BFLOAT16 = "mkldnn_matmul failed"
"""the beginning of a warning of torch, with a stack of C++ frames, about a CPU without bfloat16 products"""


@contextlib.contextmanager
def errors_in_one_sentence() -> Iterator[None]:
    """Print a mistake of the user, or a warning of ours, as one sentence. The exit code is 2, or 130 after Ctrl-C."""
    show, said = warnings.showwarning, set[str]()

    def show_without_code(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, LossyWarning | CutWarning | LargeDraftWarning):
            if str(message) not in said:  # several methods of a benchmark may have one draft model
                print_notice(str(message))
            said.add(str(message))
        elif str(message).startswith(SLOW_BFLOAT16):
            print_notice("This CPU has no products in bfloat16: passes take long in it, and less in float32.")
        else:
            show(message, category, *place, **more)

    warnings.showwarning = show_without_code
    try:
        yield
    except BranchwiseError as error:
        print_notice(str(error))
        raise SystemExit(2) from None
    except OSError as error:
        if error.errno not in FULL:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  what is still buffered would fail again at exit
        print_notice(f"The output cannot be written: {error.strerror}. Make room, and run the command again.")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def print_notice(sentence: str) -> None:
    """Print a sentence for people on standard error, because standard output belongs to results."""
    print(f"branchwise: {sentence}", file=sys.stderr)


def console(width: int = 160) -> Console:
    """A console that prints texts as they are; `width` is for pipes and files, which have no width of their own."""
    from rich.console import Console

    made = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = width
    return made


def bare_table(*columns: str, left: Collection[str] = ()) -> Table:
    """A table without lines. All columns are aligned right, as numbers are, except those on the `left`."""
    from rich.table import Column, Table

    made = (Column(name, justify="left" if name in left else "right", no_wrap=True) for name in columns)
    return Table(*made, box=None, header_style="bold", pad_edge=False)


def write_answer(
    shown: Console, llm: LLM, prompt: Any, options: Options, show_draft: bool, printed: list[Piece] | None = None
) -> Completion:
    """Print the answer step by step; `printed` collects the printed pieces, even if Ctrl-C ends the answer."""
    for chunk in llm.stream(prompt, **options):
        show_pieces(shown, chunk.pieces, show_draft)
        if printed is not None:
            printed += chunk.pieces
        if chunk.completion is not None:
            shown.print()
            return chunk.completion
    raise AssertionError("a stream ends with its completion")


def show_pieces(shown: Console, pieces: list[Piece], show_draft: bool) -> None:
    """Print pieces of text; only coloured pieces go through rich, which would change control characters."""
    for piece in pieces:
        if show_draft and piece.drafted:
            shown.print(piece.text, end="", style="bold green")
        else:
            shown.file.write(piece.text)
    shown.file.flush()


def summarise(llm: LLM, completion: Completion, show_draft: bool) -> None:
    """Print a line of numbers on standard error if a person reads it. A second line says if speculation did not pay, or
    the guard let the drafter rest."""
    refuse_incomplete(completion)
    if not sys.stderr.isatty():
        return
    from rich.console import Console

    from branchwise.control.choice import WORTH

    stats = completion.stats
    legend = "green: drafted and accepted · " if show_draft else ""
    found = llm.explain(completion)
    legend += f"{completion.model} · " if found.weights else ""
    Console(stderr=True, highlight=False).print(
        f"{legend}{len(completion.token_ids)} tokens in {stats.steps} steps, "
        f"mean acceptance length {stats.mean_acceptance_length:.2f}, {stats.tokens_per_second:.1f} tokens/s",
        style="dim",
    )
    if found.speedup is not None and found.speedup < 1 / WORTH and any(size.nodes for size in found.sizes):
        print_notice(" ".join([found.headline, *found.advice[:1], "branchwise explain says more."]))
    elif found.aside is not None:
        print_notice(found.aside)


def refuse_incomplete(completion: Completion) -> None:
    """Raise the error that ended an answer too early."""
    if completion.error is not None:
        raise ModelError(completion.error)
