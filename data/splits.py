"""Train, validation and test are disjoint by construction: a task's own text decides where it belongs.

Validation is held back for choosing settings; no stage reads it yet.
"""

import hashlib

from data.types import Split

TEST_SHARE, VALIDATION_SHARE, BUCKETS = 3, 1, 16


def split_of(text: str) -> Split:
    """The one split that may hold a task of this text: 3/16 test, 1/16 validation, the rest train."""
    bucket = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % BUCKETS
    if bucket < TEST_SHARE:
        return "test"
    return "validation" if bucket < TEST_SHARE + VALIDATION_SHARE else "train"
