"""The benchmark: one ruler for everything.

Words used in every file here:

    contestant  plain decoding (the baseline), a method of Branchwise, or a peer
    item        one prompt of a set: a text to continue, or a dialogue, continued with the model's own answers
    request     one turn of one item for one contestant in one round: one record
    round       one pass over all items; `--repeat` says how many
    group       the requests that run together as one batch and share a clock

All contestants run in one process, in turn, from the same token ids, and are counted by token ids. Every table, figure
and page is a function of records alone.
"""
