"""Stop strings: found in the text of the tokens, as they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]


class StopStrings:
    """Watches one sequence. A string may be spread over tokens, and a character over several of them."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings, self._decode = strings, decode
        self._tokens: list[int] = []
        # A string that ends in the newest token began at most so many tokens ago: four bytes a character, one
        # token a byte; and a few more, because the first character of a decoded text can be cut.
        self._window = 4 * max(map(len, strings)) + 8

    def add(self, token_ids: Sequence[int]) -> int | None:
        """How many of these tokens there are up to the end of a stop string; None when there is none."""
        for count, token in enumerate(token_ids, 1):
            self._tokens.append(token)
            text = self._decode(self._tokens[-self._window :])
            if any(string in text for string in self._strings):
                return count
        return None


def before_stop(text: str, strings: Sequence[str]) -> str:
    """The text up to the first stop string."""
    places = [place for string in strings if (place := text.find(string)) >= 0]
    return text[: min(places)] if places else text
