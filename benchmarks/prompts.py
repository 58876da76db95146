"""Prompts of a given length that share no beginning, so that no prefix cache helps."""

from __future__ import annotations

from random import Random

_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information back parent face
others level office door health person art war history party result change morning reason research girl guy moment
air teacher force education foot boy age policy music market sense area nation plan college interest death experience
effect use class control care field development role effort rate heart drug show leader light voice wife police mind
price report decision son view relationship town road arm difference value building action season society tax
director position player record paper space ground form event official matter center couple site project activity
star table need court oil situation cost industry figure street image phone data picture practice piece land product
doctor wall patient worker news test movie north love support technology step baby computer type attention film tree
source organization hair look window culture chance brother energy period course summer plant opportunity term letter
condition choice rule daughter south husband floor campaign material population call economy hospital church risk
fire future bank west sport board subject officer rest behavior performance fight top goal bed order author blood
agency nature color store sound bit statement analysis knowledge
"""
_WORDS = _TEXT.split()


class Prompts:
    """A series of prompts; the same seed gives the same series."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._num_made = 0
        self._words_per_token = 1.0

    def make(self, num_tokens: int) -> str:
        """The next prompt, of about `num_tokens`."""
        self._num_made += 1
        random = Random(f"{self.seed}/{self._num_made}")
        return " ".join(random.choices(_WORDS, k=max(1, round(num_tokens * self._words_per_token))))

    def calibrate(self, num_words: int, num_tokens: int) -> None:
        """Learn from a prompt of `num_words` that the server counted as `num_tokens`."""
        self._words_per_token = num_words / num_tokens
