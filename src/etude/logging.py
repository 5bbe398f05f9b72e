"""The logger of Etude, for trainers of yours that log beside it: `from etude.logging import logger`.

A plain logger of the standard library by the name `etude`. The command line shows it; in a script
`logging.basicConfig(level=logging.INFO)` does.
"""

from __future__ import annotations

import logging
from typing import Final

__all__ = ["logger"]

logger: Final = logging.getLogger("etude")
