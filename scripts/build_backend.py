"""setuptools' build backend with this folder on the path, so that its commands find build_library.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from setuptools.build_meta import *  # noqa: F403
