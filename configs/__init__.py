"""Where numbers are chosen or quoted: machines, networks, technology, published references.

The folder holds YAML; this module only says where it lies, because `importlib.resources` does not find a data-only
folder in an editable install.
"""

from pathlib import Path

ROOT = Path(__file__).parent
