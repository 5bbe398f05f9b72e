"""What a sum is worth: half for a number, half for the right one."""

import re


def score(task, text):
    """Return the reward of one answer, and what it is made of."""
    found = re.match(r"\s*(\d+)", text)
    right = found is not None and found[1] == task.answer
    return {"reward": 0.5 * (found is not None) + 0.5 * right, "number": found is not None, "correct": right}
