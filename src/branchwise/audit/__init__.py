"""Audits: does speculation keep the target's distribution?

Three audits, each of which runs the code that serves users:

    exact    a verifier's own code on small distributions, through every draft and every coin, without sampling
    model    a loaded model, its drafter and its engine: sampled blocks against the exact probabilities of those
             blocks, and greedy texts against plain decoding
    server   any server that completes prompts and reports logprobs: sampled blocks against the probabilities that a
             reference server states

The last two sample, so they state their false-alarm rate and the distance that they would have detected, and
conclude LOSSLESS, NOT LOSSLESS or UNDECIDED (`findings`); `blocks` holds their statistics.
"""
