"""A module whose import does not end. It makes the file IMPORT_BEGAN first."""

import os
import signal
from pathlib import Path

Path(os.environ["IMPORT_BEGAN"]).touch()
signal.pause()
