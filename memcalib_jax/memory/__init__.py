"""Memory-R2: building an agent's memory session by session, and what it is worth."""

from memcalib_jax.memory.bank import Bank, Delete, Entry, Insert, NoOperation, Update
from memcalib_jax.memory.conversations import Conversation, ConversationError, load_conversations
from memcalib_jax.memory.episodes import (
    EpisodeConfig, choose_rerolls, run_sessions, run_trajectories)
from memcalib_jax.memory.retrieval import Retriever, SearchConfig
from memcalib_jax.memory.rewards import RewardConfig, bleu_1, token_f1

__all__ = [
    "Bank",
    "Conversation",
    "ConversationError",
    "Delete",
    "Entry",
    "EpisodeConfig",
    "Insert",
    "NoOperation",
    "RewardConfig",
    "Retriever",
    "SearchConfig",
    "Update",
    "bleu_1",
    "choose_rerolls",
    "load_conversations",
    "run_sessions",
    "run_trajectories",
    "token_f1",
]
