"""Makes `tests/` importable for what several test files share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
