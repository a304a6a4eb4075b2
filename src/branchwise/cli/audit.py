"""`branchwise audit`: does speculation write what the target would have written?

The exit code is the finding: 0 LOSSLESS, 1 NOT LOSSLESS, 3 UNDECIDED; 2 is a mistake of the user, as in every command.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from branchwise.cli import findings, group
from branchwise.cli.console import console
from branchwise.cli.options import AsJson, Drafting, Loading, PromptFile, Sampling, at_least, grouped
from branchwise.errors import UsageError
from branchwise.progress import showing
from branchwise.registry import split_specs

if TYPE_CHECKING:
    from branchwise.audit.methods import MethodAudited

app = group(
    "Prove that speculation keeps the distribution of the target. "
    "The finding is LOSSLESS (exit code 0), NOT LOSSLESS (1) or UNDECIDED (3)."
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
"""default prompts: after some of them the model is nearly certain of the next token, after others it is uncertain"""


@dataclass(frozen=True)
class Blocks:
    """The blocks of tokens to sample, and the distance that their tests must be able to detect."""

    prompts: PromptFile = None
    limit: Annotated[int | None, Option(help="Use only the first prompts.", show_default="all")] = None
    samples: Annotated[int, Option(help="Blocks to sample for each prompt.")] = 1000
    length: Annotated[int, Option(help="Tokens of a block.")] = 3
    false_alarm: Annotated[float, Option(help="Probability to find a correct decoder NOT LOSSLESS in any test.")] = 1e-3
    detect: Annotated[float, Option(help="LOSSLESS needs tests that would detect this distance.")] = 0.1


@dataclass(frozen=True)
class Asking:
    """The options of asking servers."""

    model: Annotated[str | None, Option(help="Name of the model on the server.", show_default="the first")] = None
    reference_model: Annotated[str | None, Option(help="Its name on the reference.", show_default="the first")] = None
    per_request: Annotated[int, Option("--n", help="Texts to ask for in one request.")] = 16
    threads: Annotated[int, Option(help="Requests to send at the same time.")] = 8
    timeout: Annotated[float, Option(help="Seconds to wait for an answer.")] = 60.0
    key: Annotated[str | None, Option("--api-key", help="Key of the servers.", show_default="OPENAI_API_KEY")] = None
    reference_key: Annotated[str | None, Option("--reference-api-key", help="Key of the reference, if another.")] = None


FLOAT32 = Loading(dtype="float32")
"""float32, the dtype for which equal texts are promised"""
SAMPLED = Sampling(temperature=1.0)


@app.command()
def verifiers(
    cases: Annotated[
        Path | None, Option(help='JSON file {"cases": [{"V", "L", "K", "p", "q"}, …]} in place of random cases.')
    ] = None,
    instances: Annotated[int, Option(help="Random instances for each of close, medium and far.")] = 6,
    vocab: Annotated[int, Option(help="Tokens of the vocabulary.")] = 3,
    depth: Annotated[int, Option(help="Tokens of a drafted path.")] = 2,
    paths: Annotated[int, Option(help="Drafted paths.")] = 2,
    verify: Annotated[str | None, Option(help="Only these, separated by commas.", show_default="every one")] = None,
    seed: Annotated[int, Option(help="Seed of the random instances.")] = 0,
    plot: Annotated[Path | None, Option(help="Draw the table as a PNG file.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object a line for each audited case.")] = False,
) -> None:
    """Prove verifiers exact by enumeration, without sampling.

    The verifier's own code runs on small distributions through every draft and every random decision. The table shows
    the distance of the emitted distribution from the target's, the block efficiency (tokens per step), and the optimum
    of all verifiers.

    branchwise audit verifiers --instances 18 --vocab 4 --depth 3 --paths 2
    """
    from branchwise.audit.exact import audit_instance
    from branchwise.audit.instances import SIMILARITIES, Instance, read_cases
    from branchwise.audit.summary import Row, draw, summarise
    from branchwise.methods import LOSSY
    from branchwise.plots import check_plot
    from branchwise.verify import VERIFIERS

    if plot is not None:
        check_plot(plot)
    rules = [VERIFIERS.build(name) for name in (split_names(verify) if verify else VERIFIERS)]
    for rule in rules if verify else ():
        if LOSSY in rule.name:
            raise UsageError(
                f"Verifier {rule.name!r} is lossy, there is nothing to prove; `branchwise audit methods "
                "improved-mcsd-lossy` measures its distance."
            )
    if cases is not None:
        worlds = [("", instance) for instance in read_cases(cases)]
    else:
        at_least(1, instances=instances, depth=depth, paths=paths)
        at_least(2, vocab=vocab)
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
                    kind = {"similarity": similarity} if similarity else {}
                    print(json.dumps(audited.as_dict() | kind), flush=True)
            progress("instances", number + 1, len(worlds))
    if plot is not None:
        draw(rows, plot)
    biased = sorted({row.audited.verifier for row in rows if not row.audited.lossless})
    if not as_json:
        shown = console()
        summarise(shown, rows)
        worst = max(row.audited.tv for row in rows)
        evidence = f"Every outcome of {len(rows)} audits was followed; the largest distance is {worst:.1e}."
        findings.print_exact(shown, biased, evidence)
    raise typer.Exit(1 if biased else 0)


@app.command()
def methods(
    names: Annotated[list[str] | None, Argument(help="Names or draft/tree/verify.", show_default="all presets")] = None,
    as_json: AsJson = False,
) -> None:
    """Prove methods exact by enumeration: tree policy and verifier together.

    Each method runs on small distributions, with a small tree of its own kind, through every draft and every random
    decision. The table shows the distance of the emitted distribution from the target's, and the tokens per step. For a
    lossy method the distance is its price.

    branchwise audit methods cascade rsd-s
    """
    from branchwise.audit.methods import audit_method
    from branchwise.methods import PRESETS, find_any

    chosen = [find_any(name) for name in names or PRESETS]
    audits: list[MethodAudited] = []
    with showing() as progress:
        for number, method in enumerate(chosen):
            progress(method.name, number, len(chosen))
            audits.append(audit_method(method))
    raise typer.Exit(findings.print_methods(audits, as_json))


@app.command()
@grouped
def model(
    *,
    loading: Loading = FLOAT32,
    drafting: Drafting,
    blocks: Blocks,
    sampling: Sampling = SAMPLED,
    greedy_tokens: Annotated[int, Option(help="Tokens of each greedy text to compare.")] = 48,
    near_ties: Annotated[bool, Option(help="Compare greedy texts in bfloat16 too, on a copy of the model.")] = True,
    raw: Annotated[bool, Option("--raw", help="Take prompts as they are, without the chat template.")] = False,
    seed: Annotated[int | None, Option(help="The same seed repeats an audit.", show_default="random")] = None,
    batch: Annotated[int, Option(help="Texts that are written together.")] = 16,
    as_json: AsJson = False,
) -> None:
    """Audit a drafter and a verifier on a real model.

    Sampled blocks of tokens are compared with their exact probabilities, greedy texts with plain decoding. Verifiers
    are audited one after the other if --verify names several, separated by commas.

    branchwise audit model --model smollm2 --draft ngram --verify match --samples 2000
    """
    texts = read_prompts(blocks.prompts, blocks.limit)
    from branchwise.audit.model import ModelAudit, ModelAuditor, Plan
    from branchwise.core.sampling import SamplingParams

    plan = Plan(
        samples=blocks.samples,
        length=blocks.length,
        sampling=SamplingParams(**vars(sampling)),
        greedy_tokens=greedy_tokens,
        near_ties=near_ties,
        false_alarm=blocks.false_alarm,
        limit=blocks.detect,
        seed=seed,
        raw=raw,
    )
    at_least(1, batch=batch)
    wanted = drafting.choose()
    rules = [wanted.verify] if drafting.method else split_names(wanted.verify)
    for rule in rules:  # refuses a wrong pairing before a model is loaded
        audited = replace(wanted, verify=rule)
        audited.build()
        audited.warn_if_lossy()
    llm = loading.load([wanted], draft="none", max_batch=batch + 1)
    audits: list[ModelAudit] = []
    with showing() as progress:
        auditor = ModelAuditor(llm, texts, plan, progress)
        for rule in rules:
            audits.append(auditor.audit(wanted.draft, wanted.tree, rule))
            if audits[-1].interrupted:
                break
    titles = [
        f"{audit.model}, {audit.dtype}, drafter {audit.draft}{f', tree {audit.tree}' if audit.tree else ''}, verifier "
        f"{audit.verify}: {blocks.samples:,} blocks of {blocks.length} tokens for each prompt, seed {audit.seed}"
        for audit in audits
    ]
    raise typer.Exit(findings.print_audits("model", audits, titles, as_json))


@app.command()
@grouped
def server(
    url: Annotated[str, Argument(help="The server to audit, such as http://127.0.0.1:8000.")],
    reference: Annotated[str, Option(help="Server of the same model without speculation; its logprobs are the truth.")],
    *,
    asking: Asking,
    blocks: Blocks,
    as_json: AsJson = False,
) -> None:
    """Audit any OpenAI-compatible server.

    The texts that it samples are compared with the logprobs of a reference server, which must run the same weights.

    branchwise audit server http://127.0.0.1:8000 --reference http://127.0.0.1:8001
    """
    texts = read_prompts(blocks.prompts, blocks.limit)
    from branchwise.audit.server import audit_server

    with showing() as progress:
        audit = audit_server(
            url,
            reference,
            texts,
            blocks.samples,
            **vars(asking),
            length=blocks.length,
            false_alarm=blocks.false_alarm,
            limit=blocks.detect,
            progress=progress,
        )
    title = (
        f"{audit.model} at {audit.url} against {audit.reference_model} at {audit.reference}: "
        f"{blocks.samples:,} blocks of {blocks.length} tokens for each prompt"
    )
    raise typer.Exit(findings.print_audits("server", [audit], [title], as_json))


def split_names(verify: str) -> list[str]:
    """The specs of several verifiers, separated by commas."""
    rules = split_specs(verify)
    if not rules:
        raise UsageError("There is no verifier to audit; name one with --verify.")
    return rules


def read_prompts(file: Path | None, limit: int | None = None) -> list[str]:
    """The prompts of a file, or `PROMPTS`."""
    at_least(1, limit=limit)
    if file is None:
        return list(PROMPTS[:limit])
    from branchwise.bench.prompts import read_items

    return [item.turns[0] for item in read_items(file)[:limit]]
