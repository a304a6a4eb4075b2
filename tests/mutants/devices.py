# ruff: noqa: E501  (texts of the source stay in one piece)
"""Mutants of what is computed where it is fast, on GPUs and CPUs."""

from __future__ import annotations

from tests.mutants.family import Family

FAMILIES = [
    Family("drawn", ["tests/test_device_paths.py"], {
        "draft/recycle/adjacency.py": [
            ("if paths[0][0][0] < 0:", "if False:"),
        ],
        "draft/builder.py": [
            ("q[: max(parents) + 1] if length else None", "q[: max(parents) + 1]"),
        ],
        "draft/recycle/paths_kernel.py": [
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
        ],
    }),
    Family("penalties", [
        "tests/test_choices.py",
        "tests/test_draw.py::test_each_node_is_penalised_for_its_own_path",
        "tests/test_draw.py::test_what_looks_back_is_recorded_where_the_kernel_draws",
    ], {
        "cuda/draw.py": [
            ("while node > 0:  # the root is in the text", "while node >= 0:"),
            ("node = row.node", "node = tl.load(row.parents + row.node)"),
            ("(token < start + names.numel)", "(token < start + BLOCK)"),
            ("(token < start + names.numel)", "(token < row.vocabulary)", "a comparison of all names finds no token that is not among them; the guard spares it"),
            ("tl.where(seen > 0, damped, value)", "tl.where((seen & TIMES) > 0, damped, value)"),
            ("row.presence + row.frequency * times", "(row.presence + row.frequency) * times"),
            ("counts + counted * vocabulary", "counts + text * vocabulary"),
        ],
        "cuda/choices.py": [
            ("self._known.pop(text) for text", "self._known[text] for text"),
            ("text.prompt_length <= counted <= len(text.tokens)", "text.prompt_length <= counted"),
            ("if row not in held and row not in taken", "if row not in held"),
            ("self.table.index_fill_(0, rows, 0)", "pass"),
            ("if known and self._counted == counted:", "if known:"),
            ("if known and max(self._counted) < 0:", "if known:"),
        ],
        "cuda/verify_graph.py": [
            ("probs._warp.processes or not have_kernels(device)", "not have_kernels(device)"),
            ("(choices is None and not probs.capturable)", "not probs.capturable"),
        ],
    }),
    Family("foresight", ["tests/test_foresight.py", "tests/test_best_tokens.py"], {
        "draft/foresight.py": [
            ("torch.tensor(depths) + len(sequence.tokens)", "torch.tensor(depths) + len(sequence.tokens) - 1"),
            ('STREAM = stream_of("verify", "token", 0)', 'STREAM = stream_of("draft", "token", 0)'),
            ("waits(mix(keys), blocks)", "waits(keys, blocks)"),
            ("speed, own_speed = mass / second, more / own", "speed, own_speed = mass * second, more / own"),
            ("listed = (masses / first / speeds)", "listed = (1 / first / speeds)"),
            (" + (more / first.gather(2, theirs)).sum(-1, keepdim=True)", ""),
        ],
        "engine/engine.py": [
            ('drafter.let_foresee(verifier.name == "match")', "drafter.let_foresee(True)"),
        ],
        "draft/tree_drafter.py": [
            ("if self.foresees and self.draw is Draw.FIXED:", "if self.draw is Draw.FIXED:"),
        ],
        "cuda/heads/best_tokens.py": [
            ("tl.sum(mass / wait, axis=1)", "tl.sum(mass * wait, axis=1)"),
            ("own_first = _waits(mix(key), own_block)", "own_first = 1.0"),
            ("real = first + number < end", "real = first + number <= end"),
            ("own = tl.topk(_ranked(own_value, tokens + column)", "own = tl.topk(_ranked(own_value, column)"),
        ],
    }),
    Family("few-rows", [
        "tests/test_head_kernels.py::test_the_best_nodes_of_a_level_are_expanded",
        "tests/test_draw.py::test_flat_rows_are_cut_as_they_would_be_whole",
        "tests/test_head_kernels.py::test_products_find_the_same_in_slices",
        "tests/test_layer_kernels.py::test_products_find_the_same_in_slices",
    ], {
        "cuda/heads/tree.py": [
            ("((rival == value[:, None]) & (other[None, :] < at[:, None]))\n        rank", "((rival == value[:, None]) & (other[None, :] > at[:, None]))\n        rank"),
            ("spot = tl.minimum(at, rows * count - 1)", "spot = at * (at < rows * count)"),
            ("word == bit // 32, 1, 0) << (bit % 32)", "word == 0, 1, 0) << (bit % 32)"),
        ],
        "cuda/products.py": [
            ("tl.arange(0, slices)[:, None] * piece", "tl.arange(0, slices)[:, None]"),
            ("real[None, :, None] & (at < width)[:, None, :]", "real[None, :, None] & (at < width + 999)[:, None, :]"),
        ],
        "cuda/draw.py": [
            ("least = (1 - top_p) * whole / (2 * row.vocabulary)", "least = (1 - top_p) * whole * 40 / row.vocabulary"),
        ],
    }),
    Family("sheet", ["tests/test_graphs.py"], {
        "cuda/inputs.py": [
            ("if layout is None or layout is not self._layout:", "if self._layout is None:"),
            ('np.add(host["depths"], host["lengths"][:, None], out=host["positions"])', 'np.copyto(host["positions"], host["depths"])'),
            ('host["slots"].fill(-1)', 'host["slots"].fill(0)'),
            ('host["tokens"][:texts, 0] = roots', "pass"),
            ("if written is not None:", "if False:"),
        ],
    }),
    Family("packed", ["tests/test_packed.py"], {
        "backends/packed.py": [
            ("self.plain(rows, bias) if changed or ", "self.plain(rows, bias) if "),
            ("layer.__dict__.pop(\"forward\", None)", "pass"),
            ("wanted <= SHARE * free_memory()", "wanted <= free_memory()"),
            (" and one.numel() >= SMALL", ""),
            ("return self.product(rows, self.layer.bias)", "return self.product(rows, None)"),
            ("rows = rows.contiguous()", "pass"),
            ("torch.allclose(wanted.float(), found.float(), atol=TOLERANCE * float(wanted.abs().max()))", "True"),
        ],
    }),
    Family("layers", ["tests/test_layer_kernels.py"], {
        "cuda/products.py": [
            ("mask &= ((slot >= 0) & (cell < capacity))[:, None]", "mask &= (slot >= 0)[:, None]"),
            ("mask &= ((slot >= 0) & (cell < capacity))[:, None]", "mask &= (cell < capacity)[:, None]"),
            ("kind, kept = (head - heads) // kv_heads, (head - heads) % kv_heads", "kind, kept = (head - heads) % 2, (head - heads) // 2"),
        ],
        "cuda/layers/rows.py": [
            ("squares.sum(dim=-1)", "squares.mean(dim=-1)"),
            ("if head < heads + kv_heads:", "if head < heads:"),
            ("upper * second.to(tl.float32) + lower", "upper * first.to(tl.float32) + lower"),
            ("(kept * weights).to(", "kept.to("),
            ("found = (total + before.to(tl.float32))", "found = total"),
            ("tl.load(bias + line + half, mask", "tl.load(bias + line, mask"),
        ],
        "cuda/layers/usual.py": [
            ("self._last[0] is states and ", ""),
            ("Turn(*position_embeddings) if self._turns else None", "Turn(*position_embeddings)"),
            ("attention_mask.size, self._scale", "None, self._scale"),
            ("rows.states, inner_norm)", "rows.weighted, inner_norm)"),
        ],
        "cuda/layers/fuse.py": [
            ("if {(way, index), (way, key)} <= self._agreed:", "if (way, index) in self._agreed:"),
            ("if {(way, index), (way, key)} <= self._agreed:", "if (way, key) in self._agreed:"),
            ("if reason is None:\n", "if True:\n"),
            ("return any(module._forward_hooks or module._forward_pre_hooks for module in parts)", "return False"),
        ],
        "cuda/layers/rounding.py": [
            ("flatten(0, -2)[telling]", "flatten(0, -2)"),
        ],
    }),
    Family("around", [
        "tests/test_layer_kernels.py::test_what_stands_around_the_layers_is_one_kernel_each",
        "tests/test_layer_kernels.py::test_positions_that_depend_on_the_others_are_not_looked_up",
    ], {
        "cuda/layers/ends.py": [
            ("tl.sum(wide * wide, axis=0)", "tl.sum(wide, axis=0)"),
            ("times = wide * tl.load(norm", "times = 1 + wide * tl.load(norm"),
            ("found = (state * scale)", "found = state"),
            ("for part in (some[:, :TRIED], some[:, TRIED:])", "for part in (every,)"),
            ("return found[:, :, 0], found[:, :, 1]", "return found[:, :, 1], found[:, :, 0]"),
        ],
    }),
    Family("advance", ["tests/test_advance.py"], {
        "cuda/advance_kernel.py": [
            ("(node > 0) & (node < drafted_nodes)", "node < drafted_nodes"),
            ("length + kept + depth", "length + depth"),
            ("tl.store(starts + text, start + kept)", "tl.store(starts + text, start)"),
            ("token.to(tl.int64), mask=inside)", "token.to(tl.int64), mask=inside & (node > 0))"),
            ("tl.store(key_depths + text * columns + node, depth, mask=laid)", "pass"),
            ("(text * laid_nodes + node) * laid_words + word", "(text * nodes + node) * laid_words + word"),
            ("    if steps > 0:\n", "    if steps >= 0:\n"),
        ],
    }),
    Family("bytes", [
        "tests/test_int8.py::test_our_own_product_is_exact_wherever_it_is",
        "tests/test_int8.py::test_a_row_gives_the_same_bits_alone_and_among_others",
        "tests/test_int8.py::test_rows_of_a_long_prompt_are_multiplied_in_parts",
    ], {
        "backends/native/products.c": [
            ("_mm512_sub_epi32(sums[r], zeros)", "sums[r]"),
            ("all->scales[from + r]", "all->scales[r]"),
            ("i < in; i += 4, rows += all->count", "i < in; i += 4, rows += count"),
            ("(const int32_t *)all->rows + from;", "(const int32_t *)all->rows;"),
            ("fours + i * some + 4 * r, bytes", "fours + i * some + r, bytes"),
            ("bytes + (first + r) * in", "bytes + r * in"),
            (".scales = scales + first", ".scales = scales"),
        ],
        "backends/int8.py": [
            ("self.zero * matrix.numbers.sum(", "127 * matrix.numbers.sum("),
            ("functional.pad(rows, self._fill) if self._fill[1] else rows.contiguous()", "rows.contiguous()"),
        ],
        "backends/native/__init__.py": [
            (".view(-1, PANEL, filled.shape[1] // 4, 4).transpose(1, 2)", ".view(-1, PANEL // 4, filled.shape[1], 4).transpose(1, 2)"),
        ],
    }),
    Family("host-layers", ["tests/test_host_layers.py", "tests/test_nested.py"], {
        "backends/native/attention.c": [
            ("depth < from[l] || ", ""),
            ("depth - all->window + 1 : INT64_MIN", "depth - all->window : INT64_MIN"),
            ("all->own ? text * all->nodes + nodes[l] : nodes[l]", "nodes[l]"),
            ("chance[l] == -INFINITY ? 0.0f : share", "share"),
            ("first = row < first ? row : first;", "first = row;"),
            ("for (ptrdiff_t j = 0; j < rows; j += KEYS)", "for (ptrdiff_t j = 0; j + 1 < rows; j += KEYS)"),
            ("(k < count ? k : count - 1) * width", "k * width", "what is behind the rows of a text may be read and is not used"),
            ("const int64_t depth = column < 0 ? column : depths[column];", "const int64_t depth = column;"),
            ("for (; i < width; i++) add_up(", "for (; i + 1 < width; i++) add_up("),
            ("kv_head * group + own % group", "kv_head + own % group"),
            ("(2 * width + all->most);", "width;"),
        ],
        "backends/native/rows.c": [
            ("r++, state += width, out += width", "r++, out += width"),
            ("(gate < 0 ? small : 1.0f)", "1.0f"),
            ("const float *const norm = h < heads ? all->query_norm : all->key_norm;", "const float *const norm = all->query_norm;"),
            ("all->places[r]) * width", "all->places[node]) * width"),
            ("rintf(rows[i] / scale) + zero", "(rows[i] / scale) + zero"),
            ("columns[i] * scale;", "columns[i];"),
        ],
        "backends/transformers/runner.py": [
            ("positions + max(first, 0), store)", "positions, store)"),
            ("if known is None or not known.layers.unchanged:", "if known is None:"),
        ],
        "backends/transformers/host_layers.py": [
            ("type(current) is not Pass or ", ""),
            ("hidden.shape[0] * hidden.shape[1] > MANY and not self._quantised", "False"),
            (".clone(memory_format=torch.contiguous_format)", ""),
            ("if self._quantised and len(self.layers) < len(layout.keys):", "if False:"),
            ("(agreed if agrees else refused).add(layer)", "agreed.add(layer)"),
            ("layer in agreed - refused", "layer not in refused"),
            ("return same and not watched and self._places() == self._values", "return not watched and self._places() == self._values"),
            ("return same and not watched and self._places() == self._values", "return same and self._places() == self._values"),
            ("return same and not watched and self._places() == self._values", "return same and not watched"),
            ("fits &= self._heads % self._kv_heads == 0 and self._width % 2 == 0", "fits = True"),
            ("window=window or 0", "window=0"),
            ("undo.callback(layer.__dict__.pop, \"forward\", None)", "pass"),
            ("jobs.turning.keys = jobs.attention.keys = keys.data_ptr()", "jobs.turning.keys = keys.data_ptr()"),
        ],
        "backends/native/layer.c": [
            ("add_norm(state, back, all->norm", "add_norm(state, 0, all->norm"),
            ("out[r * by->size + i] += by->bias[i];", ";"),
            ("all->norm, normed, rows, width, all->epsilon);\n    multiply(all->wide", "all->input_norm, normed, rows, width, all->epsilon);\n    multiply(all->wide"),
            ("out[i] = state[r * width + i] + out[i];", ";"),
        ],
    }),
    Family("host-head", ["tests/test_head_host.py", "tests/test_head_paced.py"], {
        "backends/native/layer.c": [
            ("all->read ? all->read : normed", "normed"),
            ("+ (r * all->outputs + o) * width", "+ r * all->outputs * width"),
            ("multiply(all->select, all->embedded", "multiply(all->select, all->out"),
            ("all->out[i] += back[i];", "all->out[i] = back[i];"),
            ("(2 * r + 1) * wide", "r * wide"),
        ],
        "backends/native/likely.c": [
            ("few < all->most && known[few] >= 0", "few < all->most"),
            ("mass(logits, size, most) + mass(own, few, most)", "mass(logits, size, most)"),
            ("all->width) * scale;", "all->width);"),
            ("(in_table ? logits : own)[place] = -INFINITY;", ""),
            ("all->slots[r / all->nodes]", "all->slots[0]"),
            ("in_table ? all->table[place] : known[place]", "in_table ? place : known[place]"),
        ],
        "draft/head/host.py": [
            ("None if number else read, jobs)", "read, jobs)"),
            ("if head.config.norm_before_residual:", "if False:"),
            ("torch.arange(first, first + own.shape[1])", "torch.arange(own.shape[1])"),
            ("lengths[:, None] + depths", "lengths[:, None] + depths * 0"),
            ("window=config.window", "window=0"),
            ("cache.store.dtype == torch.float32 and not head.config.cross", "cache.store.dtype == torch.float32"),
            ("if found is None or len(found) < len(layers):", "if found is None:"),
        ],
        "draft/head/trees/paced.py": [
            ("self.values[parent] if parent >= 0 else 0.0", "0.0"),
            ("real = above >= 0 and reach[above] > 0", "real = above >= 0"),
            ("reach[above] | 1 << number if real", "1 << number if real"),
            ("one >> WORD * word & (1 << WORD) - 1", "one & (1 << WORD) - 1"),
            ("own = own[every, above.numpy()]", "own = own[:, :1].repeat(width, axis=1)"),
            ("carry[torch.from_numpy(every), above]", "carry[:, :1].expand(-1, width, -1)"),
            ("[: self._texts]", ""),
        ],
    }),
]  # fmt: skip
