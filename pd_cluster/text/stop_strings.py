"""Ends a stream of text at the first stop string."""

from __future__ import annotations

from functools import lru_cache


class StopStrings:
    """Cuts a stream of text before the first stop string, holding back text that may still become one.

    The first stop string is the one that is completed first. If several are completed by the same character, the
    longest counts. The result therefore does not depend on how the text was split. The average cost of a character is
    one step per stop string (Knuth-Morris-Pratt search).
    """

    def __init__(self, stops: list[str], include: bool = False) -> None:
        """`include` keeps the stop string itself."""
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallback(stop) for stop in self._stops]
        self._nums_matched = [0 for _ in stops]  # lengths of the prefixes of stop strings at the text's end
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def __bool__(self) -> bool:
        """Returns whether there are any stop strings."""
        return bool(self._stops)

    def add(self, text: str, may_match: bool = True) -> str:
        """Returns text that is certainly not part of a stop string. After a match, returns "".

        A stop string that is completed by text with `may_match` False does not count.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        for at, char in enumerate(text):
            found = self._step(char)
            if found is not None and may_match:
                self.matched = found
                whole, self._held = self._held + text[: at + 1], ""
                return whole if self._include else whole[: len(whole) - len(found)]
        self._held += text
        keep = max(self._nums_matched)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return certain

    def finish(self) -> str:
        """Returns the text that was held back, which cannot become a stop string because the stream has ended."""
        rest, self._held = self._held, ""
        return rest

    def _step(self, char: str) -> str | None:
        """Returns the longest stop string that ends with this character."""
        found = None
        for which, stop in enumerate(self._stops):
            num_matched, fallback = self._nums_matched[which], self._fallbacks[which]
            while num_matched and stop[num_matched] != char:
                num_matched = fallback[num_matched]
            num_matched += stop[num_matched] == char
            if num_matched == len(stop):
                found = found or stop
                num_matched = fallback[num_matched]
            self._nums_matched[which] = num_matched
        return found


@lru_cache(maxsize=1024)  # the sequences of one request share their stop strings
def _fallback(stop: str) -> list[int]:
    """Returns, for each prefix, the length of the longest shorter prefix that is also its suffix."""
    found = [0, 0]
    for char in stop[1:]:
        length = found[-1]
        while length and stop[length] != char:
            length = found[length]
        found.append(length + (stop[length] == char))
    return found
