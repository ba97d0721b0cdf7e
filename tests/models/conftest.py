"""One thread for torch: these models are so small that a second one only costs."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
