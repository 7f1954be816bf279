"""Without the plugin installed (``pip install -e .``) its tests are not collected."""

from importlib.util import find_spec

import torch

torch.set_num_threads(1)
collect_ignore_glob = [] if find_spec("hybridtf_example") else ["test_*.py"]
