"""Imported by the server that `train_helpers.spawn` forks processes from: what each of them would do again."""

import gc

import sqlite_utils  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("qwen3")  # type: ignore[no-untyped-call]  # compiles a thousand patterns

gc.collect()
gc.freeze()
