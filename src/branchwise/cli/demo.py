"""`branchwise demo`: plain and speculative decoding side by side, on a prompt to copy and on free writing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated

from typer import Option

from branchwise.bench.prompts import FREE
from branchwise.cli.console import console, refuse_incomplete, write_answer
from branchwise.cli.options import Loading, MaxNewTokens, grouped
from branchwise.errors import BranchwiseError
from branchwise.progress import showing

if TYPE_CHECKING:
    from rich.console import Console

    from branchwise.llm import LLM, Completion
    from branchwise.methods import Method

COPY = """Repeat this note word for word.

The committee meets on Thursday at nine in the small hall behind the library. Please bring the printed plans of the \
new footbridge, the letter from the water board, and the list of families who offered to help with the planting along \
the river. After the meeting on Thursday we walk to the river together, look at the place where the old bridge stood, \
and decide where the new footbridge should begin. If it rains on Thursday, the committee meets in the school."""

GAINED = "The gain comes from drafted tokens that the model accepts: one pass then writes several tokens."
HEAD_DRAFTS = "A small network, trained for this model, foretells them from what the model itself has just computed."
TEXT_DRAFTS = """The drafter finds them in the prompt and in the text so far, so it gains most where an answer repeats \
earlier text."""
LOST = "Nothing was gained here; branchwise explain says where the time goes."
DISTURBED = """These times say little: a pass that scores drafted tokens as well cannot take less time than one \
without them, so other work disturbed the measurement. Try again when the machine is quiet."""
ROUNDS = 3
SECONDS = 40
"""no round begins later than this, so that the demo also ends soon on a slow machine"""
QUICKER = 0.9
"""the least time of a pass over a draft, in plain passes; below it, other work must have slowed the plain passes"""


@dataclass(frozen=True)
class Trial:
    """The answers to one prompt, two for every round, each with a new drafter, since drafters remember."""

    name: str
    prompt: str
    plain: list[Completion]
    drafted: list[Completion]

    @property
    def speed(self) -> float:
        """The speed of the method as a multiple of plain decoding's."""
        return _speed(self.drafted) / _speed(self.plain)

    @property
    def tokens(self) -> float:
        """Tokens per pass as a multiple of plain decoding's."""
        return _per_pass(self.drafted) / _per_pass(self.plain)


@grouped
def demo(
    *,
    loading: Loading,
    method: Annotated[
        str | None,
        Option(
            help="Method that drafts without a model; see `branchwise methods`.",
            show_default="default where a trained head comes with the model, else ngram",
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
) -> None:
    """Show plain and speculative decoding side by side: same tokens, measured speed.

    One prompt asks for a copy, where most tokens can be drafted, and one for free writing, where fewer can.

    branchwise demo --method ngram
    """
    import torch

    from branchwise.draft.head.shipped import shipped_head
    from branchwise.methods import choose_method

    if method is not None:
        choose_method(method).build()  # refuses a method that cannot draft before a model is loaded
    llm = loading.load(draft="none", max_batch=1)
    with_head = shipped_head(llm.engine.target.info) is not None
    chosen = choose_method(method or ("default" if with_head else "ngram"))
    shown = console()
    precision = str(llm.model.dtype).removeprefix("torch.")
    place = f"{torch.get_num_threads()} CPU threads" if llm.model.device.type == "cpu" else str(llm.model.device)
    shown.print(f"{llm.name} in {precision} on {place}, greedy, method {chosen.name}", style="bold")
    started = time.monotonic()
    for warm in (llm, llm.with_method(chosen, guard=True)):
        warm.generate(COPY, max_new_tokens=8)  # the first passes are slower: libraries choose their kernels
    prompts = {"copy": COPY, "free writing": FREE[0]}
    trials = [_show(shown, llm, chosen, name, prompt, max_new_tokens) for name, prompt in prompts.items()]
    rounds = 1
    with showing() as progress:
        while rounds < ROUNDS and time.monotonic() - started < SECONDS:
            for trial in trials:
                progress(f"measuring again: {trial.name}", rounds - 1, ROUNDS - 1)
                trial.plain.append(llm.generate(trial.prompt, max_new_tokens=max_new_tokens))
                guarded = llm.with_method(chosen, guard=True)  # the default of `generate`
                trial.drafted.append(guarded.generate(trial.prompt, max_new_tokens=max_new_tokens))
            rounds += 1
    _print_table(shown, trials, f"{precision}, median of {rounds} rounds" if rounds > 1 else f"{precision}, one round")
    for trial in trials:
        shown.print(_gain(trial))
    shown.print(_conclusion(trials, HEAD_DRAFTS if with_head and chosen.draft == "auto" else TEXT_DRAFTS))


def _show(shown: Console, llm: LLM, method: Method, name: str, prompt: str, max_new_tokens: int) -> Trial:
    """Print both answers to a prompt as they are written, and whether they are equal."""
    shown.print(f"\n{prompt}", style="dim")
    answers = []
    writers = {"plain decoding": llm, "speculative (green: drafted and accepted)": llm.with_method(method, guard=True)}
    for title, writer in writers.items():
        shown.print(f"\n{name}, {title}", style="bold")
        answers.append(write_answer(shown, writer, prompt, {"max_new_tokens": max_new_tokens}, writer is not llm))
        refuse_incomplete(answers[-1])
    plain, drafted = answers
    shown.print(f"\n{_comparison(llm, prompt, plain, drafted)}", style="green")
    return Trial(name, prompt, [plain], [drafted])


def _comparison(llm: LLM, prompt: str, plain: Completion, drafted: Completion) -> str:
    """Whether two answers are equal. Promised in float32; in other types rounding may decide near-ties."""
    import torch

    from branchwise.bench.run import first_difference

    if plain.token_ids == drafted.token_ids:
        return f"All {len(plain.token_ids)} tokens are equal."
    found = first_difference(drafted.token_ids, plain.token_ids, llm.encode(prompt), llm)
    if found.token is None or found.expected is None or llm.model.dtype == torch.float32:
        raise BranchwiseError("The tokens differ. This is a bug in Branchwise; please report it.")
    return (
        f"The first {found.place} tokens are equal, then {llm.decode([found.expected])!r} against "
        f"{llm.decode([found.token])!r}: a near-tie with a logit gap of {found.gap:.3f}, which rounding decides."
    )


def _print_table(shown: Console, trials: list[Trial], title: str) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("prompt", "decoding", "tokens/s", "tokens per pass", "speed"):
        table.add_column(column, justify="left" if column in ("prompt", "decoding") else "right")
    for trial in trials:
        for decoding, answers in (("plain", trial.plain), ("speculative", trial.drafted)):
            times = f"{_speed(answers) / _speed(trial.plain):.2f} x"
            table.add_row(trial.name, decoding, f"{_speed(answers):.1f}", f"{_per_pass(answers):.2f}", times)
    shown.print()
    shown.print(table)


def _gain(trial: Trial) -> str:
    """A sentence about where the speed of a trial comes from: tokens per pass, and the time of a pass."""
    stats = trial.drafted[0].stats
    return (
        f"{trial.name}: {stats.accepted_tokens} of {stats.emitted_tokens} tokens were drafted and accepted. "
        f"{trial.tokens:.2f} times the tokens per pass, at {trial.tokens / trial.speed:.2f} times the time per pass: "
        f"{trial.speed:.2f} times the speed."
    )


def _conclusion(trials: list[Trial], who_drafts: str) -> str:
    """The lesson of the trials, if they have one."""
    if any(trial.tokens / trial.speed < QUICKER for trial in trials):
        return DISTURBED
    return f"{GAINED} {who_drafts}" if any(trial.speed > 1 for trial in trials) else LOST


def _speed(answers: list[Completion]) -> float:
    return median(answer.stats.tokens_per_second for answer in answers)


def _per_pass(answers: list[Completion]) -> float:
    return answers[0].stats.emitted_tokens / answers[0].stats.steps
