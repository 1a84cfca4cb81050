"""The probe's package lives where only an engine finds it: put that folder on the path."""

import sys
from pathlib import Path

import harness.probe

sys.path.insert(0, str(Path(harness.probe.__file__).parent / "inject"))
