"""What drafting earns and what it costs: how many nodes pay, decided before every step.

costs     what a pass over some number of rows costs, learned from the passes of generation
memory    these costs, kept from one process to the next
trust     how often the promises of a source come true, learned from verdicts
choice    the tree size with the most tokens a second, or none if drafting loses
guard     which source drafts, for any drafter, by the time of whole steps
ladder    the same choice on a device, among the few tree sizes that are recorded there
bandit    a choice among arms, by what each of them gave lately
"""
