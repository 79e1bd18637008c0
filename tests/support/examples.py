"""How many examples a property test draws: where CI is set all of them, elsewhere a fifth.

Why: what a hundred more examples find is rare, and is found in CI; what a change breaks, few show.
"""

import os


def examples(count: int) -> int:
    """Of `count` in CI."""
    return count if os.environ.get("CI") else -(-count // 5)
