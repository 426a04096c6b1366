"""A bound on what a run may spend, in tokens or money, shared by all of its clients."""

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from memcalib_jax.api.failures import ChatError


@dataclass(frozen=True)
class Price:
    """Of a million tokens, in any currency."""

    prompt: float
    completion: float

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Returns what so many tokens cost."""
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / 1e6


def read_prices(path: str | os.PathLike) -> dict[str, Price]:
    """Reads a JSON object of models: {"model": {"prompt": 0.5, "completion": 1.5}}, per million.

    Raises:
      ValueError: the file cannot be read, or holds no such thing.
    """
    try:
        with open(path, encoding="utf-8") as file:
            table = json.load(file)
        prices = {str(model): Price(float(row["prompt"]), float(row["completion"]))
                  for model, row in table.items()}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f'{path} must hold {{"model": {{"prompt": PRICE, "completion": PRICE}}}}, '
                         "prices of a million tokens") from None
    for model, price in prices.items():
        if not (0 <= price.prompt < float("inf") and 0 <= price.completion < float("inf")):
            raise ValueError(f"{path}: the prices of {model} must be numbers of at least 0")
    return prices


@dataclass
class Reservation:
    """What a call may take at most, until it is known what it took."""

    model: str
    tokens: int
    money: float


class Budget:
    """Counts what calls take and refuses those that could go beyond the bounds.

    Args:
      max_tokens, max_money: bounds; None: none. Never exceeded, if the endpoint keeps to the
        largest reply that it was asked for and a prompt takes no more than a token for 3 bytes.
      prices: of each model, for money.

    Attributes:
      tokens, money: spent so far.

    Raises:
      ValueError: a bound is not positive.
    """

    def __init__(self, *, max_tokens: int | None = None, max_money: float | None = None,
                 prices: Mapping[str, Price] | None = None):
        for name, bound in (("max_tokens", max_tokens), ("max_money", max_money)):
            if bound is not None and not bound > 0:
                raise ValueError(f"{name} must be positive, not {bound}")
        self.tokens = 0
        self.money = 0.0
        self._max_tokens = float("inf") if max_tokens is None else max_tokens
        self._max_money = float("inf") if max_money is None else max_money
        self._prices = dict(prices or {})
        self._lock = threading.Lock()
        self._reserved: list[Reservation] = []

    def spend(self, model: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Notes what was spent before, by an earlier run."""
        with self._lock:
            self.tokens += prompt_tokens + completion_tokens
            self.money += self._price(model).of(prompt_tokens, completion_tokens)

    def reserve(self, model: str, prompt_tokens: int, completion_tokens: int
                ) -> Reservation | None:
        """Sets aside what a call may take; None: ask again when another call has come back.

        Raises:
          ChatError: of kind "budget": there is not that much left.
        """
        wanted = Reservation(model, prompt_tokens + completion_tokens,
                             self._price(model).of(prompt_tokens, completion_tokens))
        with self._lock:
            if (self.tokens + wanted.tokens > self._max_tokens
                    or self.money + wanted.money > self._max_money):
                raise ChatError("budget", self._told(wanted), retried=False)
            if (self.tokens + sum(each.tokens for each in self._reserved) + wanted.tokens
                    > self._max_tokens
                    or self.money + sum(each.money for each in self._reserved) + wanted.money
                    > self._max_money):
                return None
            self._reserved.append(wanted)
            return wanted

    def settle(self, reservation: Reservation, prompt_tokens: int, completion_tokens: int) -> None:
        """Puts what a call took in place of what was set aside."""
        with self._lock:
            self._reserved = [each for each in self._reserved if each is not reservation]
            self.tokens += prompt_tokens + completion_tokens
            self.money += self._price(reservation.model).of(prompt_tokens, completion_tokens)

    def _price(self, model):
        return self._prices.get(model, Price(0.0, 0.0))

    def _told(self, wanted):
        if self.tokens + wanted.tokens > self._max_tokens:
            return (f"{self.tokens:,} of {self._max_tokens:,} tokens are spent, and the next call "
                    f"may take {wanted.tokens:,}")
        return (f"{self.money:.4f} of {self._max_money:g} are spent, and the next call may cost "
                f"{wanted.money:.4f}")
