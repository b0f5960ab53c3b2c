"""The OpenAI-compatible client of one episode: chat completions in, exact token ids recorded.

Invariant: a call sends only token ids the graph holds and returns only text those ids decode to; it never goes through
HTTP to this process, and a call that fails or is cancelled records nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, TypedDict, Unpack, cast

import anyio
from openai.types.chat import ChatCompletion

from agentrl.client.arguments import MessageLike, checked_messages, read_arguments, read_sampling
from agentrl.client.completion import completion, token_logprobs
from agentrl.client.config import SamplingConfig
from agentrl.client.episode import Episode, completion_id
from agentrl.client.openai_base import EpisodeClient, RawResponse, call_timeout
from agentrl.client.stream import ChatStream
from agentrl.client.tokenizer import PolicyTokenizer
from agentrl.inference.backend import Backend, GenerateRequest, Generation
from agentrl.tokens.graph import TokenGraph
from agentrl.tokens.renderer import Renderer
from agentrl.types import Int32Array, Turn


class GenerateArguments(TypedDict, total=False):
    """Sampling arguments of `Client.generate`; None means the run's default.

    Recorded log-probs are of the untruncated distribution: `top_p` below 1, `top_k` and `min_p` above 0 sample from another
    one and bias the behavior weights.
    """

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    seed: int | None


class Client(EpisodeClient[Episode]):
    """An `AsyncOpenAI` whose model is the policy being trained, bound to one episode.

    Calls may run in parallel and be retried; each completed one is a turn of the episode. Sub-conversations (other system
    prompt, other tools) are turns of the same episode, too: the graph keeps them as branches.

    Args:
        backend: samples the tokens.
        renderer: chat template and tokenizer of the policy.
        sampling: the default of each sampling argument that a call leaves out.
        episode_id: unique within the run.
        task_id: the task the episode is of.
        max_turns: completed calls allowed; a running call counts as one.
        max_episode_tokens: sampled tokens allowed; a call's output is clipped to what is left when it starts, so only
            parallel calls can pass it, each by its own `max_tokens` at most.
        max_context_tokens: context plus output of one call; the model's own limit holds as well.
        seed: of the run; a call without a seed of its own gets one from it, the episode's id and the number of the call, so
            that sampling depends neither on the order of calls nor on restarts. None leaves seeds to the server.
        on_turn: called with each turn as it is recorded.
        counts_misses: compare answers with what their calls demanded; false for one call whose metrics are not read.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        renderer: Renderer,
        sampling: SamplingConfig,
        episode_id: str,
        task_id: str,
        max_turns: int | None = None,
        max_episode_tokens: int | None = None,
        max_context_tokens: int | None = None,
        seed: int | None = None,
        on_turn: Callable[[Turn], None] | None = None,
        counts_misses: bool = True,
    ) -> None:
        episode = Episode(
            backend=backend,
            renderer=renderer,
            sampling=sampling,
            episode_id=episode_id,
            task_id=task_id,
            max_turns=max_turns,
            max_episode_tokens=max_episode_tokens,
            max_context_tokens=max_context_tokens,
            seed=seed,
            on_turn=on_turn,
            counts_misses=counts_misses,
        )
        super().__init__(episode)

    @property
    def graph(self) -> TokenGraph:
        """The episode's turns so far."""
        return self.episode.graph

    @property
    def tokenizer(self) -> PolicyTokenizer:
        """The tokenizer of the policy, for `generate`."""
        return PolicyTokenizer(self.episode.renderer)

    async def answer(
        self, messages: Iterable[MessageLike], stream: bool, arguments: Mapping[str, object]
    ) -> ChatCompletion | ChatStream | RawResponse:
        """Return the policy's answer; this is `chat.completions.create`.

        An aborted generation raises: text cut by the server, not by the policy, must not look like an answer.
        `finish_reason` is `stop`, `length` or `tool_calls`.
        """
        episode = self.episode
        with episode.refusals():
            call = read_arguments(
                arguments,
                episode.sampling,
                default_timeout=self.timeout,
                vocab_size=episode.renderer.vocab_size,
                by_prompt=episode.sampling.unsupported == "prompt",
            )
            checked = checked_messages(messages)
        if stream:
            result = ChatStream(episode, checked, call, speaker=self.speaker)
        else:
            with episode.start_call() as running:
                prompt = episode.prepare(checked, call.tools, call.demand, self.speaker.branch)
                request = episode.request(prompt, call.sampling)
                generation = await _generate(episode.backend, request, call.timeout_s)
                episode.check_not_aborted(request, generation)
                turn = episode.record(prompt, request, generation, speaker=self.speaker)
                episode.compare(checked, call.demand, turn.message)
                running.complete()
            result = completion(
                completion_id(request),
                call.model,
                turn.message,
                generation,
                prompt_tokens=prompt.context.size,
                logprobs=token_logprobs(episode.renderer, generation) if call.logprobs else None,
                prompt_ids=prompt.context.ids() if call.return_prompt_ids else None,
            )
        return RawResponse(result, result.id) if call.raw else result

    async def generate(
        self, input_ids: Sequence[int] | Int32Array, *, timeout: float | None = None, **sampling: Unpack[GenerateArguments]
    ) -> Generation:
        """Sample one completion of a context of token ids, and record it as a turn.

        Args:
            input_ids: the whole context, [N] ids. It continues the turn whose context and output it begins with, the
                longest if there are several; else it starts a new root.
            timeout: deadline of this call, seconds.
            **sampling: as `GenerateArguments` lists them.

        Returns:
            What the server returned, aborted (partial) output included: a token-level workflow sees `stop_reason`.

        Raises:
            EpisodeLimit: a budget is spent, or the context leaves no room; nothing was sent.
            ServerError: the backend failed, or returned nothing usable.
            WorkflowError: an argument is wrong, or an id is outside the vocabulary.

        Cancellation: the request is aborted and nothing is recorded.
        """
        episode = self.episode
        with episode.refusals():
            params = read_sampling(sampling, episode.sampling, vocab_size=episode.renderer.vocab_size)
            ids = episode.check_ids(input_ids)
        with episode.start_call() as running:
            parent, end = episode.parent_of(ids, self.speaker.branch)
            prompt = episode.graph.prepare_ids(ids[end:], parent)
            request = episode.request(prompt, params)
            generation = await _generate(episode.backend, request, timeout)
            episode.record(prompt, request, generation, speaker=self.speaker, given=generation)
            running.complete()
        return generation

    def copy(self, *, timeout: object = None, **options: object) -> Self:
        """Return a client of the same episode; `timeout` becomes the default deadline of its calls, seconds.

        Options about the connection (`max_retries`, `default_headers`, ...) have nothing to change here.
        """
        other = self._twin()
        if timeout is not None:
            other.timeout = cast("float", timeout)  # whatever it is, the next call checks it
        return other

    with_options = copy


async def _generate(backend: Backend, request: GenerateRequest, timeout_s: float | None) -> Generation:
    if timeout_s is None:
        return await backend.generate(request)
    with anyio.move_on_after(timeout_s):
        return await backend.generate(request)
    raise call_timeout(request.episode_id, timeout_s)
