"""`branchwise audit`: is what speculation writes what the target would have written?

Heavy imports wait until a command needs them, so that help is instant. The exit code says what was found: 0 LOSSLESS,
1 NOT LOSSLESS, 3 UNDECIDED; 2 is a mistake in the request, as everywhere.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from branchwise.cli.options import AsJson, Device, DraftModel, Index, Model, Threads, TopK, TopP, TrustRemoteCode
from branchwise.errors import UsageError
from branchwise.models import DEFAULT_MODEL
from branchwise.progress import showing

if TYPE_CHECKING:
    from rich.console import Console

    from branchwise.audit.blocks import BlockTests
    from branchwise.audit.findings import Finding
    from branchwise.audit.greedy import Greedy
    from branchwise.audit.methods import MethodAudited

app = typer.Typer(
    name="audit",
    help="Prove that speculation keeps the distribution: LOSSLESS (exit code 0), NOT LOSSLESS (1) or UNDECIDED (3).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

MOST_DRAFTS = 100_000

PROMPTS = (
    "Once upon a time there was a",
    "The capital of France is",
    "The best thing about the sea is that",
    "def add(a, b):\n    return",
    "Monday, Tuesday, Wednesday,",
    "My favourite colour is",
)
"""what is audited with where no file is given: some of them nearly certain of what follows, some open"""

Prompts = Annotated[
    Path | None,
    typer.Option(
        help='Text with one prompt a line, or JSON lines with "prompt", "turns" or "question"; may end in .gz.',
        show_default="six short ones",
    ),
]
Limit = Annotated[int | None, typer.Option(help="Use only the first prompts.", show_default="all")]
Samples = Annotated[int, typer.Option(help="Sampled blocks for each prompt.")]
Length = Annotated[int, typer.Option(help="Tokens of a block.")]
FalseAlarm = Annotated[
    float, typer.Option(help="How often a correct decoder may be found NOT LOSSLESS, all tests of an audit together.")
]
Detect = Annotated[float, typer.Option(help="The distance that must have been detectable before LOSSLESS is said.")]


@app.command()
def verifiers(
    cases: Annotated[
        Path | None,
        typer.Option(
            help='JSON file {"cases": [{"V", "L", "K", "p", "q"}, …]} to audit in place of random distributions.'
        ),
    ] = None,
    instances: Annotated[int, typer.Option(help="Random instances for each of close, medium and far.")] = 6,
    vocab: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 3,
    depth: Annotated[int, typer.Option(help="Tokens of a drafted path.")] = 2,
    paths: Annotated[int, typer.Option(help="Drafted paths.")] = 2,
    verify: Annotated[
        str | None, typer.Option(help="Only these, separated by commas.", show_default="every verifier")
    ] = None,
    seed: Annotated[int, typer.Option(help="Other random instances.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the table as a PNG file.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line for each audited case.")
    ] = False,
) -> None:
    """Prove verifiers exact: every draft, every coin, no sampling.

    The verifier's own code is run on small distributions through all that can happen. Reported are the distance of what
    it emits from the target's distribution, its block efficiency (tokens per step) and the optimum that no verifier can
    pass.

    branchwise audit verifiers --instances 18 --vocab 4 --depth 3 --paths 2
    """
    from branchwise.audit.exact import audit_instance
    from branchwise.audit.instances import SIMILARITIES, Instance, read_cases
    from branchwise.audit.summary import Row, draw, summarise
    from branchwise.plots import check_plot
    from branchwise.verify import VERIFIERS

    if plot is not None:
        check_plot(plot)
    rules = [VERIFIERS.build(name) for name in (split_names(verify) if verify else VERIFIERS)]
    for rule in rules if verify else ():
        if not getattr(rule, "lossless", True):
            raise UsageError(
                f"Verifier {rule.name!r} is lossy, there is nothing to prove; `branchwise audit methods "
                "improved-mcsd-lossy` measures its distance."
            )
    if cases is not None:
        worlds = [("", instance) for instance in read_cases(cases)]
    else:
        for name, value, least in (
            ("instances", instances, 1),
            ("vocab", vocab, 2),
            ("depth", depth, 1),
            ("paths", paths, 1),
        ):
            if value < least:
                raise UsageError(f"{name} must be at least {least}, not {value}.")
        if (drafts := vocab ** (depth * paths)) > MOST_DRAFTS:
            raise UsageError(
                f"{vocab} tokens, {depth} levels and {paths} paths make {drafts:,} drafts, more than can be enumerated "
                f"({MOST_DRAFTS:,}); choose smaller numbers."
            )
        worlds = [
            (similarity, Instance.random(vocab, depth, paths, sigma, (seed, number)))
            for similarity, sigma in SIMILARITIES.items()
            for number in range(instances)
        ]
    rows: list[Row] = []
    with showing() as progress:
        for number, (similarity, instance) in enumerate(worlds):
            for audited in audit_instance(instance, rules, number):
                rows.append(Row(similarity, audited))
                if as_json:
                    print(
                        json.dumps(audited.as_dict() | ({"similarity": similarity} if similarity else {})), flush=True
                    )
            progress("instances", number + 1, len(worlds))
    if plot is not None:
        draw(rows, plot)
    biased = sorted({row.audited.verifier for row in rows if not row.audited.lossless})
    if not as_json:
        console = _console()
        summarise(console, rows)
        console.print()
        if biased:
            console.print("NOT LOSSLESS", style="bold red")
            console.print(f"  The emitted distribution is not the target's: {', '.join(biased)}.")
        else:
            console.print("LOSSLESS", style="bold green")
            worst = max(row.audited.tv for row in rows)
            console.print(f"  Every outcome of {len(rows)} audits was followed; the largest distance is {worst:.1e}.")
    raise typer.Exit(1 if biased else 0)


@app.command()
def methods(
    names: Annotated[
        list[str] | None, typer.Argument(help="Presets or draft/tree/verify specs.", show_default="every preset")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove methods exact: the policy that grows the tree and the verifier together, every draft and every coin.

    Each method is run on small distributions with a small tree of its own kind. Reported are the distance of what it
    emits from the target's distribution and its tokens per step; for a method that is called lossy the distance is what
    it costs.

    branchwise audit methods cascade rsd-s
    """
    from branchwise.audit.instances import SIMILARITIES
    from branchwise.audit.methods import SEEDS, VOCABULARY, audit_method
    from branchwise.methods import PRESETS, find_any

    chosen = [find_any(name) for name in names or PRESETS]
    audits: list[MethodAudited] = []
    with showing() as progress:
        for number, method in enumerate(chosen):
            progress(method.name, number, len(chosen))
            audits.append(audit_method(method))
        progress("methods", len(chosen), len(chosen))
    broken = [audit.method.name for audit in audits if not audit.kept]
    if as_json:
        from branchwise import __version__

        word = "NOT LOSSLESS" if broken else "LOSSLESS"
        found = [audit.as_dict() for audit in audits]
        print(json.dumps({"audit": "methods", "branchwise": __version__, "finding": word, "audits": found}))
    else:
        _print_methods(
            audits, broken, f"{len(SIMILARITIES) * len(SEEDS)} random distributions over {VOCABULARY} tokens"
        )
    raise typer.Exit(1 if broken else 0)


def _print_methods(audits: list[MethodAudited], broken: list[str], worlds: str) -> None:
    from rich.table import Table

    console = _console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("method", "enumerated tree", "verifier", "drafts", "tokens/step", "distance", "verdict"):
        numeric = column in ("drafts", "tokens/step", "distance")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for audit in audits:
        table.add_row(
            audit.method.name,
            audit.tree,
            audit.method.verify,
            "" if audit.drafts is None else f"{audit.drafts:,}",
            "" if audit.block_efficiency is None else f"{audit.block_efficiency:.3f}",
            f"{audit.tv:.1e}" if audit.lossless else f"{audit.tv:.3f}",
            audit.verdict,
        )
    console.print(table)
    console.print()
    lossless = [audit.tv for audit in audits if audit.method.lossless]
    if broken:
        console.print("NOT LOSSLESS", style="bold red")
        console.print(f"  The emitted distribution is not the target's: {', '.join(broken)}.")
    elif lossless:
        console.print("LOSSLESS", style="bold green")
        console.print(
            f"  Every outcome of {len(lossless)} methods on {worlds} was followed; the largest distance is "
            f"{max(lossless):.1e}."
        )
    for audit in audits:
        if not audit.method.lossless:
            console.print(
                f"  {audit.method.name} is lossy: on the same distributions and {audit.tree} its distance is up to "
                f"{audit.tv:.3f}; for {audit.method.tree} it is not known."
            )


@app.command()
def model(
    model: Model = DEFAULT_MODEL,
    method: Annotated[
        str | None,
        typer.Option(help="A method by name, or draft/tree/verify; see `branchwise methods`.", show_default="default"),
    ] = None,
    draft_model: DraftModel = None,
    index: Index = None,
    draft: Annotated[str | None, typer.Option(help="What proposes tokens.", show_default="the method's")] = None,
    tree: Annotated[str | None, typer.Option(help="Shape of the draft.", show_default="the drafter's")] = None,
    verify: Annotated[
        str | None,
        typer.Option(
            help="The rule to audit; several, separated by commas, one after the other.", show_default="match"
        ),
    ] = None,
    prompts: Prompts = None,
    limit: Limit = None,
    samples: Samples = 1000,
    length: Length = 3,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Must be above 0.")] = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    greedy_tokens: Annotated[int, typer.Option(help="Tokens of each greedy text that is compared.")] = 48,
    near_ties: Annotated[bool, typer.Option(help="Compare greedy texts in bfloat16 too, on a copy.")] = True,
    raw: Annotated[bool, typer.Option("--raw", help="Take prompts as they are, without the chat template.")] = False,
    false_alarm: FalseAlarm = 1e-3,
    detect: Detect = 0.1,
    seed: Annotated[int | None, typer.Option(help="Repeat an audit.", show_default="random")] = None,
    batch: Annotated[int, typer.Option(help="Texts that are written side by side.")] = 16,
    dtype: Annotated[str, typer.Option(help="float32, where equality is promised, or another.")] = "float32",
    device: Device = "auto",
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Audit a drafter and a verifier on a real model.

    Sampled blocks are compared with their exact probabilities, greedy texts with plain decoding.

    branchwise audit model --model smollm2 --draft ngram --verify match --samples 2000
    """
    texts = read_prompts(prompts, limit)
    from branchwise.audit.model import ModelAudit, ModelAuditor, Plan
    from branchwise.core.sampling import SamplingParams
    from branchwise.llm import load
    from branchwise.methods import choose_method

    plan = Plan(
        samples=samples,
        length=length,
        sampling=SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p),
        greedy_tokens=greedy_tokens,
        near_ties=near_ties,
        false_alarm=false_alarm,
        limit=detect,
        seed=seed,
        raw=raw,
    )
    if batch < 1:
        raise UsageError(f"batch must be at least 1, not {batch}.")
    wanted = choose_method(method, draft=draft, tree=tree, verify=verify, draft_model=draft_model, index=index)
    rules = [wanted.verify] if method else split_names(wanted.verify)
    for rule in rules:  # a name that does not fit is told before a model is loaded for nothing
        audited = replace(wanted, verify=rule)
        audited.build()
        audited.warn_if_lossy()
    llm = load(
        model,
        draft="none",
        dtype=dtype,
        device=device,
        threads=threads,
        max_batch=batch + 1,
        trust_remote_code=trust_remote_code,
    )
    audits: list[ModelAudit] = []
    with showing() as progress:
        auditor = ModelAuditor(llm, texts, plan, progress)
        for rule in rules:
            audits.append(auditor.audit(wanted.draft, wanted.tree, rule))
            if audits[-1].interrupted:
                break
    findings = [audit.finding for audit in audits]
    if as_json:
        _print_json("model", findings, [audit.as_dict() for audit in audits])
    else:
        console = _console()
        for audit in audits:
            shape = f", tree {audit.tree}" if audit.tree else ""
            _print_tests(
                console,
                f"{audit.model}, {audit.dtype}, drafter {audit.draft}{shape}, verifier {audit.verify}: "
                f"{samples:,} blocks of {length} tokens for each prompt, seed {audit.seed}",
                audit.tests,
            )
            _print_differences(console, audit.greedy, audit.near_ties)
            _print_finding(console, audit.finding)
    raise typer.Exit(_exit_code(findings))


@app.command()
def server(
    url: Annotated[str, typer.Argument(help="The server to audit, such as http://127.0.0.1:8000.")],
    reference: Annotated[
        str, typer.Option(help="A server of the same model without speculation, whose logprobs are the truth.")
    ],
    model: Annotated[str | None, typer.Option(help="Model name to ask for.", show_default="the first listed")] = None,
    reference_model: Annotated[
        str | None, typer.Option(help="Model name to ask the reference for.", show_default="the first listed")
    ] = None,
    prompts: Prompts = None,
    limit: Limit = None,
    samples: Samples = 1000,
    length: Length = 3,
    per_request: Annotated[int, typer.Option("--n", help="Texts to ask for in one request.")] = 16,
    threads: Annotated[int, typer.Option(help="Requests at a time.")] = 8,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 60.0,
    api_key: Annotated[str | None, typer.Option(help="Key of the servers.", show_default="OPENAI_API_KEY")] = None,
    reference_api_key: Annotated[
        str | None, typer.Option(help="Key of the reference.", show_default="the same")
    ] = None,
    false_alarm: FalseAlarm = 1e-3,
    detect: Detect = 0.1,
    as_json: AsJson = False,
) -> None:
    """Audit any OpenAI-compatible server.

    Its sampled texts are compared with the logprobs of a reference server, which must run the same weights.

    branchwise audit server http://127.0.0.1:8000 --reference http://127.0.0.1:8001
    """
    texts = read_prompts(prompts, limit)
    from branchwise.audit.server import audit_server

    with showing() as progress:
        audit = audit_server(
            url,
            reference,
            texts,
            samples,
            length=length,
            model=model,
            reference_model=reference_model,
            key=api_key,
            reference_key=reference_api_key,
            per_request=per_request,
            threads=threads,
            timeout=timeout,
            false_alarm=false_alarm,
            limit=detect,
            progress=progress,
        )
    if as_json:
        _print_json("server", [audit.finding], [audit.as_dict()])
    else:
        console = _console()
        _print_tests(
            console,
            f"{audit.model} at {audit.url} against {audit.reference_model} at {audit.reference}: "
            f"{samples:,} blocks of {length} tokens for each prompt",
            audit.tests,
        )
        _print_finding(console, audit.finding)
    raise typer.Exit(_exit_code([audit.finding]))


def split_names(verify: str) -> list[str]:
    """`token,block` as two specs; a comma inside a spec belongs to it: `k-seq:2,rho=3,block`."""
    rules: list[str] = []
    for part in filter(None, (part.strip() for part in verify.split(","))):
        inside = rules and ":" in rules[-1] and ":" not in part and ("=" in part or part[0].isdigit())
        if inside:
            rules[-1] += f",{part}"
        else:
            rules.append(part)
    if not rules:
        raise UsageError("There is no verifier to audit; name one with --verify.")
    return rules


def read_prompts(file: Path | None, limit: int | None = None) -> list[str]:
    """The prompts of a file, or the built-in ones."""
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1, not {limit}.")
    if file is None:
        return list(PROMPTS[:limit])
    from branchwise.bench.prompts import read_items

    return [item.turns[0] for item in read_items(file)[:limit]]


def _exit_code(findings: list[Finding]) -> int:
    """The worst of them: a proof of a difference, then a doubt."""
    codes = {finding.exit_code for finding in findings}
    return next((code for code in (1, 3) if code in codes), 0)


def _print_json(audit: str, findings: list[Finding], results: list[dict[str, Any]]) -> None:
    from branchwise import __version__

    worst = next(finding for finding in findings if finding.exit_code == _exit_code(findings))
    whole = {"audit": audit, "branchwise": __version__, "finding": worst.word.value, "audits": results}
    print(json.dumps(whole))


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160  # a table in a file is not cut to a screen that is not there
    return console


def _print_tests(console: Console, title: str, tests: BlockTests) -> None:
    from rich.table import Table

    console.print(f"\n{title}")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("context", "blocks", "cells", "G", "p (Holm)", "distance", "by chance", "detectable"):
        table.add_column(column, justify="left" if column == "context" else "right", no_wrap=True)
    for test, adjusted in zip(tests.family, tests.adjusted, strict=True):
        table.add_row(
            test.context,
            f"{test.samples:,}",
            str(test.cells),
            f"{test.statistic:.1f}",
            f"{adjusted:.2g}",
            f"{test.distance:.3f}",
            f"{test.expected_distance:.3f}",
            f"{test.detectable(tests.level):.3f}",
        )
    console.print(table)
    silent = [test.context for test in tests.contexts if not test.says_something]
    if silent:
        console.print(f"Without a test, because no two cells expect enough blocks: {'; '.join(silent)}.")


def _print_differences(console: Console, *comparisons: Greedy | None) -> None:
    from branchwise.audit.findings import shorten

    for comparison in comparisons:
        for difference in comparison.differences if comparison else ():
            console.print(
                f"{comparison.dtype if comparison else ''} greedy, {shorten(difference.prompt)}: after "
                f"{difference.position} tokens {difference.speculative!r} in place of {difference.plain!r}, "
                f"logits {difference.gap:.3g} apart"
            )


def _print_finding(console: Console, finding: Finding) -> None:
    console.print()
    console.print(finding.word.value, style={0: "bold green", 1: "bold red", 3: "bold yellow"}[finding.exit_code])
    for sentence in finding.evidence:
        console.print(f"  {sentence}")
