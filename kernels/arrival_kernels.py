"""How the splits of a tile's keys, each a program, wait for one another in front of their merge."""

import triton
import triton.language as tl

MAX_SPLITS = 32  # a power of two; one bit each in the arrival word
COUNT_STEP = tl.constexpr(MAX_SPLITS)  # what a call adds to the count of arrivals
GIVEN_UP = tl.constexpr(0xFFFFFFFF)  # bits of the arrival word; the count is above them


@triton.jit
def meet(word, split, live, POLLS: tl.constexpr):
    """Says that this split's partial is stored, and waits for the others: (whether all are stored,
    the splits whose shares are this one's to merge, as bits). Scalars alone: Gluon calls it too.

    The arrival word: bits 32-63 count the splits that have stored their partial; bit z says that
    split z gave up waiting. Every call adds exactly COUNT_STEP to the count (the last to arrive
    makes up for the splits without keys), so that nothing needs to be reset and a call begins at
    a multiple of COUNT_STEP. Whoever is last sees who had given up, clears the bits and merges
    their rows too; who gives up after that sees it, takes the bit back and merges its own.
    """
    mine = (split * 0 + 1).to(tl.int64) << split
    old = tl.atomic_add(word, GIVEN_UP + 1, sem="acq_rel", scope="gpu")
    arrivals = ((old >> 32) & (COUNT_STEP - 1)) + 1
    base = (old >> 32) - arrivals + 1
    if arrivals == live:
        given_up = old & GIVEN_UP
        missing = ((split * 0 + COUNT_STEP).to(tl.int64) - live) << 32
        tl.atomic_add(word, missing - given_up, sem="relaxed", scope="gpu")
        mine |= given_up
    polls = 0
    while (arrivals < live) & (polls < POLLS):
        seen = tl.atomic_add(word, 0, sem="acquire", scope="gpu")
        arrivals = ((seen >> 32) - base) & GIVEN_UP
        polls += 1
    if arrivals < live:
        seen = tl.atomic_add(word, mine, sem="acq_rel", scope="gpu")
        arrivals = ((seen >> 32) - base) & GIVEN_UP
        if arrivals >= live:
            tl.atomic_add(word, -mine, sem="relaxed", scope="gpu")
    return arrivals >= live, mine
