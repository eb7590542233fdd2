"""A checked request to generations: prompts to token ids, fields to sampling parameters, lengths to the context."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from protocol.errors import ContextLengthExceeded, InvalidRequest, UnsupportedField
from protocol.sampling import MAX_STOP_TOKEN_IDS, SamplingParams
from router.front.config import FrontConfig
from router.front.echo import Echo
from router.front.generation import Generation
from router.front.output_budget import OutputBudget
from router.front.parsing import chat_messages, check_token_ids, shown
from router.front.schema import ChatRequest, CompletionRequest, GenerationRequest
from router.front.standing import Standing
from router.front.structure import Form, refuse_forms, wanted_form
from router.front.tools import CallReading, Toolbox
from router.sampling_defaults import SamplingDefaults
from router.tokenizer import Tokenizer
from router.tool_format import KnownFormat

MAX_TEMPERATURE = 2.0
SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class Plan:
    """What a request comes to.

    Attributes:
        generations: one per choice.
        stops: stop strings.
        stream: whether the answer is sent as events.
        include_usage: whether a stream ends with a usage chunk.
        prompt_tokens: of all prompts; one that several choices continue counts once.
        candidates: generations of each prompt, which follow each other.
        kept: how many of them become choices: the likeliest per token, where they are more.
        logprobs: alternatives that choices show beside each output token; None shows no log-probabilities.
        prompt_logprobs: the same of prompt tokens, in a field of their own.
        echoes: of each prompt, where it goes before its output; empty where none does.
        silent: nothing of the output is shown.
        forms: to be looked at before anything is asked for; the last is the whole of each choice.
        calls: how calls of tools are found in the output; None where there are no tools.
    """

    generations: tuple[Generation, ...]
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    prompt_tokens: int
    candidates: int = 1
    kept: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echoes: tuple[Echo, ...] = ()
    silent: bool = False
    forms: tuple[Form, ...] = ()
    calls: CallReading | None = None

    def of(self, name: str, standing: Standing) -> Plan:
        """The same, for a client's request of that name and standing."""
        fields = {"name": name, **vars(standing)}
        generations = tuple(dataclasses.replace(generation, **fields) for generation in self.generations)
        return dataclasses.replace(self, generations=generations)

    def leaders(self) -> list[int]:
        """For each generation the index of the first one of the same prompt."""
        first: dict[tuple[int, ...], int] = {}
        return [first.setdefault(generation.token_ids, index) for index, generation in enumerate(self.generations)]


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request: its ids, the field that it came from, and its text where that was sent."""

    token_ids: tuple[int, ...]
    where: str
    text: str | None


@dataclass(frozen=True)
class Wishes:
    """What chats and completions ask for by different fields.

    Attributes:
        logprobs: alternatives beside each output token; None shows no log-probabilities.
        toolbox: the tools that may be called.
        echo: whether the prompt goes before the output.
        best_of: candidates of each prompt; None makes as many as are shown.
    """

    logprobs: int | None
    toolbox: Toolbox | None = None
    echo: bool = False
    best_of: int | None = None


class Planner:
    """Makes plans for one model.

    Args:
        tokenizer: of the served checkpoint.
        config: bounds of the front.
        max_model_len: prompt plus output tokens at most; None when it is not known.
        defaults: of sampling fields that a request leaves out.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: FrontConfig, max_model_len: int | None, defaults: SamplingDefaults
    ) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._max_model_len = max_model_len
        self._defaults = defaults

    def chat(self, request: ChatRequest) -> Plan:
        """The plan for a chat.

        Raises:
            InvalidRequest: a value is out of range, or the prompt is too long; names the field.
        """
        toolbox = Toolbox.of(request)
        told = () if toolbox is None else toolbox.told()
        text = self._tokenizer.render_chat(chat_messages(request.messages), tools=told)
        prompt = self._ids(text, "messages", add_special_tokens=False)
        given = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        budget = OutputBudget(given, field, self._defaults.max_tokens)
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequest("top_logprobs is allowed only with logprobs set", field="top_logprobs")
        wishes = Wishes(logprobs=(request.top_logprobs or 0) if request.logprobs else None, toolbox=toolbox)
        return self._plan(request, (Prompt(prompt, "messages", None),), budget, wishes)

    def completion(self, request: CompletionRequest) -> Plan:
        """The plan for a completion, one choice per prompt; raises as :meth:`chat`."""
        echo = bool(request.echo)
        least = 0 if echo else 1
        budget = OutputBudget(request.max_tokens, "max_tokens", self._config.default_max_tokens, least)
        kept = request.n or 1
        best_of = request.best_of or kept
        if best_of < kept:
            raise InvalidRequest(f"best_of must be at least n, got {best_of} with n {kept}", field="best_of")
        if request.stream and best_of > kept:
            raise InvalidRequest(
                f"best_of above n is not available with stream, got {best_of} with n {kept}", field="best_of"
            )
        wishes = Wishes(logprobs=request.logprobs, echo=echo, best_of=best_of)
        return self._plan(request, tuple(self._prompts(request)), budget, wishes)

    def _prompts(self, request: CompletionRequest) -> Iterator[Prompt]:
        prompt = request.prompt
        if isinstance(prompt, str):
            yield self._encode(prompt, "prompt")
            return
        kinds = set(map(type, prompt))
        if kinds == {int}:
            yield self._check(tuple(prompt), "prompt")  # type: ignore[arg-type]
            return
        if int in kinds:
            raise InvalidRequest(f"prompt mixes token ids and other things: {shown(prompt)}", field="prompt")
        if not 1 <= len(prompt) <= self._config.max_batch:
            raise InvalidRequest(
                f"prompt must hold 1 to {self._config.max_batch} prompts, got {len(prompt)}", field="prompt"
            )
        for index, entry in enumerate(prompt):
            where = f"prompt[{index}]"
            if isinstance(entry, str):
                yield self._encode(entry, where)
            elif isinstance(entry, list):
                yield self._check(tuple(entry), where)

    def _encode(self, text: str, where: str) -> Prompt:
        # Checked before the tokenizer puts its own tokens around it.
        if not text:
            raise InvalidRequest(f"{where} is empty", field=where)
        return Prompt(self._ids(text, where), where, text)

    def _ids(self, text: str, where: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        most = self._max_model_len
        least = 0 if most is None else self._tokenizer.least_tokens(text, most)
        if most is not None and least > most:
            raise ContextLengthExceeded(
                f"the model's context is {most} tokens, and {where} alone has over {least}", field=where
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check(self, token_ids: tuple[int, ...], where: str) -> Prompt:
        check_token_ids(token_ids, self._tokenizer.vocab_size, where)
        return Prompt(token_ids, where, None)

    def _plan(
        self,
        request: GenerationRequest,
        prompts: tuple[Prompt, ...],
        budget: OutputBudget,
        wishes: Wishes,
    ) -> Plan:
        kept = request.n or 1
        candidates = wishes.best_of or kept
        if candidates * len(prompts) > self._config.max_batch:
            field = "best_of" if candidates > kept else "n"
            raise InvalidRequest(
                f"{field} must leave at most {self._config.max_batch} choices, got {candidates} of {len(prompts)} "
                "prompts",
                field=field,
            )
        told = self._told_of_prompts(request, prompts, wishes)
        # Candidates are ranked by them, whether the client sees them or not.
        logprobs = 0 if wishes.logprobs is None and candidates > kept else wishes.logprobs
        seed = secrets.randbits(63) if request.seed is None else request.seed & SEED_MASK
        stop_token_ids = self._stop_token_ids(request)
        logit_bias = self._logit_bias(request)
        forms, calls = self._forms(request, wishes.toolbox)
        form = forms[-1] if forms else None
        generations: list[Generation] = []
        seen: set[tuple[int, ...]] = set()
        for prompt in prompts:
            max_tokens = budget.of(len(prompt.token_ids), prompt.where, self._max_model_len)
            sampling = _sampling(request, self._defaults, max_tokens, seed, stop_token_ids, logit_bias, logprobs, form)
            for copy in range(candidates):
                generation = Generation(
                    token_ids=prompt.token_ids,
                    # Copies of one prompt are drawn apart, each the same again for the same seed.
                    sampling=msgspec.structs.replace(sampling, seed=(seed + copy) & SEED_MASK) if copy else sampling,
                    cache_salt=request.cache_salt or "",
                    # One generation of a prompt tells of its tokens; the others find the prompt in the caches.
                    prompt_logprobs=None if prompt.token_ids in seen else told,
                    ttft_target=request.ttft_target,
                    session=request.prompt_cache_key or request.user or "",
                )
                seen.add(prompt.token_ids)
                generations.append(generation)
        options = request.stream_options
        if options is not None and not request.stream:
            raise InvalidRequest("stream_options is allowed only with stream set", field="stream_options")
        stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        return Plan(
            generations=tuple(generations),
            stops=stops,
            stream=bool(request.stream),
            include_usage=options is not None and bool(options.include_usage),
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            candidates=candidates,
            kept=kept,
            logprobs=wishes.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            echoes=tuple(Echo.of(self._tokenizer, prompt.token_ids, prompt.text) for prompt in prompts)
            if wishes.echo
            else (),
            silent=budget.given == 0,
            forms=forms,
            calls=calls,
        )

    def _forms(
        self, request: GenerationRequest, toolbox: Toolbox | None
    ) -> tuple[tuple[Form, ...], CallReading | None]:
        """What the output must look like, and how calls of tools are found in it."""
        if toolbox is None:
            form = wanted_form(request)
            return () if form is None else (form,), None
        refuse_forms(request)
        way = self._tool_format()
        return toolbox.forms(way), toolbox.reading(way)

    def _tool_format(self) -> KnownFormat:
        if self._config.tool_format != "auto":
            return self._config.tool_format
        template = self._tokenizer.tool_template
        # A template without tools is told of them in Hermes's way.
        form = "hermes" if template is None or not template.knows_tools else template.tool_format
        if form is None:
            raise UnsupportedField(
                "tools are not supported: this model's chat template has calls in a way that is not known, and the "
                "cluster's router.tool_format names none",
                field="tools",
            )
        return form

    def _told_of_prompts(self, request: GenerationRequest, prompts: tuple[Prompt, ...], wishes: Wishes) -> int | None:
        """How many alternatives of each prompt token the workers shall tell; None when nothing is to be told."""
        if request.prompt_logprobs is not None and request.stream:
            raise InvalidRequest("prompt_logprobs is not available with stream", field="prompt_logprobs")
        wanted = {"prompt_logprobs": request.prompt_logprobs, "logprobs": wishes.logprobs if wishes.echo else None}
        asked = {field: count for field, count in wanted.items() if count is not None}
        tokens = (request.n or 1) * sum(len(prompt.token_ids) for prompt in prompts)
        for field, count in asked.items():
            if tokens * (count + 1) > self._config.max_prompt_logprobs:
                raise InvalidRequest(
                    f"{field} of {count} for {tokens} prompt tokens is {tokens * (count + 1)} log-probabilities, over "
                    f"the bound of {self._config.max_prompt_logprobs}",
                    field=field,
                )
        return max(asked.values(), default=None)

    def _stop_token_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        wanted = tuple(request.stop_token_ids or ())
        check_token_ids(wanted, self._tokenizer.vocab_size, "stop_token_ids")
        own = () if request.ignore_eos else self._tokenizer.eos_token_ids
        merged = tuple(dict.fromkeys((*own, *wanted)))
        if len(merged) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids must be at most {MAX_STOP_TOKEN_IDS - len(own)} ids, got {len(wanted)}",
                field="stop_token_ids",
            )
        return merged

    def _logit_bias(self, request: GenerationRequest) -> tuple[tuple[int, float], ...]:
        # Keys that write the same id differently ("07") are one id, whose last value counts.
        biases = {int(key): bias for key, bias in (request.logit_bias or {}).items()}
        most = max(biases, default=0)
        if most >= self._tokenizer.vocab_size:
            raise InvalidRequest(
                f"logit_bias must be of token ids of at most {self._tokenizer.vocab_size - 1}, got {most}",
                field="logit_bias",
            )
        return tuple(sorted(biases.items()))


def _sampling(
    request: GenerationRequest,
    defaults: SamplingDefaults,
    max_tokens: int,
    seed: int,
    stop_token_ids: tuple[int, ...],
    logit_bias: tuple[tuple[int, float], ...],
    logprobs: int | None,
    form: Form | None,
) -> SamplingParams:
    temperature = request.temperature
    if temperature is not None and not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise InvalidRequest(
            f"temperature must be in [0, {MAX_TEMPERATURE:g}], got {temperature!r}", field="temperature"
        )
    return SamplingParams(
        temperature=defaults.temperature if temperature is None else temperature,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        top_k=_top_k(request.top_k, defaults.top_k),
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=stop_token_ids,
        min_p=defaults.min_p if request.min_p is None else request.min_p,
        repetition_penalty=defaults.repetition_penalty
        if request.repetition_penalty is None
        else request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=logit_bias,
        logprobs=logprobs,
        grammar=None if form is None else form.grammar,
    )


def _top_k(value: int | None, otherwise: int) -> int:
    # -1 is the field's other way to say "all".
    return otherwise if value is None else 0 if value == -1 else value
