"""Videos for tiny models: files that PyAV writes, frames, and what transformers answers to them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image as Pictures
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize as of_frames
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_all_frames

from pd_cluster.media.clips import fitted
from pd_cluster.media.given_video import Frames
from pd_cluster.media.kinds.qwen import GridRules
from tests.support.checkpoints import EOS_ID, make_tokenizer, until_end
from tests.support.pictures import PATCH, Shown, VisionPart, reference_model

FRAME_SIZES = {"shortest_edge": 2 * (2 * PATCH) ** 2, "longest_edge": 6 * (2 * PATCH) ** 2}  # 2 to 6 tokens of a frame
TOKENS_PER_SECOND = 4
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)
