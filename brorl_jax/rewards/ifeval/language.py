"""The two language models that instructions are judged with. Importing this loads them: about a second.

Both come with their packages, so that nothing is downloaded: langdetect's character profiles of 55 languages, and the
English Punkt model of sentence ends (Kiss & Strunk 2006).
"""

from __future__ import annotations

import functools

import langdetect
import punkt
from langdetect import detector_factory

langdetect.DetectorFactory.seed = 0  # its verdicts on short texts are random otherwise
detector_factory.init_factory()

PUNKT = punkt.PunktSentenceTokenizer(punkt.load_model("english"))


@functools.lru_cache(maxsize=64)  # one response is asked about by several instructions
def language(text: str) -> str | None:
    """ISO 639-1 code of the text's language; None where there is nothing to tell it by, as in "1234"."""
    try:
        return langdetect.detect(text)
    except langdetect.LangDetectException:
        return None
