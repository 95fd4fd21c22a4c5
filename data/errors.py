"""What can be wrong with data, said in one line: what was given, what was expected, what to do."""

from collections import Counter

from earlyfusion.kernels.errors import UserError


class DataError(UserError, ValueError):
    """Data or its configuration cannot be used. The message is one line and names the file, source or
    option."""


class BadSample(DataError):
    """One sample cannot be used (unreadable image, wrong encoding, image over the budget); others may be
    fine.

    The loader raises or skips and counts it by `reason` (one word of REASONS), as `DataConfig.on_bad_sample`
    says.
    """

    # A reason beside the text: counters need one word, people a sentence.
    def __init__(self, message: str, reason: str = "unreadable") -> None:
        super().__init__(message)
        self.reason = reason


# A closed list: reports and resumed counters sum over the same names.
REASONS = (
    "unreadable",
    "truncated_tar",
    "missing_member",
    "corrupt_image",
    "empty_file",
    "pixel_limit",
    "corrupt_video",
    "video_limit",
    "encoding",
    "bad_json",
    "empty_text",
    "box_outside",
    "over_budget",
    "too_large",
    "bad_index",
    "unexpected",
)
"""Why a sample was left out."""


def told(reasons: Counter[str]) -> str:
    """Reasons with their counts, the most frequent first."""
    return ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())


class DataExhausted(DataError):
    """Every source with a positive weight has reached its `max_epochs` and the packing pool is empty."""
