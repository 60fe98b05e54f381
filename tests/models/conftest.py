"""Lets the tests of this folder import its helpers (model_cases, make_goldens, stories) by name."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
