"""Options that several commands share, so that they have the same meaning and text in every command.

A command that loads, drafts or samples takes the whole group of options as one parameter: `@grouped` makes the fields
of every parameter that is a dataclass options of the command.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Option

from branchwise.cli.console import print_notice
from branchwise.errors import BranchwiseError, UsageError
from branchwise.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from branchwise.llm import LLM
    from branchwise.methods import Method

# Single options
Model = Annotated[str, Option("--model", "-m", help="Alias, hub id, folder or GGUF file; see `branchwise models`.")]
TrustRemoteCode = Annotated[bool, Option("--trust-remote-code", help="Run the Python code of a model's repository.")]
DraftModel = Annotated[
    str | None, Option(help="Model that drafts, named as for --model; options may follow: ID,temperature=0.8,top-k=20.")
]
Index = Annotated[str | None, Option(help="Folder of an index to retrieve from; see `branchwise index build`.")]
TrainedHead = Annotated[
    str | None, Option("--head", metavar="FILE", help="Trained head that drafts; see `branchwise train head`.")
]
State = Annotated[str | None, Option(metavar="FILE", help="What the drafter learned: read first, saved at the end.")]
MaxNewTokens = Annotated[int, Option("--max-new-tokens", "-n", help="Write at most this many tokens.")]
Seed = Annotated[
    int | None,
    Option(help="Under the rule match, a seed writes the same text with any drafter.", show_default="random"),
]
ShowDraft = Annotated[bool, Option("--show-draft", help="Colour the tokens that were drafted and accepted.")]
PromptFile = Annotated[
    Path | None, Option(help='Lines, or JSON lines ("prompt", "turns"), or .gz.', show_default="prompts of Branchwise")
]
Guard = Annotated[bool, Option("--guard/--no-guard", help="Draft nothing while that is slower than plain decoding.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]


# Groups of options
@dataclass(frozen=True)
class Loading:
    """The model and the hardware."""

    model: Model = DEFAULT_MODEL
    dtype: Annotated[str, Option(help="auto (bfloat16 if the hardware has it), float32, bfloat16 or float16.")] = "auto"
    weights: Annotated[
        str, Option(help="float (as --dtype says), int8 or int4 on a CPU, or auto: int8 where that pays.")
    ] = "float"
    device: Annotated[str, Option(help="auto (a GPU if one is found), cpu or cuda.")] = "auto"
    threads: Annotated[int | None, Option(help="CPU threads.", show_default="all cores")] = None
    compile: Annotated[
        bool, Option("--compile", help="Compile what has no GPU kernels of ours: faster, after seconds.")
    ] = False
    warmup: Annotated[bool, Option(help="Prepare at load what requests need; else the first is slower.")] = True
    max_nodes: Annotated[
        int | None, Option(help="Nodes that one pass may score, at most 1024.", show_default="as trees need")
    ] = None
    trust_remote_code: TrustRemoteCode = False

    def load(self, methods: Sequence[Method] = (), /, **settings: Any) -> LLM:
        """The loaded model, with room for the trees of these methods, which will run on it."""
        from branchwise.backends.base import nodes_for
        from branchwise.cli import collect_as_usual
        from branchwise.engine.warmup import leave_to_itself
        from branchwise.llm import load
        from branchwise.methods import largest_tree

        given = vars(self)
        if self.max_nodes is None and methods:
            given = given | {"max_nodes": nodes_for(largest_tree(methods))}
        llm = load(**given, **settings)
        if (found := llm.conversion) is not None:
            print_notice(f"The target is {llm.name}: {found.distance}.")
        collect_as_usual()
        leave_to_itself()  # a command keeps its model until it ends
        return llm


@dataclass(frozen=True)
class Target(Loading):
    """The target that something is made for."""

    model: Annotated[
        str, Option("--target", "--model", "-m", help="Alias, hub id, folder or GGUF file; see `branchwise models`.")
    ] = DEFAULT_MODEL


@dataclass(frozen=True)
class Drafting:
    """The method that drafts."""

    method: Annotated[
        str | None, Option(help="By name, or as draft/tree/verify; see `branchwise methods`.", show_default="default")
    ] = None
    draft_model: DraftModel = None
    index: Index = None
    head: TrainedHead = None
    draft: Annotated[str | None, Option(help="Drafter, such as ngram or none.", show_default="the method's")] = None
    tree: Annotated[str | None, Option(help="Shape of drafts, such as chain:8.", show_default="the drafter's")] = None
    verify: Annotated[str | None, Option(help="Rule of acceptance; lossy rules say so.", show_default="match")] = None

    def choose(self) -> Method:
        from branchwise.methods import choose_method

        return choose_method(**vars(self))


@dataclass(frozen=True)
class Sampling:
    temperature: Annotated[float, Option("--temperature", "-t", help="Randomness; 0 is greedy.")] = 0.0
    top_p: Annotated[float, Option(help="Sample from the most probable tokens of this total probability.")] = 1.0
    top_k: Annotated[int, Option(help="Sample from the k most probable tokens; 0 means all.")] = 0


@dataclass(frozen=True)
class Constraining:
    """The form that an answer must have."""

    json_schema: Annotated[Path | None, Option(metavar="FILE", help="Answer in JSON of the schema in this file.")] = (
        None
    )
    regex: Annotated[str | None, Option(help="Answer with what this regular expression matches.")] = None
    grammar: Annotated[Path | None, Option(metavar="FILE", help="Answer by the Lark rules in this file.")] = None

    def read(self) -> dict[str, Any]:
        """The options of `LLM.generate` for this form."""
        schema, rules = (None if file is None else read_text(file) for file in (self.json_schema, self.grammar))
        found = {"json_schema": schema, "regex": self.regex, "grammar": rules}
        given = {name: text for name, text in found.items() if text is not None}
        if len(given) > 1:
            raise UsageError("An answer follows --json-schema, --regex or --grammar; give one of them.")
        if given:
            from branchwise.constrain import check_grammar

            check_grammar(**given)
        return given


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
        raise UsageError(f"The file {file} cannot be read: {reason}.") from None


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option, and its default, for each field of its dataclass parameters."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        group: Any = parameter.annotation
        groups[parameter.name] = group
        types = get_type_hints(group, include_extras=True)
        values = vars(group() if parameter.default is parameter.empty else parameter.default)
        parameters += [parameter.replace(name=name, default=values[name], annotation=types[name]) for name in values]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


# Checks before anything is loaded
def at_least(least: int, **options: int | None) -> None:
    """Refuse options with values below `least`."""
    for name, value in options.items():
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {value}.")


def drafter_spec(draft: str | None, draft_model: str | None) -> str:
    """The spec of the drafter that --draft or --draft-model names."""
    if (draft is None) == (draft_model is None):
        raise UsageError("Name what drafts, with --draft-model ID or with --draft SPEC; one of the two.")
    return draft if draft is not None else f"model:{draft_model}"


def check_out(out: Path, read: Callable[[Path], object], kind: str) -> None:
    """Refuse a file that cannot be written, or an existing file that `read` does not accept."""
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"The {kind} cannot be written to {out}; name a file in a folder that exists and is writable.")
    if out.exists():
        try:
            read(out)
        except BranchwiseError:
            raise UsageError(f"{out} exists and is no {kind}; name another file, or remove it.") from None
