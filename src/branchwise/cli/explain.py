"""`branchwise explain`: a prompt answered with a method and by plain decoding, and why one of them was faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from branchwise.cli.console import console, refuse_incomplete
from branchwise.cli.generate import checked_options, read_prompt
from branchwise.cli.options import AsJson, Drafting, Guard, Loading, MaxNewTokens, Sampling, Seed, grouped
from branchwise.plots import LIGHT, check_plot, pyplot, save

if TYPE_CHECKING:
    from branchwise.engine.explain import Explanation

WARMING = "Hello."
"""a prompt for warming up, different from the explained prompt, because drafters learn from what they see"""


@grouped
def explain(
    prompt: Annotated[str | None, Argument(help="The prompt; - or nothing reads standard input.")] = None,
    file: Annotated[Path | None, Option("--file", "-f", help="Read the prompt from a file.")] = None,
    *,
    loading: Loading,
    drafting: Drafting,
    max_new_tokens: MaxNewTokens = 128,
    sampling: Sampling,
    seed: Seed = None,
    raw: Annotated[bool, Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    guard: Guard = True,
    as_json: AsJson = False,
    plot: Annotated[Path | None, Option(help="Draw where the time went as a PNG file.")] = None,
) -> None:
    """Say where the time of an answer went, and whether speculation paid.

    The prompt is answered with the method, and then by plain decoding for comparison. The report says what each phase
    of a step took, what drafted nodes cost and earned, who drafted them, and what would help.

    branchwise explain "Write a haiku about rivers." --max-new-tokens 64
    """
    text = read_prompt(prompt, file, raw)
    options = checked_options(sampling, max_new_tokens=max_new_tokens, seed=seed, raw=raw)
    if plot is not None:
        check_plot(plot)
    from branchwise.engine.warmup import warm_up

    llm = loading.load(method=drafting.choose(), max_batch=1, guard=guard)
    alone = llm.with_drafter("none")
    warm_up(alone.engine)
    for one in (llm, alone):  # costs of the first text of a process belong to neither
        one.generate(WARMING, max_new_tokens=8)
    drafted = llm.generate(text, **options)
    options["seed"] = drafted.seed
    plain = alone.generate(text, **options)
    for completion in (drafted, plain):
        refuse_incomplete(completion)
    found = llm.explain(drafted, plain)
    if plot is not None:
        _draw(found, plot)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        console().print(str(found))


def _draw(found: Explanation, file: Path) -> None:
    """Draw the report. Left: where the time went. Right: time, in plain steps, and tokens of steps by drafted nodes."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9, 3.2), width_ratios=(3, 2))
    spent = {name: 1e3 * seconds for name, seconds in found.seconds.items() if seconds}
    left.barh(list(spent), list(spent.values()), color=LIGHT.colours[0])
    left.invert_yaxis()
    left.set_xlabel("milliseconds of the request")
    unit = found.plain or found.sizes[0].seconds or 1.0
    names = [str(size.nodes) for size in found.sizes]
    right.bar(names, [size.seconds / unit for size in found.sizes], color=LIGHT.neutral, label="time, in plain steps")
    right.plot(names, [size.tokens for size in found.sizes], "o", color=LIGHT.colours[1], label="tokens")
    right.set_xlabel("nodes drafted in a step")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(found.headline, fontsize=9, x=0.01, ha="left")
    figure.tight_layout()
    save(figure, file)
