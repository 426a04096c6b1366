"""MemCalib records and the prompts made from them."""

from memcalib_jax.data.jsonl import RecordError
from memcalib_jax.data.records import LEVELS, Atom, Block, Record, load_records

__all__ = ["LEVELS", "Atom", "Block", "Record", "RecordError", "load_records"]
