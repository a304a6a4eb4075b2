"""Students by their layers, the source of their data and their divergence: what they were worth before and after.

Every student begins with layers of the target, spread evenly, and learns for the same time from the same texts. Sources
are `teacher` (texts of the target), `fixed` (a set of texts of others, --fixed), `student` (the student writes all that
it learns from) and `mixed` (half of it). `--nested` trains one student whose exits are the same numbers of layers.
Acceptance is 1 - TV on held-out texts, and block efficiency that of a chain along them; `drafted` are tokens a pass of
the engine itself, for held-out prompts, greedy and drawn at temperature 1.

    branchwise train data --target smollm2 --out texts.jsonl
    python benchmarks/students.py --data texts.jsonl --layers 2 4 --minutes 2
    python benchmarks/students.py --tiny            a random target of four layers, in minutes on a CPU
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measure import kept, progress, provenance, recorded

from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_policy
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.nested.drafter import NestedDrafter
from branchwise.engine import Request
from branchwise.llm import LLM, load
from branchwise.train.corpus import Text, Texts, checked_texts
from branchwise.train.student.divergence import KINDS
from branchwise.train.student.learn import Recipe
from branchwise.train.student.model import begin, spread_layers
from branchwise.train.student.run import Run
from branchwise.train.writing import prepare

SOURCES = {"teacher": 0.0, "fixed": 0.0, "student": 1.0, "mixed": 0.5}
"""share of the batches that the student writes"""
TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def main() -> None:
    arguments = parse()
    records = recorded(arguments.read) if arguments.read else kept(measured(arguments), arguments.out)
    summarise(records)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, help="texts of the target, as `branchwise train data` writes them")
    parser.add_argument("--fixed", type=Path, help="a fixed set of texts for the source `fixed`")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=["teacher", "mixed", "student"])
    parser.add_argument("--divergences", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--nested", nargs="?", const="too", choices=["too", "only"], help="one with these exits too")
    parser.add_argument("--minutes", type=float, default=2.0, help="of learning, for each student")
    parser.add_argument("--steps", type=int, help="so many steps instead")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two scores")
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--depth", type=int, default=5, help="tokens of a draft")
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts that the engine answers")
    parser.add_argument("--tokens", type=int, default=64, help="of such an answer")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "students.jsonl")
    parser.add_argument("--read", type=Path, help="summarise these records; nothing is measured")
    arguments = parser.parse_args()
    if arguments.read is None and arguments.data is None and not arguments.tiny:
        parser.error("give --data, or --tiny, or --read")
    if "fixed" in arguments.sources and arguments.fixed is None:
        parser.error("the source `fixed` needs --fixed")
    return arguments


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with TemporaryDirectory() as place:
        folder = Path(place)
        model = str(tiny_target(folder / "tiny")) if arguments.tiny else arguments.model
        llm = load(model, draft="none", device=arguments.device, dtype=arguments.dtype, warmup=False)
        run = provenance(llm.engine.target.device, arguments)
        files = {name: getattr(arguments, name) for name in ("data", "fixed")}
        run["arguments"] |= {name: file and Path(file).name for name, file in files.items()}
        learn, held_out = texts_for(llm, folder, arguments.data)
        sets = {"teacher": learn, "student": learn, "mixed": learn}
        if arguments.fixed is not None:
            sets["fixed"] = checked_texts(arguments.fixed, llm.tokenizer, "student")
        ways = [(layers, ()) for layers in arguments.layers if arguments.nested != "only"]
        ways += [(arguments.layers[-1], tuple(arguments.layers))] if arguments.nested else []
        wanted = list(itertools.product(ways, arguments.sources, arguments.divergences))
        for number, ((layers, exits), source, divergence) in enumerate(wanted):
            progress(f"student {number + 1} of {len(wanted)}: {layers} layers, {source}, {divergence}")
            recipe = Recipe(
                arguments.minutes,
                arguments.steps,
                divergence,
                on_policy=SOURCES[source],
                tokens=arguments.batch_tokens,
                rate=arguments.rate,
                depth=arguments.depth,
            )
            about = {"model": "a random one" if arguments.tiny else arguments.model, "layers": layers}
            about |= {"exits": list(exits), "source": source, "divergence": divergence, "depth": arguments.depth}
            found = student(llm, folder / f"run-{number}", recipe, layers, exits, sets[source], held_out, arguments)
            yield {**about, **found, "run": run}


def student(
    llm: LLM,
    folder: Path,
    recipe: Recipe,
    layers: int,
    exits: Sequence[int],
    learn: Sequence[Text],
    held_out: Sequence[Text],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    init = spread_layers(layers, llm.model.config.get_text_config().num_hidden_layers)
    device, stops = llm.engine.target.device, sorted(llm.stop_tokens)
    model = begin(init, llm.model, llm.tokenizer, device)
    drafted = {"before": drafting(llm, model, exits, held_out, arguments)}
    run = Run(model, llm.model, llm.engine.target.info, folder, recipe, exits, stops)
    learner = run.run(learn, held_out, arguments.every)
    drafted["after"] = drafting(llm, model, exits, held_out, arguments)
    best = max(learner.curve, key=lambda entry: sum(one["block"] for one in entry["exits"]))
    return {
        "init": init,
        "texts": len(learn),
        "held_out": len(held_out),
        "before": learner.curve[0]["exits"],
        "after": best["exits"],
        "drafted": drafted,
        "steps": learner.steps,
        "own_steps": learner.written,
        "minutes": learner.elapsed / 60,
    }


def drafting(
    llm: LLM, model: Any, exits: Sequence[int], held_out: Sequence[Text], arguments: argparse.Namespace
) -> dict[str, float]:
    """Tokens a pass of the engine with a chain, greedy and drawn."""
    dtype = llm.engine.target.info.dtype
    weights = Weights("student", model.eval().requires_grad_(False).to(dtype), llm.tokenizer)
    tree = build_policy(f"chain:{arguments.depth}")
    if exits:
        model.config.exits = list(exits)
    found = {}
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        drafter = NestedDrafter(weights, tree=tree) if exits else ModelDrafter(weights, tree=tree)
        with_draft = llm.with_drafter(drafter, verify="token")
        engine, made = with_draft.engine, []
        for number, text in enumerate(held_out[: arguments.prompts]):
            sampling = SamplingParams(temperature, seed=number)
            prompt = tuple(text.tokens[: text.prompt].tolist())
            made.append(engine.submit(Request(prompt, sampling, max_new_tokens=arguments.tokens)))
        while engine.busy:
            engine.step()
        found[name] = sum(len(one.token_ids) for one in made) / max(1, sum(one.stats.steps for one in made))
    model.to(torch.float32).requires_grad_(True)
    return found


def texts_for(llm: LLM, folder: Path, data: Path | None) -> tuple[list[Text], list[Text]]:
    (folder / "texts").mkdir()
    if data is None:
        return prepare(llm, folder / "texts", 200, seed=0, avoid=(), kind="turns")
    texts = Texts(folder / "texts" / "texts.pt")
    texts.write(checked_texts(data, llm.tokenizer, "student"))
    return texts.read()


def tiny_target(folder: Path) -> Path:
    """A random model whose distributions have an opinion, and a tokenizer of letters."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
        model.lm_head.weight[2].mul_(0.2)  # texts that seldom end
    names = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, TINY["vocab_size"]))]
    words = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def summarise(records: Sequence[dict[str, Any]]) -> None:
    if not records:
        return
    title = f"{'layers':>8}  {'source':10}{'divergence':12}{'acceptance':>16}{'block':>14}{'greedy':>14}{'drawn':>14}"
    print(f"{records[0]['model']}, chains of {records[0]['depth']}, before and after learning")
    print(f"{title}{'steps':>8}{'minutes':>9}")
    for record in records:
        for number, (before, after) in enumerate(zip(record["before"], record["after"], strict=True)):
            several = len(record["exits"]) > 1
            shown = f"{before['layers']} of {record['layers']}" if several else str(record["layers"])
            line = f"{shown:>8}  {record['source']:10}{record['divergence']:12}"
            line += f"{before['acceptance']:9.3f}{after['acceptance']:7.3f}{before['block']:8.2f}{after['block']:6.2f}"
            if number == len(record["before"]) - 1:
                for name in ("greedy", "drawn"):
                    line += f"{record['drafted']['before'][name]:8.2f}{record['drafted']['after'][name]:6.2f}"
                line += f"{record['steps']:8}{record['minutes']:9.1f}"
            print(line)


if __name__ == "__main__":
    main()
