"""Audits: is what speculation writes what the target would have written?

Three audits, each of something that really runs, never of a twin of it:

    exact    a verifier's own code on small distributions, through every draft and every coin: no statistics
    model    a loaded model, its drafter and its engine: sampled blocks against the exact probabilities of those
             blocks, and greedy texts against plain decoding
    server   any server that completes prompts and reports logprobs: sampled blocks against the probabilities that a
             reference server states

The last two draw samples, so they state how often they would accuse a correct decoder and how small a distance they
would have found, and answer with LOSSLESS, NOT LOSSLESS or UNDECIDED; `blocks` holds their statistics.
"""
