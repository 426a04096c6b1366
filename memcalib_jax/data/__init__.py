"""MemCalib records, the prompts made from them, and the stream that feeds training."""

from memcalib_jax.data.ablation import ablate
from memcalib_jax.data.jsonl import RecordError
from memcalib_jax.data.pipeline import prompt_batches
from memcalib_jax.data.prompts import build_messages, render
from memcalib_jax.data.records import LEVELS, Atom, Block, Record, load_records
from memcalib_jax.data.sample import SampleResponse, load_responses, sample_path
from memcalib_jax.data.sentences import sentence_ids, sentence_ids_of_text
from memcalib_jax.data.splits import split_by_ids, stratified_split

__all__ = [
    "LEVELS",
    "Atom",
    "Block",
    "Record",
    "RecordError",
    "SampleResponse",
    "ablate",
    "build_messages",
    "load_records",
    "load_responses",
    "prompt_batches",
    "render",
    "sample_path",
    "sentence_ids",
    "sentence_ids_of_text",
    "split_by_ids",
    "stratified_split",
]
