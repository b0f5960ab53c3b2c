"""What ends an output: stop tokens, stop strings, the model's own end token, and what of them is left in ids and text."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.api import Api
from tests.support.embedded import ReferenceModel
from tests.support.servers import RunningServer

pytestmark = pytest.mark.starts

PROMPT = [5, 6, 7, 8]


async def greedy(api: Api, max_new_tokens: int = 12, **sampling: Any) -> dict[str, Any]:  # noqa: ANN401 - SGLang's parameters
    return await api.generate(PROMPT, max_new_tokens, sampling={"temperature": 0, **sampling})


def first_word(text: str) -> str:
    """Two printable characters that stand next to one another early in `text`."""
    at = next(at for at in range(1, len(text) - 1) if text[at : at + 2].isascii() and text[at : at + 2].isprintable())
    return text[at : at + 2]


async def test_a_stop_token_ends_the_output_and_stays_in_the_ids(api: Api) -> None:
    ids = (await greedy(api))["output_ids"]
    stop = ids[4]
    until = ids.index(stop) + 1
    for trim in (True, False):
        cut = await greedy(api, ignore_eos=False, stop_token_ids=[stop], no_stop_trim=not trim)
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert cut["output_ids"] == ids[:until]
        shorter = await greedy(api, until - trim)
        assert cut["text"] == shorter["text"]
    last = await greedy(api, until, ignore_eos=False, stop_token_ids=[stop])
    assert last["meta_info"]["finish_reason"]["type"] == "stop"


async def test_ignoring_eos_ignores_stop_tokens_too(api: Api) -> None:
    ids = (await greedy(api))["output_ids"]
    body = await greedy(api, ignore_eos=True, stop_token_ids=[ids[4]])
    assert (body["output_ids"], body["meta_info"]["finish_reason"]) == (ids, {"type": "length", "length": 12})


async def test_the_models_own_end_token_stops_it(api: Api, server: RunningServer, reference: ReferenceModel) -> None:
    eos = 350
    before = max(range(server.vocab_size), key=lambda token: reference.logprobs([token, eos])[1])
    sampling = {"n": 800, "max_new_tokens": 2}  # each has a chance of one in fifty
    _, bodies = await api.post("/generate", {"input_ids": [before], "sampling_params": sampling})
    ended = [body for body in bodies if body["output_ids"][0] == eos]
    assert ended
    for body in ended:
        assert (body["output_ids"], body["text"]) == ([eos], "")
        assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}
    ignoring = {**sampling, "n": 160, "ignore_eos": True}
    _, bodies = await api.post("/generate", {"input_ids": [before], "sampling_params": ignoring})
    assert {len(body["output_ids"]) for body in bodies} == {2}


async def test_a_stop_string_is_trimmed_from_the_text_and_kept_in_the_ids(api: Api) -> None:
    free = await greedy(api)
    word = first_word(free["text"])
    cut = await greedy(api, stop=[word, "never said"])
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    assert cut["output_ids"] == free["output_ids"][: len(cut["output_ids"])]
    assert cut["text"] == free["text"][: free["text"].index(word)]
    kept = await greedy(api, stop=word, no_stop_trim=True)
    assert kept["text"] == cut["text"] + word
    assert kept["output_ids"] == cut["output_ids"]


async def test_the_first_stop_string_listed_is_reported_and_strings_come_before_tokens(
    api: Api, server: RunningServer
) -> None:
    tokenizer = Tokenizer.from_file(str(server.checkpoints[0] / "tokenizer.json"))

    async def said(prompt: list[int], **sampling: object) -> dict[str, Any]:
        return await api.generate(prompt, 12, sampling={"temperature": 0, **sampling})

    for first in range(30):  # until one token brings two letters at once, the first of them new
        ids = (await said([first, 5]))["output_ids"]
        texts = [tokenizer.decode([token]) for token in ids]
        found = [at for at, text in enumerate(texts) if text[:2].isalpha() and text[0] not in "".join(texts[:at])]
        if found and len(texts[found[0]]) > 1:
            break
    else:
        raise AssertionError("no prompt was answered with a word")
    word, until = texts[found[0]][:2], ids[: found[0] + 1]
    for stop in ([word, word[0]], [word[0], word]):
        cut = await said([first, 5], stop=stop)
        assert (cut["output_ids"], cut["meta_info"]["finish_reason"]["matched"]) == (until, stop[0])
    both = await said([first, 5], stop=word, stop_token_ids=until[-1:], ignore_eos=False)
    assert both["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}


async def test_an_empty_stop_string_matches_at_once(api: Api) -> None:
    body = await greedy(api, stop="")
    assert (len(body["output_ids"]), body["text"]) == (1, "")
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": ""}


@pytest.mark.parametrize("ignore_eos", [True, False])
async def test_stop_tokens_cannot_be_sampled_before_the_minimum(ignore_eos: bool, api: Api) -> None:
    ids = (await greedy(api))["output_ids"]
    body = await greedy(api, stop_token_ids=ids[4:5], min_new_tokens=12, ignore_eos=ignore_eos)
    assert ids[4] not in body["output_ids"]
    assert body["output_ids"][: ids.index(ids[4])] == ids[: ids.index(ids[4])]
