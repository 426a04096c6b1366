"""A model of ours as an agent: tokens in, tokens out, shared prompts; and endpoints."""

import jax
import pytest
from random_models import random_params
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from memcalib_jax.api import BackgroundLoop, ChatClient, ChatSettings
from memcalib_jax.api.server import ChatServer, Refusal, serving
from memcalib_jax.memory.agents import Ask, Chat, EndpointAgent, Identity, LocalAgent, later_turn
from memcalib_jax.memory.roles import SCHEMAS
from memcalib_jax.models import ModelConfig

TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}")
WORDS = "<unk> <|im_start|> <|im_end|> system user assistant keep notes a boat cat runs".split()
END = WORDS.index("<|im_end|>")
CONFIG = ModelConfig("llama", vocab_size=len(WORDS), hidden_size=16, intermediate_size=24,
                     num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=256,
                     eos_ids=(END,))


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>",
                                   eos_token="<|im_end|>", chat_template=TEMPLATE)


def ids(text):
    return tuple(map(WORDS.index, text.split()))


def ask(text, trajectory=0, chat=Chat.opening("keep notes"), chunk=0):
    return Ask(Identity("c1", trajectory, 1, chunk, "extract"), chat, text)


def agent_of(tokenizer, **settings):
    settings = {"key": jax.random.key(0), "max_tokens": 60, "max_prompt_tokens": 150} | settings
    return LocalAgent(random_params(CONFIG, scale=0.3), CONFIG, tokenizer, **settings)


OPENING = ids("<|im_start|> system keep notes <|im_end|> <|im_start|> user a boat <|im_end|> "
              "<|im_start|> assistant")


def test_later_turns(tokenizer):
    assert later_turn(tokenizer, "a cat", CONFIG.eos_ids) == list(
        ids("<|im_start|> user a cat <|im_end|> <|im_start|> assistant"))


def test_a_chat_grows_by_the_sampled_tokens(tokenizer):
    agent = agent_of(tokenizer)
    first, = agent.reply([ask("a boat")])
    (start, end), = first.chat.steps
    assert first.end == "stop" and first.chat.tokens[:start] == OPENING
    assert first.chat.tokens[end - 1] == END and end == len(first.chat.tokens)
    assert len(first.chat.log_probs[0]) == end - start
    second, = agent.reply([ask("a cat", chat=first.chat, chunk=1)])
    grown = second.chat.tokens
    # The reply holds what no text brings back: special tokens are decoded to nothing.
    assert grown[:end] == first.chat.tokens
    start, _ = second.chat.steps[1]
    assert grown[end:start] == ids("<|im_start|> user a cat <|im_end|> <|im_start|> assistant")
    assert [m["content"] for m in second.chat.messages][1::2] == ["a boat", "a cat"]
    assert second.chat.messages[2]["content"] == first.text


def test_equal_prompts_are_prefilled_once_and_still_differ(tokenizer):
    agent = agent_of(tokenizer)
    spoken = agent.reply([ask("a boat", t) for t in range(4)] + [ask("a cat runs", 4)])
    short, long = len(OPENING), len(OPENING) + 1
    assert agent.counts["prompt_tokens"] == 4 * short + long
    assert agent.counts["prefilled_tokens"] == short + long
    assert agent.counts["reply_tokens"] == sum(e - s for x in spoken for s, e in x.chat.steps)
    assert len({x.chat.tokens for x in spoken[:4]}) > 1
    again = agent_of(tokenizer).reply([ask("a cat runs", 4), ask("a boat", 0)])
    assert again[0].chat.tokens == spoken[4].chat.tokens


def test_limits(tokenizer):
    long, cut = agent_of(tokenizer, max_tokens=1, max_prompt_tokens=len(OPENING)).reply(
        [ask("a cat runs"), ask("a boat")])
    assert (long.end, long.text, long.chat.steps) == ("too_long", "", ())
    # One token alone: cut off, but for a chance of about one in twelve that it ends the reply.
    (start, end), = cut.chat.steps
    assert end - start == 1 and cut.end == ("stop" if cut.chat.tokens[-1] == END else "length")


def test_greedy_replies_are_equal(tokenizer):
    spoken = agent_of(tokenizer, temperature=0.0, max_tokens=5).reply(
        [ask("a boat", t) for t in range(3)])
    assert len({x.chat.tokens for x in spoken}) == 1


@pytest.fixture
def endpoint():
    """Says what it was asked last; fails on "cat"."""
    bodies = []

    def answer(body):
        bodies.append(body)
        text = body["messages"][-1]["content"]
        if text == "a cat":
            raise Refusal(400, "no cats")
        if text == "runs":
            return {"message": {"role": "assistant", "content": "cut"}, "finish_reason": "length"}
        return f"heard {text}"

    with serving(ChatServer(0, {"m": "test"}, answer)) as server, BackgroundLoop() as loop:
        settings = ChatSettings(server.base_url, "m", max_attempts=1, requests_per_minute=6000)
        yield EndpointAgent(ChatClient(settings, api_key=""), loop, SCHEMAS), bodies


def test_an_endpoint_as_an_agent(endpoint):
    agent, bodies = endpoint
    good, bad, cut = agent.reply([ask("a boat"), ask("a cat"), ask("runs")])
    assert (good.text, good.end, good.chat.tokens) == ("heard a boat", "stop", ())
    assert (bad.text, bad.end, bad.chat) == ("", "failed", Chat.opening("keep notes"))
    assert (cut.text, cut.end) == ("cut", "length")
    agent.reply([ask("more", chat=good.chat)])
    assert [m["role"] for m in bodies[-1]["messages"]] == ["system", "user", "assistant", "user"]
    assert bodies[-1]["messages"][2]["content"] == "heard a boat"
    assert bodies[-1]["response_format"]["json_schema"]["schema"] == SCHEMAS["extract"]
