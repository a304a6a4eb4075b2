# ruff: noqa: E501  (texts of the source stay in one piece)
"""Mutation check: change one operator in a verifier, and a named test must fail.

    python -m tests.mutants                 every mutant; exits with 1 if one survives
    python -m tests.mutants block cascade   those of some families
    python -m tests.mutants --changed       those of files that changed since tests/proof.json did
    python -m tests.mutants --jobs 2        so many at a time

The source is copied, one text in one file is replaced, and the tests of the family run until the first failure. Pytest
does not collect this file, since it takes a while; `test_verify_mutants.py` checks that every mutant still applies, so
that the table cannot rot. A mutant that changes nothing anybody could see is marked with the reason, and is not run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    family: str
    file: str
    """below src/branchwise"""
    old: str
    """occurs once in the file"""
    new: str
    equivalent: str = ""
    """why no test could tell, where none can"""

    @property
    def name(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())}  ->  {' '.join(self.new.split()) or 'nothing'}"

    def apply(self, source: Path) -> None:
        path = source / "branchwise" / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.name}: the text occurs {text.count(self.old)} times"
        path.write_text(text.replace(self.old, self.new))


def family(name: str, file: str, *changes: tuple[str, ...]) -> list[Mutant]:
    return [Mutant(name, file, *change) for change in changes]


MUTANTS = [
    *family(
        "token",
        "verify/token.py",
        ("odds = row.gather(1, token) / q.gather(1, token)", "odds = row.gather(1, token)"),
        ("odds = row.gather(1, token) / q.gather(1, token)", "odds = q.gather(1, token) / row.gather(1, token)"),
        ("return left_of(probs, p, q)", "return p"),
        ("return left_of(probs, p, q)", "return left_of(probs, q, p)"),
        ("here = (kept == step) & (path.length > step)", "here = kept == step"),
        ("here = (kept == step) & (path.length > step)", "here = path.length > step"),
        ("torch.where(here[:, None], odds.clamp_max(1), 0.0), step)", "torch.where(here[:, None], odds.clamp_max(1), 0.0), 0)"),
        ("path.nodes[:, step + 1]", "path.nodes[:, step]"),
        ("batch.paths[:, 0]", "batch.paths[:, -1]"),
        ("if settled(probs, ~accepted)", "if settled(probs, accepted)"),
    ),
    *family(
        "block",
        "verify/block.py",
        ("batch.paths[:, 0]", "batch.paths[:, -1]"),
        ("(found[-1] * ratio).clamp_max(1)", "found[-1] * ratio"),
        ("(found[-1] * ratio).clamp_max(1)", "ratio.clamp_max(1)"),
        ("(found[-1] * ratio).clamp_max(1)", "found[-1] * ratio.clamp_max(1)"),
        ("mass / (mass + 1 - w))", "mass / (mass + 1))"),
        ("mass / (mass + 1 - w))", "mass)"),
        ("mass / (mass + 1 - w))", "w)"),
        ("(p * w[..., None].to(p.dtype)).sub_", "p.clone().sub_"),
        (".sub_(drawn).clamp_min_(0)", ".sub_(drawn).abs_()"),
        ("w.gather(1, here[:, None]), drawn_from(span, here)", "w[:, :1], drawn_from(span, here)"),
        ("w.gather(1, here[:, None]), drawn_from(span, here)", "w.gather(1, here[:, None]), drawn_from(span, None)[:, :1]"),
        ("torch.where((w == 1) | (steps == 0), 1.0,", "torch.where(steps == 0, 1.0,"),
        ("torch.where((w == 1) | (steps == 0), 1.0,", "torch.where(w == 1, 1.0,", "the weight of the first node is always 1"),
        ("(steps < path.length[:, None]) & (kept < 0)[:, None]", "(steps < path.length[:, None])"),
        ("(steps < path.length[:, None]) & (kept < 0)[:, None]", "(steps <= path.length[:, None]) & (kept < 0)[:, None]"),
        ("chance.first(odds.flip(1), coin)", "chance.first(odds, coin)"),
        ("here = (len(steps) - 1 - turn).clamp_min(0)", "here = turn.clamp_max(len(steps) - 1)"),
        ("torch.where(nodes == path.length[:, None], known.flip(1), 0.0)", "torch.where(nodes == path.length[:, None], known, 0.0)"),
        ("torch.where(nodes == path.length[:, None], known.flip(1), 0.0)", "torch.where(nodes == nodes.max(), known.flip(1), 0.0)"),
        ("whole = chance.first(", "whole = len(nodes) - 1 - chance.first("),
        ("for span in reversed(spans):", "for span in spans:"),
        ("open_ = (kept < 0) & (path.length > span.start)", "open_ = path.length > span.start",
         "rows that are done hope along: that costs a look at a row and decides nothing"),
        ("if not chance.hopes(torch.where(open_[:, None], w, 0.0), coin).any():", "if not chance.hopes(torch.where(open_[:, None], w * w, 0.0), coin).any():"),
        ("empty = found & (here_mass == 0)", "empty = found & False"),
        ("return where_rows(probs, self.whole, end, self.left)", "return self.left"),
        ("if settled(probs, ~self.whole):", "if settled(probs, self.whole):"),
        ("length = (nodes >= 0).sum(dim=1) - 1", "length = torch.full_like(nodes[:, 0], nodes.shape[1] - 1)"),
        ("torch.where(steps <= kept[:, None], self.nodes, -1)", "torch.where(steps < kept[:, None], self.nodes, -1)"),
        ("if settled(probs, path.length <= start):", "if settled(probs, path.length < start):",
         "one row more is read below every path and looked at by no one"),
    ),
    *family(
        "gbv",
        "verify/gbv.py",
        ("torch.where(draws.alive, wins, -1).argmax", "torch.where(draws.alive, wins, -1).argmin"),
        ("_beats((keys, tokens, self.ranks))", "_beats((keys, -tokens, self.ranks))"),
        ("_beats((keys, tokens, self.ranks))", "_beats((keys, tokens))"),
        ("_beats((keys, tokens, self.ranks))", "_beats((tokens, self.ranks))"),
        ("zip(found.unbind(dim=2), tokens.unbind(dim=2), strict=True)",
         "zip(found.unbind(dim=2)[:1], tokens.unbind(dim=2)[:1], strict=True)"),
        ("zip(found.unbind(dim=2), tokens.unbind(dim=2), strict=True)",
         "zip(found.unbind(dim=2), found.unbind(dim=2), strict=True)"),
        ("beats = (mine > theirs) | ((mine == theirs) & beats)", "beats = (mine >= theirs) | ((mine == theirs) & beats)"),
        ("beats = (mine > theirs) | ((mine == theirs) & beats)", "beats = (mine > theirs) | beats"),
        ("torch.where(draws.alive, wins, -1).argmax", "wins.argmax"),
        ("taken_first = chance.first(share[:, None], coin) == 0", "taken_first = chance.first(1 - share[:, None], coin) == 0"),
        ("taken = torch.where(taken_first, first, self._highest(draws))", "taken = self._highest(draws)"),
        (".clamp_(max=p)) for share in mixtures", ") for share in mixtures"),
        ("row_sum(torch.lerp(highest, q, share)", "row_sum(torch.lerp(q, highest, share)"),
        ("overlaps.amax(dim=1, keepdim=True) - noise", "overlaps.amin(dim=1, keepdim=True) - noise"),
        ("for number, mixture in reversed(list(enumerate(mixtures))):", "for number, mixture in enumerate(mixtures):"),
        ("return torch.where(alone, 1.0, share)\n\n\n@dataclass", "return share\n\n\n@dataclass",
         "with one path the first and the highest are one, and the law of both is q"),
        ("found.append(found[-1] * mass / (1 - found[-1] + found[-1] * (lower + mass)))", "found.append(found[-1])"),
        ("found.append(found[-1] * mass / (1 - found[-1] + found[-1] * (lower + mass)))",
         "found.append(found[-1] * mass / (1 - found[-1] + found[-1] * mass))"),
        ("found.append(found[-1] * mass / (1 - found[-1] + found[-1] * (lower + mass)))", "found.append(mass / (lower + mass))"),
        ("found.append(found[-1] / (found[-1] + (1 - found[-1]) * more))", "found.append(found[-1])"),
        ("found.append(found[-1] / (found[-1] + (1 - found[-1]) * more))", "found.append(found[-1] / (found[-1] + more))"),
        ("found.append(found[-1] / (found[-1] + (1 - found[-1]) * more))", "found.append(start / (start + (1 - start) * more))"),
        ("weights = clipped_products(p / (q * (first + (1 - first) * gain)))", "weights = clipped_products(p / (q * gain))"),
        ("weights = clipped_products(p / (q * (first + (1 - first) * gain)))", "weights = clipped_products(p / q)"),
        ("return gain.mul_(1 - one).add_(one).mul_(q)", "return gain.mul_(q)"),
        ("return gain.mul_(1 - one).add_(one).mul_(q)", "return q"),
        ("(gather_rows(table, place)[:, None] for table in", "(table[:, :1] for table in"),
        ("count = self.draws.count[:, None]", "count = self.draws.count[:, None] * 0 + self.most"),
    ),
    *family(
        "cascade",
        "verify/cascade.py",
        ("others = draws.alive & (numbers != taken)", "others = draws.alive"),
        ("(active & ~block.whole)[:, None]", "active[:, None]", "nothing can be drawn below a last token; a stage is saved"),
        ("others &= here == here.gather(1, taken)", "others &= here == here"),
        ("others &= choice.taken_first[:, None] | (next_ != next_.gather(1, taken))", "others &= next_ != next_.gather(1, taken)"),
        ("others &= choice.taken_first[:, None] | (next_ != next_.gather(1, taken))", "others &= True"),
        ("wanted = wanted / block.mass[:, None].to(wanted.dtype)", "wanted = wanted * 1.0"),
        ("lower_q /= row_sum(lower_q)[:, None].to(q.dtype)", "lower_q /= 1"),
        ("q = where_rows(probs, choice.taken_first, q, lower_q)", "q = lower_q"),
        ("q = where_rows(probs, choice.taken_first, q, lower_q)", "q = q"),
        ("row = where_rows(probs, inside, q, row)", "row = q"),
        ("inside = (kept >= span.start) & (kept < span.stop) & others.any(dim=1)", "inside = (kept >= span.start) & others.any(dim=1)", "a later span writes over what an earlier one wrote"),
        ("p = where_rows(paths.probs, active, wanted, draws.p)", "p = wanted"),
        ("depth = draws.depth + block.kept", "depth = block.kept"),
        ("anchor = torch.where(draws.count > 0, choice.taken, anchor)", "anchor = choice.taken"),
        ("for stage in range(total):", "for stage in range(1):"),
        ("most=total - stage)", "most=total)", "a bound that is not as tight; nothing reaches it"),
        ("last=stage == total - 1)", "last=False)", "the last stage leaves no other paths in either case"),
        ("wanted = block.residual(paths.batch, paths.probs, choice.path)", "wanted = block.left"),
    ),
    *family(
        "recursive",
        "verify/recursive.py",
        ("chance = (a * p_t - b * q_t).clamp_min(0) * z / (c * q_t)", "chance = (a * p_t - b * q_t).clamp_min(0) * z / c"),
        ("chance = (a * p_t - b * q_t).clamp_min(0) * z / (c * q_t)", "chance = (a * p_t - b * q_t).clamp_min(0) / (c * q_t)"),
        ("chance = (a * p_t - b * q_t).clamp_min(0) * z / (c * q_t)", "chance = (a * p_t - b * q_t).clamp_min(0) * z / q_t"),
        ("chance = (a * p_t - b * q_t).clamp_min(0) * z / (c * q_t)", "chance = a * p_t * z / (c * q_t)"),
        ("chance = (a * p_t - b * q_t).clamp_min(0) * z / (c * q_t)", "chance = (p_t - b * q_t).clamp_min(0) * z / (c * q_t)"),
        ("next_b = b + c / z", "next_b = b + c"),
        ("next_b = b + c / z", "next_b = c / z"),
        ("next_c = left + c * (1 - wanted)", "next_c = left"),
        ("next_c = left + c * (1 - wanted)", "next_c = left + (1 - wanted)"),
        ("wanted = torch.where(here, (left / next_c).nan_to_num(0.0), wanted)", "wanted = torch.where(here, left, wanted)"),
        ("wanted = torch.where(here, (left / next_c).nan_to_num(0.0), wanted)", "wanted = (left / next_c).nan_to_num(0.0)"),
        ("b, c = torch.where(here, next_b, b), torch.where(here, next_c, c)", "b, c = next_b, next_c"),
        ("z = torch.where(here, row_sum(untried), z)", "z = torch.where(here, z * (1 - q_t), z)"),
        ("untried = blank(untried, tokens[..., turn])", "untried = blank(untried, tokens[..., 0])"),
        ("numbers = [torch.where(accepted, 0.0, number) for number in numbers]", "pass"),
        ("(b / a).nan_to_num(0.0))", "b.nan_to_num(0.0))"),
        ("if replace or tokens.shape[-1] == 1 else q.clone()", "if replace or tokens.shape[-1] == 1 else q"),
        ("torch.where(ended[:, None], 0.0, odds)", "odds"),
        ("node = torch.where(accepted, child, node)", "node = child"),
        ("way.append(torch.where(accepted, child, -1))", "way.append(child)"),
        ("accepted = turn < children.shape[1]", "accepted = turn <= children.shape[1]"),
        ('reads = ("tokens", "candidates")\n    replace = True', 'reads = ("tokens", "candidates")\n    replace = False'),
        ("return batch.candidates", "return batch.children"),
        ("        return batch.children\n\n\nclass MSS", "        return batch.children.flip(2)\n\n\nclass MSS"),
        ("probs.at(node), batch.q_rows(node), share)", "probs.at(node), batch.q_rows(node))"),
    ),
    *family(
        "replacement",
        "core/tree.py",
        ("for node in self.draws or range(1, len(self)):", "for node in range(1, len(self)):"),
        ("for node in self.draws or range(1, len(self)):", "for node in sorted(self.draws) or range(1, len(self)):"),
        ("found[node][turn] = below", "found[node][0] = below"),
        ("found = [[-1] * len(self.leaves) for _ in self.parents]", "found = [[-1] for _ in self.parents]"),
    ),
    *family(
        "replacement",
        "draft/policies/iid.py",
        ("if len(tree) + len(level) * count > budget.nodes:", "if len(tree) + len(level) > budget.nodes:"),
        ("self.draws[: max(budget.depth, 0)]", "self.draws"),
        ("(depth << 20) + place * count + turn)", "(depth << 20) + turn)"),
        ("(depth << 20) + place * count + turn)", "place * count + turn)"),
        ("if step not in children:", "if True:"),
        ("tree.draws.append(children[step])", "tree.draws.append(len(tree) - 1)"),
        ("level = list(children.values())", "level = list(children.values())[:1]"),
    ),
    *family(
        "traversal",
        "verify/recursive.py",
        ("acceptance=start)", "acceptance=None)"),
        ("replace=False, acceptance", "replace=True, acceptance"),
        ("odds.scatter_(1, own, tried.acceptance)", "odds.scatter_(1, own, start)"),
        ("wanted.scatter_(1, below, tried.odds.flatten(1))", "wanted"),
        ("odds.scatter_(1, below, tried.odds.flatten(1))", "odds"),
        ("share.scatter_(1, own, tried.share)", "share"),
        ("odds[:, 0].fill_(1)", "odds[:, 0]", "the root keeps all of its mass; this is for rounding that loses it"),
        ("order = batch.postorder", "order = batch.postorder.flip(1)"),
        ("order = batch.postorder", "order = torch.arange(batch.nodes).flip(0).expand(len(batch), -1)"),
        ("children = gather_rows(batch.children, nodes)[..., :width]", "children = gather_rows(batch.children, nodes)[..., :1]"),
        ("batch.q_rows(node), gather_rows(share, node))", "batch.q_rows(node))"),
        ("left = left_of(probs, probs.at(node), batch.q_rows(node), gather_rows(share, node))", "left = probs.at(node)"),
        ("children = torch.where((level >= 0)[..., None], children, -1)", "children = children"),
        ("own = torch.where(level >= 0, level, batch.nodes)", "own = level.clamp_min(0)"),
        ("if settled(probs, level < 0):", "if settled(probs, level <= 0):"),
    ),
    *family(
        "k-seq",
        "verify/spectr.py",
        ("/ (rho[..., None] * q.gather(-1, tokens))", "/ q.gather(-1, tokens)"),
        ("/ (rho[..., None] * q.gather(-1, tokens))", "/ rho[..., None]"),
        ("count = (children >= 0).sum(dim=-1)", "count = (children >= -1).sum(dim=-1)"),
        ("count = (children >= 0).sum(dim=-1)", "count = (children >= 0).sum(dim=-1).clamp_max(1)"),
        ("enough = excess >= 0", "enough = excess <= 0"),
        ("excess = rho * beta - 1 + missed", "excess = beta - 1 + missed"),
        ("excess = rho * beta - 1 + missed", "excess = rho * beta - 1"),
        ("power = torch.where(turn < count, power * base, power)", "power = power * base"),
        ("for turn in range(most):", "for turn in range(most - 1):"),
        ("beta = row_sum(scaled.clamp_(max=p)) / rho", "beta = row_sum(scaled.clamp_(max=p))"),
        ("return high, best", "return low, best"),
        ("return high, best", "return high, beta"),
        ("torch.minimum(p / rho.clamp_min(1)[:, None].to(p.dtype), q)", "torch.minimum(p, q)"),
        ("rho.clamp_min(1)", "rho"),
        ("left_of(probs, p, served, taken)", "left_of(probs, p, served)"),
        ("left_of(probs, p, served, taken)", "p"),
        ("gather_rows(batch.candidates, nodes)", "gather_rows(batch.children, nodes)"),
        ("else 4 * ITERATIONS", "else 1"),
        ("ITERATIONS = 8", "ITERATIONS = 2"),
    ),
    *family(
        "order",
        "verify/order.py",
        ("self.q.shape[-1]).argsort(dim=-1, stable=True)", "self.q.shape[-1]).argsort(dim=-1, stable=True, descending=True)"),
        ("(mass.cumsum(dim=-1) - mass).clamp_min_(0)", "mass.cumsum(dim=-1)"),
        ("(numbers[None, :] < numbers[:, None])", "(numbers[None, :] > numbers[:, None])"),
        ("(numbers[None, :] < numbers[:, None])", "(numbers[None, :] <= numbers[:, None])"),
        ("lower = (theirs < mine)", "lower = (theirs > mine)"),
        ("lower = (theirs < mine)", "lower = (theirs <= mine)"),
        ("slots, heavy + everything)", "slots, heavy)"),
        ("torch.nn.functional.pad(light.cumsum(dim=-1)[..., :-1], (1, 0))", "light.cumsum(dim=-1)"),
        ("(within + before[..., None])", "within"),
        ("self.q.gather(-1, inside).where(exists, 0.0)", "self.q.gather(-1, inside)"),
        ("return running - blocks, running[..., -1:]", "return running, running[..., -1:]"),
        ("(members < missing[..., None]).sum(dim=-1)", "(members <= missing[..., None]).sum(dim=-1)"),
        ("[..., None, :] < wanted[:, None])", "[..., None, :] <= wanted[:, None])"),
        ("torch.where(wanted <= everything, place", "torch.where(wanted < everything, place"),
        ("(keys < own) | ((keys == own) & (ids < tokens[..., None]))", "(keys < own) | (keys == own)"),
        ("(keys < own) | ((keys == own) & (ids < tokens[..., None]))", "keys < own"),
        ("least = 1 / RANKED if vocabulary > RANKED else 0.0", "least = 0.0"),
        ("return torch.where(q > least, p / q, -1.0)", "return torch.where(q > least, q / p, -1.0)"),
        ("self.ranked = heavy[(p[heavy] / q[heavy]).argsort(stable=True)]", "self.ranked = heavy[(-p[heavy] / q[heavy]).argsort(stable=True)]"),
        ("self.ranked = heavy[(p[heavy] / q[heavy]).argsort(stable=True)]",
         "self.ranked = heavy.flip(0)[(p[heavy] / q[heavy]).flip(0).argsort(stable=True)]"),
        ("places = self._masses.cumsum(dim=0) - self._masses + row[-1]", "places = self._masses.cumsum(dim=0) - self._masses"),
        ("row_sum(self.q[:token]) - self._masses[self.ranked < token].sum()", "row_sum(self.q[:token])"),
        ("row_sum(self.q) - self._masses[place:].sum()", "row_sum(self.q) - self._masses[place + 1 :].sum()"),
        ("self.q.index_fill(0, self.ranked[place:], 0.0)", "self.q.index_fill(0, self.ranked[place + 1 :], 0.0)"),
        ("row[token:] = 0.0", "row[token + 1 :] = 0.0"),
        ("rest = 1 - share", "rest = 0 * share"),
        ("low = (below * share).add_(rest)", "low = below.add(rest)"),
        ("high = (q * share).add_(low)", "high = q.add(low)"),
        ("_mean_power(high, low, count, most, lazy).div_(norm)", "_mean_power(high, low, count, most, lazy)"),
        ("result = torch.where(count > 1, result, 1.0)", "pass"),
        ("if lazy and bool((count > k).all()):", "if True:"),
        ("power = power * low", "power = low"),
        ("for k in range(2, most):", "for k in range(2, most - 1):"),
    ),
    *family(
        "match",
        "verify/match.py",
        ("node = torch.where(done, node, child)", "node = child"),
        ("paths[:, depth] = torch.where(done, -1, child)", "paths[:, depth] = child"),
        ("token = torch.where(done, token, self._draw(probs, node, chance, depth))", "token = self._draw(probs, node, chance, depth)"),
        ("self._draw(probs, node, chance, depth))", "self._draw(probs, node, chance, depth + 1))"),
        ("probs.best(node) if probs.greedy else", "probs.best(node) if False else"),
    ),
    *family(
        "auto",
        "verify/auto.py",
        ('"cascade" if any(len(tree.leaves) > 1 for tree in batch.trees) else "block"', '"block"'),
        ('"cascade" if any(len(tree.leaves) > 1 for tree in batch.trees) else "block"', '"cascade"'),
        ('"cascade" if any(len(tree.leaves) > 1 for tree in batch.trees) else "block"',
         '"cascade" if all(len(tree.leaves) > 1 for tree in batch.trees) else "block"'),
        ('name = "traversal"', 'name = "rrs"'),
        ('name = "match"', 'name = "block"'),
    ),
    *family(
        "common",
        "verify/__init__.py",
        (".clamp_min_(0)\n    empty", ".abs_()\n    empty"),
        ("return torch.where(empty[..., None], p, left)", "return left"),
        ("if probs.lazy and not bool(empty.any()):", "if probs.lazy:"),
        ("tuple(node for node in row[:longest] if node >= 0)", "tuple(node for node in row[:longest] if node > 0)"),
        ("if draw in verifier.accepts:", "if True:"),
    ),
    *family(
        "common",
        "core/target_probs.py",
        ("return probs.lazy and bool(done.all())", "return probs.lazy and bool(done.any())"),
        ("return probs.lazy and bool(done.all())", "return bool(done.all())"),
        ("if probs.lazy and bool(condition.all()):\n        return one", "if probs.lazy and bool(condition.any()):\n        return one"),
        ("return torch.where(condition[:, None], one, other)", "return torch.where(condition[:, None], other, one)"),
    ),
    *family(
        "common",
        "core/rows.py",
        ("trees = torch.arange(len(nodes), device=nodes.device) * size", "trees = torch.arange(len(nodes), device=nodes.device) * 0"),
        ("+ rows[..., whole:].sum(dim=-1, dtype=torch.float64)", ""),
    ),
    *family(
        "chance",
        "core/rng.py",
        ("torch.where(self.hopes(odds, draw), places, count)", "torch.where(~self.hopes(odds, draw), places, count)"),
        ("(found, (0, 1), value=count).amin(dim=1)", "(found.where(found < count, -1), (0, 1), value=count).amax(dim=1)"),
        ("self._tossed(draw, bounds.shape[1]) < bounds", "self._tossed(draw, bounds.shape[1]) <= bounds"),
        ("self._tossed(draw, bounds.shape[1]) < bounds", "self._tossed(0, bounds.shape[1]) < bounds"),
        ("self._tossed(draw, bounds.shape[1]) < bounds", "self._tossed(draw, bounds.shape[1]) > bounds"),
        ("torch.arange(chunk * COINS, (chunk + 1) * COINS,", "torch.arange(0, COINS,"),
        ("coins[:, start - first * COINS : start - first * COINS + count]", "coins[:, :count]"),
        ("left.scatter_(1, token, 0.0)", "left"),
        ('zlib.crc32(f"{role} {purpose}".encode()) << 31 | draw', "zlib.crc32(purpose.encode()) << 31 | draw"),
        ("sums if rows is None else sums[rows]", "sums if rows is None else sums[rows * 0]"),
        ("blocks[rows, winner]", "blocks[rows * 0, winner]"),
        ("probs if rows is None else probs[rows]", "probs if rows is None else probs[rows * 0]"),
        ("torch.where(left.gather(1, token) > 0, token, -1)", "token"),
    ),
    *family(
        "enumeration",
        "audit/enumeration.py",
        ("torch.cat([failed[:, :-1] * odds, failed[:, -1:]], dim=1)", "torch.cat([odds, failed[:, -1:]], dim=1)"),
        ("(1 - odds).cumprod(dim=1)", "(1 - odds).cumsum(dim=1)"),
        ("torch.stack([1 - bound, bound], dim=1)", "torch.stack([bound, 1 - bound], dim=1)"),
        ("torch.where(hope, (odds[:, column] / bound).clamp_max(1).nan_to_num(0.0), 0.0)", "torch.where(hope, odds[:, column], 0.0)"),
        ("torch.where(hope, (odds[:, column] / bound).clamp_max(1).nan_to_num(0.0), 0.0)", "odds[:, column]"),
        ("probs / probs.sum(dim=1, keepdim=True))", "probs)"),
        ("others = (weights > 0) & (prescribed < 0)[:, None]", "others = weights > 0"),
        ("others = (weights > 0) & (prescribed < 0)[:, None]", "others = (prescribed < 0)[:, None] & (weights >= 0)",
         "ways of probability 0 are followed too, with the weight 0"),
        ("others.scatter_(1, decided[:, None], False)", "others"),
        ('assert key not in self.made, f"the verifier asked twice for {kind} {draw}"', "pass"),
        ("<= bound + 1e-12).all()", "<= bound + 1).all()"),
        ("if len(script.rows) > most:", "if False:", "only how many rows run at once"),
        ("torch.where(prescribed >= 0, self.weights, self.weights * taken)", "self.weights * taken"),
        ("self.weights[rows] * weights[rows, ways]", "weights[rows, ways]"),
        ("column = self._script.ways.get(key, self._free)[fork.rows]", "column = torch.full_like(fork.ways, -1)"),
        ("self._tossed[draw + column] = decides if before is None else before | decides", "pass"),
    ),
    *family(
        "audit",
        "audit/exact.py",
        ("return 0.5 * float((probs - target).abs().sum())", "return float((probs - target).abs().sum())"),
        ("return 0.5 * float((probs - target).abs().sum())", "return 0.0"),
        ("sum((level + 1) * float(mass.sum())", "sum(level * float(mass.sum())"),
        ("codes, drafts.weights[found.rows] * found.weights", "codes, found.weights"),
        ("kept = (found.verdicts.paths >= 0).sum(dim=1) - 1", "kept = (found.verdicts.paths > 0).sum(dim=1)",
         "the root is the only node 0"),
        ("return self.tv < TOLERANCE", "return self.tv > TOLERANCE"),
        ("TOLERANCE = 1e-9", "TOLERANCE = 1e-2"),
    ),
    *family(
        "growth",
        "draft/policies/paths.py",
        ("nodes = budget.nodes - 1", "nodes = budget.nodes"),
        ("max(min(self.length, budget.depth, fits), 0)", "max(min(self.length, fits), 0)"),
        ("independent = self.common == 0 or self.count == 1", "independent = True"),
        ("paths if level >= self.common else paths[:1]", "paths"),
        ("level * self.count + path) for path in drawing", "level) for path in drawing"),
        ("level * self.count + path) for path in drawing", "path) for path in drawing"),
        ("nodes.index(ends[path])", "0"),
        ("if step not in children:", "if True:"),
        ("ends[path] = children[step]", "ends[path] = len(tree) - 1"),
    ),
    *family(
        "growth",
        "draft/policies/rsd.py",
        ("if len(tree) + len(level) * width > budget.nodes:", "if len(tree) + len(level) > budget.nodes:"),
        ("self.branching[: max(budget.depth, 0)]", "self.branching"),
        ("(place, (depth << 16) + place) for", "(place, depth << 16) for"),
        ("(place, (depth << 16) + place) for", "(place, place) for"),
        ("for token in order]", "for token in sorted(order)]"),
    ),
    *family(
        "growth",
        "draft/builder.py",
        ("self.probs.update(zip(nodes, probs, strict=True))", "self.probs.update((node, probs[0]) for node in nodes)"),
    ),
    *family(
        "growth",
        "draft/noisy_target.py",
        ("torch.softmax(logits.float() / temperature + self.sigma * noise, dim=-1)", "torch.softmax(logits.float() + self.sigma * noise, dim=-1)"),
        ("torch.softmax(logits.float() / temperature + self.sigma * noise, dim=-1)", "torch.softmax(logits.float() / temperature, dim=-1)"),
        ("[*sequence.tokens, *tree.path(node)]", "[*sequence.tokens]"),
        ("logits[places[node]]", "logits[0]"),
    ),
    *family(
        "growth",
        "draft/sampler.py",
        ('key_of("draft", purpose', 'key_of("verify", purpose'),
        ("if sequence.sampling.temperature == 0:", "if False:"),
        ("if mass > 0]", "]"),
    ),
    *family(
        "growth",
        "draft/policies/rsd.py",
        ("time.append(now)", "time.append(-math.inf)"),
        ("math.log(rest.mass / whole[parent])", "0.0"),
        ("len(level) < self.width:\n                now", "len(level) <= self.width:\n                now"),
        ("(budget.nodes - 1) // self.width", "budget.nodes // self.width"),
    ),
    *family(
        "growth",
        "draft/policies/dynamic.py",
        ("heapq.heappush(slots, (value * share, 2 * child, child))", "heapq.heappush(slots, (value * rest, 2 * child, child))"),
        ("heapq.heappush(slots, (value * rest, 2 * child + 1, parent))", "heapq.heappush(slots, (value, 2 * child + 1, parent))"),
        ("if tree.depths[child] < budget.depth:", "if True:"),
        ("heapq.nsmallest(room, slots)", "heapq.nsmallest(1, slots)"),
    ),
    *family(
        "growth",
        "draft/policies/dynamic.py",
        ("if -value * share >= least:", "if True:"),
        ("if rest > 0 and -value * rest >= least:", "if rest > 0:"),
        ("(drawn + unserved) / self.nodes", "drawn / self.nodes"),
        ("if unserved and drawn < self.nodes:", "if False:"),
        ("if sequence not in self._controllers:", "if not self._controllers:"),
    ),
    *family(
        "growth",
        "draft/sampler.py",
        ("left[token] = 0.0", "pass"),
        ("self.mass / before)", "1 - taken / before)"),
    ),
    *family(
        "dice",
        "core/rng.py",
        ("_first_int(blocks, mix_int(key))", "_first_int(blocks, key)"),
        ("wait_of(key + name * GAMMA) / mass", "wait_of(key + name * GAMMA) * mass"),
        ("blocks.get(token // BLOCK, 0.0) + mass", "mass"),
        ("if token // BLOCK == winner", "if True"),
    ),
    *family(
        "dice",
        "draft/sparse.py",
        ("if mass >= TINY", "if mass > 0"),
        ("if other != token", "if True"),
        ("mix_int(key + turn)", "key + turn"),
        ("reverse=True)[:k]", ")[:k]"),
        ("spread[row] = p", "pass"),
    ),
    *family(
        "dice",
        "draft/sampler.py",
        ("found = self.device_sampler.orders(probs, keys, max(sizes))", "found = self.device_sampler.orders(probs, keys, min(sizes))"),
        ("repeat(best[row][0])", "repeat(best[row][-1])"),
        ("race(probs, draws[:, 0], draws[:, 1])", "race(probs, draws[:, 0], draws[:, 1] * 0)"),
        ("if token >= 0]", "]"),
        ("key = mix_int(key + turn)", "key = mix_int(key)"),
        ("race(left, mix(keys + turn))", "race(left, mix(keys))"),
        ("left.scatter_(1, token, 0.0)", "pass"),
        ("return type(self), type(self.sampler), self.sizes is None", "return type(self.sampler), self.sizes is None"),
        ("JointSampler(seeded) if seeded else", "seeded[0] if seeded else"),
    ),
    *family(
        "growth",
        "draft/sampler.py",
        ("self._left[self._out] = 0.0", "pass"),
        ("self._turn += 1", "pass"),
        ("list(enumerate(nodes)), [turns] * len(nodes))", "[(row, 0) for row in range(len(nodes))], [turns] * len(nodes))"),
    ),
    *family(
        "growth",
        "draft/policies/topk.py",
        ("min(math.log(mass), 0.0)", "math.log(mass)"),
    ),
    *family(
        "growth",
        "draft/policies/rsd.py",
        ("(self.length - 1) * (self.width // 2)", "0"),
    ),
    *family(
        "dice",
        "cuda/graphs.py",
        ("place[: len(rows)].copy_(rows", "place[: len(rows)].add_(rows"),
    ),
    *family(
        "model",
        "draft/model/draft_model.py",
        ("row_depths[b, row] = one.tree.depths[node] - 1", "row_depths[b, row] = one.tree.depths[node]"),
        ("depths[b, place] = one.tree.depths[node] - 1", "depths[b, place] = one.tree.depths[node]"),
        ("ancestors[b, place, rows[node]] = True", "ancestors[b, place, : before[b]] = True"),
        ("if cached != text[:known] or known == len(text):", "if known == len(text):"),
        ("if cached != text[:known] or known == len(text):", "if cached != text[:known]:"),
        ("store.cut(followed.key, known)", "pass"),
        ("path.append(node := child)", "path.append(child)"),
        ("slice(len(new) - 1, len(new)) for new in ahead", "slice(nodes - 1, nodes) for new in ahead"),
        ("one.tree = tree", "pass"),
        ("followed.rows = {}\n        ahead", "ahead"),
    ),
    *family(
        "model",
        "draft/model/drafter.py",
        ("self.temperature or sampling.temperature or FOR_GREEDY", "sampling.temperature or FOR_GREEDY"),
        ("own_head(None if self.trim is None else self.vocabulary.columns)", "own_head(None)"),
        ("if bias and not self.vocabulary.whole:", "if bias:", "of a whole vocabulary the places are the tokens; the guard spares a table of them"),
        ("self._following.close(sequence)\n        self._spelled", "self._spelled"),
    ),
    *family(
        "dice",
        "draft/model/reading.py",
        ("probs.clone() if self._replayed.fixed else probs", "probs"),
        ("None if trimmed or vocabulary.whole else vocabulary.columns", "None"),
    ),
    *family(
        "model",
        "draft/model/vocabulary.py",
        ("index_copy_(1, self.tokens, probs)", "index_copy_(1, self.columns, probs)"),
        ("if overlap < LEAST_OVERLAP:", "if False:"),
        ('found["end of text"] = tokenizer.eos_token_id', "pass"),
    ),
    *family(
        "model",
        "backends/transformers/slots.py",
        ("else self._touched[free]\n", "else self._lengths[last]\n"),
    ),
    *family(
        "longest",
        "verify/longest.py",
        ("certain = here & (batch.trusted > 0) if depth == 1", "certain = here if depth == 1"),
        ("winner = runs.argmax(dim=1, keepdim=True)", "winner = runs.argmin(dim=1, keepdim=True)"),
        ("(kept - 1).clamp_min(0)", "kept"),
        ("(p - q).clamp_min(0)", "p"),
        ("here = (length == depth - 1) & (child >= 0)", "here = child >= 0"),
        ("ratio.double().clamp_max(1)", "ratio.double().clamp_max(0.5)"),
    ),
    *family(
        "tree",
        "core/tree.py",
        ("return order[::-1]", "return order"),
        ("sorted(below, key=first.__getitem__)", "below"),
        ("first.setdefault(node, turn)", "first[node] = turn"),
        ("for leaf in self.leaves or (0,)]", "for leaf in sorted(self.leaves) or (0,)]"),
    ),
    *family(
        "tree",
        "core/topology.py",
        ("[node for node, below in enumerate(self.children) if len(below) > 1]", "[node for node, below in enumerate(self.children) if below]",
         "a fork of one way costs a look at its law and decides nothing"),
    ),
    *family(
        "tree",
        "core/batch.py",
        ("nodes.clamp(0, self.q.shape[1] - 1)", "nodes.clamp(0, 0)"),
        ("widths[depth] = max(widths[depth], len(below))", "widths[depth] = len(below)"),
        ("torch.where(above, every, -1)", "every"),
    ),
    *family(
        "ranks",
        "draft/recycle/drafter.py",
        ("next((turn for turn in turns if token not in turn), None)", "next(iter(turns), None)"),
        ("torch.where(accepted, ACCEPTED, REJECTED) * real", "torch.where(accepted, REJECTED, REJECTED) * real"),
        ("self._expected = []", "pass"),
        ("left = max(PREFILL - len(logits), 0)", "left = 0"),
        ("*[PADDING] * left]", "*[ACCEPTED] * left]"),
    ),
    *family(
        "ranks",
        "draft/recycle/adjacency.py",
        ("share = np.where(held.any(axis=1, keepdims=True), np.float32(rate), np.float32(1))", "share = np.full_like(before[:, :1], rate)"),
        ("join = np.where(known, 0, share * found.masses[rows])", "join = share * found.masses[rows]"),
        ("(best.numpy() * np.float32(HALF_DOWN))", "best.numpy()"),
    ),
    *family(
        "ranks",
        "draft/policies/adaptive.py",
        ("self._hits[places[list(verdict.path)]] += 1", "self._hits[list(verdict.path)] += 1"),
        ("self._tries[places] += 1", "self._tries[: len(places)] += 1"),
        ("tokens = [1.0, *(1 + float(gained[size - 1])", "tokens = [1.0, *(1 + float(gained[size])"),
        ("if untried or not costs.knows_plain:", "if untried:"),
        ("self._wanted, self._turn = untried[0] if untried else 0, 0", "self._wanted, self._turn = 0, 0"),
    ),
    *family(
        "controller",
        "control/choice.py",
        ("return found if speeds[found] > WORTH * speeds[0] else 0", "return found"),
        ("speeds = [gained / cost for", "speeds = [gained for"),
        (" or lost <= 0:", ":"),
        (" and lost < self._most)", ")"),
        ("(at_stake + self._invested) / terms.share", "at_stake / terms.share"),
        ("if self._left > 0:", "if False:"),
        ("self._left += round(max(0.0, passes - tokens) / terms.share)", "pass"),
    ),
    *family(
        "controller",
        "control/trust.py",
        ("return min(1.0, promise * self.came / self.promised)", "return promise"),
        ("self.promised, self.came = self._lately_promised, self._lately_came", "pass"),
        ("known.forgive()", "pass"),
        ("for node in path[1:]), last]", "for node in path[1:]), -1]"),
    ),
    *family(
        "controller",
        "draft/policies/adaptive.py",
        ("path = [order[node] for node in verdict.path]", "path = list(verdict.path)"),
        ("most, texts = max(growth.most", "most, texts = min(growth.most"),
        ("growth.bound(more) for growth in growing", "growth.bound(0) for growth in growing"),
    ),
    *family(
        "controller",
        "control/memory.py",
        ("json.dumps(_read(path) | learned)", "json.dumps(learned)"),
        ("if model.knows(1)}", "}"),
        ("str(target.dtype),", "0,"),
    ),
    *family(
        "controller",
        "engine/explain.py",
        ("(plain.wall_seconds - plain.prefill_seconds)", "plain.wall_seconds"),
        ("if not step.nodes and step.seconds]", "]"),
        ("return self.wall - self.seconds[\"prefill\"]", "return self.wall"),
        ("key=lambda one: -one[0])]", "key=lambda one: one[0])]"),
    ),
    *family(
        "controller",
        "control/costs.py",
        ("self._spread[1:, 1:] += OTHER_DAY * _WALK", "self._spread[1:, 1:] += 9 * _WALK"),
        ("self._spread[1:, 1:] += ALARM * _WALK", "pass"),
        ("self._spread[0, 0] += DRIFT", "pass"),
        ("found = found - np.clip(", "found = found - 0 * np.clip("),
        ("return not self._drafted or", "return True or"),
        ("return self._since_plain > 0 and math.log(speed) < doubt < UNTRIED", "return False"),
        ("other._spread[0, 0] += OTHER_BATCH", "pass"),
        ("(first if nearest is None else models[nearest])", "first"),
        ("for rows in wanted]) - _seen(batch)", "for rows in wanted]) - _seen(1)"),
    ),
    *family(
        "drawn",
        "draft/recycle/adjacency.py",
        ("if paths[0][0][0] < 0:", "if False:"),
    ),
    *family(
        "drawn",
        "draft/builder.py",
        ("q[: max(parents) + 1] if length else None", "q[: max(parents) + 1]"),
    ),
    *family(
        "drawn",
        "draft/recycle/paths_kernel.py",
        ("probs = tl.where(_held(masses, token, place, width), token, probs)", "probs = token"),
        ("level * count + tl.where(apart, path, 0)) + spot)", "tl.where(apart, path, 0)) + spot)"),
        ("level * count + tl.where(apart, path, 0)) + spot)", "level * count + tl.where(apart, path, 0)))"),
        ("tl.where(apart, path, 0)", "path"),
        ("tl.where(rank < many, 0, rank - many + 1)", "tl.where(rank < many, 0, rank)"),
        ("order = node * (block_paths + 1) + first", "order = first"),
        ("known = _held(masses, probs, place, width)", "known = probs >= 0"),
        ("    q.zero_()\n", ""),
        ("tl.where(chances > 0, sums, 0.0), mix(key))", "tl.where(chances > 0, sums, 0.0), key)"),
        ("(token[:, None] == token[None, :]) & real[None, :]", "(token[:, None] == token[None, :])"),
        ("mask=(weights > 0) & (real & known)[:, None])", "mask=(weights >= 0) & (real & known)[:, None])"),
    ),
    *family(
        "penalties",
        "cuda/draw.py",
        ("while node > 0:  # the root is in the text", "while node >= 0:"),
        ("node = row.node", "node = tl.load(row.parents + row.node)"),
        ("(token < start + names.numel)", "(token < start + BLOCK)"),
        ("(token < start + names.numel)", "(token < row.vocabulary)", "a comparison of all names finds no token that is not among them; the guard spares it"),
        ("tl.where(seen > 0, damped, value)", "tl.where((seen & TIMES) > 0, damped, value)"),
        ("row.presence + row.frequency * times", "(row.presence + row.frequency) * times"),
        ("counts + counted * vocabulary", "counts + text * vocabulary"),
    ),
    *family(
        "penalties",
        "cuda/choices.py",
        ("self._known.pop(text) for text", "self._known[text] for text"),
        ("text.prompt_length <= counted <= len(text.tokens)", "text.prompt_length <= counted"),
        ("if row not in held and row not in taken", "if row not in held"),
        ("self.table.index_fill_(0, rows, 0)", "pass"),
        ("if known and self._counted == counted:", "if known:"),
        ("if known and max(self._counted) < 0:", "if known:"),
    ),
    *family(
        "penalties",
        "cuda/verify_graph.py",
        ("probs._warp.processes or not have_kernels(device)", "not have_kernels(device)"),
        ("(choices is None and not probs.capturable)", "not probs.capturable"),
    ),
    *family(
        "sheet",
        "cuda/inputs.py",
        ("if layout is None or layout is not self._layout:", "if self._layout is None:"),
        ('np.add(host["depths"], host["lengths"][:, None], out=host["positions"])', 'np.copyto(host["positions"], host["depths"])'),
        ('host["slots"].fill(-1)', 'host["slots"].fill(0)'),
        ('host["tokens"][:texts, 0] = roots', "pass"),
        ("if written is not None:", "if False:"),
    ),
    *family(
        "begun",
        "cuda/advance.py",
        ("lengths += kept", "pass"),
        ("starts += kept", "pass"),
        ("positions += kept[:, None]", "pass"),
        ("tokens[:, 0] = moves[:, 1]", "pass"),
        ("(paths >= 0).sum(dim=1)", "paths.shape[1]"),
        ("tokens[:, 1 : drafted.shape[1]] = drafted[:, 1:]", "tokens[:, : drafted.shape[1]] = drafted"),
        ("key_depths[:, :nodes] = new_depths", "pass"),
        ("torch.add(lengths[:, None], depths, out=positions)", "pass"),
        ("restored(*places[:8])", "restored(*places[:5])"),
        ("    known.copy_(tokens)\n\n\ndef advance_inputs", "\n\ndef advance_inputs"),
    ),
    *family(
        "begun",
        "cuda/graphs.py",
        ("if not (self.committed and ", "if not ("),
        ("self.sequences != tuple(sequences) or ", ""),
        ("(self.batch.nodes, len(mine)) != (batch.nodes, len(theirs))", "len(mine) != len(theirs)"),
        ("one is other or len(one) == len(other) == 1", "one is other or len(one) == 1"),
        ("one is other or len(one) == len(other) == 1", "True"),
        ("tensor.copy_(value)", "pass"),
        ("batch.tokens = self.batch.tokens", "pass", "the forest brings together the same tokens by itself, with more launches"),
    ),
    *family(
        "begun",
        "backends/transformers/target.py",
        ("self._passes += 1  # graphs share memory: whatever an enqueued pass found is overwritten", "pass"),
        ("if not self._moved or furthest", "if furthest"),
        (" + after.paths.shape[1] + batch.nodes", " + batch.nodes"),
    ),
    *family(
        "begun",
        "backends/transformers/sequences.py",
        (
            "self._passes += 1  # slots move\n        self._prefills.pop(sequence, None)\n        self.store.close",
            "self._prefills.pop(sequence, None)\n        self.store.close",
        ),
    ),
    *family(
        "begun",
        "engine/pipelined.py",
        ("verdicts, logprobs, seen)", "verdicts, self.logprobs(generations, batch, scored, found), seen)"),
        ("self._budgets(generations, depth + 1)", "self._budgets(generations)"),
        ("self.drafter.draw is Draw.FIXED", "True"),
        (" or self._changes(generations)", ""),
        ("    self.clock.lap(\"score\")\n        probs =", "self.clock.lap(\"score\")\n        probs =", "on a host the time is that of a call that returns at once"),
    ),
    *family(
        "lingering",
        "engine/lingering.py",
        ("[*row.tokens, *behind]", "list(row.tokens)"),
        ("row.tokens = [*row.tokens, *behind]", "row.tokens += behind"),
        ("self.sequence.tokens = list(self.text_tokens)", "pass"),
    ),
    *family(
        "lingering",
        "engine/scheduler.py",
        ("self.target.free_slots or self.lingering", "self.target.free_slots"),
        ("if self._waiting or self.prefilling:\n            self.thin_out()", "if False:\n            pass"),
        ("if sparing and lingering and ", "if lingering and "),
        ("if sparing and lingering and ", "if False and "),
        ("return held <= MOST_HELD * (whole - held)", "return True"),
        ("            self.leave(generation)\n        self.thin_out(sparing=True)\n", "            self.leave(generation)\n"),
    ),
    *family(
        "lingering",
        "engine/request.py",
        ("return not self.request.sampling.processors", "return True"),
    ),
    *family(
        "lingering",
        "engine/pipelined.py",
        ('self._rows_may_linger = verifier.name == "match"', "self._rows_may_linger = True"),
        ("return self._rows_may_linger and self._inflight is not None", "return self._rows_may_linger"),
    ),
    *family(
        "lingering",
        "engine/engine.py",
        ("generation.sequence.tokens += outcome.tokens", "pass"),
        ("                if scheduler.lingering:\n", "                if False:\n"),
        ("behind=tokens[number:]", "behind=tokens"),
    ),
    *family(
        "copies",
        "draft/head/trees/copies.py",
        ("torch.where(places < end, agreeing, 0)", "torch.where(places <= end, agreeing, 0)"),
        ("(REACH - 1, 0), value=-2)", "(REACH - 1, 0), value=0)"),
        ("steps % (end - best).clamp_min(1)", "steps"),
        ("(agreeing * cells + places)", "(agreeing * cells - places)"),
        ("torch.maximum(values, copy.values[:, this])", "values"),
        ("torch.where(found, NOTHING, own_values[:, this])", "own_values[:, this]"),
        ("range(min(depth + 1, count))", "range(min(depth, count))"),
    ),
    *family(
        "copies",
        "draft/head/prompt.py",
        ("value, is_causal=True", "value, is_causal=False"),
        ("kept[slots, :, :longest] = new", "kept[slots, :, : longest - 1] = new[:, :, 1:]"),
        (", wanted=last)", ", wanted=0 * last)"),
        ("(positions <= last[:, None])", "(positions < last[:, None])"),
    ),
    *family(
        "head",
        "draft/head/trees/device.py",
        ("lengths[:, None] + behind.depths, attend, look)", "lengths[:, None] + 1 + behind.depths, attend, look)"),
        ("end, every = (kept - 1).clamp_min(0), ", "end, every = kept.clamp_max(steps - 1), "),
        ("after = torch.where(last, following[:, None], ", "after = torch.where(last & False, following[:, None], "),
        ("own = (rows <= rows[:, None]) & (real", "own = (rows >= 0) & (real"),
        ("depths = torch.cat([depths, kept[:, None] + ", "depths = torch.cat([depths, 0 * kept[:, None] + steps + "),
        ("foreseen[slots, min(depth, masks) - 1]", "foreseen[slots, min(depth, masks - 1)]"),
    ),
    *family(
        "head",
        "draft/head/trees/best_first.py",
        ("own = own[every, above]", "own = own[every, above * 0]"),
        ("carry[every, above], tokens, cell, own, depth)", "carry[every, above * 0], tokens, cell, own, depth)"),
        ("value = (values[..., None] + likely.logprobs).flatten(1)", "value = likely.logprobs.flatten(1)"),
        ("bits[:nodes, : words_for(nodes)])", "bits[:nodes])"),
    ),
    *family(
        "head",
        "draft/head/trees/ahead.py",
        ("self._cache.lengths[sequence] += len(verdict.path)", "self._cache.lengths[sequence] += len(verdict.path) - 1"),
        ("return self._expected == [(sequence, sequence.root) for sequence in sequences]", "return bool(self._expected)"),
    ),
    *family(
        "head",
        "draft/head/drafter.py",
        ("self.head.frequencies = self.trained.head.frequencies.float().to(target.device)", "pass"),
    ),
    *family(
        "head",
        "draft/head/following.py",
        ("self.unread.cut(before - lengths[sequence])", "pass"),
        ("self.whole &= lengths[sequence] + len(self.unread) == before", "pass"),
    ),
    *family(
        "head-training",
        "train/head/unroll.py",
        ("read = functional.pad(carry[:, :-1], (0, 0, 1, 0))", "read = carry"),
        ("torch.where(key_depths == 0, key_rows <= anchors, own)", "torch.where(key_depths == 0, key_rows <= anchors + 1, own)"),
        ("(key_depths <= depths[:, None])", "(key_depths < depths[:, None])"),
        ("own = (key_rows - key_depths == anchors) & ", "own = (key_rows <= rows[:, None]) & "),
        ("look = _look(cached, places - step)", "look = _look(cached, places)"),
    ),
    *family(
        "head-training",
        "train/head/learn.py",
        ("self.head.features([state[:, :-2] for state in hidden])", "self.head.features([state[:, 1:-1] for state in hidden])"),
        ("rows = rows & functional.pad(right[:, :-1], (1, 0))", "pass"),
    ),
    *family(
        "head-training",
        "train/head/loss.py",
        ("slope = said.exp() - 0.5 * meant.exp()", "slope = said.exp() - meant.exp()"),
    ),
    *family(
        "students",
        "train/student/divergence.py",
        ("return (p * (log_p - log_q)).sum(-1), q - p", "return (p * (log_p - log_q)).sum(-1), p - q"),
        ("return value, q * (apart - value[:, None])", "return value, q * apart"),
        ("apart = 0.5 * (log_q - log_m)", "apart = log_q - log_m"),
        ("side = 0.5 * torch.sign(q - p)", "side = torch.sign(q - p)"),
    ),
    *family(
        "students",
        "train/student/score.py",
        ("table.unfold(1, self.depth, 1).cumprod(-1)", "table.unfold(1, self.depth, 1)"),
    ),
    *family(
        "nested",
        "draft/nested/exits.py",
        ("cost += segments[number] * float(left.mean())", "cost += segments[number]"),
        ("left = left & ~leaves", "pass"),
        ("_speed(accepted[number], costs[number], depth)", "_speed(accepted[number], 0.0, depth)"),
        ("accepted = samples[:, 1].mean(axis=0)", "accepted = samples[:, 0].mean(axis=0)"),
    ),
    *family(
        "nested",
        "draft/nested/parts.py",
        ("nn.ModuleList(part._modules[last][:count])", "part._modules[last]"),
        ("found._modules = dict(module._modules)", "pass"),
    ),
    *family(
        "nested",
        "draft/nested/drafter.py",
        ("if target.execution.kernels and self.threshold is None:", "if target.execution.kernels:"),
        ("return None if self.only is None else super()._on_device(target)", "return None"),
    ),
    *family(
        "nested",
        "draft/nested/cache.py",
        ("beside.seen[place, needed] <= number", "beside.seen[place, needed] < number"),
        ("seen[place, self.length + above] = True", "pass"),
        ("beside.seen[current.slot_column, current.rows] = 1", "pass"),
    ),
    *family(
        "packed",
        "backends/packed.py",
        ("self._weight._version != self._version or ", ""),
        ("layer.__dict__.pop(\"forward\", None)", "pass"),
        ("wanted <= SHARE * free_memory()", "wanted <= free_memory()"),
        (" and one.numel() >= SMALL", ""),
        ("return lambda rows: product(rows, layer.bias)", "return lambda rows: product(rows)"),
        ("rows = rows.contiguous()", "pass"),
        ("torch.allclose(wanted.float(), found.float(), atol=TOLERANCE * float(wanted.abs().max()))", "True"),
    ),
    *family(
        "foresight",
        "draft/foresight.py",
        ("torch.tensor(depths) + len(sequence.tokens)", "torch.tensor(depths) + len(sequence.tokens) - 1"),
        ('STREAM = stream_of("verify", "token", 0)', 'STREAM = stream_of("draft", "token", 0)'),
        ("waits(mix(keys), blocks)", "waits(keys, blocks)"),
        ("speed, own_speed = mass / second, more / own", "speed, own_speed = mass * second, more / own"),
        ("listed = (masses / first / speeds)", "listed = (1 / first / speeds)"),
        (" + (more / first.gather(2, theirs)).sum(-1, keepdim=True)", ""),
    ),
    *family(
        "foresight",
        "engine/engine.py",
        ('drafter.let_foresee(verifier.name == "match")', "drafter.let_foresee(True)"),
    ),
    *family(
        "foresight",
        "draft/tree_drafter.py",
        ("if self.foresees and self.draw is Draw.FIXED:", "if self.draw is Draw.FIXED:"),
    ),
    *family(
        "foresight",
        "cuda/best_tokens.py",
        ("mass = mass / wait\n", "mass = mass * wait\n"),
        ("own_first = tl.where(drawn, _waits(mix(key), own_block), 1.0)", "own_first = 1.0"),
        ("real = first + number < end", "real = first + number <= end"),
    ),
]  # fmt: skip

BASE = "tests/conformance/test_verifiers.py"
TESTS = {
    "foresight": ["tests/test_foresight.py", "tests/test_best_tokens.py"],
    "token": ["tests/test_verify_token.py", BASE, "tests/test_verify_batches.py"],
    "block": ["tests/test_verify_block.py", BASE, "tests/test_verify_batches.py", "tests/test_verify_precision.py"],
    "gbv": ["tests/test_verify_gbv.py", BASE, "tests/test_verify_batches.py", "tests/test_verify_order.py"],
    "cascade": ["tests/test_verify_cascade.py", BASE, "tests/test_verify_batches.py", "tests/test_verify_precision.py"],
    "recursive": ["tests/test_verify_recursive.py", BASE, "tests/test_verify_batches.py"],
    "replacement": ["tests/test_with_replacement.py", "tests/test_verify_recursive.py"],
    "traversal": ["tests/test_verify_traversal.py", BASE, "tests/test_verify_batches.py"],
    "k-seq": ["tests/test_verify_spectr.py", BASE, "tests/test_verify_batches.py"],
    "order": ["tests/test_verify_order.py", "tests/test_verify_gbv.py", "tests/test_verify_precision.py"],
    "match": ["tests/test_match.py", BASE],
    "auto": ["tests/test_verify_auto.py"],
    "common": [
        "tests/test_target_probs.py",
        "tests/test_registry.py",
        "tests/test_match.py",
        "tests/test_verify_order.py",
        BASE,
    ],
    "chance": ["tests/test_rng.py", "tests/test_sampler.py", "tests/test_builder.py"],
    "enumeration": ["tests/test_enumeration.py"],
    "audit": ["tests/test_exact_audit.py"],
    "growth": ["tests/test_sampler.py", "tests/test_builder.py", "tests/test_policies.py", "tests/test_topk.py"],
    "model": ["tests/test_model_drafter.py"],
    "dice": ["tests/test_sampler.py", "tests/test_model_drafter_probs.py"],
    "longest": ["tests/test_longest.py", "tests/test_fork.py"],
    "tree": ["tests/test_tree.py", BASE],
    "ranks": ["tests/test_recycle.py", "tests/test_adaptive_ranks.py"],
    "controller": [
        "tests/test_cost_memory.py",
        "tests/test_explain.py",
        "tests/test_adaptive_size.py",
        "tests/test_controller.py",
    ],
    "drawn": ["tests/test_device_paths.py"],
    "penalties": [
        "tests/test_choices.py",
        "tests/test_draw.py::test_each_node_is_penalised_for_its_own_path",
        "tests/test_draw.py::test_what_looks_back_is_recorded_where_the_kernel_draws",
    ],
    "sheet": ["tests/test_graphs.py"],
    "begun": ["tests/test_inflight.py"],
    "lingering": ["tests/test_lingering.py"],
    "head": ["tests/test_head_drafter.py", "tests/test_head_ahead.py"],
    "copies": [
        "tests/test_head_copies.py",
        "tests/test_head_drafter.py::test_a_prompt_longer_than_one_pass_is_read_as_in_training",
    ],
    "head-training": [
        "tests/test_head_training.py",
        "tests/test_head_loss.py",
        "tests/test_head_drafter.py",
        "tests/test_head_replay.py",
        "tests/test_head_learning.py",
    ],
    "students": ["tests/test_students.py"],
    "nested": ["tests/test_nested.py"],
    "packed": ["tests/test_packed.py"],
}
"""what runs for a family, in this order, until the first failure"""


def killer(mutant: Mutant, source: Path) -> str | None:
    """The name of the test that fails, if one does."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source, Path(folder) / "src")
        mutant.apply(Path(folder) / "src")
        return first_failure(Path(folder) / "src", TESTS[mutant.family])


def first_failure(source: Path, tests: list[str], workers: int = 1) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
    if workers > 1 and find_spec("xdist"):
        command += ["-n", str(workers)]
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - |$)", run.stdout, re.MULTILINE)
    return found[1] if found else f"pytest ended with {run.returncode}: {run.stdout[-300:]}{run.stderr[-300:]}"


def changed() -> set[str]:
    """Files below src/branchwise that differ from those of the commit that last wrote down a proof; all without one."""
    git = ["git", "-C", str(ROOT)]
    last = subprocess.run(
        [*git, "log", "-1", "--format=%H", "--", "tests/proof.json"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not last:
        return {mutant.file for mutant in MUTANTS}
    below = "src/branchwise"
    differ = subprocess.run(
        [*git, "diff", "--name-only", f"--relative={below}", last, "--", below],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(differ.stdout.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation check of the verifiers.")
    parser.add_argument("families", nargs="*", help=f"of {', '.join(TESTS)}; all unless given")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--changed", action="store_true", help="of files that changed since the last proof")
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="what is mutated")
    options = parser.parse_args()
    if unknown := set(options.families) - set(TESTS):
        parser.error(f"unknown families: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not options.families or mutant.family in options.families]
    if options.changed:
        files = changed()
        chosen = [mutant for mutant in chosen if mutant.file in files]
    if not chosen:
        print("No mutants to run.")
        return 0
    needed = dict.fromkeys(file for mutant in chosen for file in TESTS[mutant.family])
    if (failed := first_failure(options.source, list(needed), options.jobs)) is not None:
        print(f"Without any mutant {failed} fails: nothing can be learnt.")
        return 2
    survivors = 0
    living = [mutant for mutant in chosen if not mutant.equivalent]
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, killed in zip(living, pool.map(lambda m: killer(m, options.source), living), strict=True):
            survivors += killed is None
            print(
                f"{'SURVIVES' if killed is None else 'killed  '}  {mutant.name}\n          {killed or '-'}", flush=True
            )
    for mutant in chosen:
        if mutant.equivalent:
            print(f"equivalent  {mutant.name}\n          {mutant.equivalent}")
    print(f"{len(living)} mutants, {survivors} survive, {len(chosen) - len(living)} change nothing.")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
