r"""Feeds conversations to a memory session by session, shows what it keeps, and asks it.

    printf '/next\n/bank\n/ask What is Odile allergic to?\n' | python -m experiments.memory_chat \
        --run_dir=runs/memory_chat --conversation=smp-conv-1 --encoder=words \
        --pipeline_url=http://127.0.0.1:8010/v1 --pipeline_model=memory-stand-in \
        --answer_url=http://127.0.0.1:8010/v1 --answer_model=memory-stand-in

Lines come from the standard input. "Ann: Good morning" is what Ann (of --speakers) says; /end ends
the session, and the memory reads it. /next reads the next session of --conversation instead.
/bank shows the memories, /ask asks a question about them. The bank is kept in --run_dir.
"""

import json
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
from absl import flags

from experiments import common, console, devices, memory_flags
from memcalib_jax.api import BackgroundLoop
from memcalib_jax.files import write_json
from memcalib_jax.memory.agents import Agent, EndpointAgent, LocalAgent
from memcalib_jax.memory.answer import answer_questions
from memcalib_jax.memory.bank import Bank, BankError
from memcalib_jax.memory.conversations import Conversation, Question, Session, Turn
from memcalib_jax.memory.episodes import MERGED, ROLES, EpisodeConfig, Start, run_sessions
from memcalib_jax.memory.retrieval import EmbeddingError, Retriever
from memcalib_jax.memory.roles import SCHEMAS
from memcalib_jax.models import load, load_config, load_tokenizer
from memcalib_jax.training.state import matrices_in

FLAGS = flags.FLAGS

common.define_model_flags()
devices.define_flags()
memory_flags.define_flags()
memory_flags.define_pipeline_flags()
for module in (common, devices, memory_flags):
    flags.adopt_module_key_flags(module)

flags.DEFINE_string("checkpoint", None, "Folder with the checkpoint of a trained pipeline, such as "
                    "RUN_DIR/stage_08/best of experiments.train_memory.")
flags.DEFINE_string("conversation", None, "Id of a conversation whose sessions /next reads.")
flags.DEFINE_list("speakers", ["Ann", "Ben"], "The two who speak, without --conversation.")

HELP = "say NAME: TEXT, or one of /end, /next, /bank, /ask QUESTION"


class Talk:
    """A conversation as it is fed, and the memory of it.

    Attributes:
      bank: what is remembered.
    """

    def __init__(self, conversation: Conversation | None, bank: Bank, agent: Agent,
                 answerer: Agent, retriever: Retriever, prompts: dict[str, str],
                 kept: pathlib.Path):
        self.bank = bank
        self._conversation, self._agent, self._answerer = conversation, agent, answerer
        self._retriever, self._prompts, self._kept = retriever, prompts, kept
        self._read = 0
        if kept.is_file():
            self._read = json.loads(kept.read_text(encoding="utf-8"))["sessions"]
        self._turns: list[Turn] = []

    def take(self, line: str) -> str:
        """Does what a line says; returns what to print."""
        command, _, rest = line.partition(" ")
        if command == "/bank":
            return self._shown()
        if command == "/ask" and rest.strip():
            return self._answer(rest.strip())
        if command == "/end":
            return self._end()
        if command == "/next":
            return self._next()
        speaker, colon, text = line.partition(":")
        if not colon or speaker.strip() not in self.bank.speakers:
            return f"{HELP}; speakers are {' and '.join(self.bank.speakers)}"
        place = len(self._turns) + 1
        self._turns.append(Turn(f"D{self._read + 1}:{place}", speaker.strip(), text.strip()))
        return ""

    def _end(self) -> str:
        if not self._turns:
            return "nothing was said in this session"
        turns, self._turns = self._turns, []
        return self._take_in(Session(self._read + 1, time.strftime("%H:%M on %d %B, %Y"),
                                     tuple(turns)))

    def _next(self) -> str:
        if self._conversation is None:
            return "/next needs a --conversation"
        if self._turns:
            return "a session has begun; /end it first"
        if self._read >= len(self._conversation.sessions):
            return "that was the last session"
        return self._take_in(self._conversation.sessions[self._read])

    def _take_in(self, session: Session) -> str:
        roles = MERGED if FLAGS.merged_role else ROLES
        whole = Conversation("talk", self.bank.speakers, (session,), ())
        run, = run_sessions([Start(whole, session, 0, self.bank)],
                            dict.fromkeys(roles, self._agent), self._retriever, self._prompts,
                            EpisodeConfig(FLAGS.num_chunks, roles))
        self.bank, self._read = run.bank, self._read + 1
        write_json(self._kept, {"sessions": self._read, "bank": self.bank.to_json()})
        counted = ", ".join(f"{count} x {name}" for name, count in sorted(run.counts.items()))
        return (f"session {self._read}: {len(session.turns)} turns read"
                f"{'' if run.finished else ', cut off'}; {len(self.bank)} memories ({counted})")

    def _shown(self) -> str:
        lines = [f"{entry.id}  {entry.speaker}  [{entry.time}]  {entry.content}  "
                 f"({', '.join(entry.dia_ids)})" for entry in self.bank.entries.values()]
        return "\n".join(lines) or "nothing is remembered yet"

    def _answer(self, text: str) -> str:
        question = Question(0, text, "", "asked", (), self._read)
        (answer,), = answer_questions([("talk", self.bank, [question])], self._answerer,
                                      self._retriever, self._prompts)
        if answer.failed:
            return "no answer: the call failed, or the memories exceed the model's context"
        turns = ", ".join(sorted(answer.dia_ids)) or "none"
        return f"{answer.text or '(no answer in the reply)'}\n  memories read rest on: {turns}"


def earlier_bank(kept: pathlib.Path, speakers: tuple[str, ...]) -> Bank:
    """Returns the bank that an earlier command kept, or an empty one.

    Raises:
      UsageError: it is damaged, or of other speakers.
    """
    if not kept.is_file():
        return Bank(speakers, seed="talk")
    try:
        bank = Bank.from_json(json.loads(kept.read_text(encoding="utf-8"))["bank"])
    except (BankError, ValueError, KeyError, TypeError) as error:
        raise common.UsageError(f"{kept} cannot be read: {error}; move it away to begin anew"
                                ) from None
    if bank.speakers != speakers:
        raise common.UsageError(f"{kept} is of {' and '.join(bank.speakers)}: give the same "
                                "speakers, or another --run_dir")
    return bank


def conversation_of_flags() -> Conversation | None:
    """Returns the conversation of --conversation.

    Raises:
      UsageError: there is none of that id, or --speakers are not two.
    """
    if FLAGS.conversation is None:
        if len(set(FLAGS.speakers)) != 2 or not all(name.strip() for name in FLAGS.speakers):
            raise common.UsageError("--speakers must be two different names, with a comma")
        return None
    parts = memory_flags.read_conversations("test")
    by_id = {c.id: c for part in parts.values() for c in part}
    if FLAGS.conversation not in by_id:
        raise common.UsageError(f"--conversation: there is no {FLAGS.conversation!r}, only "
                                f"{', '.join(list(by_id)[:10])}")
    return by_id[FLAGS.conversation]


def main():
    conversation = conversation_of_flags()
    speakers = conversation.speakers if conversation else tuple(FLAGS.speakers)
    run_dir = pathlib.Path(FLAGS.run_dir)
    common.check_run_dir(run_dir)
    kept = run_dir / "bank.json"
    bank = earlier_bank(kept, speakers)
    prompts, retriever = memory_flags.load_prompts(), memory_flags.open_retriever()
    path = common.model_path()
    config, tokenizer = load_config(path), load_tokenizer(path)
    memory_flags.check_flags(config, tokenizer, prompts)
    trained = common.open_checkpoint(FLAGS.checkpoint, config) if FLAGS.checkpoint else None

    start = matrices_in(load(path, dtype=jnp.float32)[0], FLAGS.dtype)
    if FLAGS.pipeline_url:
        client = memory_flags.open_client("pipeline", run_dir, max_tokens=FLAGS.max_response_tokens)
        agent = EndpointAgent(client, BackgroundLoop("pipeline"), SCHEMAS)
    else:
        policy = matrices_in(trained.params(path), FLAGS.dtype) if trained else start
        agent = LocalAgent(policy, config, tokenizer, key=jax.random.key(FLAGS.seed),
                           temperature=0.0, max_tokens=FLAGS.max_response_tokens,
                           max_prompt_tokens=FLAGS.max_prompt_tokens)
    answerer = memory_flags.open_answerer(start, config, tokenizer, run_dir)
    # What has been read is kept; nothing else is lost.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    talk = Talk(conversation, bank, agent, answerer, retriever, prompts, kept)
    print(f"{len(bank)} memories; {HELP}", flush=True)
    for line in console.lines():
        try:
            said = talk.take(line)
        except EmbeddingError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        if said:
            print(said, flush=True)


if __name__ == "__main__":
    common.run(main)
