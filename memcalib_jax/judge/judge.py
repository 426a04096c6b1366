"""Judging responses with a model behind an endpoint."""

from memcalib_jax.api import ChatClient, ChatError
from memcalib_jax.data import Record
from memcalib_jax.judge.prompt import DEFAULT_INSTRUCTIONS, judge_messages
from memcalib_jax.judge.schema import Judgment, parse_judgment

_REASON_CHARACTERS = 500


class Judge:
    """Asks an endpoint for the use level of every atom in a response.

    A `blind` judge is shown neither ideal levels nor rubrics; its instructions say so.
    """

    def __init__(self, client: ChatClient, instructions: str = DEFAULT_INSTRUCTIONS, *,
                 blind: bool = False):
        self._client = client
        self._instructions = instructions
        self._blind = blind

    async def judge(self, record: Record, response: str, sample_index: int = 0) -> Judgment:
        """Judges one response; a fault of the endpoint makes it invalid, never a low level.

        An empty response is invalid ("empty_response") without a call. `sample_index` tells apart
        repeated judgments of the same response, which the cache would make one.
        """
        if not response.strip():
            return Judgment.invalid("empty_response")
        messages = judge_messages(record, response, instructions=self._instructions,
                                  blind=self._blind)
        try:
            reply = await self._client.complete(
                messages,
                sample_index=sample_index,
                check=lambda text: parse_judgment(text, record.atoms, blind=self._blind),
            )
        except ChatError as error:
            return Judgment.invalid(f"{error.kind}: {error}"[:_REASON_CHARACTERS])
        return reply.parsed
