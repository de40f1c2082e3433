"""Makes `tests/` importable for what several test files share, and chooses the back end of Keras in this process."""

import os
import sys
from pathlib import Path

# Ranks that are threads need eager code. Real ranks get both back ends, from the tests that start them.
os.environ.setdefault("KERAS_BACKEND", "torch")

sys.path.insert(0, str(Path(__file__).parent))
